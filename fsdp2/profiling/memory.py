"""Memory in use: bytes of a unit by purpose, and the total of the process or device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..runtime.unit import Unit

# Purposes, as `fsdp2.estimate` names them.
PARAMETERS, GRADIENTS = "parameters", "gradients"
GATHERED, SECONDARY = "gathered parameters", "secondary shards"
UNREDUCED = "unreduced gradients"
PARTS = (PARAMETERS, GRADIENTS, GATHERED, SECONDARY, UNREDUCED)

NOTHING = (0,) * len(PARTS)


def accumulated_bytes(unit: Unit) -> int:
    """Bytes of the unsharded gradients that a backward without gradient sync left."""
    grads = [p.unsharded.grad for p in unit.params if p.unsharded is not None]
    return sum(_nbytes(grad) for grad in grads if grad is not None)


def _nbytes(grad: torch.Tensor) -> int:
    return getattr(grad, "_local_tensor", grad).nbytes


def total_reader(device: torch.device) -> Callable[[], int | None]:
    """A function that returns the memory in use: of a device's allocator, or of the process (None
    if it is unknown). It waits for nothing."""
    if device.type == "cuda":
        # (torch.cuda.memory_allocated makes a flat dict of all statistics first)
        stats = torch.cuda.memory.memory_stats_as_nested_dict

        def allocated() -> int:
            found: Any = stats(device).get("allocated_bytes", {})
            return found.get("all", {}).get("current", 0)

        return allocated
    if device.type != "cpu":
        return lambda: torch.get_device_module(device).memory_allocated(device)
    return _resident_reader()


def _resident_reader() -> Callable[[], int | None]:
    try:
        file = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115 (as long as the reader)
    except OSError:
        return lambda: None  # not Linux
    fd, pread, page = file.fileno(), os.pread, os.sysconf("SC_PAGE_SIZE")

    def resident(_of: Any = file) -> int:
        return int(pread(fd, 100, 0).split(b" ", 2)[1]) * page

    return resident
