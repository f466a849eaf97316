"""The gathered storage of a bucket: its memory, and the inputs and outputs of its gather.

It gets and loses memory by resizing, so that views, saved tensors of autograd and the unsharded
parameters stay valid; only the memory behind them comes and goes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Protocol

import torch

from ..dtensor.memory import record_gathered
from .layout import BucketLayout, Slot

Messages = list[tuple[list[torch.Tensor], int, int]]

# In units that enclose others, parameters of at least this size have separate memory. So has a pack
# of this size, which is freed once it has been copied out.
OWN_PIECE_MIN_BYTES = 1024 * 1024


# The last of these changes the size of every storage; `fsdp2.testing` adds one that records it.
resizers: list[Callable[[torch.UntypedStorage, int], object]] = [torch.UntypedStorage.resize_]


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give ``storage`` memory of the current stream, or (0) free it."""
    resizers[-1](storage, nbytes)


class Segments:
    """The gathered storage of a bucket, as one or several pieces of memory.

    There is one piece for all parameters, unless the unit encloses others (a root). There, each
    large parameter has its own piece, which is freed as soon as nothing refers to it any more. A
    large pack has one too, since nothing reads it after the gather.
    """

    keeps_memory = False  # whether addresses must stay: captured graphs contain them

    def __init__(self, bounds: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Pieces between consecutive ``bounds`` (elements), with memory."""
        self.dtype = dtype
        self.starts = list(bounds[:-1])
        self.flats = [
            torch.empty(stop - start, dtype=dtype, device=device)
            for start, stop in pairwise(bounds)
        ]
        self.storages = [flat.untyped_storage() for flat in self.flats]
        record_gathered(self.storages)
        self.sizes = [flat.nbytes for flat in self.flats]
        self.nbytes = sum(self.sizes)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Elements ``offset`` to ``offset + numel``, which lie in one piece."""
        piece = self.piece(offset)
        start = offset - self.starts[piece]
        return self.flats[piece][start : start + numel]

    def piece(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1

    def allocate(self) -> None:
        for storage, size in zip(self.storages, self.sizes, strict=True):
            # Parts may have memory: those that were not freed early, and all with `keeps_memory`.
            # `resize_` to the size that it has would still take new memory, and copy.
            if storage.nbytes() != size:
                resize(storage, size)

    def free(self) -> None:
        for storage in () if self.keeps_memory else self.storages:
            resize(storage, 0)


class GatherPlan:
    """All inputs and outputs of a gather of one bucket, as lists made once.

    Attributes:
        inputs, outputs: of the all-gathers, one pair per direct parameter and one for the pack.
        own, source: this rank's slices of ``outputs`` and where their data comes from.
        rows: for each output, how many elements each rank has that are not padding.
        messages, as_bytes, row, pieces: cached by transports: messages to send and to receive, as
            (tensors, peer, tag); the same gather of bytes; where the bytes of narrower numbers lie;
            an output in each piece of memory.
        encoded: the narrower numbers to send, if they are kept; None: computed from ``source``.
    """

    messages: tuple[Messages, Messages] | None = None
    as_bytes: GatherBatch | None = None
    row: object = None
    pieces: Sequence[torch.Tensor] | None = None
    encoded: torch.Tensor | None = None

    def __init__(
        self, layout: BucketLayout, rank: int, shards: torch.Tensor, gathered: Segments
    ) -> None:
        self.layout = layout
        self.cast = self._casts = shards.dtype != gathered.dtype
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
            gathered.view(start, num_shards * numel)
            for start, (_, numel) in zip(starts, spans, strict=True)
        ]
        self.own = [
            output[rank * numel : (rank + 1) * numel]
            for output, (_, numel) in zip(self.outputs, spans, strict=True)
        ]
        # A cast writes directly into the own slices, which are then gathered in place: no buffer
        # for the cast shard. Without a cast, shards are read in place: no copy at all.
        self.inputs = self.own if self.cast else self.source
        self._plan_unpack(layout, gathered)

    def forget_transports(self) -> None:
        """Forget how narrower numbers were sent."""
        # The others depend on the group, or hold views that are counted (`EarlyFree.count_own`).
        self.row = self.encoded = None
        self.cast = self._casts

    def _plan_unpack(self, layout: BucketLayout, gathered: Segments) -> None:
        """Views for copying packed parameters from the pack to their places."""
        # In the pack, the slices of one rank are together; in place, the slices of one parameter.
        self.unpack_to: list[torch.Tensor] = []
        self.unpack_from: list[torch.Tensor] = []
        if not layout.packed:
            return
        num_shards = layout.num_shards
        pack = gathered.view(layout.pack_full_offset, num_shards * layout.pack_numel)
        pack = pack.view(num_shards, layout.pack_numel)
        slots = [layout.slots[i] for i in layout.packed]
        for group in _of_equal_size([slot for slot in slots if slot.dim in (0, None)]):
            # Seen as (parameter, rank, element), both sides are strided, so one copy is enough for
            # the group. (Every rank sends its copy of a 0-dim parameter; rank 0's is used.)
            first, numel = group[0], group[0].shard_numel
            whole = gathered.view(first.full_offset, len(group) * num_shards * numel)
            rows = pack.narrow(1, first.shard_offset - layout.pack_offset, len(group) * numel)
            self.unpack_to.append(whole.view(len(group), num_shards, numel))
            self.unpack_from.append(rows.unflatten(1, (len(group), numel)).transpose(0, 1))
        for slot in slots:
            if slot.dim in (0, None):
                continue
            # Cut along another dim, the slice of a rank is a block of columns in the whole, and the
            # last ranks' blocks are narrower: a copy for each rank.
            whole = gathered.view(slot.full_offset, prod(slot.shape)).view(slot.shape)
            offset = slot.shard_offset - layout.pack_offset
            for rank in range(num_shards):
                start, stop = slot.span(rank)
                piece = pack[rank, offset : offset + slot.local_numel(rank)]
                self.unpack_to.append(whole.narrow(slot.dim, start, stop - start))
                self.unpack_from.append(piece.view(slot.local_shape(rank)))

    def unpack(self) -> None:
        """Copy packed parameters from the pack to their places, groups of equal size at once."""
        # (`_foreach_copy_` refuses empty lists.)
        if self.unpack_to:
            torch._foreach_copy_(self.unpack_to, self.unpack_from)


class GatherBatch:
    """The gathers of several buckets over the same ranks, as one.

    Args:
        plans: must be allocated, since views of their tensors are made.
    """

    def __init__(self, plans: Sequence[GatherPlan]) -> None:
        self.plans = tuple(plans)
        # As bytes, so that one call takes buckets of several dtypes: gloo's coalesced calls promote
        # mixed dtypes and corrupt data without an error, and torch does not document NCCL's.
        self.outputs = [t.view(torch.uint8) for plan in plans for t in plan.outputs]
        self.inputs = [t.view(torch.uint8) for plan in plans for t in plan.inputs]
        self.own = [t.view(torch.uint8) for plan in plans for t in plan.own]

    def unpack(self) -> None:
        for plan in self.plans:
            plan.unpack()


def _of_equal_size(slots: Sequence[Slot]) -> list[list[Slot]]:
    """Neighbours in both storages with shards of equal size, grouped; empty ones left out."""
    # Equal size is not enough: whole parameters start on 256 bytes, so small ones have gaps between
    # them unless they fill that, and one strided view needs equal distances.
    groups: list[list[Slot]] = []
    for slot in slots:
        if not slot.shard_numel:
            continue
        last = groups[-1][-1] if groups else None
        if (
            last is not None
            and slot.shard_numel == last.shard_numel
            and slot.shard_offset == last.shard_offset + last.shard_numel
            and slot.full_offset == last.full_offset + last.full_numel
        ):
            groups[-1].append(slot)
        else:
            groups.append([slot])
    return groups


class SecondarySource(Protocol):
    """A temporary source of a bucket's gather, in place of the shards of all ranks.

    Attributes:
        layout, plan: of that gather, which has a separate transport.
        saved: whether the next gather uses it.
    """

    layout: BucketLayout
    plan: GatherPlan
    saved: bool

    def materialize(self, gathered: Segments) -> None:
        """``gathered`` has memory now: make views of it."""


class GatheredStorage(Segments):
    """The gathered storage of a bucket.

    Attributes:
        plan: of the gather over all shards.
        secondary: another source of gathers, if a part provides one.
        own_pieces: direct slots with a piece of memory each.
        has_own_pack: whether the pack has one, too.
        offload_buffer: the copy of offloaded shards on the device, which gathers read.
        fills_own_slices: whether something is copied before the gather.
    """

    def __init__(
        self,
        layout: BucketLayout,
        rank: int,
        shards: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
        *,
        secondary: SecondarySource | None,
        split: bool,
    ) -> None:
        """Allocate everything, so that views can be made.

        Args:
            split: give each large parameter a separate piece of memory.
        """
        self.secondary = secondary
        super().__init__(self._plan_pieces(layout, dtype.itemsize, split), dtype, device)
        self._shards = source = shards
        self.offload_buffer: torch.Tensor | None = None
        if shards.device != device:
            self.offload_buffer = source = torch.empty_like(shards, device=device)
        self.plan = GatherPlan(layout, rank, source, self)
        # A single shard gets here only if it is cast or offloaded: the "gather" is then that copy.
        self.fills_own_slices = (
            self.offload_buffer is not None or self.plan.cast or layout.num_shards == 1
        )

    def _plan_pieces(self, layout: BucketLayout, itemsize: int, split: bool) -> list[int]:
        """Choose the pieces of memory; returns their bounds (elements)."""
        enough = OWN_PIECE_MIN_BYTES // itemsize
        end = layout.gathered_numel
        if self.secondary is not None:
            # Its pack is at the same place, and may be larger: slices that are aligned over all
            # ranks may not be aligned over fewer, and are then packed.
            end = max(end, self.secondary.layout.gathered_numel)
        bounds = {0, end}
        self.has_own_pack = end - layout.pack_full_offset >= enough
        if self.has_own_pack:
            bounds.add(layout.pack_full_offset)
        direct = layout.direct if split else ()
        self.own_pieces = frozenset(i for i in direct if layout.slots[i].full_numel >= enough)
        for i in self.own_pieces:
            slot = layout.slots[i]
            bounds |= {slot.full_offset, slot.full_offset + slot.full_numel}
        # If no parameter has elements: one piece without elements, for the views.
        return sorted(bounds) if end else [0, 0]

    def free_pack(self) -> None:
        """Free the pack, which has a separate piece, once it was copied out."""
        # Parameters are then not held twice while they compute. It gets memory again at the next
        # `allocate`; until then only views refer to it, which nothing reads.
        if not self.keeps_memory:
            resize(self.storages[-1], 0)

    def own_piece(self, i: int) -> torch.UntypedStorage:
        """The memory of one of the `own_pieces`."""
        return self.storages[self.piece(self.plan.layout.slots[i].full_offset)]

    def fill_own_slices(self) -> None:
        """Before a gather: copy offloaded shards to the device, cast into the own slices."""
        # On the stream of gathers, which orders everything: the buffer's memory, the copies here,
        # the gather that reads them, and `free_offload_buffer`, which is called once the gather is
        # enqueued.
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), self._shards.nbytes)
            self.offload_buffer.copy_(self._shards, non_blocking=True)
        if self.plan.cast or self.plan.layout.num_shards == 1:
            torch._foreach_copy_(self.plan.own, self.plan.source)

    def free_offload_buffer(self) -> None:
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), 0)
