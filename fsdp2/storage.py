"""The storages of a bucket, and every view of them that the steps of training need.

All views are made once, here. A storage is freed and allocated by resizing it, so views, saved
tensors of autograd and the unsharded parameters stay valid; what changes is only whether there
is memory behind them. Owners: the bucket owns all three storages; the slices handed out to
users (sharded parameters, gradients) keep their memory alive by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from .layout import BucketLayout, Slot, plan_bucket, regroup
from .param import ShardedParam


class GatherPlan:
    """Everything that a gather of one bucket reads and writes, as lists made once.

    Attributes:
        inputs, outputs: of the all-gathers, one pair per direct parameter and one for the pack.
        own, source: this rank's slices of ``outputs`` and where their data comes from. With a
            cast, ``own`` is written first (cast straight into place) and gathered in place.
        rows: for each output, how many elements each rank has that are not padding.
    """

    __slots__ = (
        "cast",
        "inputs",
        "messages",
        "outputs",
        "own",
        "pack_split",
        "rank",
        "rows",
        "source",
        "unpack_from",
        "unpack_to",
    )

    def __init__(
        self, layout: BucketLayout, rank: int, shards: torch.Tensor, gathered: torch.Tensor
    ) -> None:
        self.rank = rank
        self.cast = shards.dtype != gathered.dtype
        self.messages: Any = None  # what a transport wants to keep with the plan
        num_shards = layout.num_shards
        spans = [(layout.slots[i].shard_offset, layout.slots[i].shard_numel) for i in layout.direct]
        starts = [layout.slots[i].full_offset for i in layout.direct]
        self.rows = [
            [layout.slots[i].local_numel(r) for r in range(num_shards)] for i in layout.direct
        ]
        if layout.pack_numel:
            spans.append((layout.pack_offset, layout.pack_numel))
            starts.append(layout.pack_full_offset)
            self.rows.append([layout.pack_numel] * num_shards)
        self.source = [shards[offset : offset + numel] for offset, numel in spans]
        self.outputs = [
            gathered[start : start + num_shards * numel]
            for start, (_, numel) in zip(starts, spans, strict=True)
        ]
        self.own = [
            output[rank * numel : (rank + 1) * numel]
            for output, (_, numel) in zip(self.outputs, spans, strict=True)
        ]
        self.inputs = self.own if self.cast else self.source
        self._plan_unpack(layout, gathered)

    def _plan_unpack(self, layout: BucketLayout, gathered: torch.Tensor) -> None:
        """Views for copying packed parameters from the pack to their places."""
        self.pack_split: tuple[torch.Tensor, list[int], list[torch.Tensor]] | None = None
        self.unpack_to: list[torch.Tensor] = []
        self.unpack_from: list[torch.Tensor] = []
        if not layout.packed:
            return
        num_shards = layout.num_shards
        pack = gathered[layout.pack_full_offset :][: num_shards * layout.pack_numel]
        pack = pack.view(num_shards, layout.pack_numel)
        sizes, outs = [], []
        for i in layout.packed:
            slot = layout.slots[i]
            full = gathered[slot.full_offset : slot.full_offset + slot.full_numel]
            if slot.dim in (0, None):
                sizes.append(slot.shard_numel)
                outs.append(full.view(num_shards, slot.shard_numel))
                continue
            whole = full[: prod(slot.shape)].view(slot.shape)
            offset = slot.shard_offset - layout.pack_offset
            for rank in range(num_shards):
                start, stop = slot.span(rank)
                piece = pack[rank, offset : offset + slot.local_numel(rank)]
                self.unpack_to.append(whole.narrow(slot.dim, start, stop - start))
                self.unpack_from.append(piece.view(slot.local_shape(rank)))
        if sizes:
            self.pack_split = (pack[:, : sum(sizes)], sizes, outs)

    def unpack(self) -> None:
        """Copy packed parameters from the pack to their places: one kernel for those on dim-0."""
        if self.pack_split is not None:
            pack, sizes, outs = self.pack_split
            torch.split_with_sizes_copy(pack, sizes, dim=1, out=outs)
        if self.unpack_to:
            torch._foreach_copy_(self.unpack_to, self.unpack_from)


class GradientStore:
    """The sharded gradients of a bucket: one storage, one DTensor per parameter, made once.

    A gradient that the user kept (across ``zero_grad``, say) must stay as it is, so before the
    storage is written again with no ``.grad`` attached, the references to it are counted; if
    anybody else holds one, the old storage is left to them and a new one is made.
    """

    __slots__ = ("_baseline", "dtensors", "flat", "locals", "params", "storage")

    def __init__(self, layout: BucketLayout, rank: int, params: Sequence[ShardedParam], flat):
        self.params = params
        self.flat: torch.Tensor = flat
        self.storage = flat.untyped_storage()
        self.locals = [
            flat[slot.shard_offset : slot.shard_offset + slot.local_numel(rank)].view(
                slot.local_shape(rank)
            )
            for slot in layout.slots
        ]
        self.dtensors = [
            p.sharded_spec.wrap(local) for p, local in zip(params, self.locals, strict=True)
        ]
        self._baseline = self._references()

    def _references(self) -> tuple[int, int, int]:
        return (
            sum(map(sys.getrefcount, self.dtensors)),
            sum(map(sys.getrefcount, self.locals)),
            torch._C._storage_Use_Count(self.storage._cdata),
        )

    def attached(self) -> bool:
        """Whether any parameter has a gradient, ours or not."""
        return any(p.sharded.grad is not None for p in self.params)

    def kept_elsewhere(self) -> bool:
        """Whether somebody else holds a gradient of ours. Only valid while none is attached."""
        return self._references() != self._baseline

    def allocate(self) -> None:
        nbytes = self.flat.numel() * self.flat.itemsize
        if self.storage.size() != nbytes:
            self.storage.resize_(nbytes)

    def free(self) -> None:
        self.storage.resize_(0)


class Bucket:
    """The parameters of a unit that share dtypes, with their storages.

    Attributes:
        shards: 1-D, original dtype, on the device where shards live.
        gathered: 1-D, dtype of computation. With one shard and no cast it *is* ``shards``.
        plan: of the gather over all shards; ``regrouped`` of the one after forward, if any.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        num_shards: int,
        rank: int,
        *,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        device: torch.device,
        shard_device: torch.device,
        pin_memory: bool,
        direct_min_bytes: int,
    ) -> None:
        self.params = tuple(params)
        self.rank = rank
        self.orig_dtype = params[0].dtype
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.device = device
        self.shard_device = shard_device
        self.pin_memory = pin_memory
        self.itemsizes = (gather_dtype.itemsize, self.orig_dtype.itemsize, reduce_dtype.itemsize)
        self.layout = plan_bucket(
            [p.full_shape for p in params],
            [p.dim for p in params],
            num_shards,
            itemsizes=self.itemsizes,
            direct_min_bytes=direct_min_bytes,
        )
        self.grads: GradientStore | None = None
        self.in_flight_params: set[int] = set()  # whose gradients are on their way
        # HSDP without all-reduce: what reductions over shards only have left, and for whom.
        self.partial: torch.Tensor | None = None
        self.partial_present: set[int] = set()
        self.regrouped: RegroupedShards | None = None

    # -- sharding ---------------------------------------------------------------------------

    def shard_from(self, sources: Sequence[torch.Tensor], *, whole: bool) -> None:
        """Fill a new sharded storage and attach its slices to the parameters.

        Args:
            sources: for each parameter its whole (``whole=True``) or sharded local tensor; on
                any device.
        """
        meta = any(source.is_meta for source in sources)
        device = torch.device("meta") if meta else self.shard_device
        pin = self.pin_memory and not meta
        shards = torch.zeros(
            self.layout.shard_numel, dtype=self.orig_dtype, device=device, pin_memory=pin
        )
        for param, slot, source in zip(self.params, self.layout.slots, sources, strict=True):
            local = _slice_with_own_storage(shards, slot, self.rank)
            if not meta:
                local.copy_(_own_rows(source, slot, self.rank) if whole else source)
            param.attach(local)
        self.shards = shards

    @property
    def is_meta(self) -> bool:
        return self.shards.is_meta

    @property
    def aliases_shards(self) -> bool:
        """Whether gathering is the identity: one shard, same dtype, same device."""
        return (
            self.layout.num_shards == 1
            and self.gather_dtype == self.orig_dtype
            and self.shard_device == self.device
        )

    def materialize(self) -> None:
        """Make the gathered storage (without memory), the unsharded parameters and the plan."""
        self.staged: torch.Tensor | None = None
        if self.aliases_shards:
            self.gathered = self.shards
        else:
            self.gathered = torch.empty(
                self.layout.gathered_numel, dtype=self.gather_dtype, device=self.device
            )
        self.gathered_bytes = 0 if self.aliases_shards else self.gathered.nbytes
        self.gathered_storage = self.gathered.untyped_storage()
        source = self.shards
        if self.shard_device != self.device:  # offloaded: gathers read a copy on the device
            self.staged = source = torch.empty_like(self.shards, device=self.device)
        self.plan = GatherPlan(self.layout, self.rank, source, self.gathered)
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            # Alignment of the sharded storage is that of the gathered one where they are one.
            start = slot.shard_offset if self.aliases_shards else slot.full_offset
            param.make_unsharded(_alias(self.gathered_storage, self.gathered, start, slot.shape))
        self.free()
        if self.staged is not None:
            self.staged.untyped_storage().resize_(0)

    def regroup(self, num_shards: int, rank: int) -> None:
        """Prepare resharding to ``num_shards`` ranks after forward."""
        layout = regroup(self.layout, num_shards, itemsizes=self.itemsizes)
        if layout.gathered_numel > self.gathered.numel():
            self.gathered = torch.empty(0, dtype=self.gather_dtype, device=self.device).set_(
                self.gathered_storage, 0, (layout.gathered_numel,), (1,)
            )
            self.gathered_bytes = self.gathered.nbytes
        self.regrouped = RegroupedShards(layout, rank, self.gathered)

    # -- memory -----------------------------------------------------------------------------

    def allocate(self) -> None:
        if self.gathered_bytes:
            self.gathered_storage.resize_(self.gathered_bytes)

    def free(self) -> None:
        if self.gathered_bytes:
            self.gathered_storage.resize_(0)

    def fill_own_slices(self) -> None:
        """Before a gather: copy offloaded shards to the device, cast into the own slices."""
        if self.staged is not None:
            self.staged.untyped_storage().resize_(self.shards.nbytes)
            self.staged.copy_(self.shards, non_blocking=True)
        if self.plan.cast or self.layout.num_shards == 1:
            torch._foreach_copy_(self.plan.own, self.plan.source)

    def free_staged(self) -> None:
        if self.staged is not None:
            self.staged.untyped_storage().resize_(0)

    def gradient_store(self) -> GradientStore:
        """The store of sharded gradients, with memory, safe to write where no ``.grad`` is."""
        grads = self.grads
        if grads is None or not (self.in_flight_params or grads.attached() or not grads.kept_elsewhere()):
            flat = torch.zeros(
                self.layout.shard_numel,
                dtype=self.orig_dtype,
                device=self.shard_device,
                pin_memory=self.pin_memory,
            )
            grads = self.grads = GradientStore(self.layout, self.rank, self.params, flat)
        grads.allocate()
        return grads

    def release_gradients(self) -> None:
        """Give back the memory of gradients that ``zero_grad(set_to_none=True)`` dropped."""
        grads = self.grads
        if grads is None or self.in_flight_params or grads.attached():
            return
        if grads.kept_elsewhere():
            self.grads = None
        else:
            grads.free()


class RegroupedShards:
    """Larger shards kept between forward and backward (``reshard_after_forward=int``)."""

    __slots__ = ("_keep", "layout", "locals", "plan", "shards", "storage")

    def __init__(self, layout: BucketLayout, rank: int, gathered: torch.Tensor) -> None:
        self.layout = layout
        self.shards = torch.empty(
            layout.shard_numel, dtype=gathered.dtype, device=gathered.device
        )
        self.storage = self.shards.untyped_storage()
        self.plan = GatherPlan(layout, rank, self.shards, gathered)
        self.locals = [
            self.shards[slot.shard_offset : slot.shard_offset + slot.shard_numel]
            for slot in layout.slots
        ]
        self._keep = [
            gathered[slot.full_offset + rank * slot.shard_numel :][: slot.shard_numel]
            for slot in layout.slots
        ]
        self.free()

    def save(self) -> None:
        """Copy this rank's slices out of the gathered storage, before that is freed."""
        self.storage.resize_(self.shards.numel() * self.shards.itemsize)
        torch._foreach_copy_(self.locals, self._keep)

    def free(self) -> None:
        self.storage.resize_(0)


def _own_rows(whole: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    if slot.dim is None:
        return whole
    start, stop = slot.span(rank)
    return whole.narrow(slot.dim, start, stop - start)


def _alias(
    storage: torch.UntypedStorage, like: torch.Tensor, offset: int, shape: tuple[int, ...]
) -> torch.Tensor:
    """A tensor on ``storage`` with a version counter of its own.

    Gathers write through other tensors on the same storage; were the counter shared, autograd
    would take the gather in backward for a change of its saved weights.
    """
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        storage, offset, shape, strides
    )


def _slice_with_own_storage(flat: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's shard of a parameter as a tensor whose storage is just these bytes of ``flat``.

    ``torch.save`` writes whole storages, so a plain view would make it write the whole unit.
    """
    numel, shape = slot.local_numel(rank), slot.local_shape(rank)
    if flat.is_meta or numel == 0:
        return flat[slot.shard_offset : slot.shard_offset + numel].view(shape)
    start = slot.shard_offset * flat.itemsize
    part = flat.untyped_storage()[start : start + numel * flat.itemsize]
    return _alias(part, flat, 0, shape)
