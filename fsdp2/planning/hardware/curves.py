"""Measured tables: points of a curve, interpolated in logarithms, and how files spell them."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import exp, isfinite, log
from statistics import median
from typing import Any

Points = tuple[tuple[float, float], ...]


def seconds_at(points: Points, amount: float) -> float:
    """Time of an ``amount`` of bytes, between measured (amount, seconds).

    Less than the least measured takes as long as that: a call has a fixed cost. More than the most
    takes time in proportion.

    Example:
        >>> seconds_at(((1e3, 1e-6), (1e6, 1e-3)), 4e6)
        0.004
    """
    amount = max(amount, points[0][0])
    last, seconds = points[-1]
    return seconds * amount / last if amount >= last else _between(points, amount)


def rate_at(points: Points, intensity: float) -> float:
    """FLOP/s at an arithmetic intensity (FLOP per byte), between measured (intensity, FLOP/s).

    Below the least measured one memory is the limit: FLOP/s in proportion to intensity. Above the
    largest they stay what they are.

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
    """Points from samples: medians of those that are close together.

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
    """The same, without falls: more takes no less time, whatever a measurement says.

    Neighbours that fall become their mean (pool adjacent violators: Ayer et al., An Empirical
    Distribution Function for Sampling with Incomplete Information, 1955), in logarithms.

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
    """As many digits as a measurement could have."""
    return float(f"{number:.{digits}g}")


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def checked(name: str, tables: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Points]:
    """The tables as tuples.

    Raises:
        ValueError: if one has no points, one that is not two positive numbers, or is out of order.
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
