"""Tensor subclasses in files: the inner tensors of a shard as separate entries.

Only the class can combine the inner tensors of shards (a scale per block, a table for all rows).
So there is no whole tensor that all ranks could write into: one rank writes each shard, under names
that contain its rows::

    exp_avg.weight.rows-0-512.codes        U8   (512, 256)
    exp_avg.weight.rows-0-512.scale        F32  (512,)
    exp_avg.weight.rows-0-512.subclass     U8   JSON: the class, its shape, its inner tensors

`pieces` puts them together again.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ...common.memory import memory_of
from ...dtensor.boxes import Box
from ...dtensor.parts import local_part
from ...dtensor.subclasses import fewer_rows, follows_rows, inner_of, kind_of
from ..errors import CheckpointError
from .header import fits, parse_json
from .strict import Check
from .values import encode

DESCRIPTION = "subclass"
_PIECE = re.compile(
    r"(?P<name>.*)\.rows-(?P<start>[0-9]{1,18})-(?P<stop>[0-9]{1,18})\.(?P<part>.*)", re.DOTALL
)


@dataclass(frozen=True)
class Description:
    """What the shard of a tensor subclass is.

    Attributes:
        kind: the class, with its module.
        shape: shape of the whole tensor. ``local_shape``: of this shard.
        dtype: the dtype that the shard reports.
        follows: by name of each inner tensor, whether it has a part for each row of the shard
            (False: it is for all rows; None: the class does not show which).
        context: the context of ``__tensor_flatten__``, as tagged JSON; None if JSON cannot hold it.
    """

    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    follows: dict[str, bool | None]
    context: Any


def rows_of(box: Box, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """First and one-past-last row of a part.

    Raises:
        CheckpointError: if the part is not a range of whole rows.
    """
    if box.shape[1:] != tuple(shape)[1:]:
        raise CheckpointError(
            f"'{name}' is a tensor subclass that is sharded on a dim other than 0: only rows can "
            "be saved and loaded"
        )
    return (box.start[0], box.start[0] + box.shape[0]) if shape else (0, 1)


def entries_of(name: str, tensor: Tensor, box: Box) -> dict[str, Tensor]:
    """What to save of a part: inner tensors and a description, by their names in the files."""
    start, stop = rows_of(box, tuple(tensor.shape), name)
    if start == stop:
        return {}
    local = local_part(tensor)
    inner = inner_of(local)
    description = Description(
        kind_of(local), tuple(tensor.shape), tuple(local.shape), str(local.dtype),
        follows_rows(local, inner, fewer_rows(local)), _context(local),
    )  # fmt: skip
    if DESCRIPTION in inner:
        raise CheckpointError(f"'{name}': an inner tensor cannot be called '{DESCRIPTION}'")
    text = json.dumps(asdict(description)).encode()
    inner[DESCRIPTION] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return {f"{name}.rows-{start}-{stop}.{part}": value for part, value in inner.items()}


def parse_name(name: str) -> tuple[str, int, int, str] | None:
    """Name of the tensor, its rows and the part; None if it is not a name of `entries_of`."""
    match = _PIECE.fullmatch(name) if ".rows-" in name else None  # of most names, quickly
    if match is None:
        return None
    return match["name"], int(match["start"]), int(match["stop"]), match["part"]


def parse_description(data: Tensor, what: str) -> Description:
    """The inverse of what `entries_of` writes.

    Args:
        what: the file and the name, for messages.

    Raises:
        CorruptCheckpoint: if it is not what was written.
    """
    check = Check(what)
    found = check.table(parse_json(bytes(memory_of(data)), what), "it")
    follows = check.table(found.get("follows"), "follows")
    if any(each not in (None, True, False) for each in follows.values()):
        raise check.bad("follows", "other than true, false or null")
    context = found.get("context")
    if context is not None and "value" not in check.table(context, "context"):
        raise check.bad("context", "without a value")
    shape = check.numbers(found.get("shape"), "shape")
    if not fits(shape, 1):
        raise check.bad("shape", str(shape))
    return Description(
        check.text(found.get("kind"), "kind"), shape,
        check.numbers(found.get("local_shape"), "local_shape"),
        check.text(found.get("dtype"), "dtype"), follows, context,
    )  # fmt: skip


def _context(local: Tensor) -> Any:
    with suppress(TypeError):
        return {"value": encode(cast(Any, local).__tensor_flatten__()[1])}
    return None
