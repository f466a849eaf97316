"""What a gather of one bucket reads and writes, as lists of tensors that are made once."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from .layout import BucketLayout, Slot

Messages = list[tuple[list[torch.Tensor], int, int]]


class Gathered(Protocol):
    """The gathered storage: one or several pieces of memory."""

    dtype: torch.dtype

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Elements ``offset`` to ``offset + numel``, which lie in one piece."""
        ...


class GatherPlan:
    """Everything that a gather of one bucket reads and writes, as lists made once.

    Attributes:
        inputs, outputs: of the all-gathers, one pair per direct parameter and one for the pack.
        own, source: this rank's slices of ``outputs`` and where their data comes from.
        rows: for each output, how many elements each rank has that are not padding.
        messages, as_bytes, row, pieces: what transports keep with the plan, so that it is made
            once: messages to send and to receive, as (tensors, peer, tag), the same gather of
            bytes, where the bytes of narrower numbers lie, or an output in each piece of memory.
        encoded: what is sent in narrower numbers, if it is kept so; None: it is made of ``source``.
    """

    messages: tuple[Messages, Messages] | None = None
    as_bytes: GatherBatch | None = None
    row: object = None
    pieces: Sequence[torch.Tensor] | None = None
    encoded: torch.Tensor | None = None

    def __init__(
        self, layout: BucketLayout, rank: int, shards: torch.Tensor, gathered: Gathered
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
        # A cast writes straight into the own slices, which are then gathered in place: no buffer
        # for the cast shard. Without a cast, shards are read where they are: no copy at all.
        self.inputs = self.own if self.cast else self.source
        self._plan_unpack(layout, gathered)

    def forget_transports(self) -> None:
        """Forget how narrower numbers were sent."""
        # The others are of the group, and of views that are counted (`Bucket.note_references`).
        self.row = self.encoded = None
        self.cast = self._casts

    def _plan_unpack(self, layout: BucketLayout, gathered: Gathered) -> None:
        """Views for copying packed parameters from the pack to their places."""
        # In the pack the slices of one rank are together, and in place those of one parameter.
        self.unpack_to: list[torch.Tensor] = []
        self.unpack_from: list[torch.Tensor] = []
        if not layout.packed:
            return
        num_shards = layout.num_shards
        pack = gathered.view(layout.pack_full_offset, num_shards * layout.pack_numel)
        pack = pack.view(num_shards, layout.pack_numel)
        slots = [layout.slots[i] for i in layout.packed]
        for group in _of_equal_size([slot for slot in slots if slot.dim in (0, None)]):
            # Seen as (parameter, rank, element) both sides are strided, so one copy takes the whole
            # group. (Every rank sends its copy of a 0-dim parameter; rank 0's is the one in use.)
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
        """Copy packed parameters from the pack to their places, those of equal size together."""
        # (`_foreach_copy_` refuses empty lists.)
        if self.unpack_to:
            torch._foreach_copy_(self.unpack_to, self.unpack_from)


class RowGather:
    """A gather of one tensor of each rank, all of one length, for exchanges.

    Args:
        rows: of shape (ranks, length); this rank's row is left to the caller.
        mine: this rank's tensor.
    """

    def __init__(self, rows: torch.Tensor, mine: torch.Tensor) -> None:
        self.inputs, self.outputs = [mine], [rows.view(-1)]
        self.rows = [[len(mine)] * len(rows)]
        self.messages: tuple[Messages, Messages] | None = None


class GatherBatch:
    """The gathers of several buckets over the same ranks, as one.

    Args:
        plans: allocated, since views of their tensors are made.
    """

    def __init__(self, plans: Sequence[GatherPlan]) -> None:
        self.plans = tuple(plans)
        # As bytes, so that one call takes buckets of several dtypes: gloo's coalesced calls promote
        # mixed dtypes and corrupt data without an error, and of NCCL's torch does not say.
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
