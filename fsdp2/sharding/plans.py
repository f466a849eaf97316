"""What a gather and a reduction of one bucket read and write, planned once.

A `GatherPlan` has lists of tensors. A `ReducePlan` says which parts of a bucket one reduction
covers: usually all parameters of a unit, but unused ones have no gradient, and the root unit's head
is reduced long before its embedding. `copy_in` is the one copy that packed gradients need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        # The others are of the group, and of views that are counted (`EarlyFree.count_own`).
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


class ReducePlan:
    """The slots of a bucket that are reduced together; made once per set of present gradients.

    Attributes:
        direct: slots whose gradients are sent as they are.
        copied_in: slots that are copied into one buffer (the stage) first, in storage order; empty
            if none of them has a gradient.
        present: slots that have a gradient; ``numel``: of these gradients, before reduction.
        covered: slots whose sharded gradient is written.
        spans: (offset, numel) in the sharded storage of each direct slot, then of the stage.
        shapes: of the padded shard of each direct slot.
        sums: gradients may be sums over several backwards, in the dtype of the reduction already.
        ranges: ``spans`` with neighbours merged.
    """

    def __init__(
        self,
        layout: BucketLayout,
        present: Sequence[int],
        must_copy_in: Sequence[int],
        *,
        casts: bool = False,
        sums: bool = False,
    ) -> None:
        """
        Args:
            present: slots that have a gradient, ascending.
            must_copy_in: slots that can only be sent through the buffer: the last of the storage.
            casts: whether gradients are cast before they are sent.
        """
        self.present = tuple(present)
        self.sums = sums
        # All of them or none: those without a gradient send zeros, so that the stage has one layout
        # whichever of them a backward has used. (Without elements, there is nothing to send.)
        has_stage = any(i in must_copy_in and layout.slots[i].shard_numel for i in present)
        self.copied_in = tuple(must_copy_in) if has_stage else ()
        # A gradient that is cast is copied anyway. Cast into the stage it costs no more, and is no
        # entry of its own in the batch: one kernel and one message for all.
        if casts and (has_stage or not must_copy_in):
            self.copied_in = _neighbours_before(layout, present, must_copy_in) + self.copied_in
        joined = {*must_copy_in, *self.copied_in}
        self.direct = tuple(i for i in present if i not in joined)
        self.spans = [
            (layout.slots[i].shard_offset, layout.slots[i].shard_numel) for i in self.direct
        ]
        self.shapes = [layout.slots[i].padded_shape for i in self.direct]
        # (What has no elements is not sent, and has a gradient all the same.)
        empty = tuple(i for i in present if not layout.slots[i].shard_numel)
        self.covered = frozenset(self.direct + self.copied_in + empty)
        self.numel = sum(prod(layout.slots[i].shape) for i in self.present)
        self.stage_offset = layout.shard_numel
        if self.copied_in:
            self.stage_offset = min(layout.slots[i].shard_offset for i in self.copied_in)
            self.spans.append((self.stage_offset, layout.shard_numel - self.stage_offset))
        # Known once per plan: in a steady step the gradients go to `_chunk_cat` without a look at
        # each of them.
        self.all_simple = set(self.copied_in) <= set(present) and all(
            _is_simple(layout.slots[i]) for i in self.copied_in
        )
        # All-reduces and hooks see these: one call for what lies together, not one per parameter.
        self.ranges: list[tuple[int, int]] = []
        for offset, numel in sorted(self.spans):
            if self.ranges and sum(self.ranges[-1]) == offset:
                self.ranges[-1] = (self.ranges[-1][0], self.ranges[-1][1] + numel)
            else:
                self.ranges.append((offset, numel))

    def outputs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Where the sums go in ``flat``, laid out like the sharded storage: the padded shards of
        direct slots in their shapes, then the stage."""
        outs = [flat[offset : offset + numel] for offset, numel in self.spans]
        return [o.view(s) for o, s in zip(outs, self.shapes, strict=False)] + outs[
            len(self.shapes) :
        ]


def _neighbours_before(
    layout: BucketLayout, present: Sequence[int], must_copy_in: Sequence[int]
) -> tuple[int, ...]:
    """The slots that lie before those that must be copied in, as far as each has a gradient."""
    # Backwards from there, and no further than the first gap: the output of the stage is one range
    # of the sharded storage, and a slot in it without a gradient would be overwritten with zeros.
    end = min((layout.slots[i].shard_offset for i in must_copy_in), default=layout.shard_numel)
    found: list[int] = []
    for i in reversed(layout.direct):
        slot = layout.slots[i]
        if i in must_copy_in:
            continue
        if i not in present or slot.shard_offset + slot.shard_numel != end:
            break
        found.append(i)
        end = slot.shard_offset
    return tuple(reversed(found))


def copy_in(
    layout: BucketLayout,
    plan: ReducePlan,
    grads: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
    *,
    allocate: Callable[..., torch.Tensor] = torch.empty,
) -> torch.Tensor:
    """Copy the staged gradients into one reduce-scatter input: row r is what rank r will own.

    Args:
        allocate: called as ``allocate(size, dtype=..., device=...)`` for that input.

    Returns:
        Tensor of shape (num_shards, numel of the stage) and dtype ``dtype``, padding zeroed.
    """
    num_shards = layout.num_shards
    if plan.all_simple:
        pieces = [grad for i in plan.copied_in if (grad := grads[i]) is not None]
    else:
        pieces = [
            _rows_first(layout.slots[i], grads[i], num_shards, dtype, device)
            for i in plan.copied_in
            if layout.slots[i].shard_numel
        ]
    # `_chunk_cat` casts into ``out``, but all pieces from one dtype. They have several where unused
    # parameters send zeros, and where autograd left a norm's gradient in float32.
    if len({piece.dtype for piece in pieces}) > 1:
        pieces = [piece.to(dtype) for piece in pieces]
    # The filler rounds up the row of each rank, so that the slice of the next one is aligned. It
    # has to be a piece: `_chunk_cat` takes the shape of its result from the pieces.
    if layout.filler_numel:
        pieces.append(
            torch.zeros(num_shards * layout.filler_numel, dtype=pieces[0].dtype, device=device)
        )
    out = allocate((num_shards, layout.shard_numel - plan.stage_offset), dtype=dtype, device=device)
    torch._chunk_cat(pieces, dim=0, num_chunks=num_shards, out=out)
    return out


def _is_simple(slot: Slot) -> bool:
    """Whether ``_chunk_cat`` by itself cuts the gradient as the ranks hold it."""
    # It pads with zeros, for ranks without any rows as well. It would fail on empty tensors, and it
    # cuts as `torch.chunk` does, with no regard to blocks.
    if slot.dim != 0 or not slot.shard_numel:
        return False
    num_shards = slot.full_numel // slot.shard_numel
    return slot.chunk == -(-slot.shape[0] // num_shards)


def _rows_first(
    slot: Slot, grad: torch.Tensor | None, num_shards: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The gradient as a tensor that cutting along dim-0 divides among the ranks."""
    if grad is None:
        return torch.zeros(slot.full_numel, dtype=dtype, device=device)
    if slot.dim is None:  # every rank holds it whole, so every rank gets the whole mean
        return grad.reshape(1, -1).expand(num_shards, -1).contiguous()
    if _is_simple(slot):
        return grad
    whole = grad.new_zeros((num_shards, slot.shard_numel))
    for rank in range(num_shards):
        start, stop = slot.span(rank)
        piece = grad.narrow(slot.dim, start, stop - start)
        whole[rank, : piece.numel()].view(piece.shape).copy_(piece)
    return whole
