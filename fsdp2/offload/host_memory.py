"""Page-locked host memory that copies of device memory use again and again."""

from __future__ import annotations

from collections import defaultdict

import torch

from ..common.pinned import CHUNK_BYTES, power_of_two


def sizes_for(nbytes: int) -> list[int]:
    """Blocks for ``nbytes``: powers of two, as torch's allocator would round other sizes up.

    Less than 1/8 is wasted, and there are at most four below `CHUNK_BYTES`: each is a separate
    copy.

    Example:
        >>> sizes_for(1000), sizes_for(1025), sizes_for(3 << 28 | 1)
        ([1024], [1024, 128], [268435456, 268435456, 268435456, 16777216])
    """
    unit = max(1, min(CHUNK_BYTES, power_of_two(nbytes)) // 16)
    units = -(-nbytes // unit)
    whole, rest = divmod(units * unit, CHUNK_BYTES)
    bits = range(rest.bit_length())
    return [CHUNK_BYTES] * whole + [1 << bit for bit in reversed(bits) if rest >> bit & 1]


class HostMemory:
    """Blocks of bytes that are given out and taken back.

    A block may be given out again while copies to or from it are under way: all of them have to be
    on one stream, which then orders the old ones before the new.

    Args:
        pin: whether to page-lock the blocks.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.reserved_bytes = 0
        self.used_bytes = 0

    def take(self, nbytes: int) -> list[torch.Tensor]:
        """1-D tensors of bytes, which together have at least ``nbytes``."""
        blocks: list[torch.Tensor] = []
        try:
            for size in sizes_for(nbytes):
                free = self._free[size]
                blocks.append(free.pop() if free else self._allocate(size))
                self.used_bytes += size
        except BaseException:  # no more memory to lock
            self.give_back(blocks)
            raise
        return blocks

    def give_back(self, blocks: list[torch.Tensor]) -> None:
        """Blocks of `take`, which nothing will read from now on."""
        for block in blocks:
            self._free[block.numel()].append(block)
            self.used_bytes -= block.numel()

    def _allocate(self, size: int) -> torch.Tensor:
        block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
        self.reserved_bytes += size
        return block
