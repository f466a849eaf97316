"""Days and cost over the number of GPUs as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..render.timeline import pyplot_for_files

Point = tuple[int, float, float]  # GPUs, days, cost


def draw(lines: Mapping[str, Sequence[Point]], path: Path, *, title: str) -> None:
    """Write one line for each kind of GPU to ``path``; the suffix selects the format.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[train]``).
    """
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5))
    for name, points in lines.items():
        ranks, days, costs = zip(*points, strict=True)
        axes[0].plot(ranks, days, marker="o", label=name)
        axes[1].plot(ranks, costs, marker="o", label=name)
    for axis, what in zip(axes, ("Days", "Cost"), strict=True):
        axis.set_title(what, loc="left")
        axis.set_xlabel("GPUs")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_yscale("log")
    axes[1].set_ylim(bottom=0)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
