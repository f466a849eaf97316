"""Memory in use: bytes of a unit by purpose, and the total of the process or device."""

from __future__ import annotations

import os
from collections.abc import Callable
from operator import add, sub
from time import perf_counter
from typing import Any

import torch

from ..runtime.unit import Unit

# Purposes, as `fsdp2.estimate` names them.
PARAMETERS, GRADIENTS = "parameters", "gradients"
GATHERED, SECONDARY = "gathered parameters", "secondary shards"
UNREDUCED = "unreduced gradients"
PARTS = (PARAMETERS, GRADIENTS, GATHERED, SECONDARY, UNREDUCED)

# The system is asked for the memory of the process at most this often: a call of some microseconds,
# which small units would make every hundred.
RESIDENT_INTERVAL_S = 5e-4


class Held:
    """Bytes that units hold on the device, by purpose; updated unit by unit.

    Attributes:
        now: sums over all units measured so far, in the order of `PARTS`. A tuple, which is made
            again only if a number changes: samples keep it as it is.
    """

    def __init__(self) -> None:
        self.now = _NOTHING
        self._of_unit: dict[Unit, tuple[int, ...]] = {}
        self._accumulated: dict[Unit, int] = {}

    def measure(self, unit: Unit) -> None:
        """Update the bytes of one unit."""
        # About ten times per unit and step: what is slow here is what a profile costs.
        parts = _parts(unit, self._accumulated.get(unit, 0))
        before = self._of_unit.get(unit, _NOTHING)
        if parts != before:
            self._of_unit[unit] = parts
            self.now = tuple(map(sub, map(add, self.now, parts), before))

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
        self.now = (*self.now[:-1], self.now[-1] + nbytes)


_NOTHING = (0,) * len(PARTS)


def _parts(unit: Unit, unreduced: int) -> tuple[int, ...]:
    shards = grads = gathered = secondary = 0
    for bucket in unit.buckets:
        if bucket.shard_device == bucket.device:  # else in host memory
            shards += bucket.shards.nbytes
            if bucket.grads is not None:
                grads += bucket.grads.storage.nbytes()
        if bucket.gathered is not None:
            for storage in bucket.gathered.storages:
                gathered += storage.nbytes()
        if bucket.secondary is not None:
            secondary += bucket.secondary.storage.nbytes()
        if bucket.partial is not None:
            unreduced += bucket.partial.nbytes
    return shards, grads, gathered, secondary, unreduced


def _nbytes(grad: torch.Tensor) -> int:
    return getattr(grad, "_local_tensor", grad).nbytes


def total_reader(device: torch.device) -> Callable[[], Any]:
    """A function that returns the memory in use: of a device's allocator, or of the process.

    It returns what `total_of` takes, in about a microsecond, and waits for nothing.
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


def total_of(read: Any) -> int | None:
    """Bytes, from what a `total_reader` returned; None if they are unknown."""
    if isinstance(read, bytes):
        return int(read.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return read


def _resident_reader() -> Callable[[], Any]:
    try:
        file = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115 (as long as the reader)
    except OSError:
        return lambda: None  # not Linux

    last_s, text = float("-inf"), b""
    fd, pread = file.fileno(), os.pread

    def resident(_of: Any = file) -> bytes:
        nonlocal last_s, text
        now_s = perf_counter()
        if now_s - last_s >= RESIDENT_INTERVAL_S:
            last_s, text = now_s, pread(fd, 100, 0)  # understood when the profile is over
        return text

    return resident
