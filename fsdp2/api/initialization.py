"""Materialize and initialize sharded models, with weights that do not depend on the sharding.

A random operation on a DTensor draws only the local shard. On the CPU, the weights then depend on
the world size, the mesh and each rank's rows, and the ranks' generators diverge. Inside
`init_on_whole_tensors` every rank draws the whole tensor from the device's default generator and
keeps its part. Any initialization code then gives the same weights as in a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from ..common.failures import explained
from ..common.memory import usual_device
from ..common.pytree import map_tensors
from ..dtensor.placement import is_gathered_part, own_part
from ..guards.rank_agreement.initial_values import is_seen_by_all
from ..guards.unwritten import Marked, marks_of, never_written, to_be_made, write_pattern
from ..runtime.hooks import about_to_write
from ..runtime.unit import own_modules, units_in
from .torch_errors import items_reach_shards


@contextmanager
def init_on_whole_tensors(seed: int) -> Iterator[None]:
    """Context in which sharded parameters are initialized to the weights of the unsharded model.

    The weights are bitwise equal for every world size, mesh, placement (uneven, HSDP, tensor
    parallel) and order of units. The initialization must do the same operations on parameters of
    the same device and dtype.

    In-place random operations on a DTensor (``normal_``, ``uniform_``: all of ``torch.nn.init``),
    ``rand_like`` and ``randn_like`` draw the whole tensor. Only one whole tensor at a time is in
    memory. Writes to rows (``weight[padding_idx].zero_()``) reach the shards; outside of this
    context they do not.

    Args:
        seed: seed of the default generators inside the context; must be equal on all ranks. On
            exit, the generators continue from their earlier state.

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
    with torch.random.fork_rng(), _WholeTensors(), items_reach_shards():
        torch.manual_seed(seed)
        yield


class _WholeTensors(TorchDispatchMode):
    """Runs random operations on DTensors, and writes to parts of them, on whole plain tensors.

    A part on the dim that is sharded (``weight[padding_idx]``) is a gathered copy: DTensor would
    write to it, and no shard would change.
    """

    def __init__(self) -> None:
        super().__init__()
        # What each copy is a part of, and how it was taken.
        self._parts = WeakIdKeyDictionary()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DTensor) and not first.is_meta:
            if func.is_view:
                result = func(*args, **kwargs)
                self._note_parts(first, result, lambda whole: func(whole, *args[1:], **kwargs))
                return result
            if first in self._parts and func._schema.name.endswith("_"):
                return self._write(first, func, args[1:], kwargs)
        return self._run(func, first, args, kwargs)

    def _note_parts(self, base: DTensor, result: Any, take: Callable[[Any], Any]) -> None:
        several = isinstance(result, list | tuple)
        for i, part in enumerate(result if several else [result]):
            if isinstance(part, DTensor) and (base in self._parts or is_gathered_part(part, base)):
                self._parts[part] = base, partial(_item_of, take, i) if several else take

    def _write(self, part: DTensor, func: Any, args: Any, kwargs: Any) -> DTensor:
        """Do the operation on the part of the whole tensor; keep this rank's part of the result."""
        steps, base = [], part
        while base in self._parts:
            base, take = self._parts[base]
            steps.append(take)
        whole = base.full_tensor().clone()
        inside = whole
        for take in reversed(steps):
            inside = take(inside)
        func(inside, *map_tensors(_plain, args), **map_tensors(_plain, kwargs))
        for tensor, values in ((base, whole), (part, inside)):
            tensor._local_tensor.copy_(own_part(values, tensor)._local_tensor)
        return part

    def _run(self, func: Any, first: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(first, DTensor):
            # ``if not mask.any()`` in a rejection loop must ask all ranks, not only this one.
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
            f"{name} on a DTensor in init_on_whole_tensors: only in-place random operations, "
            "rand_like and randn_like are supported"
        )


def _item_of(take: Callable[[Any], Any], i: int, whole: Any) -> Any:
    return take(whole)[i]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _draw(operation: Any, into: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Do the random operation on a whole tensor and keep this rank's part."""
    whole = torch.empty(into.shape, dtype=into.dtype, device=into._local_tensor.device)
    operation(whole, *args, **kwargs)
    into._local_tensor.copy_(own_part(whole, into)._local_tensor)
    return into


def broadcast_replicas(model: nn.Module) -> None:
    """Broadcast each replicated part of a parameter from the first rank that holds it.

    This makes replicas equal: units of `replicate`, the replicas of a 2-D mesh, and 0-dim
    parameters. ``DistributedDataParallel`` does the same in its constructor. Shards without
    replicas and buffers stay as they are. Collective: call it on all ranks, before training.

    Args:
        model: a sharded model, or one that contains sharded modules.

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
    """Allocate and initialize a sharded model that is on the meta device, including its buffers.

    This is like ``to_empty`` followed by ``init_weights``, but only for tensors on the meta device.

    Before loading a checkpoint, use ``parameters=False``. This computes only the buffers, some of
    which no checkpoint has (the frequencies of rotary embeddings). `fsdp2.checkpoint.load_model`
    then allocates and loads the rest at once, and reads every byte once.

    Args:
        model: a sharded or plain model.
        device: where to allocate. None: the device of the parameters' mesh; for shards under
            `CPUOffloadPolicy` and for plain models, the CPU.
        init: called with the model to set the values. None: call ``model.init_weights()``
            (transformers, torchtitan and others have it); without it, call ``reset_parameters()``
            of every module that has one (all of torch.nn).
        seed: gives the same weights for every world size and mesh, as in
            `init_on_whole_tensors`. None: each random operation draws only the local shard.
        parameters: False materializes buffers only.

    Returns:
        ``model``.

    Raises:
        RuntimeError: if ``init`` left parameters or buffers without values (with
            ``parameters=False``: buffers that checkpoints do not contain). The message names them.
            All other tensors have their values, so setting the named ones is enough.

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
    outside = to_be_made(make, own_modules(model), ())
    model._apply(make)
    outside = write_pattern(outside)
    for module in model.modules():
        # transformers records which modules have values; these were made on the meta device.
        vars(module).pop("_is_hf_initialized", None)
    with nullcontext() if seed is None else init_on_whole_tensors(seed):
        (init or _usual_init)(model)
    _check_written(model, outside, parameters)
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


def _check_written(model: nn.Module, outside: list[Marked], parameters: bool) -> None:
    """Check that nothing is left as `materialize` has allocated it.

    Args:
        outside: the tensors that it made for modules that are not sharded.
        parameters: False: check only buffers that no checkpoint holds.

    Raises:
        RuntimeError: naming what is left.
    """
    names = {module: name for name, module in model.named_modules()}
    left = never_written([*outside, *(m for u in units_in(model) for m in marks_of(u))])
    if not parameters:
        left = [m for m in left if m.module and m.name in m.module._non_persistent_buffers_set]
    # Where some ranks cannot tell, others would be alone with an error: the first forward warns.
    if any(mark.param is None or is_seen_by_all(mark.param) for mark in left):
        listed = ", ".join(sorted({mark.full_name(names) for mark in left}))
        held = "No checkpoint holds these buffers"
        if parameters:
            held = "If a checkpoint has them: materialize(model, parameters=False), then load_model"
        raise RuntimeError(
            f"Nothing gave values to {listed}: their memory is arbitrary. Write them now, or "
            "pass init=, a function of the model that does (the default is its init_weights(), or "
            f"else reset_parameters() of each module). {held}"
        )
