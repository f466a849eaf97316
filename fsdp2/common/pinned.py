"""Page-locked host memory without the waste of powers of two.

torch's allocator rounds every page-locked block up to a power of two: a buffer of 17 GiB takes 32.
So the block sizes here are powers of two, filled as follows:

- `PinnedBytes` holds a sequence of bytes that may be split. It takes one block per binary digit of
  its size, of at most `CHUNK_BYTES` each, and wastes less than `SMALLEST_BYTES`;
- `PinnedArena` holds tensors, which may not be split. Several of them share a block. For tensors of
  one size (equal layers), it wastes less than 1/8 (1/3 for large tensors), not counting the last
  block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

CHUNK_BYTES = 256 << 20
SMALLEST_BYTES = 1 << 20
ALIGN_BYTES = 256


def power_of_two(nbytes: int) -> int:
    """The smallest power of two that is not less than ``nbytes``.

    Example:
        >>> power_of_two(17)
        32
    """
    return 1 << max(0, nbytes - 1).bit_length()


def chunk_sizes(nbytes: int) -> list[int]:
    """Powers of two, the largest first, whose sum exceeds ``nbytes`` by less than the smallest
    chunk.

    Example:
        >>> [size >> 20 for size in chunk_sizes(604 << 20)]
        [256, 256, 64, 16, 8, 4]
    """
    sizes = [CHUNK_BYTES] * (nbytes // CHUNK_BYTES)
    rest = nbytes % CHUNK_BYTES
    if rest < SMALLEST_BYTES:
        return [*sizes, power_of_two(rest)] if rest else sizes
    rest = -(-rest // SMALLEST_BYTES)  # in smallest chunks
    return [
        *sizes,
        *(SMALLEST_BYTES << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1),
    ]


def slab_bytes(nbytes: int) -> int:
    """How large a block to take for a tensor of ``nbytes``, if more of its size may follow.

    The smallest power of two that such tensors fill to at least 7/8. A block larger than
    `CHUNK_BYTES` holds at most two such tensors: a parameter and its gradient have the same size,
    so two are certain.

    Example:
        >>> slab_bytes(600), slab_bytes(1000)
        (2048, 1024)
    """
    size = power_of_two(nbytes)
    most = max(CHUNK_BYTES, 2 * size)
    while size * 2 <= most and nbytes * (size // nbytes) * 8 < size * 7:
        size *= 2
    return size


class PinnedBytes:
    """A growing sequence of bytes that are not moved.

    Args:
        pin: whether to page-lock the memory; if not, it is one piece, and growing discards it.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._chunks: list[torch.Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Make room for at least so many bytes."""
        missing = nbytes - sum(chunk.numel() for chunk in self._chunks)
        if missing <= 0:
            return
        sizes = chunk_sizes(missing)
        if not self._pin:
            self._chunks, sizes = [], [nbytes]
        for size in sizes:
            self._chunks.append(
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pin)
            )

    def pieces(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        """The bytes from ``start`` to ``stop``, in their order, as 1-D tensors of bytes."""
        for chunk in self._chunks:
            if start < min(stop, chunk.numel()):
                yield chunk[start : min(stop, chunk.numel())]
            start, stop = max(0, start - chunk.numel()), stop - chunk.numel()
            if stop <= 0:
                return


class _Slab:
    """A block, and how much of it is in use, counted from its start."""

    def __init__(self, nbytes: int) -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.storage = memory.untyped_storage()
        self.nbytes = nbytes
        self.used = 0
        del memory
        self._unused = torch._C._storage_Use_Count(self.storage._cdata)

    def is_free(self) -> bool:
        """Whether all tensors in it are gone."""
        return torch._C._storage_Use_Count(self.storage._cdata) <= self._unused


class PinnedArena:
    """Tensors in page-locked memory. A block is used again once all tensors in it are gone.

    Args:
        device: the device whose copies may be reading or writing the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor at some offset of a shared storage."""
        nbytes = -(-max(1, numel * dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            slab = self._slab_for(nbytes)
            start = slab.used // dtype.itemsize
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(slab.storage, start, (numel,), (1,))
            slab.used += nbytes
        return tensor.zero_()

    def _slab_for(self, nbytes: int) -> _Slab:
        """The fullest existing block with room, or a new one."""
        free = [slab for slab in self._slabs if slab.used and slab.is_free()]
        if free:
            # Copies to or from former tensors may still be running.
            torch.get_device_module(self._device).synchronize(self._device)
            for slab in free:
                slab.used = 0
        fitting = [slab for slab in self._slabs if slab.nbytes - slab.used >= nbytes]
        if fitting:
            return min(fitting, key=lambda slab: slab.nbytes - slab.used)
        # No longer needed: torch's allocator may reuse them.
        self._slabs = [slab for slab in self._slabs if slab.used]
        self._slabs.append(_Slab(slab_bytes(nbytes)))
        return self._slabs[-1]

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(slab.nbytes for slab in self._slabs)


_arenas: dict[torch.device, PinnedArena] = {}


def pinned_arena(device: torch.device) -> PinnedArena:
    """The arena for copies to and from ``device``, of all models."""
    return _arenas.setdefault(device, PinnedArena(device))
