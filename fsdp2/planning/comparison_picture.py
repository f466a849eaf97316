"""A prediction beside a measurement as a picture: bars of the step, errors of the units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ..render.timeline import pyplot_for_files

_PREDICTED, _MEASURED = "#a9c6e2", "#6d9bc8"
_MOST_UNITS = 40  # of which the names can be read


class Figure(Protocol):
    """What `comparison.Compared` has."""

    @property
    def unit(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def predicted(self) -> float: ...
    @property
    def measured(self) -> float: ...
    @property
    def error(self) -> float | None: ...


def draw(step: Sequence[Figure], units: Sequence[Figure], path: Path) -> None:
    """Write three rows of bars: the step's times, the units' times, and bytes in memory.

    Raises:
        ImportError: without matplotlib (``pip install fsdp2[train]``).
    """
    pyplot = pyplot_for_files()
    figure, axes = pyplot.subplots(3, 1, figsize=(13, 11))
    times = [each for each in step if each.kind == "seconds"]
    _bars(axes[0], [each.what for each in times], times, 1e3, "Step, ms")
    names = list(dict.fromkeys(each.unit for each in units))[:_MOST_UNITS]
    by_unit = {(each.unit, each.what): each for each in units}
    # Forward and backward in one row: they differ by less than units do.
    whats, title = ("forward", "backward"), "Units, forward and backward, ms"
    labels = [f"{name}\n{what}" for name in names for what in whats]
    _bars(axes[1], labels, [by_unit[name, w] for name in names for w in whats], 1e3, title)
    what = "memory" if (names[0], "memory") in by_unit else "gathered"
    peaks = [each for each in step if each.kind == "bytes" and each.what.startswith("peak")]
    labels = [each.what for each in peaks] + [f"{name}\n{what}" for name in names]
    bytes_of = [*peaks, *(by_unit[name, what] for name in names)]
    _bars(axes[2], labels, bytes_of, 2**-20, "Memory, MiB")
    figure.suptitle("Predicted and measured", x=0.01, ha="left", fontweight="bold")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _bars(
    axis: Any, labels: Sequence[str], figures: Sequence[Figure], scale: float, title: str
) -> None:
    places = range(len(figures))
    predicted = [scale * each.predicted for each in figures]
    measured = [scale * each.measured for each in figures]
    axis.bar([x - 0.2 for x in places], predicted, 0.4, color=_PREDICTED, label="predicted")
    axis.bar([x + 0.2 for x in places], measured, 0.4, color=_MEASURED, label="measured")
    for x, each in zip(places, figures, strict=True):
        if each.error is not None:
            height = scale * max(each.predicted, each.measured)
            axis.text(x, height, f"{100 * each.error:+.0f} %", ha="center", va="bottom", fontsize=7)
    turned = 90 if len(labels) > 12 else 0
    axis.set_xticks(list(places), labels, fontsize=7, rotation=turned)
    axis.set_title(title, loc="left")
    axis.margins(y=0.15)
    axis.legend()
