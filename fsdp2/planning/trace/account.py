"""Bytes in memory by purpose, over the course of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .allocator import Allocator, Block


@dataclass
class Peak:
    """The memory peak of a phase.

    Attributes:
        total: bytes in memory at the peak.
        parts: bytes at the peak, by category.
    """

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)


class Account:
    """The bytes that are in memory now, and the peaks of every phase.

    Attributes:
        now: bytes by category.
        phase: name of the current phase, whose peak is updated.
        samples: (number of operations launched so far, bytes by category) at every change, with
            ``keep_samples``.
        memory: the allocator of all that is counted; None: reserved memory is not needed.
        stream: the name of the current stream.
    """

    def __init__(self, *, keep_samples: bool = False, memory: Allocator | None = None) -> None:
        self.memory = memory
        self.stream: Callable[[], str] = lambda: "compute"
        self.now: dict[str, int] = {}
        self.host: dict[str, int] = {}  # memory of the host, for offloaded shards
        self.total = 0
        self.phase = "forward"
        self.peaks: dict[str, Peak] = {}
        self.clock = 0
        self.samples: list[tuple[int, dict[str, int]]] | None = [] if keep_samples else None

    def add(self, category: str, nbytes: int) -> None:
        """Count ``nbytes`` more (or, if negative, fewer) from now on."""
        self.now[category] = self.now.get(category, 0) + nbytes
        self.total += nbytes
        self._note(0, category)

    def touch(self, category: str, nbytes: int, *, allocates: bool = True) -> None:
        """Count ``nbytes`` that are allocated only for a moment, for the peak.

        Args:
            allocates: whether `memory` allocates them; it already has the trace's allocations.
        """
        self._note(nbytes, category)
        if allocates:
            self.free(self.allocate(nbytes))

    def allocate(self, nbytes: int) -> Block | None:
        """Memory for the current stream; None without `memory`."""
        return None if self.memory is None else self.memory.allocate(nbytes, self.stream())

    def free(self, block: Block | None) -> None:
        """Free a result of `allocate`."""
        if block is not None and self.memory is not None:
            self.memory.free(block)

    @property
    def reserved(self) -> int | None:
        """Bytes that the allocator has reserved; None without `memory`."""
        return None if self.memory is None else self.memory.reserved

    def _note(self, extra: int, category: str) -> None:
        peak = self.peaks.get(self.phase)
        if peak is None:
            peak = self.peaks[self.phase] = Peak()
        if self.total + extra > peak.total:
            peak.total = self.total + extra
            peak.parts = {**self.now, category: self.now.get(category, 0) + extra}
        if self.samples is not None:
            parts = {**self.now, category: self.now.get(category, 0) + extra}
            self.samples.append((self.clock, parts))

    def forget_peaks(self) -> None:
        """Start measuring peaks here."""
        self.peaks.clear()
        if self.samples is not None:
            self.samples.clear()
        self._note(0, "activations")

    @property
    def peak(self) -> Peak:
        """The highest of all phases."""
        return max(self.peaks.values(), key=lambda peak: peak.total, default=Peak())


class HeldBytes:
    """Bytes that count as in memory while this object is referenced.

    Args:
        block: their memory. None: it is allocated now.
    """

    def __init__(
        self, account: Account, category: str, nbytes: int, block: Block | None = None
    ) -> None:
        self._account = account
        self._category = category
        self.nbytes = nbytes
        self._block = account.allocate(nbytes) if block is None else block
        account.add(category, nbytes)

    def recount(self, category: str) -> None:
        """Count it in another category from now on."""
        now = self._account.now
        now[self._category] -= self.nbytes
        now[category] = now.get(category, 0) + self.nbytes
        self._category = category

    def __del__(self) -> None:
        self._account.add(self._category, -self.nbytes)
        self._account.free(self._block)
