"""What ran when in one step: intervals of compute and communication, memory, and a picture.

On CUDA everything comes from the profiler's trace: kernels with their streams, the ranges of the
simulated collectives on the GPU, and the allocator's events. On the CPU the collectives run on a
thread that the profiler does not follow, so their times come from the log of the link; a mark
that both clocks see brings them together.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdp2.testing import SimulatedGroup, Transfer

Interval = tuple[float, float]

COMPUTE = "compute"
OTHER = "other streams"  # copies of communication buffers, casts
MARK = "benchmarks::clock"
PREFIX = "simulated::"


@dataclass
class Timeline:
    """One step.

    Attributes:
        lanes: by name ("compute", "all_gather", ...), intervals in seconds, in order of begin.
        memory: (second, bytes that were allocated from then on, above those at the start).
    """

    lanes: dict[str, list[Interval]]
    memory: list[tuple[float, int]] = field(default_factory=list)


def record(step: Callable[[], object], device: torch.device, group: SimulatedGroup) -> Timeline:
    """Runs `step` once under the profiler.

    Args:
        step: Everything that it starts must be over when it returns.
        device: Where it computes.
        group: On whose link it communicates.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with (
        group.recording() as transfers,
        profile(activities=activities, profile_memory=True) as profiler,
    ):
        mark = time.perf_counter()
        with record_function(MARK):
            pass
        step()
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    if device.type == "cuda":
        return from_cuda_trace(events)
    return from_cpu_trace(events, transfers, mark)


def from_cuda_trace(events: list[dict[str, Any]]) -> Timeline:
    """Lanes by stream: the busiest one outside collectives is compute."""
    lanes: dict[str, list[Interval]] = defaultdict(list)
    ranges: dict[Any, list[Interval]] = defaultdict(list)  # of collectives, by stream
    for event in events:
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith(PREFIX):
            lanes[event["name"].removeprefix(PREFIX)].append(interval(event))
            ranges[event["tid"]].append(interval(event))
    kernels: dict[Any, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            begin, end = interval(event)
            if not any(b <= begin and end <= e for b, e in ranges[event["tid"]]):
                kernels[event["tid"]].append((begin, end))
    by_time = sorted(kernels.values(), key=busy_s, reverse=True)
    lanes[COMPUTE] = by_time[0] if by_time else []
    lanes[OTHER] = [each for stream in by_time[1:] for each in stream]
    return shifted(lanes, memory(events, device_type=1))


def from_cpu_trace(
    events: list[dict[str, Any]], transfers: Iterable[Transfer], mark: float
) -> Timeline:
    """Compute is every operator of the profiled threads; collectives are those of the log.

    Only ATen's operators: a node of autograd may be waiting inside.

    Args:
        events: Of the trace.
        transfers: With times of `time.perf_counter`.
        mark: When the range `MARK` began, on that clock.
    """
    lanes: dict[str, list[Interval]] = defaultdict(list)
    offset = next(interval(e)[0] for e in events if e.get("name") == MARK) - mark
    for transfer in transfers:
        name = transfer.name.removeprefix(PREFIX)
        lanes[name].append((transfer.begin + offset, transfer.end + offset))
    lanes[COMPUTE] = [
        interval(e) for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")
    ]
    return shifted(lanes, memory(events, device_type=0))


def interval(event: dict[str, Any]) -> Interval:
    """Begin and end of an event of a trace, in seconds."""
    return event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6


def memory(events: list[dict[str, Any]], device_type: int) -> list[tuple[float, int]]:
    """What the allocator says was allocated, on the GPU (1) or the CPU (0, changes only)."""
    return sorted(
        (event["ts"] * 1e-6, event["args"]["Total Allocated"])
        for event in events
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == device_type
    )


def shifted(lanes: dict[str, list[Interval]], samples: list[tuple[float, int]]) -> Timeline:
    """With the first moment of all as 0, and intervals that overlap joined."""
    begins = [begin for lane in lanes.values() for begin, _ in lane] or [0.0]
    start = min(begins)
    return Timeline(
        {
            name: joined((begin - start, end - start) for begin, end in lane)
            for name, lane in sorted(lanes.items())
            if lane
        },
        [(moment - start, num_bytes - samples[0][1]) for moment, num_bytes in samples],
    )


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not touch, in order."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def busy_s(intervals: Iterable[Interval]) -> float:
    """Seconds that lie in at least one interval."""
    return sum(end - begin for begin, end in joined(intervals))


def overlap_s(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """Seconds that lie in both lanes."""
    one, other = list(one), list(other)
    return busy_s(one) + busy_s(other) - busy_s([*one, *other])


def draw(timelines: dict[str, Timeline], title: str, path: Path) -> None:
    """Writes a picture: for each name its lanes over time, and its memory below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [COMPUTE, "all_gather", "reduce_scatter", "all_reduce", OTHER]
    colours = dict(zip(names, ["0.45", "tab:blue", "tab:orange", "tab:green", "0.75"], strict=True))
    end_ms = 1e3 * max(
        end for t in timelines.values() for lane in t.lanes.values() for _, end in lane
    )
    figure, axes = pyplot.subplots(
        2 * len(timelines),
        figsize=(14, 3 * len(timelines)),
        sharex=True,
        height_ratios=[2, 1.2] * len(timelines),
        squeeze=False,
    )
    for i, (name, timeline) in enumerate(timelines.items()):
        above, below = axes[2 * i, 0], axes[2 * i + 1, 0]
        shown = [n for n in names if n in timeline.lanes]
        for row, lane in enumerate(reversed(shown)):
            bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in timeline.lanes[lane]]
            above.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours[lane])
        above.set_yticks(range(len(shown)), list(reversed(shown)))
        above.set_title(name, loc="left", fontsize=10)
        if timeline.memory:
            times, sizes = zip(*timeline.memory, strict=True)
            below.step([1e3 * t for t in times], [s * 1e-6 for s in sizes], where="post", color="k")
        below.set_ylabel("MB")
    axes[-1, 0].set_xlabel("ms")
    axes[-1, 0].set_xlim(0, 1.01 * end_ms)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
