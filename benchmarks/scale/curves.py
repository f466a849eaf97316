"""Counts over the number of ranks: how fast they grow, and what they come to on more ranks.

Nothing is measured here. A module of curves has ``CURVES``, which says for each name how to count
one point; a count that depends on the model takes ``tensors`` besides the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression

Counted = dict[str, float]  # of one point: {"bytes read": 1e6, "files opened": 3, "cpu s": 0.1}
Curves = dict[str, Callable[..., Counted]]  # called with the number of ranks

FAR = (16_384, 65_536)  # ranks that are only computed


@dataclass
class Curve:
    """The counts of one thing, by the number of ranks."""

    name: str
    points: dict[int, Counted] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted(self.points)

    @property
    def keys(self) -> list[str]:
        """Everything that was counted at any point, in the order in which it came."""
        return list(dict.fromkeys(key for n in self.ranks for key in self.points[n]))

    def values(self, key: str) -> list[tuple[int, float]]:
        """The number of ranks and the count, where there is one."""
        return [(n, self.points[n][key]) for n in self.ranks if key in self.points[n]]


def slope(curve: Curve, key: str) -> float:
    """By which power of the number of ranks a count grows: 0 constant, 1 linear, 2 quadratic.

    The least-squares slope of the logarithms. Points without a count have none and are left out.

    Raises:
        ValueError: if fewer than two points are left, unless nothing was ever counted.
    """
    return _slope(curve.values(key))


def last_slope(curve: Curve, key: str) -> float:
    """The same between the last two points, where constant parts weigh the least."""
    return _slope(curve.values(key)[-2:])


def extrapolated(curve: Curve, key: str, num_ranks: int) -> float:
    """The last count, continued by the last slope: arithmetic, not a measurement.

    Too little where a part that is still small grows faster than the others.
    """
    n, count = curve.values(key)[-1]
    return count * (num_ranks / n) ** last_slope(curve, key)


def _slope(values: Sequence[tuple[int, float]]) -> float:
    if len(values) > 1 and not any(count for _, count in values):
        return 0.0
    logs = [(math.log(n), math.log(count)) for n, count in values if count > 0]
    if len(logs) < 2:
        raise ValueError(f"No slope: only {len(logs)} of the points {values} have a count")
    return linear_regression(*zip(*logs, strict=True)).slope


def table(curve: Curve, far: Sequence[int] = FAR) -> str:
    """A Markdown table: a row for each count that is not always 0, a column for each number of
    ranks."""
    ranks = curve.ranks
    beyond = [n for n in far if not ranks or n > ranks[-1]]
    heads = [curve.name, *(f"{n:,}" for n in ranks), "slope", "last slope"]
    heads += [f"{n:,}, by arithmetic" for n in beyond]
    lines = [_row(heads), _row(["---"] + ["---:"] * (len(heads) - 1))]
    for key in curve.keys:
        if not any(count for _, count in curve.values(key)):
            continue
        counts = [number(curve.points[n].get(key)) for n in ranks]
        lines.append(_row([key, *counts, *_continued(curve, key, beyond)]))
    return "\n".join(lines)


def _continued(curve: Curve, key: str, beyond: Sequence[int]) -> list[str]:
    try:
        slopes = [f"{slope(curve, key):.2f}", f"{last_slope(curve, key):.2f}"]
        return [*slopes, *(number(extrapolated(curve, key, n)) for n in beyond)]
    except ValueError:  # one point
        return ["-"] * (2 + len(beyond))


def number(value: float | None) -> str:
    """For a cell: three digits, in thousands and millions where it is large."""
    if value is None:
        return "-"
    for unit, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if unit == 1e4 else unit):.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
