"""A step as a picture: streams over time, memory below, and a part of the streams enlarged.

`plan` draws a simulated step and `profile` a recorded one in the same way, so that the two can be
compared side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .text import show_bytes

COMPUTE = "compute"
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"

# For each stream, the label of its lane and two alternating colours.
_LANES = {
    COMPUTE: ("{device} computes", ("#6d9bc8", "#a9c6e2")),
    "all-gather": ("all-gather:\nfetch parameters", ("#5fb386", "#a4d8bb")),
    "reduce-scatter": ("reduce-scatter:\nsum gradients", ("#df8a55", "#f2c0a0")),
    "all-reduce": ("all-reduce:\nacross replicas", ("#a07cc5", "#cdb8e4")),
    "tensor parallel": ("collectives of\nthe model", ("#8d8f3f", "#c9ca8c")),
    "context parallel": ("keys and\nvalues", ("#7a6f9b", "#bfb8d6")),
    "pipeline": ("between\nstages", ("#4f8f8b", "#a8cfcc")),
    "all-to-all": ("all-to-all:\ntokens to experts", ("#c4607a", "#e3adbb")),
    "copies": ("copies:\nhost memory", ("#7a7a7a", "#bdbdbd")),
}
_PHASES = {
    FORWARD: ("forward", _LANES[COMPUTE][1]),
    RECOMPUTE: ("forward again", ("#7fc4c9", "#b5dfe2")),
    BACKWARD: ("backward", ("#b5b567", "#d9d9a3")),
    OPTIMIZER: ("optimizer", ("#555555", "#555555")),
}
_WAITS = "#d62728"
# From the bottom up; categories not listed come last.
_MEMORY = {
    "parameters": ("parameters (this rank's part)", "#9ecae1"),
    "optimizer state": ("optimizer state", "#6baed6"),
    "gradients": ("gradients (this rank's part)", "#3182bd"),
    "activations": ("activations", "#fdd0a2"),
    "gathered parameters": ("gathered parameters", "#74c476"),
    "secondary shards": ("parameters kept after forward", "#a1d99b"),
    "unreduced gradients": ("gradients not summed yet", "#fd8d3c"),
    "communication buffers": ("communication buffers", "#bcbddc"),
    "all else": ("other: activations,\noptimizer state, ...", "#eeeeee"),
}
_HEIGHT = 0.76  # of a lane


@dataclass(frozen=True)
class Bar:
    """Work on a stream.

    Attributes:
        lane: the stream.
        unit: the unit it belongs to; empty for none.
        phase: one of the phases above; determines the colour of compute.
        row, num_rows: the row of the lane, if several bars in a lane overlap in time.
    """

    lane: str
    unit: str
    phase: str
    begin_s: float
    end_s: float
    row: int = 0
    num_rows: int = 1


@dataclass(frozen=True)
class Picture:
    """What to draw; times in seconds from 0 to ``seconds``.

    Attributes:
        title: title of the picture.
        device: "GPU" or "CPU".
        bars: in the order of time within each lane.
        waits: (begin, end, cause) when compute waits; the cause may be empty.
        times, samples: memory in bytes by purpose, from each time on.
        memory_title: title of the memory plot.
        stretch: (begin, end) of the enlarged part; ``stretch_title``: its title.
        budget: memory limit in bytes, if any.
        note: a note about the streams.
    """

    title: str
    device: str
    seconds: float
    bars: Sequence[Bar]
    waits: Sequence[tuple[float, float, str]]
    times: Sequence[float]
    samples: Sequence[dict[str, int]]
    memory_title: str
    stretch: tuple[float, float]
    stretch_title: str
    budget: int | None = None
    note: str = ""


def pyplot_for_files() -> Any:
    """``matplotlib.pyplot``, which then needs no display.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[plots]``).
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install matplotlib, or fsdp2[plots]"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(picture: Picture, path: Path) -> None:
    """Write the picture to ``path``; the suffix selects the format.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[plots]``).
    """
    pyplot = pyplot_for_files()
    scale, unit = (1.0, "s") if picture.seconds >= 2 else (1e3, "ms")
    figure, axes = pyplot.subplots(3, figsize=(15, 10), height_ratios=[1.5, 2, 1.5])
    whole = (0.0, picture.seconds)
    _draw_streams(axes[0], picture, scale, whole)
    _stream_legend(axes[0], picture)
    _draw_memory(axes[1], picture, scale)
    _draw_streams(axes[2], picture, scale, picture.stretch, small_names=True)
    for axis in axes[:2]:
        axis.set_xlim(0, picture.seconds * scale * 1.002)
    axes[0].axvspan(*(moment * scale for moment in picture.stretch), color="0.85", zorder=0)
    title = "The whole step: what runs when (grey: enlarged at the bottom)"
    axes[0].set_title(title, loc="left")
    axes[0].set_xlabel(f"time in {unit}. {picture.note}" if picture.note else f"time in {unit}")
    axes[1].set_title(picture.memory_title, loc="left")
    axes[2].set_title(picture.stretch_title, loc="left")
    for axis in axes[1:]:
        axis.set_xlabel(f"time in {unit}")
    figure.suptitle(picture.title, fontsize=13, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    write(figure, path)


def write(figure: Any, path: Path) -> None:
    """Write a figure to ``path``, creating its folders, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot_for_files().close(figure)


# -- streams -------------------------------------------------------------------------------------


def _draw_streams(
    axis: Any,
    picture: Picture,
    scale: float,
    window: tuple[float, float],
    small_names: bool = False,
) -> None:
    used = {bar.lane for bar in picture.bars}
    lanes = [lane for lane in _LANES if lane in used or lane == COMPUTE]
    begin, end = window
    heights = {lane: len(lanes) - 1 - i for i, lane in enumerate(lanes)}
    named: dict[str, tuple[str, str]] = {}  # in each lane, last
    shades: dict[str, int] = {}  # in turns, by unit: neighbours differ
    for bar in picture.bars:
        number = shades.setdefault(bar.unit, len(shades))
        left, right = max(bar.begin_s, begin), min(bar.end_s, end)
        if right <= left:
            continue
        colours = _phase(bar)[1] if bar.lane == COMPUTE else _LANES[bar.lane][1]
        height = _HEIGHT / bar.num_rows
        bottom = heights[bar.lane] + _HEIGHT / 2 - (bar.row + 1) * height
        axis.broken_barh(
            [(left * scale, (right - left) * scale)], (bottom, height),
            facecolors=colours[number % 2],
        )  # fmt: skip
        width = (right - left) / (end - begin)
        wide = width > 0.05
        # A narrow bar next to a wide one of the same unit, split off by a wait, needs no name.
        known = named.get(bar.lane) == (bar.unit, bar.phase)
        if bar.unit and (wide or (small_names and width > 0.005 and not known)):
            named[bar.lane] = (bar.unit, bar.phase)
            place = (left + right) / 2 if wide else right + 0.003 * (end - begin)
            axis.text(
                place * scale, bottom + height / 2, _short(bar),
                ha="center" if wide else "left", va="center", fontsize=8, clip_on=True,
            )  # fmt: skip
    for left, right, cause in picture.waits:
        left, right = max(left, begin), min(right, end)
        if right <= left:
            continue
        axis.broken_barh(
            [(left * scale, (right - left) * scale)],
            (heights[COMPUTE] - _HEIGHT / 2, _HEIGHT),
            facecolors="white", edgecolor=_WAITS, hatch="////", linewidth=0,
        )  # fmt: skip
        if cause and right - left > 0.08 * (end - begin):
            axis.text(
                (left + right) / 2 * scale, heights[COMPUTE], cause,
                ha="center", va="center", fontsize=8, color=_WAITS, clip_on=True,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
    labels = [_LANES[lane][0].format(device=picture.device) for lane in lanes]
    axis.set_yticks([heights[lane] for lane in lanes], labels)
    axis.set_ylim(-0.6, len(lanes) - 0.4)
    axis.set_xlim(begin * scale, end * scale)


def _stream_legend(axis: Any, picture: Picture) -> None:
    from matplotlib.patches import Patch

    phases = {bar.phase for bar in picture.bars if bar.lane == COMPUTE}
    patches = [
        Patch(color=colours[0], label=label)
        for phase, (label, colours) in _PHASES.items()
        if phase in phases
    ]
    if picture.waits:
        label = f"{picture.device} waits"
        patches.append(Patch(facecolor="white", edgecolor=_WAITS, hatch="////", label=label))
    axis.legend(handles=patches, loc="lower right", ncols=len(patches), fontsize=9, frameon=False,
                bbox_to_anchor=(1.0, 0.99))  # fmt: skip


def _phase(bar: Bar) -> tuple[str, tuple[str, str]]:
    return _PHASES.get(bar.phase, _PHASES[FORWARD])


def _short(bar: Bar) -> str:
    name = bar.unit
    if len(name) > 18:
        name = f"{name[:15]}..."
    return f"{name}\n{_phase(bar)[0]}" if bar.lane == COMPUTE else name


# -- memory --------------------------------------------------------------------------------------


def _draw_memory(axis: Any, picture: Picture, scale: float) -> None:
    samples, times = picture.samples, picture.times
    totals = [sum(parts.values()) for parts in samples]
    most = max(totals, default=0)
    size, size_name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    known = list(_MEMORY)
    rest = sorted({name for parts in samples for name in parts} - set(known))
    seen = 0.003 * most  # below this, thinner than a line
    names = [n for n in (*known, *rest) if max(p.get(n, 0) for p in samples) > seen]
    values = [[parts.get(name, 0) / size for parts in samples] for name in names]
    labels = [_MEMORY.get(name, (name, ""))[0] for name in names]
    colours = [_MEMORY[name][1] if name in _MEMORY else "0.7" for name in names]
    lower = [0.0] * len(times)
    for own, label, colour in zip(values, labels, colours, strict=True):
        upper = [below + value for below, value in zip(lower, own, strict=True)]
        seen_at = [now > 0 or before > 0 for now, before in zip(own, [0.0, *own], strict=False)]
        axis.fill_between(
            [t * scale for t in times], lower, upper, where=seen_at, step="post", label=label,
            facecolor=colour, edgecolor=colour, linewidth=0.7,  # or moments would not be seen
        )  # fmt: skip
        lower = upper
    top = most
    if picture.budget is not None and picture.budget < 2.5 * most:
        top = max(most, picture.budget)
        height = picture.budget / size
        axis.axhline(height, color=_WAITS, linestyle="--", linewidth=1)
        text = f" budget: {height:.0f} {size_name}"
        axis.text(0, height, text, color=_WAITS, va="bottom")
    axis.set_ylabel(size_name)
    axis.set_ylim(0, 1.18 * top / size)
    at = times[max(range(len(totals)), key=totals.__getitem__)]
    late = at > 0.85 * picture.seconds  # then there is no room on the right
    axis.annotate(
        f"peak: {show_bytes(most)}", (at * scale, most / size),
        xytext=(-40 if late else 40, 4), textcoords="offset points", fontsize=9,
        ha="right" if late else "left",
        arrowprops={"arrowstyle": "-", "color": "0.3"},
    )  # fmt: skip
    handles, texts = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], texts[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5),
                fontsize=8, frameon=False)  # fmt: skip
