"""What a process can find out about its host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """An id that all processes of a machine share, also in containers, until it reboots."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def num_cores() -> int:
    """How many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def address_of_interface(name: str) -> str:
    """The IPv4 address of a network interface.

    Raises:
        OSError: if there is no such interface, or it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = struct.pack("256s", name[:15].encode())
        answer = fcntl.ioctl(sock.fileno(), 0x8915, asked)  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])


def memory_bytes() -> tuple[int, int]:
    """All and available bytes of the host, or of the container's limit; 0 where unknown."""
    found = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            found[key] = int(value.split()[0]) * 1024
    total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    return total, free
