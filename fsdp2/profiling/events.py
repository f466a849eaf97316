"""The recording of a profile as data: times in seconds since it began, bytes, names.

It does not depend on how it was recorded: `measures`, `trace` and `picture` use only these classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"


@dataclass(frozen=True)
class UnitBorder:
    """Compute entered or left a unit, or the optimizer (a unit without a name).

    Attributes:
        depth: number of units that enclose it.
    """

    enters: bool
    unit: str
    phase: str
    depth: int
    time_s: float


@dataclass(frozen=True)
class ComputeInterval:
    """An interval of compute in one unit, but in no unit inside it."""

    unit: str
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Communication:
    """One gather or reduction of one unit.

    Attributes:
        kind: one of `KINDS`.
        phase: "forward" or "backward": the model's phase when it was launched.
        num_ranks: number of ranks that take part.
        nbytes: bytes of the whole parameters or gradients, without padding.
        sent_bytes: bytes that this rank sends, including padding, as `describe.bucket_bytes`
            counts them.
        launched_s: when the host launched it; ``launch_s``: how long that took the host.
        begin_s, end_s: on its stream. On the CPU ``begin_s`` is ``launched_s``, and ``end_s`` is
            the end of the wait for it, an upper bound.
    """

    unit: str
    kind: str
    phase: str
    num_ranks: int
    nbytes: int
    sent_bytes: int
    launched_s: float
    launch_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class WaitInterval:
    """Compute (the stream; on the CPU, the thread) waited for a communication."""

    unit: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes.

    Attributes:
        parts: by purpose, named as in `fsdp2.estimate`.
        total: memory that the device's allocator has handed out; on the CPU, the resident memory
            of the process, or None if the system does not report it.
    """

    time_s: float
    parts: dict[str, int]
    total: int | None


@dataclass(frozen=True)
class Moment:
    """An event that separates steps: "root" (a root's forward began), "optimizer" (an optimizer
    step ended) or "step" (the user marked the end of a step)."""

    kind: str
    time_s: float


@dataclass(frozen=True)
class Recording:
    """Everything recorded, each list in host order.

    Attributes:
        num_ranks: of the job.
        units: names, the root first, then in model order.
        stream_ordered: whether work ran on streams and was timed by events (CUDA); otherwise
            everything was timed on the host (CPU).
        end_s: when the profile ended.
    """

    rank: int
    device: str
    stream_ordered: bool
    units: tuple[str, ...]
    compute: tuple[ComputeInterval, ...]
    communications: tuple[Communication, ...]
    waits: tuple[WaitInterval, ...]
    memory: tuple[Sample, ...]
    moments: tuple[Moment, ...]
    end_s: float
    num_ranks: int = 1


def exclusive(
    borders: Iterable[UnitBorder], waits: Sequence[WaitInterval]
) -> tuple[ComputeInterval, ...]:
    """Intervals of compute: each moment belongs to the innermost unit that was entered and not
    left (of several, to the one entered last), unless compute was waiting.

    Units are not always entered from the outside in: backward may report a unit before the one that
    encloses it. Nor are they always left in reverse order: backward leaves a unit whose inputs need
    no gradient only at the end.
    """
    stretches: list[ComputeInterval] = []
    inside: list[tuple[int, str, str]] = []  # by depth
    last = 0.0
    for border in borders:
        now = max(last, border.time_s)
        if inside and now > last:
            stretches.append(ComputeInterval(*inside[-1][1:], last, now))
        last = now
        key = (border.depth, border.unit, border.phase)
        if border.enters:
            inside.append(key)
            inside.sort(key=lambda each: each[0])  # stable: the one entered last stays last
        elif key in inside:
            del inside[len(inside) - 1 - inside[::-1].index(key)]
    return tuple(_without(stretches, waits))


def _without(
    stretches: Sequence[ComputeInterval], waits: Sequence[WaitInterval]
) -> list[ComputeInterval]:
    """``stretches`` minus ``waits``; both are ordered by time and have no overlaps."""
    left: list[ComputeInterval] = []
    first = 0
    for stretch in stretches:
        begin = stretch.begin_s
        while first < len(waits) and waits[first].end_s <= begin:
            first += 1
        for wait in waits[first:]:
            if wait.begin_s >= stretch.end_s:
                break
            if wait.begin_s > begin:
                left.append(ComputeInterval(stretch.unit, stretch.phase, begin, wait.begin_s))
            begin = max(begin, wait.end_s)
        if begin < stretch.end_s:
            left.append(ComputeInterval(stretch.unit, stretch.phase, begin, stretch.end_s))
    return left
