"""Reconstructs a whole tensor subclass from its shards.

Shards are joined through their inner tensors (`dtensor.subclasses`): classes implement the
operators that split a whole tensor, but rarely the operators that join parts. An inner tensor
either has rows for each row of the shard (codes, scales), or serves all rows (a table). To find
out, this file asks the class for fewer rows: the inner tensors that get shorter scale with the
rows. All ranks exchange their descriptions, and a whole tensor is built only if these agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from ..common.memory import memory_of
from ..dtensor.subclasses import fewer_rows, follows_rows, inner_of, is_subclass, kind_of
from ..features.tensor_subclasses.tensor_subclass import contiguous_strides
from .spread import Spread


@dataclass(frozen=True)
class Inner:
    """An inner tensor of one part.

    Attributes:
        follows: whether it scales with the rows of the part; None if the class does not show it.
        digest: digest of its bytes, unless it follows.
    """

    shape: tuple[int, ...]
    dtype: str
    follows: bool | None
    digest: str


@dataclass(frozen=True)
class PartDescription:
    """One rank's description of a tensor subclass.

    Attributes:
        rows: rows of the part; ``all_rows``: rows of the whole.
        inner: the inner tensors, by path.
        settings: the class's other data about the whole, as comparable values.
        problem: why the whole cannot be described; empty if it can.
    """

    kind: str
    rows: int
    all_rows: int
    inner: dict[str, Inner]
    config: Any = None
    problem: str = ""


def describe(part: Tensor, shape: Sequence[int]) -> PartDescription:
    """Describe the whole tensor of ``shape`` as far as ``part`` shows it."""
    inner = inner_of(part)
    rows, all_rows = (part.shape[0], shape[0]) if len(shape) else (1, 1)
    cut = rows != all_rows
    fewer = fewer_rows(part) if cut else None
    follows: Mapping[str, bool | None] = follows_rows(part, inner, fewer) if cut else {}
    found = {
        path: Inner(tuple(t.shape), str(t.dtype), f, "" if f or not cut else _digest(t))
        for path, t in inner.items()
        for f in [follows.get(path)]
    }
    described = PartDescription(kind_of(part), rows, all_rows, found)
    try:
        contexts = _contexts(part, fewer, shape)
    except _ChangesWithRows as problem:
        return replace(described, problem=str(problem))
    return replace(described, config=_comparable(contexts))


def agreed(parts: Sequence[PartDescription], *, equal_tables: bool = True) -> dict[str, Inner]:
    """The inner tensors of the whole, by path; ``follows`` is never None.

    Args:
        parts: the parts of all ranks that have one.
        equal_tables: whether inner tensors that do not follow the rows must be equal in all parts.

    Raises:
        NotImplementedError: if the class does not show how its parts make up the whole.
        ValueError: if parts differ where they must be equal.
    """
    first = parts[0]
    for part in parts:
        if part.problem:
            raise NotImplementedError(part.problem)
        for what in ("kind", "config"):
            if getattr(part, what) != getattr(first, what):
                values = f"{getattr(first, what)} and {getattr(part, what)}"
                raise ValueError(f"its {what} differs: {values}")
        if part.inner.keys() != first.inner.keys():
            raise ValueError(
                f"its inner tensors are {[*first.inner]} in one and {[*part.inner]} in another"
            )
    return {path: _agreed_inner(path, parts, equal_tables) for path in first.inner}


def _agreed_inner(path: str, parts: Sequence[PartDescription], equal_tables: bool) -> Inner:
    known = {p.inner[path].follows for p in parts} - {None}
    if len(known) > 1 or (not known and any(p.rows != p.all_rows for p in parts)):
        raise NotImplementedError(
            f"its class does not show which rows its inner tensor '{path}' is for"
        )
    follows = known == {True}
    wholes = []
    for part in parts:
        inner = part.inner[path]
        if follows and not part.rows:
            continue
        shape = inner.shape
        if follows and part.rows != part.all_rows:
            if shape[0] * part.all_rows % part.rows:
                raise NotImplementedError(f"the blocks of '{path}' do not end where shards do")
            shape = (shape[0] * part.all_rows // part.rows, *shape[1:])
        digest = inner.digest if equal_tables and not follows else ""
        wholes.append(Inner(shape, inner.dtype, follows, digest))
    for other in wholes[1:]:
        if other != wholes[0]:
            raise ValueError(f"its inner tensor '{path}' is not the same in all")
    return wholes[0]


def spread_of_inner(inner: Inner, outer: Spread) -> Spread:
    """The spread of an inner tensor of a whole tensor with the spread ``outer``.

    Raises:
        NotImplementedError: if the tensor is not cut into rows, or not where blocks end.
    """
    if not inner.follows:
        return outer.of_copies(inner.shape)
    if any(box.shape[1:] != outer.shape[1:] for _, box in outer.boxes):
        raise NotImplementedError("it is sharded on a dim other than 0")
    try:
        return outer.of_rows(inner.shape)
    except ValueError as error:
        raise NotImplementedError(str(error)) from None


def assembled(
    part: Tensor, inner: Mapping[str, Tensor], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Build the whole tensor of ``shape``, of the class of ``part``, from ``inner`` tensors."""
    fewer = fewer_rows(part) if len(shape) and part.shape[0] != shape[0] else None
    contexts = _contexts(part, fewer, shape, device)
    with torch.no_grad():
        made = _assembled(part, inner, "", tuple(shape), contexts)
    return made.requires_grad_(False) if made.requires_grad else made


def _assembled(
    part: Any, inner: Mapping[str, Tensor], prefix: str, shape: tuple[int, ...], contexts: Any
) -> Tensor:
    values = {}
    for name in part.__tensor_flatten__()[0]:
        value = getattr(part, name)
        if is_subclass(value):
            size = _scaled(value.shape, part.shape, shape)
            values[name] = _assembled(value, inner, f"{prefix}{name}.", size, contexts)
        else:
            values[name] = inner[prefix + name]
    strides = contiguous_strides(shape)
    return type(part).__tensor_unflatten__(values, contexts[prefix], torch.Size(shape), strides)


def _scaled(size: Sequence[int], before: Sequence[int], now: Sequence[int]) -> tuple[int, ...]:
    """The size of an inner tensor that follows the rows, after their number changed."""
    if not len(size) or tuple(before) == tuple(now) or size[0] != before[0]:
        return tuple(size)
    return (now[0], *size[1:])


# -- the data of the class apart from its inner tensors -------------------------------------------


class _ChangesWithRows(Exception):
    pass


_UNKNOWN: Any = object()


def _contexts(
    part: Tensor,
    fewer: Tensor | None,
    shape: Sequence[int],
    device: torch.device | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """What ``__tensor_flatten__`` returns apart from names, for the whole tensor; by path."""
    names, context = cast(Any, part).__tensor_flatten__()
    other = cast(Any, fewer).__tensor_flatten__()[1] if fewer is not None else _UNKNOWN
    shapes = tuple(part.shape), tuple(fewer.shape) if fewer is not None else None, tuple(shape)
    found = {prefix: _for_shape(context, other, shapes, device)}
    for name in names:
        value = getattr(part, name)
        if is_subclass(value):
            less = getattr(fewer, name) if fewer is not None else None
            size = _scaled(value.shape, part.shape, shape)
            found.update(_contexts(value, less, size, device, f"{prefix}{name}."))
    return found


def _for_shape(value: Any, other: Any, shapes: Any, device: torch.device | None) -> Any:
    """Convert ``value`` of a tensor of the first of ``shapes`` to one of the last.

    Args:
        other: the same of a tensor of the second shape: what changed there depends on the rows.
    """
    before, less, now = shapes

    def inside(value: Any, pick: Any) -> Any:
        return _for_shape(value, pick(other) if other is not _UNKNOWN else other, shapes, device)

    if isinstance(value, torch.device):
        return device if device is not None else value
    if isinstance(value, list | tuple):
        if tuple(value) == before and (other is _UNKNOWN or tuple(other) == less):
            return type(value)(now)
        if other is not _UNKNOWN and len(other) != len(value):
            raise _ChangesWithRows(_changes(value, other))
        items = [inside(item, lambda o, i=i: o[i]) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: inside(item, lambda o, k=key: o[k]) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        found = {
            f.name: inside(getattr(value, f.name), lambda o, n=f.name: getattr(o, n))
            for f in fields(value)
            if f.init
        }
        return replace(value, **found)
    if other is not _UNKNOWN and _comparable(other) != _comparable(value):
        raise _ChangesWithRows(_changes(value, other))
    return value


def _changes(value: Any, other: Any) -> str:
    return (
        "its __tensor_flatten__ returns something that changes with the number of rows in a way "
        f"only its class can compute: {value!r}, and {other!r} for fewer rows"
    )


def _comparable(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to one that can be sent and compared: no devices, objects by contents."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float | complex):
        return repr(value)  # two NaNs are equal
    if isinstance(value, torch.device) or depth > 8:
        return None
    if isinstance(value, list | tuple):
        return [_comparable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return [(_comparable(k, depth + 1), _comparable(v, depth + 1)) for k, v in value.items()]
    if isinstance(value, Enum | torch.dtype | torch.layout | torch.memory_format | type):
        return str(value)
    inside = getattr(value, "__dict__", {})
    if is_dataclass(value):
        inside = {f.name: getattr(value, f.name) for f in fields(value)}
    kept = {k: v for k, v in inside.items() if k != "requires_grad"}
    return (type(value).__qualname__, _comparable(kept, depth + 1))


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(memory_of(tensor.cpu().contiguous())).hexdigest()
