"""Which parts of a bucket one gradient reduction covers, and how small gradients are staged.

Pure bookkeeping over a layout, and the one copy that packed gradients need. A reduction covers
the parameters that have a gradient: usually all of a unit, but unused parameters have none, and
the root unit's head is reduced long before its embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from .layout import BucketLayout, Slot


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
