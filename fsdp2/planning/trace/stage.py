"""Forward and backward of one stage of a pipeline, on fake tensors.

As in ``torch.distributed.pipelining``, the inputs of a stage and the gradients of its outputs are
allocated for each micro-batch, and an output is dropped when it is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from ...common.pytree import map_tensors, tensors_in


class Stage(NamedTuple):
    """The position of a stage in its pipeline; a middle stage is neither first nor last.

    Attributes:
        is_first: it gets the sample input, and receives nothing.
        is_last: it computes the loss, and sends nothing.
        splits_backward: gradients of inputs come first, gradients of weights later.
    """

    is_first: bool = True
    is_last: bool = True
    splits_backward: bool = False


# Shape and dtype of a tensor.
Shape = tuple[tuple[int, ...], torch.dtype]


class StageOutputs(NamedTuple):
    """The outputs of a stage.

    Attributes:
        outputs: the shapes and dtypes.
        nbytes: bytes of the outputs.
        returned_nbytes: bytes of the gradients of its inputs.
    """

    outputs: tuple[Shape, ...]
    nbytes: int
    returned_nbytes: int


def run_stage(
    model: Any,
    arguments: tuple[tuple, dict],
    stage: Stage,
    loss_of: Callable[[Any], torch.Tensor],
    between: Callable[[], None],
    before_weights: Callable[[], None],
) -> StageOutputs:
    """Run forward and backward.

    Args:
        between: called between the two.
        before_weights: called between the two parts of a split backward.
        arguments: positional and keyword arguments of the model; only shapes matter for received
            ones.
        loss_of: computes and checks the loss from the output of the last stage.

    Raises:
        ValueError: if a stage that sends returns anything but tensors that need gradients.
    """
    args, kwargs = arguments
    if not stage.is_first:
        args, kwargs = map_tensors(lambda t: _received(t.shape, t.dtype), (args, kwargs))
    inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad and not stage.is_first]
    output = model(*args, **kwargs)
    del args, kwargs
    outputs: list[torch.Tensor] = []
    if stage.is_last:
        roots: list[Any] = [loss_of(output)]
    else:
        outputs = _checked(output)
        roots = [get_gradient_edge(tensor) for tensor in outputs]
        if stage.splits_backward and not _takes_edges():
            roots = list(outputs)  # held until then, as by the stages of such releases of torch
    told = tuple((tuple(t.shape), t.dtype) for t in outputs)
    nbytes = sum(t.numel() * t.itemsize for t in outputs)
    # The last one of several sends nothing, and drops its output after backward.
    held = output if stage.is_last and not stage.is_first else None
    del output, outputs
    between()
    grads = None if stage.is_last else [_received(*each).detach() for each in told]
    groups = None
    if stage.splits_backward:
        if not stage.is_first:  # there, torch computes all with the gradients of weights
            groups = _backward_of_inputs(model, roots, grads, inputs)
        returned = _returned(inputs)
        before_weights()
    if groups is not None:
        del roots, grads, held
        split_backward().stage_backward_weight(model.parameters(), groups)
        return StageOutputs(told, nbytes, returned)
    if grads is None:
        roots[0].backward()
    else:
        torch.autograd.backward(roots, grads)
    del roots, held, grads
    return StageOutputs(told, nbytes, _returned(inputs))


def split_backward() -> Any:
    """The functions with which torch's stages compute the two parts of a backward."""
    from torch.distributed.pipelining import _backward

    return _backward


def _takes_edges() -> bool:
    """Whether torch splits a backward without the outputs of the stage: since 2.15."""
    told = split_backward().stage_backward_input.__annotations__["stage_outputs_or_loss"]
    return "GradientEdge" in str(told)


def _backward_of_inputs(
    model: Any, roots: list[Any], grads: list[torch.Tensor] | None, inputs: list[torch.Tensor]
) -> Any:
    """Compute gradients of inputs; returns the data for the gradients of weights."""
    _, groups = split_backward().stage_backward_input(
        tuple(roots), grads, inputs, model.parameters()
    )
    return groups


def _returned(inputs: list[torch.Tensor]) -> int:
    """Drop the gradients of received inputs, as if they were sent; returns their bytes."""
    returned = 0
    for tensor in inputs:
        if tensor.grad is not None:
            returned += tensor.grad.nbytes
            tensor.grad = None  # sent; the loss holds its graph, and that the input
    return returned


def _received(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype, device="cpu")
    return made.requires_grad_(made.is_floating_point() or made.is_complex())


def _checked(output: Any) -> list[torch.Tensor]:
    outputs = [output] if isinstance(output, torch.Tensor) else output
    if not isinstance(outputs, list | tuple) or not all(
        isinstance(each, torch.Tensor) and each.requires_grad for each in outputs
    ):
        raise ValueError(
            "A stage of a pipeline must return a tensor that needs a gradient, or a tuple of such "
            f"tensors, got {type(output).__name__}"
        )
    return list(outputs)
