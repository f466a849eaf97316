"""Where every byte of a bucket lies: pure arithmetic, no tensors, no torch.

A bucket is the set of parameters of one unit that share dtypes and therefore storages. Three
flat storages belong to it; all offsets below count elements.

Sharded storage of a rank (and the sharded gradients, laid out alike)::

    | direct, even rows | direct, uneven rows | packed | filler |
                        `------- one reduce-scatter input -----'   (the "tail")

Gathered storage, the same on every rank, for a world size of 3::

    | A rank 0 | A rank 1 | A rank 2 | B rank 0 | ... | pack rank 0 | pack rank 1 | pack rank 2 |
    `------ parameter A, whole ------'                 `- packed shards as they travel together -'

Sharding on dim 0 makes a rank's rows one contiguous range of the parameter, and rank order is
row order. So a *direct* parameter is gathered directly into its final place, one output per
parameter, and rows that the last ranks lack are only padding behind its end. *Packed* parameters
travel together in one gather and are copied to their places, since tens of collectives of a few
kilobytes cost more than copying them. `direct_limit` decides which parameters are packed.

The length of a direct shard is a multiple of 16 bytes in every dtype it is used in. So every slice
of a collective starts on 16 bytes (NCCL is an order of magnitude slower otherwise), and there are
no gaps between direct shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

from ..dtensor.boxes import entries_per_part

ALIGN_BYTES = 16  # of every slice of a collective
GATHERED_ALIGN_BYTES = 256  # of every whole parameter, as kernels get from allocators
# The minimum size of a rank's slice for a direct parameter. The cost of a direct one (a message to
# each peer, or a ring with one step per rank) and the cost of a pack (a copy of all slices) grow
# alike with the number of ranks, so the limit applies to a slice.
DIRECT_MIN_BYTES = 64 * 1024
# Most direct parameters of a bucket; if there are more, the largest. Each is one entry of a batched
# collective, which the host prepares one by one (a few us each) and the device runs on its few
# channels one after the other. A block with 128 experts, a module each, has 384 matrices of them.
MAX_DIRECT = 128
# The constants of `direct_limit`: the minimum number of channels over which NCCL distributes a
# batch; from NCCL's model, the seconds of a ring and of each of its steps, in a host and between
# hosts; the bytes per second that a GPU reads and writes (a copy does both).
CHANNELS = 16
RING_S, NODE_STEP_S, NETWORK_STEP_S = 8.4e-6, 3.4e-6, 14e-6
MEMORY_BYTES_PER_S = 2.5e12


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies. All numbers count elements.

    Attributes:
        shape: the whole parameter as this rank sees it (after tensor parallelism).
        dim: the sharded dim; ``None`` for a parameter that every rank holds whole (0-dim ones).
        chunk: entries along ``dim`` per rank; the last ranks may hold fewer or none. As many as
            `torch.chunk` gives, or more: a multiple of the parameter's granularity.
        shard_offset, shard_numel: the padded shard in the sharded storage.
        full_offset, full_numel: the padded whole parameter in the gathered storage.
        direct: gathered straight into its place, not in the pack.
    """

    shape: tuple[int, ...]
    dim: int | None
    chunk: int
    shard_offset: int
    shard_numel: int
    full_offset: int
    full_numel: int
    direct: bool

    @property
    def even(self) -> bool:
        """Whether every rank holds the same number of rows, with no padding."""
        return self.dim == 0 and prod(self.shape) == self.full_numel

    def span(self, rank: int) -> tuple[int, int]:
        """First and one-past-last entry along ``dim`` that ``rank`` holds (empty: equal)."""
        if self.dim is None:
            return 0, 1
        size = self.shape[self.dim]
        start = min(rank * self.chunk, size)
        return start, min(start + self.chunk, size)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard that ``rank`` holds, without padding."""
        if self.dim is None:
            return self.shape
        start, stop = self.span(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a shard with its padding, the same on every rank."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.chunk, *self.shape[self.dim + 1 :])

    def local_numel(self, rank: int) -> int:
        return prod(self.local_shape(rank))


@dataclass(frozen=True)
class BucketLayout:
    """The layout of one bucket. ``slots`` are in the order of the parameters given.

    Attributes:
        num_shards: number of ranks that share each parameter.
        tail_offset: where the reduce-scatter tail (uneven direct and packed shards) starts.
        pack_offset, pack_numel: the packed shards of one rank, filler included.
        shard_numel: sharded storage of one rank.
        gathered_numel: gathered storage, the pack included.
        pack_full_offset: where the pack starts in the gathered storage.
        filler_numel: elements at the end of the pack that belong to no parameter.
    """

    num_shards: int
    slots: tuple[Slot, ...]
    tail_offset: int
    pack_offset: int
    pack_numel: int
    shard_numel: int
    gathered_numel: int
    pack_full_offset: int
    filler_numel: int

    def __post_init__(self) -> None:
        assert self.pack_offset + self.pack_numel == self.shard_numel
        assert self.pack_full_offset + self.num_shards * self.pack_numel <= self.gathered_numel

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """Indices of direct slots, in storage order."""
        return self._ordered(lambda s: s.direct)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Indices of packed slots, in storage order."""
        return self._ordered(lambda s: not s.direct)

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """Indices of the slots in the reduce-scatter tail, in storage order."""
        return self._ordered(lambda s: s.shard_offset >= self.tail_offset)

    def _ordered(self, keep: Callable[[Slot], bool]) -> tuple[int, ...]:
        chosen = [i for i, slot in enumerate(self.slots) if keep(slot)]
        return tuple(sorted(chosen, key=lambda i: self.slots[i].shard_offset))


def plan_bucket(
    shapes: Sequence[tuple[int, ...]],
    dims: Sequence[int | None],
    num_shards: int,
    *,
    itemsizes: Sequence[int],
    direct_min_bytes: int | None = None,
    num_hosts: int | None = None,
    granularities: Sequence[int] | None = None,
) -> BucketLayout:
    """Lay out the parameters of a bucket.

    Args:
        shapes: shape of each whole parameter.
        dims: sharded dim of each, ``None`` for parameters held whole (0-dim).
        num_shards: number of ranks to shard over.
        itemsizes: bytes per element in each dtype the storages are used in, the dtype of the
            all-gather first.
        direct_min_bytes: a parameter is packed if one rank's slice has fewer bytes (in the dtype of
            the all-gather). Of the others, the `MAX_DIRECT` largest are direct. None: use
            `direct_limit`.
        num_hosts: as in `direct_limit`.
        granularities: for each parameter, the entries along its dim per block; None: 1.

    Returns:
        The layout; a pure function of the arguments, so every rank computes the same.
    """
    # Counted in elements of the narrowest dtype: storages in all dtypes share these offsets, and a
    # multiple of 16 bytes in the narrowest one is a multiple in all.
    align = ALIGN_BYTES // min(ALIGN_BYTES, *itemsizes)
    blocks = granularities or [1] * len(shapes)
    cuts = list(zip(shapes, dims, blocks, strict=True))
    chunks = [_chunk(shape, dim, num_shards, block) for shape, dim, block in cuts]
    shard_numels = [_shard_numel(*args) for args in zip(shapes, dims, chunks, strict=True)]
    if direct_min_bytes is None:
        slices = [numel * itemsizes[0] for numel in shard_numels]
        direct_min_bytes = direct_limit(slices, num_shards, num_hosts)

    def may_be_direct(i: int) -> bool:
        # A shard of another length is not rounded up: the padding would lie between the rows of two
        # ranks, in the middle of the gathered parameter. And without elements (`max(..., 1)`) it
        # would be an empty entry of a collective.
        big = shard_numels[i] * itemsizes[0] >= max(direct_min_bytes, 1)
        return dims[i] == 0 and big and shard_numels[i] % align == 0

    even = [dims[i] == 0 and chunks[i] * num_shards == shapes[i][0] for i in range(len(shapes))]
    everything = range(len(shapes))
    direct = list(everything)
    if num_shards > 1:
        # (Sorting is stable: which of two equal parameters is direct is the same on all ranks.)
        by_size = sorted(filter(may_be_direct, everything), key=lambda i: -shard_numels[i])
        direct = sorted(by_size[:MAX_DIRECT])
    # Packed parameters on dim 0 come before those on other dims: one kernel copies them out of a
    # contiguous part of the pack.
    packed = sorted(set(everything).difference(direct))
    # Uneven direct gradients need padding, so they are staged for the reduce-scatter like packed
    # ones. They lie next to the pack and form one input with it, the tail.
    direct.sort(key=lambda i: not even[i])
    # Neighbours of equal size are taken out together.
    packed.sort(key=lambda i: (dims[i] not in (0, None), shard_numels[i]))
    full_align = GATHERED_ALIGN_BYTES // min(itemsizes)
    slots: list[Slot | None] = [None] * len(shapes)
    shard_offset = full_offset = 0
    for place, i in enumerate((*direct, *packed)):
        full_numel = num_shards * shard_numels[i]
        slots[i] = Slot(
            shape=tuple(shapes[i]),
            dim=dims[i],
            chunk=chunks[i],
            shard_offset=shard_offset,
            shard_numel=shard_numels[i],
            full_offset=full_offset,
            full_numel=full_numel,
            direct=place < len(direct),
        )
        # Direct shards are multiples of `align` already, except where nothing is gathered.
        shard_offset += _round_up(shard_numels[i], align if place < len(direct) else 1)
        full_offset += _round_up(full_numel, full_align)
    return finish_layout(num_shards, slots, shard_offset, full_offset, align)


def direct_limit(slices: Sequence[int], num_ranks: int, num_hosts: int | None) -> int:
    """The minimum number of bytes of a slice for a direct parameter of a bucket.

    NCCL distributes the bytes of a batch evenly over its channels, small entries first. A channel
    runs its parts of several entries one after the other, each as a ring through all ranks. So:

    - The first channel gets all of the smallest entries. These are packed, up to one channel's
      share of the bytes: copying them costs less than their rings.
    - Between hosts, where a ring is long, everything is packed if the rings of the other entries
      take longer than copying them. (Within a host, large ones stay direct: a ring is short there,
      and copies take memory, and bandwidth from compute.)

    Args:
        slices: bytes that a rank sends of each parameter.
        num_hosts: number of hosts of the ranks; None: no batch of NCCL, since the host orders
            messages (gloo), or all direct parameters are one message
            (`CommOptions.gathers_flat`).

    Returns:
        The limit; a pure function of the arguments, so every rank computes the same.
    """
    limit = DIRECT_MIN_BYTES
    if num_hosts is None:
        return limit
    part = sum(slices) / CHANNELS
    for size in set(slices):
        if sum(nbytes for nbytes in slices if nbytes <= size) <= part:
            limit = max(limit, size + 1)
    direct = [nbytes for nbytes in slices if nbytes >= limit]
    if num_hosts > 1 and direct:
        # This many of the smallest ones fit into a channel's share, which ends inside the next one,
        # if any.
        others = len(direct) - (len(direct) == len(slices))
        more_rings = min(ceil(part / min(direct)), others)
        steps_s = (num_ranks - num_hosts) * NODE_STEP_S + (num_hosts - 1) * NETWORK_STEP_S
        if more_rings * (RING_S + steps_s) > 2 * num_ranks * sum(direct) / MEMORY_BYTES_PER_S:
            return max(direct) + 1
    return limit


def finish_layout(
    num_shards: int, slots: Sequence[Slot | None], shard_end: int, full_end: int, align: int
) -> BucketLayout:
    """Complete a layout whose slots are placed: find the tail, fill up the pack, sum up sizes."""
    done: list[Slot] = [slot for slot in slots if slot is not None]
    packed = [slot.shard_offset for slot in done if not slot.direct]
    # With one shard nothing is reduce-scattered. Gradients are then copied or adopted one by one.
    tail = [
        slot.shard_offset for slot in done if num_shards > 1 and not (slot.direct and slot.even)
    ]
    pack_offset = min(packed, default=shard_end)
    pack_numel = _round_up(shard_end - pack_offset, align)
    return BucketLayout(
        num_shards=num_shards,
        slots=tuple(done),
        tail_offset=min(tail, default=pack_offset),
        pack_offset=pack_offset,
        pack_numel=pack_numel,
        shard_numel=pack_offset + pack_numel,
        gathered_numel=full_end + num_shards * pack_numel,
        pack_full_offset=full_end,
        filler_numel=pack_offset + pack_numel - shard_end,
    )


def _chunk(shape: tuple[int, ...], dim: int | None, num_shards: int, granularity: int = 1) -> int:
    return 1 if dim is None else entries_per_part(shape[dim], num_shards, granularity)


def _shard_numel(shape: tuple[int, ...], dim: int | None, chunk: int) -> int:
    if dim is None:
        return prod(shape)
    return prod(shape[:dim]) * chunk * prod(shape[dim + 1 :])


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
