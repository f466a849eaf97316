"""A simulated step as a picture."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from ..render.timeline import BACKWARD, COMPUTE, OPTIMIZER, Bar, Picture, save
from .simulation.simulate import SimulatedStep


def draw(step: SimulatedStep, path: Path, *, title: str, memory_budget: int) -> None:
    """Write the picture of ``step`` to ``path``; the suffix selects the format.

    Args:
        memory_budget: limit on memory, in bytes.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[plots]``).
    """
    bars = _bars(step)
    times, samples = _over_time(step)
    if step.optimizer_s:
        last = step.seconds - step.optimizer_s
        bars.append(Bar(COMPUTE, "", OPTIMIZER, last, step.seconds))
    picture = Picture(
        title=title,
        device="GPU",
        seconds=step.seconds,
        bars=bars,
        waits=[(begin, end, "") for begin, end in _waits(step)],
        times=times,
        samples=samples,
        memory_title="Memory of one GPU over the same time",
        stretch=_stretch(step),
        stretch_title="A part of it, enlarged: while one unit computes, the parameters of the next "
        "one arrive and the gradients of the previous one leave",
        budget=memory_budget,
    )
    save(picture, path)


def _bars(step: SimulatedStep) -> list[Bar]:
    """The work on each stream; adjacent work of one unit is merged."""
    bars: list[list[Any]] = []
    last: dict[str, int] = {}
    for launch, span in zip(step.launches, step.spans, strict=True):
        lane, unit = launch.lane, launch.unit or "(root)"
        index = last.get(lane)
        if index is not None and lane == COMPUTE:
            bar = bars[index]
            if bar[1:3] == [unit, launch.phase] and span.begin - bar[4] <= 1e-9:
                bar[4] = span.end
                continue
        last[lane] = len(bars)
        bars.append([lane, unit, launch.phase, span.begin, span.end])
    return [Bar(*bar) for bar in bars]


def _waits(step: SimulatedStep) -> list[tuple[float, float]]:
    """When compute is idle, without gaps too short to see."""
    ended = 0.0
    gaps = []
    for launch, span in zip(step.launches, step.spans, strict=True):
        if launch.lane == COMPUTE:
            if span.begin - ended > 1e-4 * step.seconds:
                gaps.append((ended, span.begin))
            ended = span.end
    last = step.seconds - step.optimizer_s
    if last - ended > 1e-4 * step.seconds:
        gaps.append((ended, last))
    return gaps


def _stretch(step: SimulatedStep) -> tuple[float, float]:
    """About four units around the middle of backward."""
    bars = [bar for bar in _bars(step) if bar.lane == COMPUTE and bar.phase == BACKWARD]
    if not bars:
        return 0.0, step.seconds
    bars.sort(key=lambda bar: bar.begin_s)
    middle = len(bars) // 2
    chosen = bars[max(0, middle - 2) : middle + 3]
    return chosen[0].begin_s, chosen[-1].end_s


def _over_time(step: SimulatedStep) -> tuple[list[float], list[dict[str, int]]]:
    """Memory over time. The host allocates and frees in the order of launches, so a change counts
    from the beginning of the last computation launched before it."""
    numbers = [x.number for x in step.launches if x.lane == COMPUTE]
    begins = [step.spans[number].begin for number in numbers]
    times: list[float] = []
    samples: list[dict[str, int]] = []
    for clock, parts in step.samples:
        index = bisect_right(numbers, clock - 1) - 1
        moment = begins[index] if index >= 0 else 0.0
        if times and times[-1] == moment:  # keep the peak of each moment
            if sum(parts.values()) > sum(samples[-1].values()):
                samples[-1] = parts
            continue
        times.append(moment)
        samples.append(parts)
    times.append(step.seconds)
    samples.append({k: v for k, v in samples[-1].items() if k != "activations"})
    return times, samples
