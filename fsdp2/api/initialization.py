"""Memory and initial weights, which do not depend on how a model is sharded.

A random operation on a DTensor draws for the local shard: on the CPU the weights depend then on
the world size, the mesh and the rows of a rank, and each rank's generator goes its own way. Inside
`init_on_whole_tensors` every rank draws the whole tensor from the ordinary generator of the device
and keeps its own part, so any code that initializes gives what it gives on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..checkpoint.loading.fill import usual_device
from ..common.failures import explained
from ..dtensor.placement import own_part
from ..runtime.hooks import about_to_write
from ..runtime.unit import units_in
from ..runtime.unwritten import never_written


@contextmanager
def init_on_whole_tensors(seed: int) -> Iterator[None]:
    """Inside, initialization of sharded parameters gives the weights of the unsharded model.

    For every world size, mesh, placement (uneven, HSDP, tensor parallel) and order of units, bit
    by bit, as long as the code that initializes does the same operations on parameters of the same
    device and dtype. In-place random operations (``normal_``, ``uniform_``, ...: all of
    ``torch.nn.init`` comes down to them) and ``rand_like``, ``randn_like`` of a DTensor draw the
    whole tensor, which is in memory meanwhile, one at a time.

    Args:
        seed: of the default generators, inside; the same on all ranks. After it they go on from
            where they were.

    Raises:
        NotImplementedError: for other random operations on DTensors.

    Example:
        >>> with torch.device("meta"):
        ...     model = Model()
        >>> fully_shard(model)
        >>> model.to_empty(device="cuda")
        >>> with init_on_whole_tensors(seed=0):
        ...     model.init_weights()
    """
    with torch.random.fork_rng(), _WholeTensors():
        torch.manual_seed(seed)
        yield


class _WholeTensors(TorchDispatchMode):
    """Random operations on DTensors are done on whole tensors of plain memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(first, DTensor):
            # ``if not mask.any()`` of a rejection loop: the answer of all ranks, not of this one.
            with explained("init_on_whole_tensors", first.device_mesh.get_group(0)):
                return first.full_tensor().item()
        if torch.Tag.nondeterministic_seeded not in func.tags or not isinstance(first, DTensor):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if first.is_meta:  # no values, so nothing to draw
            return first if name.endswith("_") else func(*args, **kwargs)
        rest = [*args[1:], *kwargs.values()]
        if any(isinstance(arg, DTensor) for arg in rest):
            raise NotImplementedError(f"{name} with several DTensors in init_on_whole_tensors")
        if name.endswith("_"):
            return _draw(func, first, args[1:], kwargs)
        if name in ("rand_like", "randn_like"):
            dtype = kwargs.pop("dtype", None) or first.dtype
            drawn: Any = torch.empty_like(first, dtype=dtype)
            in_place = {"rand_like": torch.Tensor.uniform_, "randn_like": torch.Tensor.normal_}
            return _draw(in_place[name], drawn, (), {})
        raise NotImplementedError(
            f"{name} on a DTensor in init_on_whole_tensors: it knows in-place random operations, "
            "rand_like and randn_like"
        )


def _draw(operation: Any, into: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Do the random operation on a whole tensor and keep this rank's part."""
    whole = torch.empty(into.shape, dtype=into.dtype, device=into._local_tensor.device)
    operation(whole, *args, **kwargs)
    into._local_tensor.copy_(own_part(whole, into)._local_tensor)
    return into


def broadcast_replicas(model: nn.Module) -> None:
    """Give all ranks that hold the same part of a parameter the values of the first of them.

    For units of `replicate`, for the replicas of a 2-D mesh and for 0-dim parameters: what
    ``DistributedDataParallel`` does when it is made. Shards are not touched, nor are buffers. To
    be called on all ranks, before training.

    Args:
        model: sharded, or with sharded modules inside.

    Example:
        >>> shard_model(model, strategy="none")
        >>> broadcast_replicas(model)
    """
    for unit in units_in(model):
        about_to_write(unit)
        for param in unit.params:
            spec, local = param.sharded_spec, param.local
            for dim, placement in enumerate(spec.placements):
                if not placement.is_replicate() or spec.mesh.size(dim) == 1:
                    continue
                group = spec.mesh.get_group(dim)
                with explained("broadcast_replicas", group), torch.no_grad():
                    sent = local.to(unit.device)
                    dist.broadcast(sent, group=group, group_src=0)
                    local.copy_(sent)


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], object] | None = None,
    seed: int | None = 0,
    parameters: bool = True,
) -> nn.Module:
    """Give a sharded model on the meta device memory and initial values, buffers included.

    What ``to_empty`` and ``init_weights`` do, for what is on the meta device only. Before a
    checkpoint is loaded, use ``parameters=False``: buffers that no checkpoint has (the frequencies
    of rotary embeddings) are computed, and `fsdp2.checkpoint.load_model` gives the rest memory and
    values at once, reading every byte once.

    Args:
        model: sharded; or plain.
        device: by default that of the parameters' mesh; for shards under `CPUOffloadPolicy` and
            plain models the CPU.
        init: what gives values; called with the model. By default ``model.init_weights()`` (of
            transformers, torchtitan and others), or where there is none ``reset_parameters()``
            of every module that has it (all of torch.nn).
        seed: the same weights for every world size and mesh, as by `init_on_whole_tensors`; None:
            random operations draw as DTensors do.
        parameters: False: buffers only.

    Returns:
        ``model``.

    Raises:
        RuntimeError: naming buffers that are not saved in checkpoints and that ``init`` left
            without values.

    Example:
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(config)
        >>> shard_model(model)
        >>> materialize(model, parameters=False)
        >>> load_model(model, "Llama-3-8B")
    """
    usual = usual_device(model)
    units = units_in(model)
    offloaded = {id(p.sharded) for u in units if u.config.offload for p in u.params}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta or (isinstance(tensor, nn.Parameter) and not parameters):
            return tensor
        to = device or ("cpu" if id(tensor) in offloaded else usual)
        return torch.empty_like(tensor, device=to)

    make.makes_empty = True  # type: ignore[attr-defined]
    model._apply(make)
    for module in model.modules():
        # transformers notes which modules have values: these were made on the meta device.
        vars(module).pop("_is_hf_initialized", None)
    with nullcontext() if seed is None else init_on_whole_tensors(seed):
        (init or _usual_init)(model)
    _check_buffers(model)
    return model


def _usual_init(model: nn.Module) -> None:
    init_weights = getattr(model, "init_weights", None)
    if callable(init_weights):
        init_weights()
        return
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def _check_buffers(model: nn.Module) -> None:
    """Check that buffers which no checkpoint holds have values.

    Raises:
        RuntimeError: naming them.
    """
    names = {module: name for name, module in model.named_modules()}
    marks = [mark for unit in units_in(model) for mark in unit.param_group.unwritten]
    left = [
        mark.full_name(names)
        for mark in never_written(m for m in marks if m.module is not None)
        if mark.name in mark.module._non_persistent_buffers_set  # type: ignore[union-attr]
    ]
    if left:
        raise RuntimeError(
            f"Nothing gave values to these buffers, which no checkpoint holds: {', '.join(left)}. "
            "Pass init=: a function of the model that computes them, too"
        )
