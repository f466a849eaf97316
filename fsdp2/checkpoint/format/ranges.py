"""Numbers as ranges: a manifest names all ranks of its save, and the tensors of all layers, in as
few bytes at 10,000 as at 8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NoReturn, overload

from typing_extensions import override

from .strict import Check

MAX_LISTED = 1 << 20  # far more ranks or tensors than there are, and few enough for memory


class Ranges(Sequence[int]):
    """Numbers in a given order, as ranges; equal if the numbers and their order are."""

    def __init__(self, ranges: tuple[range, ...]) -> None:
        self.ranges = ranges
        self._len = sum(map(len, ranges))

    @staticmethod
    def of(numbers: Iterable[int]) -> Ranges:
        """The same numbers: as few ranges as one finds from the first number on."""
        if isinstance(numbers, Ranges):
            return numbers
        numbers, ranges, at = list(numbers), list[range](), 0
        while at < len(numbers):
            first, stop = numbers[at], at + 1
            step = numbers[stop] - first if stop < len(numbers) and numbers[stop] > first else 1
            while stop < len(numbers) and numbers[stop] == first + (stop - at) * step:
                stop += 1
            last = numbers[stop - 1]
            ranges.append(range(first, last + 1, step if last > first else 1))
            at = stop
        return Ranges(tuple(ranges))

    def listed(self) -> list[list[int]]:
        """As JSON: first, last and step of each range."""
        return [[each[0], each[-1], each.step] for each in self.ranges]

    def position(self, rank: int) -> int:
        """Where ``rank`` is in this order.

        Raises:
            ValueError: if it is nowhere.
        """
        before = 0
        for each in self.ranges:
            if rank in each:
                return before + each.index(rank)
            before += len(each)
        raise ValueError(f"{rank} is not one of these ranks")

    @override
    def __contains__(self, rank: object) -> bool:
        return any(rank in each for each in self.ranges)

    @override
    def __len__(self) -> int:
        return self._len

    @override
    def __iter__(self) -> Iterator[int]:
        for each in self.ranges:
            yield from each

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    @override
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        left = index + self._len if index < 0 else index
        for each in self.ranges:
            if 0 <= left < len(each):
                return each[left]
            left -= len(each)
        raise IndexError(index)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.ranges == other.ranges

    @override
    def __hash__(self) -> int:
        return hash(self.ranges)

    @override
    def __repr__(self) -> str:
        return f"Ranges({', '.join(map(_shown, self.ranges))})"


def _shown(numbers: range) -> str:
    every = f" by {numbers.step}" if numbers.step > 1 else ""
    return f"{numbers[0]} to {numbers[-1]}{every}" if len(numbers) > 1 else str(numbers[0])


@lru_cache(1 << 12)  # all manifests of a checkpoint name the same, for each group of tensors
def _of_ranges(rows: tuple[tuple[int, ...], ...]) -> Ranges | None:
    """What `Ranges.listed` gave these rows for; None if it never does."""
    if any(len(row) != 3 or row[0] > row[1] or not row[2] for row in rows):
        return None
    if sum((last - first) // step + 1 for first, last, step in rows) > MAX_LISTED:
        return None
    ranks = Ranges.of(
        number for first, last, step in rows for number in range(first, last + 1, step)
    )
    distinct = len(set(ranks)) == len(ranks)
    return ranks if distinct and ranks.listed() == list(map(list, rows)) else None


def parsed_ranges(value: object, name: str, check: Check) -> Ranges:
    """Numbers as `Ranges.listed` gives them, or as a list of all, as in manifests of version 1.

    Raises:
        CorruptCheckpoint: if they are neither.
    """
    rows = check.items(value, name)
    if rows and type(rows[0]) is int:
        ranks = Ranges.of(check.numbers(rows, name))
        return ranks if len(set(ranks)) == len(ranks) else _refuse(rows, name, check)
    return _of_ranges(tuple(check.numbers(row, name) for row in rows)) or _refuse(rows, name, check)


def _refuse(value: object, name: str, check: Check) -> NoReturn:
    raise check.bad(name, str(value)[:100])
