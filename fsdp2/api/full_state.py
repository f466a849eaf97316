"""Whole tensors from a sharded model, and back, without holding the model twice.

`full_state_dict` collects a model's state on one or several ranks, tensor by tensor. Shards are
sent directly to the receiving ranks. Other ranks only need memory for a cast or a copy of their
shards, and a receiving rank needs little more than the result. `load_full_state_dict` is the
inverse: each rank receives its part of each tensor, and replicas pass it on.

This file deals only with DTensors and plain tensors, in any placement whose shards are boxes of
the whole tensor: HSDP, tensor parallelism, strided shards. Every rank derives the whole plan from
the DTensors, so only tensor bytes are sent, and the names that `load_full_state_dict` found. For
tensor subclasses, the inner tensors and their descriptions are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..common.memory import current_device
from ..common.modules import load_through_hooks, own_state, wrapper_prefix
from ..dtensor.boxes import Box
from ..dtensor.from_local import dtensor_over
from ..dtensor.parts import local_part
from ..dtensor.placement import this_rank
from ..dtensor.subclasses import inner_of, is_subclass, kind_of
from ..runtime.hooks import about_to_write
from ..runtime.unit import units_in
from .p2p import P2PBatch
from .spread import Spread, spread_of
from .whole_subclasses import Inner, agreed, assembled, describe, spread_of_inner

# Tensors are sent in batches of up to this many bytes (of whole tensors); larger ones one by one.
BATCH_BYTES = 32 * 1024 * 1024


def full_state_dict(
    model: nn.Module | Mapping[str, Any],
    *,
    device: torch.device | str | None = "cpu",
    ranks: Sequence[int] = (0,),
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the ``state_dict()`` of a sharded model with whole tensors, on some ranks.

    Collective: every rank of ``group`` must call it. The result includes frozen parameters, the
    receiving rank's buffers, and values other than tensors. Tied parameters are one tensor under
    several names.

    Args:
        model: the model, or its state dict: a mapping of names to DTensors, tensors and other
            values.
        device: where to put the tensors. None: where the shards are.
        ranks: global ranks that get the result.
        dtype: cast floating-point tensors, except tensor subclasses, to this dtype before sending.
        group: the ranks that share this model. None: all.

    Returns:
        On ``ranks``, a dict in the order of ``state_dict()``; on other ranks, an empty dict. Its
        tensors share no memory with the model. A parameter that is a tensor subclass (NF4, int8)
        is returned whole, as the same class with the same dtypes.

    Raises:
        ValueError: if one of ``ranks`` has no part of a tensor; or if the shards of a tensor
            subclass do not form one tensor (for example with a different lookup table per rank).
        NotImplementedError: for a tensor subclass that is not sharded on dim 0, or whose class does
            not show how its inner tensors belong to its rows.

    Example:
        >>> state = full_state_dict(model, dtype=torch.bfloat16)
        >>> if dist.get_rank() == 0:
        ...     torch.save(state, "model.pt")
    """
    found = iter_full_tensors(model, device=device, ranks=ranks, dtype=dtype, group=group)
    here = this_rank() in ranks
    return {name: value for name, value in found if here}


def iter_full_tensors(
    model: nn.Module | Mapping[str, Any],
    *,
    device: torch.device | str | None = "cpu",
    ranks: Sequence[int] = (0,),
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield the entries of `full_state_dict` one by one, for example to write them one at a time.

    Tensors are sent in batches of up to 32 MiB. All ranks must iterate to the end; on ranks not in
    ``ranks`` the values are None. For arguments and errors, see `full_state_dict`.

    Example:
        >>> for name, tensor in iter_full_tensors(model):
        ...     if dist.get_rank() == 0:
        ...         write(name, tensor)
    """
    p2p = P2PBatch(group)
    spreads: dict[Any, Spread] = {}
    entries = _entries(model)
    uses = Counter(id(value) for _, value in entries)  # tied tensors have several names
    collected: dict[int, Any] = {}
    here = p2p.rank in ranks
    subclasses = _agree_on_subclasses(dict(entries), p2p)
    for batch in _batches(entries, dtype):
        for name, value in batch:
            if id(value) in collected:
                continue
            if not isinstance(value, DTensor):
                collected[id(value)] = _own_copy(value, device, dtype) if here else None
                continue
            spread, local = spread_of(value, name, p2p, spreads), _detached(value)
            if name in subclasses:
                inner = subclasses[name]
                whole = _collect_subclass(local, name, inner, spread, ranks, device, p2p)
            else:
                target = _target_dtype(value, dtype)
                whole = _collect(_plain(local, name), spread, ranks, device, target, p2p)
            collected[id(value)] = whole
        p2p.finish()
        for name, value in batch:
            uses[id(value)] -= 1
            yield name, collected[id(value)] if uses[id(value)] else collected.pop(id(value))


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    *,
    source: int = 0,
    strict: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Load whole tensors from one rank into a sharded model.

    Collective: every rank of ``group`` must call it. Each rank receives its part of each tensor,
    in the model's dtype, and replicas pass it on. Buffers get the values of ``source``.

    Parameters on the meta device are created on the device of their mesh and assigned with
    ``load_state_dict(..., assign=True)``. If they are tensor subclasses, call ``to_empty`` first.

    Args:
        model: the model.
        state: on rank ``source``, a mapping of names to whole tensors on any device; ignored on
            other ranks.
        source: the global rank that has ``state``.
        strict: whether the names must match the names of ``model.state_dict()``.
        group: the ranks that share this model. None: all.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` returns them.

    Raises:
        RuntimeError: if shapes, tensor subclasses or (with ``strict``) names do not match. It is
            raised on all ranks, before anything is written.

    Example:
        >>> state = torch.load("model.pt", mmap=True) if dist.get_rank() == 0 else None
        >>> load_full_state_dict(model, state)
    """
    p2p = P2PBatch(group)
    for unit in units_in(model):
        about_to_write(unit)
    own = dict(_entries(model))
    plan = _agree(own, state, source, strict, p2p)
    wanted = {name: own[name] for name in plan.tensors}
    subclasses = _agree_on_subclasses(wanted, p2p, state or {}, source)
    targets = _Targets(own)
    spreads: dict[Any, Spread] = {}
    done: set[int] = set()
    with torch.no_grad():
        for batch in _batches(wanted.items(), None):
            scattered = []
            for name, target in batch:
                into = targets.writable(name)
                if id(target) in done:
                    continue
                done.add(id(target))
                whole = state[name] if state is not None and p2p.rank == source else None
                for part, value, inner in _parts(into, whole, subclasses.get(name)):
                    if not isinstance(target, DTensor):
                        p2p.broadcast(part, value, source)
                        continue
                    spread = spread_of(target, name, p2p, spreads)
                    if inner is not None:
                        spread = spread_of_inner(inner, spread)
                    _scatter(_plain(part, name), value, spread, source, p2p)
                    scattered.append((part, spread))
            p2p.finish()
            for local, spread in scattered:
                _pass_on(local, spread, source, p2p)
            p2p.finish()
    if targets.made or plan.others:
        model.load_state_dict({**targets.made, **plan.others}, strict=False, assign=True)
    else:
        load_through_hooks(model, {n: v for n, v in own.items() if isinstance(v, Tensor)})
    return _IncompatibleKeys(plan.missing, plan.unexpected)


# -- planning ------------------------------------------------------------------------


def _entries(model: nn.Module | Mapping[str, Any]) -> list[tuple[str, Any]]:
    state = own_state(model) if isinstance(model, nn.Module) else model
    return list(state.items())


def _batches(
    entries: Iterable[tuple[str, Any]], dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Any]]]:
    """Batches of entries to send together; equal on all ranks, as only whole shapes count."""
    batch: list[tuple[str, Any]] = []
    size = 0
    for name, value in entries:
        nbytes = 0
        if isinstance(value, Tensor):
            nbytes = prod(value.shape) * _target_dtype(value, dtype).itemsize
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append((name, value))
        size += nbytes
    if batch:
        yield batch


def _target_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _agree_on_subclasses(
    tensors: Mapping[str, Any],
    p2p: P2PBatch,
    state: Mapping[str, Any] | None = None,
    source: int = 0,
) -> dict[str, dict[str, Inner]]:
    """Agree on the inner tensors of each whole tensor subclass, or raise on all ranks.

    Args:
        tensors: the model's tensors.
        state: on rank ``source``, the tensors to load; None: nothing is loaded.
    """
    mine = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor) and is_subclass(value):
            if state is not None and value.is_meta:
                raise NotImplementedError(
                    f"'{name}' is a {kind_of(local_part(value))} on the meta device, and only its "
                    "class can make it: call model.to_empty(device=...) before loading"
                )
            mine[name] = [describe(local_part(value), value.shape)]
            if state is not None and p2p.rank == source:
                mine[name].append(describe(state[name], value.shape))
    if not mine:
        return {}
    found = {}
    everyone = p2p.exchange(mine)
    for name in mine:
        parts = [part for each in everyone for part in each[name]]
        found[name] = _with_name(name, agreed, parts, equal_tables=state is None)
    return found


def _with_name(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; errors name the tensor."""
    try:
        return function(*args, **kwargs)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(f"The parts of '{name}' do not make one tensor: {error}") from None


def _parts(
    into: Tensor, whole: Tensor | None, inner: Mapping[str, Inner] | None
) -> list[tuple[Tensor, Tensor | None, Inner | None]]:
    """(target, source, inner tensor) for each inner tensor; for a plain tensor, only itself."""
    if inner is None:
        return [(into, whole, None)]
    values = inner_of(whole) if whole is not None else {}
    return [(part, values.get(path), inner[path]) for path, part in inner_of(into).items()]


@dataclass
class _Plan:
    """What the source rank found and broadcasts to all ranks."""

    tensors: list[str]
    others: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def _agree(
    own: dict[str, Any], state: Mapping[str, Any] | None, source: int, strict: bool, p2p: P2PBatch
) -> _Plan:
    """Compare names and shapes on ``source``, broadcast the result; raise on all ranks or none."""
    plan = _compare(own, state) if p2p.rank == source else None
    plan = p2p.share(plan, source)
    problems = list(plan.errors)
    if strict and plan.missing:
        problems.append(f"Missing key(s) in state_dict: {', '.join(plan.missing)}")
    if strict and plan.unexpected:
        problems.append(f"Unexpected key(s) in state_dict: {', '.join(plan.unexpected)}")
    if strict:
        problems += wrapper_prefix(plan.unexpected, plan.missing)
    if problems:
        raise RuntimeError("Error(s) in loading the full state dict: " + "; ".join(problems))
    return plan


def _compare(own: dict[str, Any], state: Mapping[str, Any] | None) -> _Plan:
    plan = _Plan([], {}, [], [], [])
    if state is None:
        plan.errors.append("the source rank passed None, not a state dict")
        return plan
    plan.unexpected += [name for name in state if name not in own]
    for name, target in own.items():
        if name not in state:
            plan.missing.append(name)
        elif not isinstance(target, Tensor):
            plan.others[name] = state[name]
        elif not isinstance(state[name], Tensor) or isinstance(state[name], DTensor):
            plan.errors.append(f"'{name}' is a {type(state[name]).__name__}, not a whole tensor")
        elif _kind(state[name]) != _kind(target):
            kinds = f"a {_kind(state[name])}, and in the model a {_kind(target)}"
            plan.errors.append(f"'{name}' is {kinds}: convert one of them before loading")
        elif state[name].shape != target.shape:
            shapes = f"{tuple(state[name].shape)}, and in the model {tuple(target.shape)}"
            plan.errors.append(f"size mismatch for {name}: {shapes}")
        else:
            plan.tensors.append(name)
    return plan


def _kind(tensor: Tensor) -> str:
    return kind_of(local_part(tensor)) if is_subclass(tensor) else "plain tensor"


class _Targets:
    """The tensors to write to: the model's own, or new ones for those on the meta device.

    Attributes:
        made: the new tensors that replace those on the meta device, by name.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self.made: dict[str, Tensor] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        kinds = [v.device_mesh.device_type for v in own.values() if isinstance(v, DTensor)]
        self._device = current_device(kinds[0] if kinds else "cpu")

    def writable(self, name: str) -> Tensor:
        """This rank's part of a tensor, outside of autograd."""
        target = self._own[name]
        if not target.is_meta:
            return _detached(target)
        if id(target) not in self._made:
            self._made[id(target)] = self._make(target)
        self.made[name], local = self._made[id(target)]
        return local

    def _make(self, target: Tensor) -> tuple[Tensor, Tensor]:
        local = getattr(target, "_local_tensor", target)
        new = torch.empty(local.shape, dtype=local.dtype, device=self._device)
        if not isinstance(target, DTensor):
            return new, new
        shape, stride = target.shape, target.stride()
        mesh, placements = target.device_mesh, target.placements
        wrapped = dtensor_over(new, mesh, placements, shape, stride)
        return wrapped, new


# -- moving -------------------------------------------------------------------------------------


def _collect(
    local: Tensor,
    spread: Spread,
    ranks: Sequence[int],
    device: torch.device | str | None,
    dtype: torch.dtype,
    p2p: P2PBatch,
) -> Tensor | None:
    """Start sending this rank's part to ``ranks``; there, return the tensor being filled."""
    whole = None
    for rank in ranks:
        for owner, box in spread.parts(rank):
            if rank == p2p.rank:
                if whole is None:
                    where = local.device if device is None else device
                    whole = torch.empty(spread.shape, dtype=dtype, device=where)
                if owner == rank:
                    _part(whole, box).copy_(local)
                else:
                    p2p.receive(_part(whole, box), owner, local.device)
            elif owner == p2p.rank:
                p2p.send(local.to(dtype), rank)
    if whole is None and p2p.rank in ranks:  # without elements
        whole = torch.empty(spread.shape, dtype=dtype, device=device or local.device)
    return whole


def _collect_subclass(
    local: Tensor,
    name: str,
    inner: Mapping[str, Inner],
    spread: Spread,
    ranks: Sequence[int],
    device: torch.device | str | None,
    p2p: P2PBatch,
) -> Tensor | None:
    """`_collect` for each inner tensor; the subclass is then built around the whole ones."""
    found: dict[str, Any] = {}
    for path, part in inner_of(local).items():
        of_inner = _with_name(name, spread_of_inner, inner[path], spread)
        found[path] = _collect(_plain(part, name), of_inner, ranks, device, part.dtype, p2p)
    if p2p.rank not in ranks:
        return None
    return assembled(local, found, spread.shape, torch.device(device or local.device))


def _scatter(
    local: Tensor, whole: Tensor | None, spread: Spread, source: int, p2p: P2PBatch
) -> None:
    """Start sending each part to its first holder."""
    for box, holders in spread.holders:
        first = source if source in holders else holders[0]
        if p2p.rank == source:
            assert whole is not None
            part = _part(whole, box)
            if first == source:
                local.copy_(part)
            else:
                p2p.send(part.to(local.dtype), first, local.device)
        elif p2p.rank == first:
            p2p.receive(local, source, local.device)


def _pass_on(local: Tensor, spread: Spread, source: int, p2p: P2PBatch) -> None:
    """Start sending each part from its first holder to the others."""
    for _, holders in spread.holders:
        if p2p.rank not in holders:
            continue
        first = source if source in holders else holders[0]
        for rank in holders:
            if rank == first:
                continue
            if p2p.rank == first:
                p2p.send(local, rank)
            elif p2p.rank == rank:
                p2p.receive(local, first, local.device)


def _part(whole: Tensor, box: Box) -> Tensor:
    index = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    return whole[index]


def _own_copy(value: Any, device: torch.device | str | None, dtype: torch.dtype | None) -> Any:
    """Copy a value this rank holds itself: a buffer, ignored parameter or other object."""
    if not isinstance(value, Tensor):
        return value
    where = torch.device(value.device if device is None else device)
    if is_subclass(value):
        inner = {path: t.to(where, copy=True) for path, t in inner_of(value).items()}
        return assembled(value, inner, value.shape, where)
    return value.detach().to(where, _target_dtype(value, dtype), copy=True)


def _detached(tensor: Tensor) -> Tensor:
    """This rank's part, in its own memory: ``detach`` of a subclass may copy inner tensors."""
    local = local_part(tensor)
    return local if is_subclass(local) else local.detach()


def _plain(local: Tensor, name: str) -> Tensor:
    if type(local) is not Tensor:
        raise NotImplementedError(
            f"The shard of '{name}' is a {type(local).__name__}, not a plain tensor: use "
            "DTensor.full_tensor() or fsdp2.checkpoint for it"
        )
    return local
