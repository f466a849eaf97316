"""The gathered storage of a bucket: its memory, and the gather that fills it.

It gets and loses memory by resizing, so that views, saved tensors of autograd and the unsharded
parameters stay valid; all that changes is whether there is memory behind them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from ..dtensor.memory import record_gathered
from .layout import BucketLayout
from .plans import GatherPlan

# In units that enclose others, parameters of at least this size have memory of their own. So has a
# pack of this size, which is freed once it has been copied out.
OWN_PIECE_MIN_BYTES = 1024 * 1024


# The last of these changes the size of every storage; `fsdp2.testing` adds one that records it.
resizers: list[Callable[[torch.UntypedStorage, int], object]] = [torch.UntypedStorage.resize_]


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give ``storage`` memory, of the current stream, or (0) take it away."""
    resizers[-1](storage, nbytes)


class Segments:
    """The gathered storage of a bucket, as one or several pieces of memory.

    One piece for all parameters, unless the unit encloses others (a root): there each large one has
    a piece, which is freed as soon as nothing refers to it any more. A large pack has one too,
    since nothing reads it after the gather.
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


class SecondarySource(Protocol):
    """What a bucket may be gathered from in the place of the shards of all ranks, for a while.

    Attributes:
        layout, plan: of that gather, which has a transport of its own.
        saved: whether the next gather is that one.
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
        secondary: what else it may be gathered from, if a part has anything.
        own_pieces: direct slots with a piece of memory each.
        has_own_pack: whether the pack has one, too.
        offload_buffer: what gathers read of offloaded shards, a copy on the device.
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
        """Everything has memory, for views to be made.

        Args:
            split: give large parameters a piece of memory of their own.
        """
        self.secondary = secondary
        super().__init__(self._plan_pieces(layout, dtype.itemsize, split), dtype, device)
        self._shards = source = shards
        self.offload_buffer: torch.Tensor | None = None
        if shards.device != device:
            self.offload_buffer = source = torch.empty_like(shards, device=device)
        self.plan = GatherPlan(layout, rank, source, self)
        # One shard is here since it is cast or offloaded: the "gather" is then that copy alone.
        self.fills_own_slices = (
            self.offload_buffer is not None or self.plan.cast or layout.num_shards == 1
        )

    def _plan_pieces(self, layout: BucketLayout, itemsize: int, split: bool) -> list[int]:
        """Choose the pieces of memory; returns their bounds (elements)."""
        enough = OWN_PIECE_MIN_BYTES // itemsize
        end = layout.gathered_numel
        if self.secondary is not None:
            # Its pack is at the same place, and may be larger: slices that were aligned over all
            # ranks may not be over fewer, and are packed then.
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
        # Parameters without elements only: one piece without elements, of which there are views.
        return sorted(bounds) if end else [0, 0]

    def free_pack(self) -> None:
        """Free the pack, which has a piece of its own, once it was copied out."""
        # Parameters are then not held twice while they compute. It has memory again at the next
        # `allocate`; until then only views refer to it, which nothing reads.
        if not self.keeps_memory:
            resize(self.storages[-1], 0)

    def own_piece(self, i: int) -> torch.UntypedStorage:
        """The memory of one of the `own_pieces`."""
        return self.storages[self.piece(self.plan.layout.slots[i].full_offset)]

    def fill_own_slices(self) -> None:
        """Before a gather: copy offloaded shards to the device, cast into the own slices."""
        # On the stream of gathers, which orders all of it: the buffer's memory, the copies here,
        # the gather that reads them, and `free_offload_buffer`, which is called when that is
        # enqueued.
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), self._shards.nbytes)
            self.offload_buffer.copy_(self._shards, non_blocking=True)
        if self.plan.cast or self.plan.layout.num_shards == 1:
            torch._foreach_copy_(self.plan.own, self.plan.source)

    def free_offload_buffer(self) -> None:
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), 0)
