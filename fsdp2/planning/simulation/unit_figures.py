"""A simulated step by units, with the same figures as a profile: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from ...render.timeline import BACKWARD, COMPUTE
from ..replay.device import Collective, StreamLaunch
from ..trace.events import Compute
from .simulate import SimulatedStep

ROOT, OUTSIDE = "(root)", "(outside)"
GATHERED = "gathered parameters"


@dataclass
class SimulatedTraffic:
    """Gathers or reductions of a unit in a step.

    Attributes:
        count: number of launches.
        seconds: sum of their durations.
        nbytes: bytes of the whole gathered or reduced data, with padding.
        sent_bytes: bytes that a rank sends.
        exposed_s: seconds that compute waits for them.
    """

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    sent_bytes: int = 0
    exposed_s: float = 0.0


@dataclass
class UnitFigures:
    """One unit in a step.

    Attributes:
        forward_s, backward_s: seconds of its kernels, without units inside it; recomputation is in
            backward.
        gather, reduce: its communication; ``reduce`` has reduce-scatters and all-reduces together.
        peak_bytes: the memory peak of a rank, sampled when compute enters or leaves the unit.
    """

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    gather: SimulatedTraffic = field(default_factory=SimulatedTraffic)
    reduce: SimulatedTraffic = field(default_factory=SimulatedTraffic)
    peak_bytes: int = 0


def unit_figures(step: SimulatedStep) -> list[UnitFigures]:
    """The figures of every unit of ``step``, the root first, then in the order of forward.

    Work outside all units (the loss) comes last, as a unit named `OUTSIDE`; a profile has no such
    unit. Waits for the host or for the slowest rank are in no unit.
    """
    units = {ROOT: UnitFigures(ROOT)}
    outside = UnitFigures(OUTSIDE)

    def figures(launch: StreamLaunch) -> UnitFigures:
        name = launch.unit
        if not name:
            return outside
        return units.setdefault(name, UnitFigures(name))

    for launch, span in zip(step.launches, step.spans, strict=True):
        mine, seconds = figures(launch), span.end - span.begin
        if isinstance(launch.work, Collective):
            if (traffic := _traffic(mine, launch)) is not None:
                traffic.count += 1
                traffic.seconds += seconds
                traffic.nbytes += launch.work.nbytes
                traffic.sent_bytes += launch.work.sent
        elif isinstance(launch.work, Compute) and launch.lane == COMPUTE:
            if launch.phase == BACKWARD:
                mine.backward_s += seconds
            else:
                mine.forward_s += seconds
    for launch, seconds in waits(step):
        if (traffic := _traffic(figures(launch), launch)) is not None:
            traffic.exposed_s += seconds
    for name, total in _borders(step):
        mine = units.setdefault(name, UnitFigures(name)) if name else outside
        mine.peak_bytes = max(mine.peak_bytes, total)
    return [*units.values(), outside]


def peak_gathered_bytes(step: SimulatedStep) -> int:
    """The peak of gathered parameters."""
    return max((parts.get(GATHERED, 0) for _, parts in step.samples), default=0)


def waited_s(step: SimulatedStep) -> float:
    """Seconds that compute waits for communication, including waits for the slowest rank:
    ``exposed_s`` without waits for the host."""
    return sum(seconds for _, seconds in waits(step)) + step.stragglers_s


def _traffic(mine: UnitFigures, launch: StreamLaunch) -> SimulatedTraffic | None:
    """The traffic that a collective belongs to; None for the model's own collectives."""
    if launch.lane == "all-gather":
        return mine.gather
    return mine.reduce if launch.lane in ("reduce-scatter", "all-reduce") else None


def waits(step: SimulatedStep) -> Iterator[tuple[StreamLaunch, float]]:
    """For each time that compute is idle, the launch for which it waits, if it waits for one."""
    ended, now = 0.0, step.spans
    for launch, span in zip(step.launches, now, strict=True):
        if launch.stream != COMPUTE:
            continue
        if launch.lane != COMPUTE:  # in the order of the host: compute waits for all of it
            yield launch, span.end - span.begin
            ended = span.end
            continue
        # The last of its dependencies to end. If this ended before compute was free, or well before
        # the launch began, the host is late.
        last = max(launch.after, key=lambda number: now[number].end, default=None)
        if last is not None and now[last].end > ended:
            yield step.launches[last], now[last].end - ended
        ended = max(ended, span.end)
    # The optimizer waits for all launches in flight.
    last = max(range(len(now)), key=lambda number: now[number].end, default=None)
    if last is not None and now[last].end > ended:
        yield step.launches[last], now[last].end - ended


def _borders(step: SimulatedStep) -> Iterator[tuple[str, int]]:
    """The unit and all bytes in memory, whenever compute enters or leaves a unit."""
    # The state before a launch is the last sample with this number of launches, or with fewer.
    states: list[int] = []
    for clock, parts in step.samples:
        states += [states[-1] if states else 0] * (clock + 1 - len(states))
        states[clock] = sum(parts.values())
    if not states:
        return
    computes = [launch for launch in step.launches if launch.lane == COMPUTE]
    numbers = [launch.number for launch in computes]
    first = 0
    for name, group in groupby(computes, key=lambda launch: launch.unit):
        behind = first + len(list(group))
        leaves = numbers[behind] if behind < len(numbers) else len(states) - 1
        for number in (numbers[first], leaves):
            yield name, states[min(number, len(states) - 1)]
        first = behind
