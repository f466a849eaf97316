"""Measured tables: points of a curve, interpolated in logarithms, and their form in files."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import Any

Points = tuple[tuple[float, float], ...]


def seconds_at(points: Points, amount: float) -> float:
    """Time for an ``amount`` of bytes, between measured (amount, seconds).

    Below the smallest measured amount, the time is constant: a call has a fixed cost. Above the
    largest, it is proportional to the amount.

    Example:
        >>> seconds_at(((1e3, 1e-6), (1e6, 1e-3)), 4e6)
        0.004
    """
    amount = max(amount, points[0][0])
    last, seconds = points[-1]
    return seconds * amount / last if amount >= last else _between(points, amount)


def rate_at(points: Points, intensity: float) -> float:
    """FLOP/s at an arithmetic intensity (FLOP per byte), between measured (intensity, FLOP/s).

    Below the lowest measured intensity, memory is the limit, and FLOP/s are proportional to the
    intensity. Above the highest, they are constant.

    Example:
        >>> rate_at(((1.0, 1e9), (100.0, 5e10)), 0.5)
        500000000.0
    """
    first, rate = points[0]
    if intensity <= first:
        return rate * intensity / first
    return points[-1][1] if intensity >= points[-1][0] else _between(points, intensity)


def _between(points: Points, x: float) -> float:
    i = bisect_left(points, (x,))
    if points[i][0] == x:
        return points[i][1]
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    part = log(x / x0) / log(x1 / x0)
    return exp(log(y0) + part * log(y1 / y0))


def curve(samples: Iterable[tuple[float, float]], *, per_octave: int = 2) -> Points:
    """Points from samples: medians of samples that are close together.

    Args:
        per_octave: points between an amount and twice that.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in samples:
        if x > 0 and y > 0:
            bins.setdefault(round(per_octave * log(x) / log(2)), []).append((x, y))
    points = [
        (round_to(median(x for x, _ in found)), round_to(median(y for _, y in found)))
        for found in bins.values()
    ]
    return tuple(sorted(points))


def rising(points: Points) -> Points:
    """The points, made monotonic: a larger amount never takes less time, despite noise.

    Adjacent points that fall become their mean, in logarithms (pool adjacent violators: Ayer et
    al., An Empirical Distribution Function for Sampling with Incomplete Information, 1955).

    Example:
        >>> [y for _, y in rising(((1, 1.0), (2, 8.0), (4, 2.0), (8, 9.0)))]
        [1.0, 4.0, 4.0, 9.0]
    """
    pools: list[list[float]] = []  # each with its logarithms
    for _, y in points:
        pools.append([log(y)])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    smooth = [_mean(pool) for pool in pools for _ in pool]
    return tuple((x, round_to(exp(y))) for (x, _), y in zip(points, smooth, strict=True))


def round_to(number: float, digits: int = 6) -> float:
    """Round to the digits that a measurement can have."""
    return float(f"{number:.{digits}g}")


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def checked(name: str, tables: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Points]:
    """The tables as tuples.

    Raises:
        ValueError: if a table is empty, out of order, or has points that are not two positive
            numbers.
    """
    made = {}
    for key, table in tables.items():
        points = tuple((float(x), float(y)) for x, y in table)
        if not points or not all(_is_positive(n) for point in points for n in point):
            raise ValueError(f"{name}['{key}'] must be pairs of positive numbers, got {table!r}")
        if any(x >= y for (x, _), (y, _) in itertools.pairwise(points)):
            raise ValueError(f"{name}['{key}'] must be in the order of its first numbers")
        made[key] = points
    return made


def is_tables(value: Any) -> bool:
    """Whether ``value``, of a file, is an object of lists of pairs of numbers."""
    return isinstance(value, dict) and all(
        isinstance(table, list)
        and all(
            isinstance(point, list) and len(point) == 2 and all(map(is_number, point))
            for point in table
        )
        for table in value.values()
    )


def is_number(each: Any) -> bool:
    return isinstance(each, int | float) and not isinstance(each, bool) and abs(each) < 1e300


def _is_positive(number: float) -> bool:
    return number > 0 and isfinite(number)
