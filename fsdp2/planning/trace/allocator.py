"""A model of torch's caching allocator: the memory that it reserves for a series of allocations.

It follows c10/cuda/CUDACachingAllocator.cpp with default settings, as far as this determines the
size of the reserve: two pools per stream, segments of three sizes, best fit, blocks that are split
and merged. Memory is never returned to the device: in a run, this happens only if memory has run
out, and then makes every stream wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
ALIGN = 512  # bytes; every block is a multiple of it
SMALL = MIB  # up to here, blocks are in the pool of small blocks
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB  # for up to 10 MiB; larger blocks have separate segments,
LARGEST_SHARED = 10 * MIB
ROUND_LARGE = 2 * MIB  # a multiple of that


class Block:
    """A part of a segment, in use or free; neighbours are those in the same segment."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: list[tuple[int, int, Block]]) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.free = False
        self.before: Block | None = None
        self.after: Block | None = None


class Allocator:
    """Counts the bytes that would be reserved.

    Attributes:
        reserved: bytes of all segments. It never falls.
        allocated: bytes of the blocks in use, with rounding.

    Example:
        >>> memory = Allocator()
        >>> block = memory.allocate(3 * 2**20)
        >>> memory.reserved // 2**20
        20
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        # The free blocks of each stream, small and large ones apart, by size and address.
        self._pools: dict[tuple[str, bool], list[tuple[int, int, Block]]] = {}

    def allocate(self, nbytes: int, stream: str = "compute") -> Block | None:
        """A block of at least ``nbytes``, for use on ``stream``; None for no bytes."""
        if nbytes <= 0:
            return None
        size = -(-nbytes // ALIGN) * ALIGN
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), [])
        i = bisect_left(pool, (size,))
        block = pool.pop(i)[2] if i < len(pool) else self._segment(size, pool)
        block.free = False
        rest = block.size - size
        if rest >= ALIGN if small else rest > SMALL:
            self._split(block, size)
        self.allocated += block.size
        return block

    def _segment(self, size: int, pool: list[tuple[int, int, Block]]) -> Block:
        if size <= SMALL:
            total = SMALL_SEGMENT
        elif size < LARGEST_SHARED:
            total = LARGE_SEGMENT
        else:
            total = -(-size // ROUND_LARGE) * ROUND_LARGE
        block = Block(self.reserved, total, pool)
        self.reserved += total
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool)
        block.size = size
        rest.before, rest.after, block.after = block, block.after, rest
        if rest.after is not None:
            rest.after.before = rest
        self._put(rest)

    def _put(self, block: Block) -> None:
        block.free = True
        insort(block.pool, (block.size, block.address, block))

    def free(self, block: Block | None) -> None:
        """Take a block back into the pool of its stream, merged with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        if block.after is not None and block.after.free:
            self._take(block.after)
            _join(block, block.after)
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = _join(block.before, block)
        self._put(block)

    def _take(self, block: Block) -> None:
        del block.pool[bisect_left(block.pool, (block.size, block.address))]


def _join(block: Block, after: Block) -> Block:
    """Make a block and the one after it one; neither is in a pool."""
    block.size += after.size
    block.after = after.after
    if block.after is not None:
        block.after.before = block
    return block
