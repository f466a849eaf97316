"""Traces forward, loss, backward and all communication of a step into one FX graph.

The gathers come first in the traced function and the reductions last, so what is between them is
the user's forward and autograd's backward, on plain tensors. Each node is labelled with its part
of the step; `schedule` moves the communication by these labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .collectives import gather, reduce
from .lending import StepBucket, StepTensors

LABEL = "fsdp2"  # the key of a node's `Label` in its meta
LossFunction = Callable[..., Any]
_DEPENDS_ON_DATA = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@dataclass(frozen=True)
class Label:
    """The part of a step that a node belongs to.

    Attributes:
        part: "gather", "forward", "backward" or "reduce".
        bucket: the index of the one that is gathered or reduced; -1 elsewhere.
    """

    part: str
    bucket: int = -1


@dataclass
class Arguments:
    """The arguments of a loss function after the model: tensors are inputs of the graph, and
    everything else is a constant of it.

    Attributes:
        leaves, spec: as of `torch.utils._pytree.tree_flatten`.
    """

    leaves: list[Any]
    spec: TreeSpec

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The same with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Outputs:
    """What a traced step returns: tensors of the loss function's result, then gradients.

    Attributes:
        results: what the loss function has returned.
        reduced: indices of buckets, each with the indices of its parameters that have a gradient;
            there is one flat tensor for each bucket.
        plain: indices of parameters without a unit that have a gradient.
    """

    results: Arguments
    reduced: list[tuple[int, list[int]]]
    plain: list[int]


def capture(
    model: nn.Module,
    loss_fn: LossFunction,
    tensors: StepTensors,
    arguments: Arguments,
    inputs: Sequence[Tensor],
) -> tuple[GraphModule, Outputs]:
    """Trace one step.

    Args:
        inputs: `StepTensors.inputs` and the tensors among ``arguments``, detached.

    Returns:
        The graph, which is called with such ``inputs``, and what it returns.

    Raises:
        RuntimeError: if something of it cannot be traced.
        TypeError, ValueError: if ``loss_fn`` returns no loss.
    """
    found: list[Outputs] = []

    def step(*inputs: Tensor) -> list[Tensor]:
        returned, outputs = _step(model, loss_fn, tensors, arguments, inputs)
        found.append(outputs)
        return returned

    with _without_onednn():
        module = make_fx(step, tracing_mode="fake")(*inputs)
    _check_shapes(module.graph)
    _check_randomness(module.graph, tensors)
    return module, found[-1]


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Context in which recurrent layers are operators that a graph can run.

    oneDNN's operators return no tensor for what they save, if they run without autograd.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _step(
    model: nn.Module,
    loss_fn: LossFunction,
    tensors: StepTensors,
    arguments: Arguments,
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor], Outputs]:
    """What is traced."""
    rest = iter(inputs)
    shards, plain, buffers = (
        [next(rest) for _ in held] for held in (tensors.buckets, tensors.plain, tensors.buffers)
    )
    labels = _Labels()
    with torch.enable_grad():
        whole = []
        for i, each in enumerate(tensors.buckets):
            whole.append(_parameters(each, shards[i]))
            labels.put(Label("gather", i))
        for i, (own, _) in enumerate(tensors.plain):
            plain[i] = plain[i].detach().requires_grad_(own.requires_grad)
        # Also around backward, which recomputes checkpointed activations.
        with tensors.lent(whole, plain, buffers), _explained():
            args, kwargs = arguments.filled(list(rest))
            results = Arguments(*tree_flatten(loss_fn(model, *args, **kwargs)))
            loss = _loss_of(results.leaves)
            labels.put(Label("forward"))
            wanted = [t for group in (*whole, plain) for t in group if t.requires_grad]
            grads = torch.autograd.grad(loss, wanted, allow_unused=True)
            labels.put(Label("backward"))
    grad_of = {id(t): grad for t, grad in zip(wanted, grads, strict=True) if grad is not None}
    returned = [tensor.detach() for tensor in results.tensors]
    # Without what was traced: the result is kept as long as the graph.
    rest = iter(returned)
    leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in results.leaves]
    reduced = []
    for i, each in enumerate(tensors.buckets):
        found = [grad_of.get(id(tensor)) for tensor in whole[i]]
        present = [j for j, grad in enumerate(found) if grad is not None]
        if present:
            reduced.append((i, present))
            pairs = zip(each.bucket.params, found, strict=True)
            local = [None if grad is None else param.local_gradient(grad) for param, grad in pairs]
            factor = each.unit.config.divide_factor
            returned.append(reduce(each.bucket, local, each.transports, each.host, factor))
            labels.put(Label("reduce", i))
    trained = [i for i, param in enumerate(plain) if id(param) in grad_of]
    returned += [grad_of[id(plain[i])] for i in trained]
    return returned, Outputs(Arguments(leaves, results.spec), reduced, trained)


class _Labels:
    """Labels the nodes that were traced since the last label."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._graph: Graph = mode.tracer.graph
        self._num_labelled = len(self._graph.nodes)

    def put(self, label: Label) -> None:
        nodes = list(self._graph.nodes)
        for node in nodes[self._num_labelled :]:
            node.meta[LABEL] = label
        self._num_labelled = len(nodes)


def _parameters(of: StepBucket, shards: Tensor) -> list[Tensor]:
    """The parameters that compute, as leaves of autograd."""
    bucket, found = of.bucket, []
    for param, whole in zip(bucket.params, gather(bucket, shards, of.host), strict=True):
        leaf = whole.detach()
        if param.tensor_parallel is not None:
            leaf = param.tensor_parallel.wrap(leaf)
        leaf.requires_grad_(param.sharded.requires_grad)
        if bucket.keeps_dtypes and leaf.requires_grad:
            leaf.grad_dtype = None
        found.append(leaf)
    return found


def _loss_of(leaves: Sequence[Any]) -> Tensor:
    loss = leaves[0] if leaves else None
    if not isinstance(loss, Tensor):
        raise TypeError(
            "The loss function of compile_step must return the loss, or a tuple that begins with "
            f"it, but returned {type(loss).__name__}"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            "The loss function of compile_step must return one number that depends on trained "
            f"parameters, but its shape is {tuple(loss.shape)} and requires_grad is "
            f"{loss.requires_grad}"
        )
    return loss


@contextmanager
def _explained() -> Iterator[None]:
    """Say what to do about what the tracer refuses."""
    try:
        yield
    except _DEPENDS_ON_DATA as error:
        raise _depends_on_data(str(error)) from error
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise RuntimeError(
            "compile_step found a tensor that is no parameter, no registered buffer and no "
            f"argument of the step ({str(error).partition('Found in ')[2]}). Register it as a "
            "buffer, or pass it as an argument: the graph would keep its value of today"
        ) from error


def _depends_on_data(what: object) -> RuntimeError:
    return RuntimeError(
        f"compile_step cannot capture {what}: its result has a shape or a Python value that "
        "depends on data (`.item()`, `if tensor:`, `nonzero`, a mask as index). Compute with "
        "tensors of fixed shape (`torch.where`, a fixed capacity per expert), move it out of the "
        "loss function, or train this model eagerly"
    )


def _check_shapes(graph: Graph) -> None:
    """
    Raises:
        RuntimeError: if a number or a shape in the graph is only known when it runs.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        numbers = value.shape if isinstance(value, Tensor) else (value,)
        if any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in numbers):
            raise _depends_on_data(node.target)


def _check_randomness(graph: Graph, tensors: StepTensors) -> None:
    """
    Raises:
        RuntimeError: if random numbers are drawn where the graph would draw others than eager.
    """
    parallel = any(param.is_tensor_parallel for unit in tensors.units for param in unit.params)
    for node in graph.nodes:
        if not _draws(node):
            continue
        label = node.meta.get(LABEL)
        again = label is not None and label.part == "backward"
        if again or parallel:
            where = (
                "while backward recomputes activations: it would not draw the numbers of forward"
                if again
                else "in a tensor-parallel model: ranks would not draw what DTensors agree on"
            )
            raise RuntimeError(
                f"compile_step cannot capture {node.target} {where}. Set the probability of "
                "dropout to 0, leave this module out of activation checkpointing, or train eagerly"
            )


def _draws(node: Node) -> bool:
    """Whether ``node`` draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    # Attention is tagged whatever its dropout.
    given = zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
    values = {argument.name: value for argument, value in given} | node.kwargs
    takes = any(a.name == "dropout_p" for a in node.target._schema.arguments)  # type: ignore[union-attr]
    return not takes or bool(values.get("dropout_p"))
