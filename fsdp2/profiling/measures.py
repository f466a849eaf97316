"""Computes the measures of steps and units from a recording: pure arithmetic.

All values are of this rank and per step: the mean over the steps of the profile.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .events import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    REDUCE_SCATTER,
    Communication,
    Moment,
    Recording,
    WaitInterval,
)


@dataclass(frozen=True)
class Traffic:
    """Gathers or reductions, per step.

    Attributes:
        count: number of launches.
        seconds: sum of their durations.
        nbytes: bytes of the whole gathered or reduced data, without padding.
        sent_bytes: bytes that this rank sends; in a gather, it receives the same number.
        exposed_s: seconds that compute waited for them.
        launch_s: seconds that the host spent launching them.
    """

    count: float = 0.0
    seconds: float = 0.0
    nbytes: float = 0.0
    sent_bytes: float = 0.0
    exposed_s: float = 0.0
    launch_s: float = 0.0

    @property
    def bandwidth(self) -> float | None:
        """``sent_bytes`` per second of ``seconds``; None if nothing ran."""
        return self.sent_bytes / self.seconds if self.seconds > 0 else None

    def __add__(self, other: Traffic) -> Traffic:
        mine, theirs = asdict(self), asdict(other)
        return Traffic(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class UnitMeasures:
    """One unit, per step.

    Attributes:
        forward_s, backward_s, recompute_s: seconds of compute in the unit, without waits and units
            inside it.
        gather, reduce_scatter, all_reduce: its communication.
        peak_bytes: the memory peak, sampled when compute enters or leaves the unit, as in
            `StepMeasures`; None if unknown.
    """

    name: str
    forward_s: float
    backward_s: float
    recompute_s: float
    gather: Traffic
    reduce_scatter: Traffic
    all_reduce: Traffic
    peak_bytes: int | None = None

    @property
    def reduce(self) -> Traffic:
        """Reduce-scatters and all-reduces together."""
        return self.reduce_scatter + self.all_reduce

    @property
    def exposed_s(self) -> float:
        """Seconds that compute waited for communication of this unit."""
        return self.gather.exposed_s + self.reduce.exposed_s


@dataclass(frozen=True)
class StepMeasures:
    """One step.

    Attributes:
        begin_s, end_s: seconds since the profile began.
        exposed_s: seconds that compute waited for communication.
        compute_s: seconds of compute in units; ``optimizer_s``: in the optimizer.
        peak_gathered_bytes: the peak of gathered parameters.
        peak_bytes: the memory peak, sampled when compute enters or leaves a unit, of the device's
            allocator (on the CPU, of the process); None if unknown.
    """

    begin_s: float
    end_s: float
    exposed_s: float
    compute_s: float
    optimizer_s: float
    peak_gathered_bytes: int
    peak_bytes: int | None

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.end_s - self.begin_s


@dataclass(frozen=True)
class Measures:
    """All measures of a profile, of this rank.

    Attributes:
        host_timed: whether communication was timed on the host. Its seconds are then upper bounds,
            and bandwidths lower bounds.
        units: the root first, then in model order; includes units that did not run.
        total: the sum over the units.
    """

    rank: int
    device: str
    host_timed: bool
    steps: tuple[StepMeasures, ...]
    units: tuple[UnitMeasures, ...]
    total: UnitMeasures

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return sum(step.seconds for step in self.steps) / max(1, len(self.steps))

    def to_dict(self) -> dict[str, Any]:
        """The measures as JSON-compatible values; bandwidths are in bytes per second."""
        made = asdict(self)
        made["step_s"] = self.step_s
        for unit, as_dict in zip(
            (*self.units, self.total), (*made["units"], made["total"]), strict=True
        ):
            for name in ("gather", "reduce_scatter", "all_reduce"):
                as_dict[name]["bandwidth"] = getattr(unit, name).bandwidth
        return {**made, "units": list(made["units"]), "steps": list(made["steps"])}


def measure(recording: Recording) -> Measures:
    """Compute steps, units and totals of a recording."""
    spans = steps_of(recording.moments, recording.end_s, _last_event_s(recording))
    num_steps = max(1, len(spans))
    units = tuple(_unit(recording, name, num_steps) for name in recording.units)
    return Measures(
        rank=recording.rank,
        device=recording.device,
        host_timed=not recording.stream_ordered,
        steps=tuple(_step(recording, begin, end) for begin, end in spans),
        units=units,
        total=_total(units),
    )


def steps_of(
    moments: Iterable[Moment], end_s: float, last_s: float | None = None
) -> list[tuple[float, float]]:
    """The beginnings and ends of steps.

    If the user marked the ends of steps, steps last from one mark to the next. Otherwise a step
    begins with a root's forward: if there are optimizer steps, with the first one after each, so
    that micro-batches count as one step; if not, with every one. The last step ends with the last
    event.

    Args:
        end_s: when the profile ended.
        last_s: time of the last event; by default the end.
    """
    last_s = end_s if last_s is None else last_s
    moments = list(moments)
    said = [moment.time_s for moment in moments if moment.kind == "step"]
    if said:
        begins = [0.0, *said]
        if any(m.kind == "root" and m.time_s > said[-1] for m in moments):
            said.append(last_s)
        return [(b, e) for b, e in zip(begins, said, strict=False) if e > b]
    optimizes = any(moment.kind == "optimizer" for moment in moments)
    starts: list[float] = []
    due = True
    for moment in moments:
        if moment.kind == "optimizer":
            due = True
        elif due:
            starts.append(moment.time_s)
            due = not optimizes
    return list(zip(starts, [*starts[1:], max(last_s, *starts)] if starts else [], strict=True))


def _last_event_s(recording: Recording) -> float:
    times = [stretch.end_s for stretch in recording.compute[-1:]]
    times += [wait.end_s for wait in recording.waits[-1:]]
    times += [moment.time_s for moment in recording.moments[-1:]]
    times += [each.end_s for each in recording.communications]
    return min(max(times, default=recording.end_s), recording.end_s)


def _unit(recording: Recording, name: str, num_steps: int) -> UnitMeasures:
    own = [each for each in recording.communications if each.unit == name]
    waits = [wait for wait in recording.waits if wait.unit == name]

    def compute_s(phase: str) -> float:
        stretches = (c for c in recording.compute if c.unit == name and c.phase == phase)
        return sum(c.end_s - c.begin_s for c in stretches) / num_steps

    return UnitMeasures(
        name,
        compute_s(FORWARD),
        compute_s(BACKWARD),
        compute_s(RECOMPUTE),
        gather=_traffic(own, waits, ALL_GATHER, num_steps),
        reduce_scatter=_traffic(own, waits, REDUCE_SCATTER, num_steps),
        all_reduce=_traffic(own, waits, ALL_REDUCE, num_steps),
        peak_bytes=_peak_within(recording, name),
    )


def _peak_within(recording: Recording, unit: str) -> int | None:
    """The highest memory sample at the beginnings and ends of a unit's compute intervals."""
    times = [sample.time_s for sample in recording.memory]
    totals = []
    for each in recording.compute:
        if each.unit == unit:
            first, end = bisect_left(times, each.begin_s), bisect_right(times, each.end_s)
            # On the CPU, a missing sample means that nothing has changed since the one before.
            inside = recording.memory[first:end] or recording.memory[max(0, first - 1) : first]
            totals += [sample.total for sample in inside]
    return max((total for total in totals if total is not None), default=None)


def _traffic(
    own: Sequence[Communication], waits: Sequence[WaitInterval], kind: str, num_steps: int
) -> Traffic:
    chosen = [each for each in own if each.kind == kind]
    return Traffic(
        count=len(chosen) / num_steps,
        seconds=sum(each.end_s - each.begin_s for each in chosen) / num_steps,
        nbytes=sum(each.nbytes for each in chosen) / num_steps,
        sent_bytes=sum(each.sent_bytes for each in chosen) / num_steps,
        exposed_s=sum(w.end_s - w.begin_s for w in waits if w.kind == kind) / num_steps,
        launch_s=sum(each.launch_s for each in chosen) / num_steps,
    )


def _total(units: Sequence[UnitMeasures]) -> UnitMeasures:
    none = Traffic()
    return UnitMeasures(
        "total",
        sum(unit.forward_s for unit in units),
        sum(unit.backward_s for unit in units),
        sum(unit.recompute_s for unit in units),
        sum((unit.gather for unit in units), none),
        sum((unit.reduce_scatter for unit in units), none),
        sum((unit.all_reduce for unit in units), none),
        max((unit.peak_bytes for unit in units if unit.peak_bytes is not None), default=None),
    )


def _step(recording: Recording, begin: float, end: float) -> StepMeasures:
    def within(spans: Iterable[Any]) -> float:
        clipped = (min(s.end_s, end) - max(s.begin_s, begin) for s in spans)
        return sum(seconds for seconds in clipped if seconds > 0)

    optimizer = [c for c in recording.compute if c.phase == OPTIMIZER]
    times = [sample.time_s for sample in recording.memory]
    first = max(0, bisect_right(times, begin) - 1)  # the state when it began
    samples = recording.memory[first : bisect_right(times, end)]
    totals = [sample.total for sample in samples if sample.total is not None]
    return StepMeasures(
        begin,
        end,
        exposed_s=within(recording.waits),
        compute_s=within(c for c in recording.compute if c.phase != OPTIMIZER),
        optimizer_s=within(optimizer),
        peak_gathered_bytes=max(
            (s.parts.get("gathered parameters", 0) for s in samples), default=0
        ),
        peak_bytes=max(totals, default=None),
    )
