"""What random programs are drawn with: functions of a `random.Random`.

Not strategies of hypothesis, whose engine repeats parts of earlier examples: of 200 programs, only
80 had operations of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Draw = Callable[[random.Random], T]


def just(value: T) -> Draw[T]:
    return lambda _: value


def one(*values: T) -> Draw[T]:
    """One of some values."""
    return lambda random: random.choice(values)


def one_of(draws: Sequence[Draw[T]]) -> Draw[T]:
    return lambda random: random.choice(draws)(random)


def several(draw: Draw[T], least: int, most: int) -> Draw[tuple[T, ...]]:
    """Any number of them within bounds, as a tuple."""
    return lambda random: tuple(draw(random) for _ in range(random.randint(least, most)))


def in_order(*draws: Draw[Any]) -> Draw[tuple[Any, ...]]:
    """One of each, as a tuple."""
    return lambda random: tuple(draw(random) for draw in draws)
