"""A recorded step as a picture."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from ..render.text import show_bytes
from ..render.timeline import BACKWARD, COMPUTE, OPTIMIZER, Bar, Picture, save
from .events import KINDS, Communication, Recording
from .measures import Measures, StepMeasures
from .trace import rows_of


def draw(recording: Recording, measures: Measures, path: Path, number: int) -> None:
    """Write step ``number`` to ``path``.

    Raises:
        ImportError: without matplotlib.
        IndexError: if there is no such step.
    """
    try:
        step = measures.steps[number]
    except IndexError:
        raise IndexError(
            f"There is no step {number} in this profile: it has {len(measures.steps)}"
        ) from None
    save(as_picture(recording, step), path)


def as_picture(recording: Recording, step: StepMeasures) -> Picture:
    """What to draw of a step; times are relative to its beginning."""
    device = "GPU" if recording.stream_ordered else "CPU"
    bars = _bars(recording, step)
    waits = [
        (*_within(wait.begin_s, wait.end_s, step), f"waits for {wait.unit}\n{wait.kind}")
        for wait in recording.waits
    ]
    times, samples = _memory(recording, step)
    return Picture(
        title=_title(recording, step),
        device=device,
        seconds=step.seconds,
        bars=bars,
        waits=[wait for wait in waits if wait[1] - wait[0] > 1e-4 * step.seconds],
        times=times,
        samples=samples,
        memory_title=f"Memory of this {device} over the same time"
        if recording.stream_ordered
        else "Memory of the units on this rank over the same time (without activations)",
        stretch=_stretch(bars, step.seconds),
        stretch_title="A part of it, enlarged: while one unit computes, the parameters of the next "
        "one arrive and the gradients of the previous one leave",
        note=""
        if recording.stream_ordered
        else "Timed on the host: green and orange end when they are waited for, at the latest",
    )


def _title(recording: Recording, step: StepMeasures) -> str:
    share = 100 * step.exposed_s / max(step.seconds, 1e-12)
    return (
        f"Recorded training step, rank {recording.rank} ({recording.device}): "
        f"{1e3 * step.seconds:.1f} ms, {1e3 * step.exposed_s:.1f} ms ({share:.0f} %) of it waiting "
        f"for communication; peak of gathered parameters {show_bytes(step.peak_gathered_bytes)}"
    )


def _within(begin_s: float, end_s: float, step: StepMeasures) -> tuple[float, float]:
    begin, end = max(begin_s, step.begin_s), min(end_s, step.end_s)
    return begin - step.begin_s, end - step.begin_s


def _bars(recording: Recording, step: StepMeasures) -> list[Bar]:
    bars = []
    for stretch in recording.compute:
        begin, end = _within(stretch.begin_s, stretch.end_s, step)
        if end > begin:
            unit = "" if stretch.phase == OPTIMIZER else stretch.unit
            bars.append(Bar(COMPUTE, unit, stretch.phase, begin, end))
    for kind in KINDS:
        own: list[Communication] = [
            each
            for each in recording.communications
            if each.kind == kind and each.end_s > step.begin_s and each.begin_s < step.end_s
        ]
        rows = rows_of(own)
        placed = [(each, row) for row, members in enumerate(rows) for each in members]
        for each, row in sorted(placed, key=lambda pair: pair[0].begin_s):
            begin, end = _within(each.begin_s, each.end_s, step)
            bars.append(Bar(kind, each.unit, each.phase, begin, end, row, len(rows)))
    return bars


def _stretch(bars: list[Bar], seconds: float) -> tuple[float, float]:
    """About four of the longest units around the middle of backward."""
    backward = [bar for bar in bars if bar.lane == COMPUTE and bar.phase == BACKWARD]
    longest = max((bar.end_s - bar.begin_s for bar in backward), default=0.0)
    large = [bar for bar in backward if bar.end_s - bar.begin_s > 0.2 * longest]
    if not large:
        return 0.0, seconds
    middle = len(large) // 2
    chosen = large[max(0, middle - 2) : middle + 2]
    return chosen[0].begin_s, chosen[-1].end_s


def _memory(recording: Recording, step: StepMeasures) -> tuple[list[float], list[dict[str, int]]]:
    """Memory over time: on a device, everything that its allocator has handed out; on the CPU, only
    what units hold, because the process also keeps unused memory."""
    every = [sample.time_s for sample in recording.memory]
    first = max(0, bisect_right(every, step.begin_s) - 1)
    chosen = recording.memory[first : bisect_right(every, step.end_s)]
    times = [max(0.0, sample.time_s - step.begin_s) for sample in chosen]
    samples = []
    for sample in chosen:
        parts = dict(sample.parts)
        if recording.stream_ordered and sample.total is not None:
            parts["all else"] = max(0, sample.total - sum(parts.values()))
        samples.append(parts)
    return [*times, step.seconds], [*samples, samples[-1]]
