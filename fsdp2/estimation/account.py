"""Bytes in memory by purpose, over the course of a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Peak:
    """The memory peak of a phase.

    Attributes:
        total: bytes.
        parts: bytes by category at the peak.
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
    """

    def __init__(self, *, keep_samples: bool = False) -> None:
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

    def touch(self, category: str, nbytes: int) -> None:
        """Count ``nbytes`` that are allocated only for a moment, for the peak."""
        self._note(nbytes, category)

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


class Held:
    """Bytes that count as in memory while this object is referenced."""

    def __init__(self, account: Account, category: str, nbytes: int) -> None:
        self._account = account
        self._category = category
        self.nbytes = nbytes
        account.add(category, nbytes)

    def recount(self, category: str) -> None:
        """Count it in another category from now on."""
        now = self._account.now
        now[self._category] -= self.nbytes
        now[category] = now.get(category, 0) + self.nbytes
        self._category = category

    def __del__(self) -> None:
        self._account.add(self._category, -self.nbytes)
