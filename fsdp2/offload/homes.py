"""Where bytes are between uses: host memory, or a file that is read and written directly.

A home has a tensor over its bytes for whoever looks at them in between (``state_dict``,
checkpoints), and copies them into a buffer and back for a step. Of host memory, the buffer is the
home itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..common.pinned import pinned_arena

PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to what direct I/O reads and writes.

    Example:
        >>> whole_pages(1), whole_pages(4096)
        (4096, 4096)
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def aligned_buffer(nbytes: int, *, pin: bool) -> Tensor:
    """Host memory for direct I/O: whole pages, beginning at one. 1-D, of bytes."""
    size = whole_pages(nbytes)
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pin)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + size]


class MemoryHome:
    """Host memory.

    Args:
        device: page-locked for copies to this device; None: not page-locked.

    Attributes:
        bytes: 1-D, of bytes.
    """

    def __init__(self, nbytes: int, *, device: torch.device | None) -> None:
        if device is None:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        else:
            self.bytes = pinned_arena(device).zeros(nbytes, torch.uint8)


class FileHome:
    """A file in a folder, without a name: it is gone when this object or the process is.

    Direct I/O (``O_DIRECT``) moves its bytes between the disk and a buffer without filling the
    page cache. On file systems that refuse that (older tmpfs), it goes through the cache.

    Attributes:
        bytes: 1-D, of bytes: the file, mapped. Whoever reads it reads the file; what is written to
            it is in the file for the next `read`.
        direct: whether I/O is direct.

    Raises:
        OSError: if the disk is full: now, and not as a signal in the middle of training.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._size = whole_pages(nbytes)
        self._file = -1
        descriptor, path = tempfile.mkstemp(dir=folder, prefix="state-")
        try:
            os.posix_fallocate(descriptor, 0, self._size)
            mapped = torch.from_file(path, shared=True, size=self._size, dtype=torch.uint8)
            self.bytes = mapped[:nbytes]
            self.direct = True
            try:
                self._file = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._use_cache(path)
        finally:
            os.unlink(path)
            os.close(descriptor)

    def _use_cache(self, path: str) -> None:
        self.direct = False
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)

    def read(self, buffer: Tensor) -> None:
        """Fill an `aligned_buffer`; other threads run meanwhile."""
        self._move(os.preadv, buffer)

    def write(self, buffer: Tensor) -> None:
        """Write an `aligned_buffer` of this size; other threads run meanwhile."""
        self._move(os.pwritev, buffer)

    def _move(self, call: Callable[..., int], buffer: Tensor) -> None:
        memory = memoryview((ctypes.c_char * self._size).from_address(buffer.data_ptr()))
        done = 0
        while done < self._size:
            moved = call(self._file, [memory[done:]], done)
            if moved <= 0:
                raise OSError(errno.EIO, f"{done} of {self._size} bytes of a state file were moved")
            done += moved
