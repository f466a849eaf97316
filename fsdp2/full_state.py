"""Whole tensors from a sharded model, and back, without holding the model twice.

`full_state_dict` collects the state of a model on one rank (or some), tensor by tensor: shards are
sent straight to where they are wanted, so other ranks need no memory but for a cast or a copy of
their own shards, and the receiving rank little beside the result. `load_full_state_dict` is the
way back: each rank is sent its own part of each tensor, and replicas pass it on.

It knows DTensors and plain tensors only, with any placements that are boxes of the whole tensor:
HSDP, tensor parallelism, strided shards. Every rank works out the whole plan by itself, from what
the DTensors say; only bytes of tensors travel, and the names that `load_full_state_dict` found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import _IncompatibleKeys

from .checkpoint.boxes import Box
from .checkpoint.placement import box_of, slices_like, this_rank
from .collectives import backend_name, take_tags
from .failures import explained
from .hooks import about_to_write, wrapper_prefix
from .unit import units_in

# Tensors are sent together up to this many bytes (of whole tensors), or one by one if larger.
BATCH_BYTES = 32 * 1024 * 1024


def full_state_dict(
    model: nn.Module | Mapping[str, Any],
    *,
    device: torch.device | str | None = "cpu",
    ranks: Sequence[int] = (0,),
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The ``state_dict()`` of a sharded model with whole tensors, on some ranks.

    Collective: every rank of ``group`` has to call it. Frozen parameters, buffers (of the rank
    that receives) and what is not a tensor are included; tied parameters are one tensor under
    several names.

    Args:
        model: the model, or a state dict of it: a mapping of names to DTensors, tensors and other
            values.
        device: where to put the tensors; None: where the shards are.
        ranks: global ranks that get the result.
        dtype: cast floating-point tensors to this before they travel.
        group: the ranks that share this model; None: all.

    Returns:
        A dict in the order of ``state_dict()`` on ``ranks``, an empty one elsewhere. Its tensors
        share no memory with the model.

    Raises:
        ValueError: if one of ``ranks`` has no part of a tensor.
        NotImplementedError: for shards that are tensor subclasses.

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
    """The entries of `full_state_dict` one after the other, for writing them as they come.

    A few tensors are on their way together (up to 32 MiB). All ranks have to go on to the end; on
    others than ``ranks`` the values are None. Arguments and errors are those of
    `full_state_dict`.

    Example:
        >>> for name, tensor in iter_full_tensors(model):
        ...     if dist.get_rank() == 0:
        ...         write(name, tensor)
    """
    wire = _Wire(group)
    spreads: dict[Any, _Spread] = {}
    entries = _entries(model)
    uses = Counter(id(value) for _, value in entries)  # tied tensors have several names
    collected: dict[int, Any] = {}
    for batch in _batches(entries, dtype):
        for name, value in batch:
            if id(value) in collected:
                continue
            if isinstance(value, DTensor):
                spread = _spread_of(value, name, wire, spreads)
                collected[id(value)] = _collect(value, name, spread, ranks, device, dtype, wire)
            else:
                collected[id(value)] = _own_copy(value, device, dtype, wire.rank in ranks)
        wire.finish()
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
    """Load whole tensors that one rank has into a sharded model.

    Collective: every rank of ``group`` has to call it. Each rank is sent its own part of each
    tensor, in the dtype of the model; replicas pass it on. Buffers become those of ``source``.
    Parameters on the meta device are made on the device of their mesh, by
    ``load_state_dict(..., assign=True)``.

    Args:
        model: the model.
        state: names and whole tensors, on any device, on rank ``source``; ignored elsewhere.
        source: the global rank that has them.
        strict: whether the names must be those of ``model.state_dict()``.
        group: the ranks that share this model; None: all.

    Returns:
        As ``load_state_dict``: ``missing_keys`` and ``unexpected_keys``.

    Raises:
        RuntimeError: on all ranks, for names that do not fit (if ``strict``) or shapes that do not.

    Example:
        >>> state = torch.load("model.pt", mmap=True) if dist.get_rank() == 0 else None
        >>> load_full_state_dict(model, state)
    """
    wire = _Wire(group)
    for unit in units_in(model):
        about_to_write(unit)
    own = dict(_entries(model))
    plan = _agree(own, state, source, strict, wire)
    targets = _Targets(own)
    spreads: dict[Any, _Spread] = {}
    done: set[int] = set()
    with torch.no_grad():
        for batch in _batches([(name, own[name]) for name in plan.tensors], None):
            scattered = []
            for name, target in batch:
                into = targets.writable(name)
                if id(target) in done:
                    continue
                done.add(id(target))
                whole = state[name] if state is not None and wire.rank == source else None
                if not isinstance(target, DTensor):
                    wire.broadcast(into, whole, source)
                    continue
                spread = _spread_of(target, name, wire, spreads)
                _scatter(into, whole, spread, source, wire)
                scattered.append((into, spread))
            wire.finish()
            for local, spread in scattered:
                _pass_on(local, spread, source, wire)
            wire.finish()
    if targets.made or plan.others:
        model.load_state_dict({**targets.made, **plan.others}, strict=False, assign=True)
    return _IncompatibleKeys(plan.missing, plan.unexpected)


# -- where the parts of a tensor are ------------------------------------------------------------


@dataclass(frozen=True)
class _Spread:
    """The ranks that hold a tensor, as an array with a dim per mesh dim, and how it is cut.

    Attributes:
        shape: of the whole tensor.
        ranks: global ranks.
        placements: one per dim of ``ranks``.
    """

    shape: tuple[int, ...]
    ranks: Tensor
    placements: tuple[Placement, ...]
    name: str

    def parts(self, rank: int) -> list[tuple[int, Box]]:
        """Which rank sends which box, so that ``rank`` gets all: the nearest replicas."""
        mine = self._coordinate(rank)
        replicated = [d for d, p in enumerate(self.placements) if isinstance(p, Replicate)]
        return [
            (int(self.ranks[c]), box)
            for c, box in self._boxes
            if box.numel and all(c[d] == mine[d] for d in replicated)
        ]

    @cached_property
    def holders(self) -> list[tuple[Box, list[int]]]:
        """Every box, and the ranks that hold it."""
        found: dict[Box, list[int]] = {}
        for c, box in self._boxes:
            if box.numel:
                found.setdefault(box, []).append(int(self.ranks[c]))
        return list(found.items())

    @cached_property
    def _boxes(self) -> list[tuple[tuple[int, ...], Box]]:
        shape = tuple(self.ranks.shape)
        return [
            (c, box_of(self.shape, shape, self.placements, c, self.name))
            for c in product(*map(range, shape))
        ]

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        found = (self.ranks == rank).nonzero()
        if not len(found):
            raise ValueError(
                f"Rank {rank} has no part of '{self.name}', which is on ranks "
                f"{sorted(self.ranks.flatten().tolist())}: choose one of these, and pass group=... "
                "if not all ranks share this model"
            )
        return tuple(found[0].tolist())


def _spread_of(tensor: DTensor, name: str, wire: _Wire, made: dict[Any, _Spread]) -> _Spread:
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    key = (mesh, placements, tensor.shape)
    if key not in made:
        ranks, dims = mesh.mesh, placements
        if slices_like(mesh, wire.ranks)[1] > 1:
            # On a slice of a larger mesh, whose other slices hold the same.
            ranks, num = _with_other_slices(mesh, wire.ranks)
            dims = (*[Replicate()] * num, *placements)
        made[key] = _Spread(tuple(tensor.shape), ranks, dims, name)
    return made[key]


def _with_other_slices(mesh: Any, ranks: tuple[int, ...]) -> tuple[Tensor, int]:
    """The ranks of all slices like ``mesh``: dims across the slices first, and their number."""
    whole = mesh._get_root_mesh()
    names, coordinate = whole.mesh_dim_names, whole.get_coordinate()
    array, kept = whole.mesh, list(names)
    for name in names:
        if name in mesh.mesh_dim_names:
            continue
        dim = kept.index(name)
        line = whole.mesh[
            tuple(slice(None) if n == name else coordinate[i] for i, n in enumerate(names))
        ]
        if not set(line.tolist()) <= set(ranks):  # another model: a stage of a pipeline
            array = array.select(dim, coordinate[names.index(name)])
            kept.remove(name)
    across = [n for n in kept if n not in mesh.mesh_dim_names]
    order = [kept.index(n) for n in (*across, *mesh.mesh_dim_names)]
    return array.permute(order), len(across)


# -- what there is to do ------------------------------------------------------------------------


def _entries(model: nn.Module | Mapping[str, Any]) -> list[tuple[str, Any]]:
    state = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    return list(state.items())


def _batches(
    entries: Iterable[tuple[str, Any]], dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Any]]]:
    """Entries that travel together: the same on all ranks, as it depends on whole shapes."""
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


@dataclass
class _Plan:
    """What the source found, as all ranks must know it."""

    tensors: list[str]
    others: dict[str, Any]
    missing: list[str]
    unexpected: list[str]
    errors: list[str]


def _agree(
    own: dict[str, Any], state: Mapping[str, Any] | None, source: int, strict: bool, wire: _Wire
) -> _Plan:
    """Let ``source`` compare names and shapes, and everybody know; raise everywhere or nowhere."""
    plan = _compare(own, state) if wire.rank == source else None
    plan = wire.share(plan, source)
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
        elif state[name].shape != target.shape:
            shapes = f"{tuple(state[name].shape)}, and in the model {tuple(target.shape)}"
            plan.errors.append(f"size mismatch for {name}: {shapes}")
        else:
            plan.tensors.append(name)
    return plan


class _Targets:
    """Where to write: the tensors of the model, or new ones for those on the meta device.

    Attributes:
        made: what took the place of tensors on the meta device, by name.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self.made: dict[str, Tensor] = {}
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        kinds = [v.device_mesh.device_type for v in own.values() if isinstance(v, DTensor)]
        self._device = _current_device(kinds[0] if kinds else "cpu")

    def writable(self, name: str) -> Tensor:
        """This rank's part of a tensor, outside of autograd."""
        target = self._own[name]
        if not target.is_meta:
            inside = target.detach()
            return _plain(getattr(inside, "_local_tensor", inside), name)
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
        wrapped = DTensor.from_local(
            new, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return wrapped, new


def _current_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


# -- moving -------------------------------------------------------------------------------------


def _collect(
    tensor: DTensor,
    name: str,
    spread: _Spread,
    ranks: Sequence[int],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    wire: _Wire,
) -> Tensor | None:
    """Start sending this rank's part to ``ranks``; on those, return what will be whole."""
    local = _plain(tensor._local_tensor.detach(), name)
    target = _target_dtype(tensor, dtype)
    whole = None
    for rank in ranks:
        for owner, box in spread.parts(rank):
            if rank == wire.rank:
                if whole is None:
                    where = local.device if device is None else device
                    whole = torch.empty(spread.shape, dtype=target, device=where)
                if owner == rank:
                    _part(whole, box).copy_(local)
                else:
                    wire.receive(_part(whole, box), owner, local.device)
            elif owner == wire.rank:
                wire.send(local.to(target), rank)
    if whole is None and wire.rank in ranks:  # without elements
        whole = torch.empty(spread.shape, dtype=target, device=device or local.device)
    return whole


def _scatter(
    local: Tensor, whole: Tensor | None, spread: _Spread, source: int, wire: _Wire
) -> None:
    """Start sending its part to the first holder of each."""
    for box, holders in spread.holders:
        first = source if source in holders else holders[0]
        if wire.rank == source:
            assert whole is not None
            part = _part(whole, box)
            if first == source:
                local.copy_(part)
            else:
                wire.send(part.to(local.dtype), first, local.device)
        elif wire.rank == first:
            wire.receive(local, source, local.device)


def _pass_on(local: Tensor, spread: _Spread, source: int, wire: _Wire) -> None:
    """From the first holder of each part to the others."""
    for _, holders in spread.holders:
        if wire.rank not in holders:
            continue
        first = source if source in holders else holders[0]
        for rank in holders:
            if rank == first:
                continue
            if wire.rank == first:
                wire.send(local, rank)
            elif wire.rank == rank:
                wire.receive(local, first, local.device)


def _part(whole: Tensor, box: Box) -> Tensor:
    index = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
    return whole[index]


def _own_copy(
    value: Any, device: torch.device | str | None, dtype: torch.dtype | None, wanted: bool
) -> Any:
    """What this rank has itself: buffers, ignored parameters, and what is not a tensor."""
    if not wanted:
        return None
    if not isinstance(value, Tensor):
        return value
    where = value.device if device is None else device
    return value.detach().to(where, _target_dtype(value, dtype), copy=True)


def _plain(local: Tensor, name: str) -> Tensor:
    if type(local) is not Tensor:
        raise NotImplementedError(
            f"The shard of '{name}' is a {type(local).__name__}, not a plain tensor: use "
            "DTensor.full_tensor() or fsdp2.checkpoint for it"
        )
    return local


_CALL = "a message of full_state_dict or load_full_state_dict, a call of all ranks,"


class _Wire:
    """Messages between pairs of ranks: posted one by one, then sent and waited for together.

    Both ends post the messages between them in the same order. Tensors travel as bytes, so that
    any dtype does.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = this_rank()
        self.ranks: tuple[int, ...] = (self.rank,)
        self.group: Any = None
        self._first_tag = 0
        if dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.ranks = tuple(dist.get_process_group_ranks(self.group))
            self._first_tag = take_tags([self.group], 0)  # above those that units use
            self._open()
        self._posted: list[dist.P2POp] = []
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._unpack: list[tuple[Tensor, Tensor]] = []
        self._broadcasts: list[tuple[Tensor, int]] = []

    def _open(self) -> None:
        """NCCL wants a call of all ranks of a group before messages between some of them."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return
        device = _current_device(accelerator.type)
        if len(self.ranks) > 1 and backend_name(self.group, device) == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def send(self, tensor: Tensor, rank: int, device: torch.device | None = None) -> None:
        """Send ``tensor``, from ``device`` if that is another one."""
        where = self._device(tensor.device if device is None else device)
        self._post(dist.isend, tensor.to(where).contiguous(), rank, (self.rank, rank))

    def receive(self, into: Tensor, rank: int, device: torch.device) -> None:
        """Receive on ``device``, straight into ``into`` if that is possible."""
        buffer = self._buffer(into, device)
        self._post(dist.irecv, buffer, rank, (rank, self.rank))

    def broadcast(self, into: Tensor, value: Tensor | None, source: int) -> None:
        """From ``source``, which has the ``value``, into all ranks' tensors."""
        if value is not None:
            into.copy_(value)
        if len(self.ranks) > 1:
            buffer = self._buffer(into, into.device)
            if value is not None and buffer is not into:
                buffer.copy_(into)
            self._broadcasts.append((_as_bytes(buffer), source))

    def finish(self) -> None:
        """Send and receive all that was posted."""
        with explained(_CALL, self.group):
            if self._posted:
                for work in dist.batch_isend_irecv(self._posted):
                    work.wait()
            for data, source in self._broadcasts:
                dist.broadcast(data, source, group=self.group)
        for into, buffer in self._unpack:
            if into is not buffer:
                into.copy_(buffer)
            else:
                torch.autograd.graph.increment_version(into)
        for posted in (self._posted, self._broadcasts, self._unpack):
            posted.clear()
        self._numbers.clear()

    def share(self, value: Any, source: int) -> Any:
        """What ``source`` has, on all ranks."""
        if len(self.ranks) == 1:
            return value
        values, device = [value], self._device(torch.device("cpu"))
        with explained(_CALL, self.group):
            dist.broadcast_object_list(values, source, group=self.group, device=device)
        return values[0]

    def _post(self, op: Any, data: Tensor, peer: int, pair: tuple[int, int]) -> None:
        tag = self._first_tag + self._numbers[pair]
        self._numbers[pair] += 1
        self._posted.append(dist.P2POp(op, _as_bytes(data), peer, self.group, tag))

    def _buffer(self, into: Tensor, device: torch.device) -> Tensor:
        where = self._device(device)
        direct = into.is_contiguous() and into.device == where
        buffer = into if direct else torch.empty(into.shape, dtype=into.dtype, device=where)
        self._unpack.append((into, buffer))
        return buffer

    def _device(self, device: torch.device) -> torch.device:
        """Where a tensor of ``device`` has to be for this group."""
        try:
            self.group._get_backend(torch.device(device.type))
        except RuntimeError:  # NCCL knows no tensors of the CPU
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is not None:
                return _current_device(accelerator.type)
        return device


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
