"""Compares two checkpoints tensor by tensor, as streams: any layout, any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..format.header import TensorInfo
from ..loading.source import Source, Stored
from .inspect import PIECE_BYTES, OnBytes, stream


@dataclass
class Difference:
    """A tensor that is not the same in both.

    Attributes:
        what: "shape", "dtype" or "values"; values of equal shape are compared in any case.
        num_different: elements whose bits differ; if dtypes differ, whose values differ.
        max_abs_difference: largest difference where neither is NaN; infinite if one is infinite.
        num_nan: elements where either is NaN and the bits differ.
    """

    name: str
    what: str
    a: str
    b: str
    numel: int = 0
    num_different: int = 0
    max_abs_difference: float = 0.0
    num_nan: int = 0


@dataclass
class CheckpointComparison:
    """What `compare` found.

    Attributes:
        num_equal: tensors with equal bits; ``num_close``: others within the tolerances.
        optimizer: "compared", "only in A", "only in B" (not counted as a difference), or "none".
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    num_equal: int = 0
    num_close: int = 0
    max_abs_difference: float = 0.0
    nbytes: int = 0
    optimizer: str = "none"

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.differences)


def bytes_to_compare(a: Source, b: Source) -> int:
    """How many bytes of both checkpoints `compare` will report to ``on_bytes``."""
    pairs, _, _ = _match(a, b)
    return sum(x.info.nbytes + y.info.nbytes for _, x, y in pairs if x.info.shape == y.info.shape)


def compare(
    a: Source,
    b: Source,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    on_bytes: OnBytes = None,
) -> CheckpointComparison:
    """Compare names, dtypes, shapes and values. NaNs are equal if their bits are.

    A tied tensor is compared once, whichever of its names each checkpoint keeps it by. Optimizer
    state is compared if both have any.

    Args:
        atol, rtol: values of equal dtype may differ by ``atol + rtol * abs(b)``. Without them
            bits must be equal.
        on_bytes: called with the number of further bytes that were read of both.

    Raises:
        CorruptCheckpoint: if a file is truncated meanwhile.
    """
    pairs, only_a, only_b = _match(a, b)
    result = CheckpointComparison(only_a, only_b, optimizer=_optimizer(a, b))
    for name, x, y in pairs:
        shown_a, shown_b = _shown(x.info), _shown(y.info)
        if x.info.shape != y.info.shape:
            result.differences.append(Difference(name, "shape", shown_a, shown_b))
            continue
        found, close = _compare_values(a, x, b, y, atol, rtol, on_bytes)
        result.nbytes += x.info.nbytes + y.info.nbytes
        found.name, found.a, found.b = name, shown_a, shown_b
        result.max_abs_difference = max(result.max_abs_difference, found.max_abs_difference)
        if x.info.dtype != y.info.dtype:
            found.what = "dtype"
            result.differences.append(found)
        elif not found.num_different:
            result.num_equal += 1
        elif close:
            result.num_close += 1
        else:
            result.differences.append(found)
    return result


def _shown(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _optimizer(a: Source, b: Source) -> str:
    if a.optimizer and b.optimizer:
        return "compared"
    return "only in A" if a.optimizer else "only in B" if b.optimizer else "none"


def _match(a: Source, b: Source) -> tuple[list[tuple[str, Stored, Stored]], list[str], list[str]]:
    """Pairs of tensors by name, and the names that only one checkpoint has."""
    pairs: list[tuple[str, Stored, Stored]] = []
    used: set[str] = set()
    only_a = []
    names = _names(a)
    for name, x in sorted(a.tensors.items()):
        others = [n for n in names[name] if n in b.tensors or b.aliases.get(n) in b.tensors]
        for first in dict.fromkeys(n if n in b.tensors else b.aliases[n] for n in others):
            pairs.append((first if first in names[name] else name, x, b.tensors[first]))
            used.add(first)
        if not others:
            only_a.append(name)
    only_b = sorted(b.tensors.keys() - used)
    if a.optimizer and b.optimizer:
        both = sorted(a.optimizer.keys() & b.optimizer.keys())
        pairs += [(name, a.optimizer[name], b.optimizer[name]) for name in both]
        only_a += sorted(a.optimizer.keys() - b.optimizer.keys())
        only_b += sorted(b.optimizer.keys() - a.optimizer.keys())
    return pairs, only_a, only_b


def _names(source: Source) -> Mapping[str, list[str]]:
    """All names of each tensor, starting with the one under which it is stored."""
    names = {name: [name] for name in source.tensors}
    for alias, first in source.aliases.items():
        if first in names:
            names[first].append(alias)
    return names


def _compare_values(
    a: Source,
    x: Stored,
    b: Source,
    y: Stored,
    atol: float,
    rtol: float,
    on_bytes: OnBytes,
) -> tuple[Difference, bool]:
    """Count what differs, and whether all of it is within the tolerances."""
    found = Difference("", "values", "", "", math.prod(x.info.shape))
    close = True
    piece_numel = max(1, PIECE_BYTES // max(x.info.itemsize, y.info.itemsize))
    for p, q in zip(stream(a, x, piece_numel), stream(b, y, piece_numel), strict=True):
        for part_p, part_q in _different_parts(p, q):
            close &= _add(found, part_p, part_q, atol, rtol)
        if on_bytes is not None:
            on_bytes(p.numel() * p.element_size() + q.numel() * q.element_size())
    return found, close


def _different_parts(p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What must be compared element by element: nothing if all bits are equal.

    In parts, because float64 copies are up to eight times as large.
    """
    if p.dtype == q.dtype and torch.equal(p.view(torch.uint8), q.view(torch.uint8)):
        return
    step = PIECE_BYTES // 16
    yield from zip(p.split(step), q.split(step), strict=True)


def _add(found: Difference, p: Tensor, q: Tensor, atol: float, rtol: float) -> bool:
    """Add the differences in a part; returns whether they are within the tolerances."""
    x, y = _as_numbers(p), _as_numbers(q)
    if p.dtype == q.dtype:
        size = p.element_size()
        same = (p.view(torch.uint8) == q.view(torch.uint8)).view(-1, size).all(dim=1)
    else:
        same = (x == y) | (x.isnan() & y.isnan())
    x, y = x[~same], y[~same]
    if not x.numel():
        return True
    distance = (x - y).abs()
    if not (p.is_floating_point() or p.is_complex() or q.is_floating_point() or q.is_complex()):
        distance.clamp_(min=1)  # large integers may be the same number in float64
    nan = distance.isnan()
    found.num_different += x.numel()
    found.num_nan += int(nan.sum())
    if not bool(nan.all()):
        found.max_abs_difference = max(found.max_abs_difference, float(distance[~nan].max()))
    if atol == rtol == 0:
        return False
    within = distance.isfinite() & (distance <= atol + rtol * y.abs())
    return bool(within.all())


def _as_numbers(values: Tensor) -> Tensor:
    """Convert to float64 (complex128), which holds all dtypes except 64-bit integers exactly."""
    if values.is_complex():
        return values.to(torch.complex128)
    if values.element_size() == 1 and values.is_floating_point():
        return values.float().double()
    return values.double()
