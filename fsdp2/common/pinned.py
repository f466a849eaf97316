"""Page-locked host memory without the waste of powers of two.

torch's allocator rounds every page-locked block up to a power of two: a buffer of 17 GiB takes 32.
So blocks here have sizes of that kind, and what is needed is put into them:

- `PinnedBytes`: a sequence of bytes that may be cut: as many blocks as its binary digits, of at
  most `CHUNK_BYTES`; less than `SMALLEST_BYTES` is wasted;
- `PinnedArena`: tensors, which may not: several of them lie in one block. For tensors of one size,
  as those of equal layers are, less than 1/8 is wasted (of large ones 1/3), beside the last block.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch

CHUNK_BYTES = 256 << 20
SMALLEST_BYTES = 1 << 20
ALIGN_BYTES = 256


def power_of_two(nbytes: int) -> int:
    """The smallest one that is not less than ``nbytes``.

    Example:
        >>> power_of_two(17)
        32
    """
    return 1 << max(0, nbytes - 1).bit_length()


def chunk_sizes(nbytes: int) -> list[int]:
    """Powers of two, the largest first, that together have ``nbytes``, and less than a smallest
    chunk more.

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
    """How large a block to take for a tensor of ``nbytes``, where others of its size may follow.

    The smallest power of two of which they leave at most 1/8, but none that is larger than
    `CHUNK_BYTES` and than two blocks of the tensor's own: a parameter's gradient has its size, so
    two are filled.

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
    """Bytes that grow and are not moved.

    Args:
        pin: whether to page-lock them; if not, they are one piece, and lost when they grow.
    """

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._chunks: list[torch.Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Have room for at least so many."""
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
    """A block, and how much of it is given out, from its beginning on."""

    def __init__(self, nbytes: int) -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        self.storage = memory.untyped_storage()
        self.nbytes = nbytes
        self.used = 0
        del memory
        self._unused = torch._C._storage_Use_Count(self.storage._cdata)

    def is_free(self) -> bool:
        """Whether all tensors that lay in it are gone."""
        return torch._C._storage_Use_Count(self.storage._cdata) <= self._unused


class PinnedArena:
    """Tensors in page-locked memory. What they lie in is used again when all of a block are gone.

    Args:
        device: whose copies may be reading or writing the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[_Slab] = []
        self._lock = threading.Lock()

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor, at some offset of a storage that is not its own."""
        nbytes = -(-max(1, numel * dtype.itemsize) // ALIGN_BYTES) * ALIGN_BYTES
        with self._lock:
            slab = self._slab_for(nbytes)
            start = slab.used // dtype.itemsize
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(slab.storage, start, (numel,), (1,))
            slab.used += nbytes
        return tensor.zero_()

    def _slab_for(self, nbytes: int) -> _Slab:
        """The fullest one with room, of those that are there."""
        free = [slab for slab in self._slabs if slab.used and slab.is_free()]
        if free:
            # Copies to or from what is gone may be on their way.
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
