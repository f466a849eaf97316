"""Memory of another process of this host, read with one copy: Linux's cross-memory attach.

``process_vm_readv`` (Linux 3.2; man 2 process_vm_readv) copies from the memory of one process into
another's, without a buffer in between. The kernel permits it where it would permit a debugger
(PTRACE_MODE_ATTACH_REALCREDS): to processes of the same user, unless a container, seccomp or Yama's
``ptrace_scope`` forbids it. MPI libraries send messages within a host in this way.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache

from ...common.host import boot_id

# Addresses and sizes in bytes, one after the other, as ``struct iovec`` has them.
Ranges = list[int]

_MOST_RANGES = 1024  # IOV_MAX: what one call takes


class ReadError(OSError):
    """The memory of another process could not be read."""


@cache
def _readv() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return None
    try:
        # (``CDLL`` lets other threads of Python run during a call.)
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    number, address = ctypes.c_ulong, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, address, number, address, number, number]
    function.restype = ctypes.c_ssize_t
    return function


def host_id() -> str:
    """Equal in processes that can name each other by process id, and find each other's sockets.

    "" where nothing can be read.
    """
    if _readv() is None:
        return ""
    try:
        # Sockets without a file are names of the network namespace: containers of one host may
        # share their processes and not these.
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        return " ".join([boot, *spaces]) if (boot := boot_id()) else ""
    except OSError:
        return ""


def read(pid: int, into: Ranges, ranges: Ranges) -> None:
    """Copy ``ranges`` of process ``pid`` to ``into`` of this one, range by range.

    Raises:
        ReadError: the ranges are not of equal sizes, the process is gone, or may not be read.
    """
    if into[1::2] != ranges[1::2]:
        raise ReadError(
            f"process {pid} offers {len(ranges) // 2} ranges of {sum(ranges[1::2])} bytes, "
            f"{len(into) // 2} of {sum(into[1::2])} bytes are expected"
        )
    for start in range(0, len(into), 2 * _MOST_RANGES):
        stop = start + 2 * _MOST_RANGES
        _read(pid, into[start:stop], ranges[start:stop])


def _read(pid: int, into: Ranges, ranges: Ranges) -> None:
    call = _readv()
    assert call is not None
    while into:
        numbers = ctypes.c_uint64 * len(into)
        num = len(into) // 2
        count = call(pid, numbers(*into), num, numbers(*ranges), num, 0)
        if count == sum(into[1::2]):
            return
        if count <= 0:
            code = ctypes.get_errno()
            raise ReadError(code, f"reading the memory of process {pid}: {os.strerror(code)}")
        # A call copies 2 GiB at most.
        into, ranges = _after(into, count), _after(ranges, count)


def _after(ranges: Ranges, nbytes: int) -> Ranges:
    """What is left of ``ranges`` behind their first ``nbytes``."""
    i = 0
    while nbytes and nbytes >= ranges[i + 1]:
        nbytes -= ranges[i + 1]
        i += 2
    left = ranges[i:]
    if nbytes:
        left[0] += nbytes
        left[1] -= nbytes
    return left
