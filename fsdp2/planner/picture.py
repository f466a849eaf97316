"""A simulated step as a picture."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

from ..drawing import BACKWARD, COMPUTE, OPTIMIZER, Bar, Picture, save
from ..terminal import show_bytes
from .simulate import SimulatedStep


def draw(step: SimulatedStep, path: Path, *, title: str, memory_budget: int) -> None:
    """Write the picture of ``step`` to ``path``; the kind of file is that of its suffix.

    Args:
        memory_budget: bytes that may be used.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[train]``).
    """
<<<<<<< HEAD
    step = made.step
    bars = _bars(step)
    times, samples = _over_time(step)
    if step.optimizer_s:
        last = step.seconds - step.optimizer_s
        bars.append(Bar(COMPUTE, "", OPTIMIZER, last, step.seconds))
    picture = Picture(
        title=_title(made),
        device="GPU",
        seconds=step.seconds,
        bars=bars,
        waits=[(begin, end, "") for begin, end in _waits(step)],
        times=times,
        samples=samples,
        memory_title="Memory of one GPU at the same time",
        stretch=_stretch(step),
        stretch_title="A moment of it, enlarged: while one unit computes, the next one's "
        "parameters arrive and the last one's gradients leave",
        budget=made.memory_budget,
    )
    save(picture, path)


def _title(made: Plan) -> str:
    from .planning import show_seconds

    step = made.step
    shape = " x ".join(map(str, made.mesh_shape))
    exposed = f"{show_seconds(step.exposed_s)} of it waiting for communication"
    return (
        f"Predicted training step on {shape} GPUs ({made.hardware.name}): "
        f"{show_seconds(step.seconds)}, {exposed}; most memory {show_bytes(step.peak.total)}"
    )


def _bars(step: SimulatedStep) -> list[Bar]:
    """What ran on each stream: neighbours of one unit joined."""
=======
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install matplotlib, or fsdp2[train]"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    scale, unit = (1.0, "s") if step.seconds >= 2 else (1e3, "ms")
    figure, axes = pyplot.subplots(3, figsize=(15, 10), height_ratios=[1.5, 2, 1.5])
    whole = (0.0, step.seconds)
    _draw_streams(axes[0], step, scale, whole)
    _draw_memory(axes[1], step, scale, memory_budget / 2**30)
    part = _stretch(step)
    _draw_streams(axes[2], step, scale, part, names=True)
    for axis in axes[:2]:
        axis.set_xlim(0, whole[1] * scale * 1.002)
    axes[0].axvspan(part[0] * scale, part[1] * scale, color="0.85", zorder=0)
    axes[0].set_title("The whole step: what runs when (grey: enlarged at the bottom)", loc="left")
    axes[1].set_title("Memory of one GPU at the same time", loc="left")
    axes[2].set_title(
        "A moment of it, enlarged: while one unit computes, the next one's parameters arrive and "
        "the last one's gradients leave",
        loc="left",
    )
    for axis in axes:
        axis.set_xlabel(f"time in {unit}")
    figure.suptitle(title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


# -- streams -------------------------------------------------------------------------------------


def _draw_streams(
    axis: Any, step: SimulatedStep, scale: float, window: tuple[float, float], names: bool = False
) -> None:
    lanes = [lane for lane in _LANES if lane in step.stream_s]
    begin, end = window
    rows = {lane: len(lanes) - 1 - i for i, lane in enumerate(lanes)}
    bars = _bars(step)
    for lane, bar_unit, phase, left, right, number in bars:
        if right < begin or left > end:
            continue
        left, right = max(left, begin), min(right, end)
        colours = _BACKWARD if lane == "compute" and phase == "backward" else _LANES[lane][1]
        axis.broken_barh(
            [(left * scale, (right - left) * scale)],
            (rows[lane] - 0.38, 0.76),
            facecolors=colours[number % 2],
        )
        if names and right - left > 0.005 * (end - begin):
            wide = right - left > 0.06 * (end - begin)
            place = (left + right) / 2 if wide else right + 0.003 * (end - begin)
            axis.text(
                place * scale, rows[lane], _short(bar_unit, lane, phase),
                ha="center" if wide else "left", va="center", fontsize=8, clip_on=True,
            )  # fmt: skip
    for left, right in _waits(step):
        if right > begin and left < end:
            axis.broken_barh(
                [(max(left, begin) * scale, (min(right, end) - max(left, begin)) * scale)],
                (rows["compute"] - 0.38, 0.76),
                facecolors="white", edgecolor=_WAITS, hatch="////", linewidth=0,
            )  # fmt: skip
    last = step.seconds - step.optimizer_s
    if end > last:
        axis.broken_barh(
            [(last * scale, step.optimizer_s * scale)], (rows["compute"] - 0.38, 0.76),
            facecolors=_OPTIMIZER,
        )  # fmt: skip
    axis.set_yticks([rows[lane] for lane in lanes], [_LANES[lane][0] for lane in lanes])
    axis.set_ylim(-0.6, len(lanes) - 0.4)
    axis.set_xlim(begin * scale, end * scale)
    if not names:
        _stream_legend(axis, bool(_waits(step)))


def _stream_legend(axis: Any, waits: bool) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=_LANES["compute"][1][0], label="forward"),
        Patch(color=_BACKWARD[0], label="backward"),
        Patch(color=_OPTIMIZER, label="optimizer"),
    ]
    if waits:
        patches.append(Patch(facecolor="white", edgecolor=_WAITS, hatch="////", label="GPU waits"))
    axis.legend(handles=patches, loc="lower right", ncols=4, fontsize=9, frameon=False,
                bbox_to_anchor=(1.0, 0.99))  # fmt: skip


def _bars(step: SimulatedStep) -> list[tuple[str, str, str, float, float, int]]:
    """(lane, unit, phase, begin, end, count within the lane): neighbours of one unit joined."""
>>>>>>> main
    bars: list[list[Any]] = []
    last: dict[str, int] = {}
    for launch, span in zip(step.launches, step.spans, strict=True):
        lane, unit = launch.stream, launch.unit or "(root)"
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
    """When compute has nothing to do, apart from what cannot be seen."""
    ended = 0.0
    gaps = []
    for launch, span in zip(step.launches, step.spans, strict=True):
        if launch.stream == COMPUTE:
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
<<<<<<< HEAD
    bars.sort(key=lambda bar: bar.begin_s)
    middle = len(bars) // 2
    chosen = bars[max(0, middle - 2) : middle + 3]
    return chosen[0].begin_s, chosen[-1].end_s
=======
    middle = len(wide) // 2
    chosen = wide[max(0, middle - 2) : middle + 3]
    return chosen[0][3], chosen[-1][4]


# -- memory --------------------------------------------------------------------------------------


def _draw_memory(axis: Any, step: SimulatedStep, scale: float, budget: float) -> None:
    times, samples = _over_time(step)
    known = list(_MEMORY)
    rest = sorted({name for parts in samples for name in parts} - set(known))
    seen = 0.003 * step.peak.total  # thinner than a line otherwise
    names = [n for n in (*known, *rest) if max(parts.get(n, 0) for parts in samples) > seen]
    values = [[parts.get(name, 0) / 2**30 for parts in samples] for name in names]
    labels = [_MEMORY.get(name, (name, ""))[0] for name in names]
    colours = [_MEMORY[name][1] if name in _MEMORY else "0.7" for name in names]
    axis.stackplot(
        [t * scale for t in times], values, labels=labels, colors=colours, step="post", linewidth=0
    )
    most = step.peak.total / 2**30
    axis.set_ylabel("GiB")
    axis.set_ylim(0, 1.18 * max(most, budget if budget < 2.5 * most else 0))
    if budget < 2.5 * most:
        axis.axhline(budget, color=_WAITS, linestyle="--", linewidth=1)
        axis.text(0, budget, f" may be used: {budget:.0f} GiB", color=_WAITS, va="bottom")
    totals = [sum(parts.values()) for parts in samples]
    at = times[max(range(len(totals)), key=totals.__getitem__)] * scale
    axis.annotate(
        f"most: {show_bytes(step.peak.total)}", (at, most),
        xytext=(40, -6), textcoords="offset points", fontsize=9,
        arrowprops={"arrowstyle": "-", "color": "0.3"},
    )  # fmt: skip
    handles, texts = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], texts[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5),
                fontsize=8, frameon=False)  # fmt: skip
>>>>>>> main


def _over_time(step: SimulatedStep) -> tuple[list[float], list[dict[str, int]]]:
    """Memory is given and taken by the host, in the order of launches: a change counts from the
    begin of the last computation that was launched before it."""
    numbers = [x.number for x in step.launches if x.stream == COMPUTE]
    begins = [step.spans[number].begin for number in numbers]
    times: list[float] = []
    samples: list[dict[str, int]] = []
    for clock, parts in step.samples:
        index = bisect_right(numbers, clock - 1) - 1
        moment = begins[index] if index >= 0 else 0.0
        if times and times[-1] == moment:  # the most of each stretch
            if sum(parts.values()) > sum(samples[-1].values()):
                samples[-1] = parts
            continue
        times.append(moment)
        samples.append(parts)
    times.append(step.seconds)
    samples.append({k: v for k, v in samples[-1].items() if k != "activations"})
    return times, samples
