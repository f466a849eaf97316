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


class Held:
    """Bytes that units hold on the device, by purpose; updated unit by unit.

    Attributes:
        now: sums over all units measured so far.
    """

    def __init__(self) -> None:
        self.now = dict.fromkeys(PARTS, 0)
        self._of_unit: dict[Unit, dict[str, int]] = {}
        self._accumulated: dict[Unit, int] = {}

    def measure(self, unit: Unit) -> None:
        """Update the bytes of one unit."""
        parts = _parts(unit)
        parts[UNREDUCED] += self._accumulated.get(unit, 0)
        before = self._of_unit.get(unit, {})
        for name, nbytes in parts.items():
            self.now[name] += nbytes - before.get(name, 0)
        self._of_unit[unit] = parts

    def note_accumulated(self, unit: Unit) -> None:
        """After a backward of ``unit`` without gradient sync, count the unsharded gradients."""
        nbytes = 0
        if not unit.config.reduce_grads:
            grads = [p.unsharded.grad for p in unit.params if p.unsharded is not None]
            grads += unit.gradients.accumulated.values()
            nbytes = sum(_nbytes(grad) for grad in grads if grad is not None)
        self._accumulated[unit] = nbytes

    def take(self, nbytes: int) -> None:
        """Count gradients that a reduction holds; negative when it drops them."""
        self.now[UNREDUCED] += nbytes


def _parts(unit: Unit) -> dict[str, int]:
    buckets = unit.buckets
    here = [b for b in buckets if b.shard_device == b.device]  # else in host memory
    stores = [b.grads.storage.size() for b in here if b.grads is not None]
    secondary = [b.secondary.storage.size() for b in buckets if b.secondary is not None]
    return {
        PARAMETERS: sum(b.shards.nbytes for b in here),
        GRADIENTS: sum(stores),
        GATHERED: sum(b.allocated_bytes for b in buckets),
        SECONDARY: sum(secondary),
        UNREDUCED: sum(b.partial.nbytes for b in buckets if b.partial is not None),
    }


def _nbytes(grad: torch.Tensor) -> int:
    return getattr(grad, "_local_tensor", grad).nbytes


def total_reader(device: torch.device) -> Callable[[], int | None]:
    """A function that returns the memory in use: of a device's allocator, or of the process.

    It returns None if this is unknown, takes microseconds and waits for nothing.
    """
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
    page = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(file.fileno(), 100, 0).split()[1]) * page
