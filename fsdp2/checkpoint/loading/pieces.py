"""Loading tensor subclasses: from the shards in a checkpoint to the shard that is wanted.

A shard with the same rows is read as it is. Otherwise, inner tensors that follow the rows are
assembled from the pieces that hold these rows, if the blocks of the class allow it. Inner tensors
that are for all rows (a table) must be equal in all pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import getattr_static
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...dtensor.boxes import Box
from ...dtensor.parts import laid_out_like, local_part
from ...dtensor.subclasses import inner_of, is_subclass, kind_of
from ..errors import CheckpointMismatch, CorruptCheckpoint
from ..format.inner import (
    DESCRIPTION,
    Description,
    parse_description,
    parse_name,
    rows_of,
)
from ..format.strict import converted
from ..format.tensors import DTYPES
from ..format.values import TAG, decode
from .fill import Wanted
from .reading import Target, read_into, read_verified
from .source import Source, Stored

MAX_DESCRIPTION_BYTES = 16 << 20


@dataclass
class Piece:
    """One shard in a checkpoint."""

    source: Source
    start: int
    stop: int
    parts: dict[str, Stored] = field(default_factory=dict)

    @cached_property
    def description(self) -> Description:
        info = self.parts[DESCRIPTION].info
        what = f"{self.source.path}: '{info.name}'"
        if info.dtype != "U8" or info.nbytes > MAX_DESCRIPTION_BYTES:
            raise CorruptCheckpoint(f"{what} is {info.dtype} {info.shape}: no description")
        return parse_description(self.read(DESCRIPTION), what)

    def read(self, part: str) -> Tensor:
        """Read one of its tensors now; for small ones."""
        stored = self.parts[part]
        data = torch.empty(stored.info.shape, dtype=DTYPES[stored.info.dtype], device="cpu")
        read = read_verified if self.source.verifiable else read_into
        read(self.source, [Target(part, stored, Box.whole(stored.info.shape), data)])
        return data


def pieces_in(source: Source, tensors: Mapping[str, Stored]) -> dict[str, list[Piece]]:
    """The shards of tensor subclasses in a checkpoint, by the name of the tensor."""
    found: dict[str, dict[tuple[int, int], Piece]] = {}
    for full_name, stored in tensors.items():
        parsed = parse_name(full_name)
        if parsed is not None:
            name, start, stop, part = parsed
            pieces = found.setdefault(name, {})
            piece = pieces.setdefault((start, stop), Piece(source, start, stop))
            piece.parts[part] = stored
    return {
        name: [pieces[rows] for rows in sorted(pieces)]
        for name, pieces in found.items()
        if all(DESCRIPTION in piece.parts for piece in pieces.values())
    }


def names_of(pieces: Sequence[Piece]) -> set[str]:
    """The names of all their tensors in the files."""
    return {stored.info.name for piece in pieces for stored in piece.parts.values()}


def _described(name: str, pieces: Sequence[Piece]) -> Description:
    """What all pieces are of, which have to make up its rows: others would keep their values.

    Raises:
        CorruptCheckpoint: if a row is in none of them, or in two.
    """
    described = pieces[0].description
    shape = described.shape
    # From each piece to the next; where there are no rows, nothing is saved, and no piece.
    ends = [0, *(piece.stop for piece in pieces)]
    starts = [*(piece.start for piece in pieces), shape[0] if shape else 1]
    if ends != starts or any(piece.start >= piece.stop for piece in pieces):
        rows = ", ".join(f"{piece.start} to {piece.stop}" for piece in pieces[:8])
        raise CorruptCheckpoint(
            f"{pieces[0].source.path}: the shards of '{name}', of rows {rows}, do not make up its "
            f"{starts[-1]} rows"
        )
    return described


def wanted_of(name: str, tensor: Tensor, pieces: Sequence[Piece], box: Box) -> list[Wanted]:
    """What must be read to fill the inner tensors of ``tensor``.

    Args:
        box: this rank's part of the whole tensor.

    Raises:
        CheckpointMismatch: if class or shape differ, or the pieces cannot be cut at these rows.
    """
    first = _described(name, pieces)
    local = local_part(tensor)
    if not is_subclass(tensor) or kind_of(local) != first.kind:
        raise CheckpointMismatch(
            f"'{name}' was saved as {first.kind} and is a {kind_of(local)} here: convert the model "
            "in the same way before loading"
        )
    if first.shape != tuple(tensor.shape):
        raise CheckpointMismatch(
            f"'{name}': shapes differ: {first.shape} in the checkpoint, {tuple(tensor.shape)} here"
        )
    start, stop = rows_of(box, first.shape, name)
    if start == stop:
        return []
    inner = inner_of(local)
    wanted: list[Wanted] = []
    for part, target in inner.items():
        if any(part not in piece.parts for piece in pieces):
            raise CheckpointMismatch(
                f"The inner tensor '{part}' of '{name}' is not in the checkpoint, and would keep "
                "the value that belongs to other data: load into a newly built model, without it"
            )
        for stored, place, of_piece in _sources(name, part, pieces, start, stop, target.shape):
            into = target if place is None else target.narrow(0, place.start, len(place))
            wanted.append(Wanted(name, into, stored, of_piece, is_part=True))
    return wanted


def _sources(
    name: str,
    part: str,
    pieces: Sequence[Piece],
    start: int,
    stop: int,
    shape: Sequence[int],
) -> list[tuple[Stored, range | None, Box]]:
    """For one inner tensor of ``shape``: (what to read, its rows to fill or None for all, which box
    of the stored tensor)."""
    same = [p for p in pieces if (p.start, p.stop) == (start, stop)]
    if same:
        stored = same[0].parts[part]
        if stored.info.shape != tuple(shape):
            raise _misfit(name, part, f"{stored.info.shape} was saved, {tuple(shape)} is here")
        return [(stored, None, Box.whole(stored.info.shape))]
    near = [p for p in pieces if p.start < stop and p.stop > start]
    follows = _follows(part, pieces, start, stop, shape)
    if follows is None:
        raise _misfit(name, part, "the class does not show which of its rows it is for")
    if not follows:
        values = pieces[0].read(part)
        if any(not torch.equal(values, p.read(part)) for p in pieces[1:]):
            raise _misfit(name, part, "it is not the same in all shards that were saved")
        stored = pieces[0].parts[part]
        return [(stored, None, Box.whole(stored.info.shape))]
    if not shape or any(not piece.parts[part].info.shape for piece in near):
        raise _misfit(name, part, "it has no rows")
    found: list[tuple[Stored, range | None, Box]] = []
    for piece in near:
        low, high = max(start, piece.start), min(stop, piece.stop)
        stored = piece.parts[part]
        theirs, num = stored.info.shape, piece.stop - piece.start
        cuts = [
            ((low - piece.start) * theirs[0], num),
            ((high - piece.start) * theirs[0], num),
            ((low - start) * shape[0], stop - start),
            ((high - start) * shape[0], stop - start),
        ]
        exact = all(a % b == 0 for a, b in cuts)
        if not exact or theirs[0] * (stop - start) != shape[0] * num or theirs[1:] != shape[1:]:
            raise _misfit(
                name, part, f"its blocks do not end at rows {low} and {high}, where shards begin"
            )
        a, b, c, d = (x // y for x, y in cuts)
        box = Box((a, *(0 for _ in theirs[1:])), (b - a, *theirs[1:]))
        found.append((stored, range(c, d), box))
    return found


def _follows(
    part: str, pieces: Sequence[Piece], start: int, stop: int, shape: Sequence[int]
) -> bool | None:
    said = {p.description.follows.get(part) for p in pieces} - {None}
    if len(said) == 1:
        return said.pop()
    piece = pieces[0]
    theirs = piece.parts[part].info.shape
    if theirs == tuple(shape):
        return False
    same_ratio = (
        theirs and shape and theirs[0] * (stop - start) == shape[0] * (piece.stop - piece.start)
    )
    return True if same_ratio else None


def _misfit(name: str, part: str, why: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"The inner tensor '{part}' of '{name}' cannot be assembled for shards other than those "
        f"saved: {why}. Load it on the same number of ranks as it was saved on"
    )


def empty_like_saved(name: str, param: Tensor, pieces: Sequence[Piece], box: Box) -> Tensor:
    """An empty tensor for state that an optimizer does not have yet, placed as its parameter.

    Raises:
        CheckpointMismatch: if its class cannot be rebuilt from what was saved.
    """
    description = _described(name, pieces)
    start, stop = rows_of(box, description.shape, name)
    local_shape = (stop - start, *description.shape[1:])
    device = local_part(param).device
    if start == stop:
        local = torch.empty(local_shape, dtype=_dtype(description), device=device)
        return _placed(local, param)
    near = [p for p in pieces if p.start < stop and p.stop > start]
    made: dict[str, Tensor] = {}
    for part in near[0].description.follows:
        if any(part not in piece.parts for piece in near):
            raise CorruptCheckpoint(
                f"{near[0].source.path}: the inner tensor '{part}' of '{name}' is missing"
            )
        made[part] = _empty_part(name, part, near, start, stop, device)
    local = _unflatten(name, near[0].description, made, local_shape)
    return _placed(local, param)


def _empty_part(
    name: str, part: str, pieces: Sequence[Piece], start: int, stop: int, device: torch.device
) -> Tensor:
    piece = pieces[0]
    info = piece.parts[part].info
    num, shape = piece.stop - piece.start, info.shape
    if num != stop - start or piece.start != start:
        said = {p.description.follows.get(part) for p in pieces} - {None}
        if not said:
            raise _misfit(name, part, "the class does not show which of its rows it is for")
        if said == {True}:
            if not shape or shape[0] * (stop - start) % num:
                raise _misfit(name, part, f"its blocks do not end after {stop - start} rows")
            shape = (shape[0] * (stop - start) // num, *shape[1:])
    return torch.empty(shape, dtype=DTYPES[info.dtype], device=device)


def _unflatten(
    name: str, description: Description, inner: dict[str, Tensor], shape: tuple[int, ...]
) -> Tensor:
    module, _, _ = description.kind.rpartition(".")
    found: Any = None
    # Only among classes that the program has imported: a file must not cause an import.
    for loaded in [m for m in sys.modules if module == m or module.startswith(m + ".")]:
        found = sys.modules[loaded]
        for attribute in description.kind[len(loaded) + 1 :].split("."):
            # Not `getattr`: modules may import when they are asked for a name.
            found = getattr_static(found, attribute, None)
        if found is not None:
            break
    if not (isinstance(found, type) and issubclass(found, Tensor)) or description.context is None:
        raise CheckpointMismatch(
            f"'{name}' was saved as {description.kind}, which cannot be recreated from the "
            "checkpoint: import its module, or take a step first, so that the optimizer makes it"
        )
    what = f"the context of '{name}'"
    decoded = converted(what, lambda: decode(cast(Any, description.context)["value"]))
    context = _with_shape(decoded, description.local_shape, shape)
    strides = torch.empty(shape, device="meta").stride()
    make = cast(Any, found).__tensor_unflatten__
    return converted(
        f"'{name}' as {description.kind}", lambda: make(inner, context, torch.Size(shape), strides)
    )


def _with_shape(context: Any, before: tuple[int, ...], now: tuple[int, ...]) -> Any:
    """The context for a shard of another shape: classes that record their shape do so there."""
    if isinstance(context, list | tuple):
        if tuple(context) == before:
            return type(context)(now)
        return type(context)(_with_shape(value, before, now) for value in context)
    return context


def _dtype(description: Description) -> torch.dtype:
    return converted(
        description.kind,
        lambda: decode({TAG: "dtype", "value": description.dtype.removeprefix("torch.")}),
    )


def _placed(local: Tensor, param: Tensor) -> Tensor:
    return laid_out_like(local, param) if isinstance(param, DTensor) else local
