"""The gradients of a bucket: gradients of the shards, partial sums that await an all-reduce, and
the inputs and outputs of a reduction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import torch

from ..dtensor.memory import Pack, storage_slice
from .gathered import resize
from .layout import BucketLayout, Slot
from .param import ShardedParam, shard_of, slice_with_own_storage

# Gradients that are smaller on average keep their memory between steps if new memory turned out to
# have another address: adapting to it costs about 3 us a parameter.
FREE_MIN_BYTES = 16 * 1024


class SharedMemory(Protocol):
    """Memory that the shards of a bucket share with other buckets."""

    def gradients(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for its gradients, with a separate storage; None: it must allocate its own."""

    def adopt(self, dtensors: Sequence[torch.Tensor]) -> None:
        """Take over the gradients that are in this memory."""


class GradientStore(Pack):
    """The sharded gradients of a bucket: one flat tensor, one DTensor per parameter, made once.

    Reductions write to ``flat``. Each local gradient is a slice of it with a separate storage:
    torch.compile, pickle and `copy.deepcopy` need a DTensor and its local tensor to have the same
    storage offset, and a DTensor, which has no data itself, has offset 0.

    [Note: gradients that users keep]

    A gradient that a user kept across ``zero_grad`` must not change. The library is not notified
    that it was kept: ``.grad`` is an ordinary attribute. So before the storage is written again
    with no ``.grad`` attached, the references to it are counted. If there are others than ours, the
    old storage is left to them and a new one is made.

    - There are three counts per gradient, since each misses some references: another name holds the
      DTensor, ``to_local()`` the local tensor, and a view of the local tensor only the storage.
    - The number of our references depends on the lists and views here, and on torch. They are
      counted once, before any other can exist. That baseline is private to the store, which must
      adjust it whenever it makes a view (`outputs`).
    - Reductions in flight hold views of the flat tensor, so the use count of its storage is only
      meaningful while there are none.
    - The result affects only this rank's memory, never a collective: users may keep a gradient on
      one rank.
    """

    def __init__(
        self,
        layout: BucketLayout,
        rank: int,
        params: Sequence[ShardedParam],
        flat: torch.Tensor,
        place: SharedMemory | None = None,
    ) -> None:
        self.params = params
        self.flat = flat
        self.storage = flat.untyped_storage()
        self._address = self.storage.data_ptr()
        self._moves = False  # whether new memory has ever had another address
        self.is_free = False
        self.locals = [slice_with_own_storage(flat, slot, rank) for slot in layout.slots]
        self._parts = [local.untyped_storage() for local in self.locals]
        spans = [(part.data_ptr() - self._address, part.nbytes()) for part in self._parts]
        self._spans = [(i, start, start + size) for i, (start, size) in enumerate(spans) if size]
        self.dtensors = [
            p.sharded_spec.wrap(local) for p, local in zip(params, self.locals, strict=True)
        ]
        self._outputs: dict[ReducePlan, list[torch.Tensor]] = {}
        if place is None:
            self.publish()
        else:  # one pack, of all neighbours; before references to the gradients are counted
            place.adopt(self.dtensors)
        self._baseline = self._references(range(len(self.locals)))
        self._storage_uses = self._count_storage_uses()

    def _references(self, which: Collection[int]) -> list[tuple[int, int, int]]:
        """Reference counts of the DTensors, the local tensors and their storages."""
        # The same expressions for the baseline and for every later count, so that references held
        # by the evaluation itself (arguments, loop variables) are the same in both.
        dtensors, tensors, parts = self.dtensors, self.locals, self._parts
        count, uses = sys.getrefcount, torch._C._storage_Use_Count
        return [(count(dtensors[i]), count(tensors[i]), uses(parts[i]._cdata)) for i in which]

    def _count_storage_uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)

    def outputs(self, plan: ReducePlan) -> list[torch.Tensor]:
        """Views for a reduction that writes in place, made once per plan."""
        outs = self._outputs.get(plan)
        if outs is None:
            outs = self._outputs[plan] = plan.outputs(self.flat)
            self._storage_uses += len(outs)
        return outs

    def referenced_outside(
        self, detached: Collection[int] | None = None, *, idle: bool = True
    ) -> bool:
        """Whether anything but the library refers to one of our gradients that is not attached.

        Args:
            detached: the parameters to check, which have no ``.grad``; None: no parameter has one.
            idle: whether no reduction that writes here is in flight, with its own views.
        """
        if self.is_free:
            return False  # it was freed without references, and none can be taken since
        if idle and self._count_storage_uses() != self._storage_uses:
            return True
        if hasattr(self.storage, "is_recorded"):  # the user's streams may still use it
            return True
        if detached is None:
            return self._references(range(len(self.locals))) != self._baseline
        return self._references(detached) != [self._baseline[i] for i in detached]

    def allocate(self) -> None:
        """Give it memory, for a reduction; users may keep gradients that are attached after it."""
        self.is_free = False
        nbytes = self.flat.nbytes
        if self.storage.nbytes() != nbytes:
            resize(self.storage, nbytes)
            if self.storage.data_ptr() != self._address:
                self._follow()

    def _follow(self) -> None:
        """Point the local gradients, which only the library refers to, at the new memory."""
        # Their storages are slices, which keep the address they were made with. The tensor objects
        # stay: the DTensors hold them, and the baseline counts them.
        self._address = self.storage.data_ptr()
        self._moves = True
        with torch.no_grad():
            for i, start, stop in self._spans:
                local, part = self.locals[i], storage_slice(self.storage, start, stop)
                self._parts[i] = part
                local.set_(part, 0, local.shape, local.stride())

    def free(self) -> None:
        """Free it if that pays; call this only while nothing outside refers to a gradient."""
        self.is_free = True
        if not self.storage.resizable():
            return  # in a block with others; page-locking it again would take longer than a step
        if self._moves and self.flat.nbytes < FREE_MIN_BYTES * len(self.locals):
            return  # adapting to a new address is not worth these few bytes
        resize(self.storage, 0)


class ReductionOutput:
    """Where one reduction writes its sums.

    Attributes:
        store: the gradients that the sums become, or are added to.
        dtype: of the sums.
        in_place: whether they are written directly into ``store``, else into a buffer.
        flat: the tensor that they are written to, laid out like the sharded storage.
        views: of ``flat``, one for each tensor that the reduce-scatter writes.
        added: memory of partial sums that were added to ``flat``, until nothing reads it.
    """

    def __init__(self, store: GradientStore, dtype: torch.dtype, *, in_place: bool) -> None:
        self.store = store
        self.dtype = dtype
        self.in_place = in_place
        self.flat = store.flat
        self.views: list[torch.Tensor] = []
        self.added: torch.Tensor | None = None

    def allocate(self, plan: ReducePlan, device: torch.device) -> None:
        """Make the views, and the buffer if there is one: memory of the current stream."""
        if self.in_place:
            self.views = self.store.outputs(plan)
        else:
            self.flat = torch.empty(self.flat.numel(), dtype=self.dtype, device=device)
            self.views = plan.outputs(self.flat)

    def ranges(self, plan: ReducePlan) -> list[torch.Tensor]:
        """The contiguous parts that contain the sums of ``plan``."""
        return [self.flat[offset : offset + numel] for offset, numel in plan.ranges]

    def copy_from(
        self, grads: Sequence[torch.Tensor | None], plan: ReducePlan, layout: BucketLayout
    ) -> None:
        """With one shard, gradients are the sums: copy them into one storage."""
        # Neighbours in one storage need one all-reduce. Autograd's gradients may be many tensors,
        # and may start at unaligned addresses, where NCCL is slow.
        views, present = [], []
        for i in plan.present:
            grad, start = grads[i], layout.slots[i].shard_offset
            assert grad is not None
            present.append(grad)
            views.append(self.flat[start : start + grad.numel()].view(grad.shape))
        torch._foreach_copy_(views, present)

    def scale(self, plan: ReducePlan, by: float) -> None:
        for part in self.ranges(plan):
            part.mul_(by)


class PartialSums:
    """Sums over shards that wait for a later all-reduce over replicas (HSDP).

    Attributes:
        present: the slots that have some.
        flat: laid out like the sharded storage; None if there are none.
    """

    def __init__(
        self, params: Sequence[ShardedParam], layout: BucketLayout, rank: int, device: torch.device
    ) -> None:
        self._params = params
        self._layout = layout
        self._rank = rank
        self._device = device
        self.present: set[int] = set()
        self.flat: torch.Tensor | None = None

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate memory for the first sums, on compute's stream."""
        if self.flat is None:
            numel = self._layout.shard_numel
            self.flat = torch.zeros(numel, dtype=dtype, device=self._device)

    def add(self, sums: torch.Tensor, plan: ReducePlan) -> None:
        """Add gradients that were reduced over shards only."""
        assert self.flat is not None
        for offset, numel in plan.ranges:
            self.flat[offset : offset + numel] += sums[offset : offset + numel]
        self.present.update(plan.present)

    def move_to(self, sums: torch.Tensor, plan: ReducePlan) -> torch.Tensor | None:
        """Move the partial sums that ``plan`` covers into ``sums``, which are then all-reduced.

        Returns:
            The memory, if nothing is left in it: the caller must hold it while it is read.
        """
        flat = self.flat
        if flat is None:
            return None
        for i in plan.present:  # the others wait for another reduction
            slot = self._layout.slots[i]
            part = slice(slot.shard_offset, slot.shard_offset + slot.shard_numel)
            sums[part] += flat[part]
            flat[part] = 0
        self.present.difference_update(plan.present)
        if self.present:
            return None
        self.flat = None
        return flat

    def rows(self) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """Each parameter with partial sums, and this rank's rows of them, 1-D."""
        if self.flat is not None:
            for i in self.present:
                yield (
                    self._params[i],
                    shard_of(self.flat, self._layout.slots[i], self._rank).view(-1),
                )

    def adopt(self, rows: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Take over these rows from the buckets that this one replaces."""
        for i, (param, slot) in enumerate(zip(self._params, self._layout.slots, strict=True)):
            if (part := rows.get(param)) is not None:
                self.allocate(part.dtype)
                assert self.flat is not None
                self.flat.narrow(0, slot.shard_offset, len(part)).copy_(part)
                self.present.add(i)

    def drop(self) -> None:
        self.present.clear()
        self.flat = None


class ReducePlan:
    """The slots of a bucket that are reduced together; made once per set of present gradients.

    Attributes:
        direct: slots whose gradients are sent as they are.
        copied_in: slots that are copied into one buffer (the stage) first, in storage order; empty
            if none of them has a gradient.
        present: slots that have a gradient; ``numel``: their elements, before reduction.
        covered: slots whose sharded gradient is written.
        spans: (offset, numel) in the sharded storage of each direct slot, then of the stage.
        shapes: of the padded shard of each direct slot.
        sums: gradients may be sums over several backwards, already in the reduce dtype.
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
        # All of them or none: slots without a gradient send zeros, so that the stage always has the
        # same layout. (Without elements, there is nothing to send.)
        has_stage = any(i in must_copy_in and layout.slots[i].shard_numel for i in present)
        self.copied_in = tuple(must_copy_in) if has_stage else ()
        # A gradient that is cast is copied anyway. Casting it into the stage costs no more and adds
        # no entry to the batch: one kernel and one message for all.
        if casts and (has_stage or not must_copy_in):
            self.copied_in = _neighbours_before(layout, present, must_copy_in) + self.copied_in
        joined = {*must_copy_in, *self.copied_in}
        self.direct = tuple(i for i in present if i not in joined)
        self.spans = [
            (layout.slots[i].shard_offset, layout.slots[i].shard_numel) for i in self.direct
        ]
        self.shapes = [layout.slots[i].padded_shape for i in self.direct]
        # (A gradient without elements is not sent, but still counts as a gradient.)
        empty = tuple(i for i in present if not layout.slots[i].shard_numel)
        self.covered = frozenset(self.direct + self.copied_in + empty)
        self.numel = sum(prod(layout.slots[i].shape) for i in self.present)
        self.stage_offset = layout.shard_numel
        if self.copied_in:
            self.stage_offset = min(layout.slots[i].shard_offset for i in self.copied_in)
            self.spans.append((self.stage_offset, layout.shard_numel - self.stage_offset))
        # Determined once per plan: in a steady step the gradients go to `_chunk_cat` without a
        # check of each.
        self.all_simple = set(self.copied_in) <= set(present) and all(
            _is_simple(layout.slots[i]) for i in self.copied_in
        )
        # All-reduces and hooks use these: one call per contiguous range, not one per parameter.
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
    """The slots directly before the ones that must be copied in, as long as each has a gradient."""
    # Backwards, up to the first gap: the output of the stage is one range of the sharded storage,
    # and a slot in it without a gradient would be overwritten with zeros.
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
    # `_chunk_cat` casts into ``out``, but all pieces must have one dtype. They have several if
    # unused parameters send zeros, or if autograd left a norm's gradient in float32.
    if len({piece.dtype for piece in pieces}) > 1:
        pieces = [piece.to(dtype) for piece in pieces]
    # The filler rounds up the row of each rank, so that the slice of the next one is aligned. It
    # must be a piece: `_chunk_cat` takes the shape of its result from the pieces.
    if layout.filler_numel:
        pieces.append(
            torch.zeros(num_shards * layout.filler_numel, dtype=pieces[0].dtype, device=device)
        )
    out = allocate((num_shards, layout.shard_numel - plan.stage_offset), dtype=dtype, device=device)
    torch._chunk_cat(pieces, dim=0, num_chunks=num_shards, out=out)
    return out


def _is_simple(slot: Slot) -> bool:
    """Whether ``_chunk_cat`` alone splits the gradient as the ranks hold it."""
    # It pads with zeros, also for ranks without any rows. It would fail on empty tensors, and it
    # splits as `torch.chunk` does, without regard to blocks.
    if slot.dim != 0 or not slot.shard_numel:
        return False
    num_shards = slot.full_numel // slot.shard_numel
    return slot.chunk == -(-slot.shape[0] // num_shards)


def _rows_first(
    slot: Slot, grad: torch.Tensor | None, num_shards: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The gradient as a tensor whose split along dim 0 divides it among the ranks."""
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
