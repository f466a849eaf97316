"""Boxes in a tensor, and their contiguous runs in memory and in files.

A rank's shard is a box: a start and a shape in the whole tensor. In row-major order a box is a
sequence of runs of equal length; the box of ``Shard(0)`` is a single run. Everything is pure
arithmetic on elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """Per dim, ``shape`` entries from ``start`` on; empty tuples for 0-dim tensors."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of ``shape`` contains the box."""
        return len(shape) == len(self.start) == len(self.shape) and all(
            a >= 0 and n >= 0 and a + n <= size
            for a, n, size in zip(self.start, self.shape, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def relative_to(self, origin: Box) -> Box:
        """The same box seen from the start of ``origin``."""
        return Box(tuple(a - b for a, b in zip(self.start, origin.start, strict=True)), self.shape)

    def pieces(self, limit_numel: int, container: tuple[int, ...]) -> Iterator[Box]:
        """Cut into boxes, in row-major order, that span at most ``limit_numel`` of ``container``.

        A box spans all elements from its first to its last. Single elements are not cut, so
        ``limit_numel`` must be at least 1.
        """
        if span(self, container) <= limit_numel or self.numel <= 1:
            yield self
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        row = prod(container[dim + 1 :])
        step = max(1, min(limit_numel // row, self.shape[dim] - 1))
        for first in range(0, self.shape[dim], step):
            num = min(step, self.shape[dim] - first)
            start = (*self.start[:dim], self.start[dim] + first, *self.start[dim + 1 :])
            part = Box(start, (*self.shape[:dim], num, *self.shape[dim + 1 :]))
            yield from part.pieces(limit_numel, container)


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that have an element in common; None if no two have.

    This sweeps along the dim with the most different starts: almost linear in the number of boxes
    if a tensor is split along one dim.
    """
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0].start))
    dim = max(dims, key=lambda d: len({box.start[d] for box in boxes}), default=None)
    if dim is None:  # each is the one element of a 0-dim tensor
        return boxes[0], boxes[1]
    reached: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.start[dim]):
        reached = [old for old in reached if old.start[dim] + old.shape[dim] > box.start[dim]]
        for old in reached:
            if old.intersect(box) is not None:
                return old, box
        reached.append(box)
    return None


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def offset(box: Box, container: tuple[int, ...]) -> int:
    """Offset of the first element of ``box`` in a row-major tensor of shape ``container``."""
    return sum(a * s for a, s in zip(box.start, strides(container), strict=True))


def span(box: Box, container: tuple[int, ...]) -> int:
    """Number of elements of ``container`` from the first to the last of ``box``, inclusive."""
    if box.numel == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(box.shape, strides(container), strict=True))
    return last + 1


def run_numel(box: Box, container: tuple[int, ...]) -> int:
    """Length of the contiguous runs of ``box`` in ``container``."""
    dim = len(container)
    while dim > 0 and box.shape[dim - 1] == container[dim - 1]:
        dim -= 1
    # Dims from `dim` on are covered whole; a contiguous part of the dim before is covered.
    return prod(box.shape[max(dim - 1, 0) :])


def run_offsets(box: Box, container: tuple[int, ...], run: int) -> Iterator[int]:
    """Offsets in ``container`` of the runs of ``box``, cut into pieces of ``run`` elements.

    ``run`` divides the length of the runs: it is ``run_numel(box, container)``, or the smaller
    result for the same box in another container.
    """
    if box.numel == 0:
        return
    base, steps = offset(box, container), strides(container)
    outer = len(box.shape)
    while outer > 0 and prod(box.shape[outer:]) < run:
        outer -= 1
    for index in product(*(range(n) for n in box.shape[:outer])):
        yield base + sum(i * s for i, s in zip(index, steps[:outer], strict=True))


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Row-major elements ``start`` to ``stop`` of a tensor as boxes, in order.

    There are fewer than two boxes per dim. The range must be within the tensor.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    head = min(-start % row, stop - start)  # elements of a row that begins before ``start``
    tail = (stop - start - head) % row  # elements of a row that ends after ``stop``
    middle = range(start + head, stop - tail)
    yield from _boxes_of_row(shape, row, start, middle.start)
    if middle:
        inner = shape[1:]
        yield Box((middle.start // row, *(0 for _ in inner)), (len(middle) // row, *inner))
    yield from _boxes_of_row(shape, row, middle.stop, stop)


def _boxes_of_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    index = start // row
    for box in boxes_of_range(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.start), (1, *box.shape))


def entries_per_part(size: int, num: int, granularity: int = 1) -> int:
    """Entries of all parts but the last ones, if ``size`` entries are split into ``num``.

    Args:
        granularity: parts are multiples of it, except the last one; 1: as `torch.chunk`.
    """
    return min(-(-size // (num * granularity)) * granularity, size)


def split_evenly(size: int, num: int, index: int, granularity: int = 1) -> tuple[int, int]:
    """Start and length of part ``index``, for parts of `entries_per_part` entries."""
    chunk = entries_per_part(size, num, granularity)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)
