"""What a profile recorded, as data: moments in seconds since it began, bytes, names.

Nothing here knows how it was recorded: `measures`, `trace` and `picture` work on these alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
KINDS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"


@dataclass(frozen=True)
class Border:
    """Compute entered or left a unit, or the optimizer (a unit without a name).

    Attributes:
        depth: how many units enclose it.
    """

    enters: bool
    unit: str
    phase: str
    depth: int
    time_s: float


@dataclass(frozen=True)
class Compute:
    """A stretch of compute in one unit, and in no unit inside of it."""

    unit: str
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Communication:
    """One gather or reduction of one unit.

    Attributes:
        kind: one of `KINDS`.
        phase: "forward" or "backward": what the model was in when it was launched.
        num_ranks: that take part.
        nbytes: of the whole parameters that are gathered or gradients that are reduced, without
            padding.
        sent_bytes: that this rank sends, padding included, as `describe.bucket_bytes` counts them.
        launched_s: when the host launched it; ``launch_s``: how long that took the host.
        begin_s, end_s: on its stream. On the CPU ``begin_s`` is ``launched_s``, and ``end_s`` is
            the end of the wait for it: an upper bound.
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
class Wait:
    """Compute (the stream; on the CPU the thread) stood still for a communication."""

    unit: str
    kind: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in bytes.

    Attributes:
        parts: by purpose, named as in `fsdp2.estimate`.
        total: all that the allocator has given out on the device; on the CPU the resident memory of
            the process, None where the system does not tell.
    """

    time_s: float
    parts: dict[str, int]
    total: int | None


@dataclass(frozen=True)
class Moment:
    """Something that steps are found by: "root" (a root forward began), "optimizer" (a step of one
    is over) or "step" (the user says that a step is over)."""

    kind: str
    time_s: float


@dataclass(frozen=True)
class Recording:
    """All of it, each list in the order of the host.

    Attributes:
        units: names, the root first, then in the order of the model.
        stream_ordered: whether streams ran beside each other, timed by events (CUDA); else
            everything was timed on the host (CPU).
        end_s: when the profile ended.
    """

    rank: int
    device: str
    stream_ordered: bool
    units: tuple[str, ...]
    compute: tuple[Compute, ...]
    communications: tuple[Communication, ...]
    waits: tuple[Wait, ...]
    memory: tuple[Sample, ...]
    moments: tuple[Moment, ...]
    end_s: float


def exclusive(borders: Iterable[Border], waits: Sequence[Wait]) -> tuple[Compute, ...]:
    """Stretches of compute: each moment belongs to the innermost unit that was entered and not
    left (of several, to the one entered last), unless compute waited then.

    Units are not always entered from the outside in: backward may tell of a unit before it tells
    of the one that encloses it. Nor are they always left in the reverse of that order: backward
    leaves a unit whose inputs need no gradient only at its end.
    """
    stretches: list[Compute] = []
    inside: list[tuple[int, str, str]] = []  # by depth
    last = 0.0
    for border in borders:
        now = max(last, border.time_s)
        if inside and now > last:
            stretches.append(Compute(*inside[-1][1:], last, now))
        last = now
        key = (border.depth, border.unit, border.phase)
        if border.enters:
            inside.append(key)
            inside.sort(key=lambda each: each[0])  # stable: the one entered last stays last
        elif key in inside:
            del inside[len(inside) - 1 - inside[::-1].index(key)]
    return tuple(_without(stretches, waits))


def _without(stretches: Sequence[Compute], waits: Sequence[Wait]) -> list[Compute]:
    """Both in the order of time, each without overlaps."""
    left: list[Compute] = []
    first = 0
    for stretch in stretches:
        begin = stretch.begin_s
        while first < len(waits) and waits[first].end_s <= begin:
            first += 1
        for wait in waits[first:]:
            if wait.begin_s >= stretch.end_s:
                break
            if wait.begin_s > begin:
                left.append(Compute(stretch.unit, stretch.phase, begin, wait.begin_s))
            begin = max(begin, wait.end_s)
        if begin < stretch.end_s:
            left.append(Compute(stretch.unit, stretch.phase, begin, stretch.end_s))
    return left
