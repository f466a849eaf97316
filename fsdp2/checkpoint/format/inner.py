"""Tensor subclasses in files: the inner tensors of a shard as entries of their own.

How the inner tensors of a shard make up those of the whole tensor only the class knows (a scale per
block, a table for all), so there is no whole tensor that all ranks could write into. Each shard is
written by one rank, under names with its rows::

    exp_avg.weight.rows-0-512.codes        U8   (512, 256)
    exp_avg.weight.rows-0-512.scale        F32  (512,)
    exp_avg.weight.rows-0-512.subclass     U8   JSON: the class, its shape, its inner tensors

`pieces` puts them together again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...dtensor.boxes import Box
from ..errors import CheckpointError
from .values import encode

DESCRIPTION = "subclass"
_PIECE = re.compile(r"(?P<name>.*)\.rows-(?P<start>\d+)-(?P<stop>\d+)\.(?P<part>.*)", re.DOTALL)


@dataclass(frozen=True)
class Description:
    """What the shard of a tensor subclass is.

    Attributes:
        kind: the class, with its module.
        shape: of the whole tensor. ``local_shape``: of this shard.
        dtype: that the shard says it has.
        follows: by name of each inner tensor, whether it has a part for each row of the shard
            (False: it is for all rows; None: the class does not show it).
        context: of ``__tensor_flatten__``, as tagged JSON; None if it has something that JSON
            cannot hold.
    """

    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    follows: dict[str, bool | None]
    context: Any


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, itself: without ``detach``, which may copy inner tensors."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_subclass(tensor: Tensor) -> bool:
    """Whether this rank's part consists of inner tensors."""
    local = local_part(tensor)
    return is_traceable_wrapper_subclass(local) and not isinstance(local, DTensor)


def inner_of(local: Tensor) -> dict[str, Tensor]:
    """The inner tensors by name; of inner tensors that are such classes again, by path."""
    return dict(_inner(local, ""))


def _inner(local: Tensor, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name in cast(Any, local).__tensor_flatten__()[0]:
        value = getattr(local, name)
        if is_subclass(value):
            yield from _inner(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value.detach()


def kind_of(local: Tensor) -> str:
    """The name of its class."""
    return f"{type(local).__module__}.{type(local).__qualname__}"


def rows_of(box: Box, shape: tuple[int, ...], name: str) -> tuple[int, int]:
    """First and one-past-last row of a part.

    Raises:
        CheckpointError: if the part is not rows.
    """
    if box.shape[1:] != tuple(shape)[1:]:
        raise CheckpointError(
            f"'{name}' is a tensor subclass that is sharded on another dim than 0: only rows can "
            "be saved and loaded"
        )
    return (box.start[0], box.start[0] + box.shape[0]) if shape else (0, 1)


def entries_of(name: str, tensor: Tensor, box: Box) -> dict[str, Tensor]:
    """What to save of a part: its inner tensors and a description, by their names in the files."""
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
    """Name of the tensor, rows and part; None for the name of any other tensor."""
    match = _PIECE.fullmatch(name)
    if match is None:
        return None
    return match["name"], int(match["start"]), int(match["stop"]), match["part"]


def parse_description(data: Tensor) -> Description:
    """The inverse of what `entries_of` writes."""
    found = json.loads(bytes(data.tolist()))
    found["shape"], found["local_shape"] = tuple(found["shape"]), tuple(found["local_shape"])
    return Description(**found)


def _context(local: Tensor) -> Any:
    with suppress(TypeError):
        return {"value": encode(cast(Any, local).__tensor_flatten__()[1])}
    return None


def follows_rows(
    local: Tensor, inner: dict[str, Tensor], fewer: Tensor | None
) -> dict[str, bool | None]:
    """Which inner tensors have a part for each row, by name (None: the class does not show it).

    Args:
        inner: those of ``local``.
        fewer: the same tensor with fewer rows: what follows is shorter there.
    """
    rows = local.shape[0] if local.ndim else 0
    others = {} if fewer is None else inner_of(fewer)
    found: dict[str, bool | None] = {}
    for name, before in inner.items():
        other = others.get(name)
        if local.ndim and not before.ndim:
            found[name] = False  # one number, also where the class leaves it out of what it cuts
        elif fewer is None:
            found[name] = True if before.shape == local.shape else None
        elif other is None:
            found[name] = None
        elif other.shape == before.shape:
            found[name] = False
        else:
            in_proportion = other.ndim and other.shape[0] * rows == before.shape[0] * fewer.shape[0]
            found[name] = True if in_proportion else None
    return found


def fewer_rows(local: Tensor) -> Tensor | None:
    """The first rows of ``local``, as its class cuts it; None where it refuses."""
    rows = local.shape[0] if local.ndim else 0
    # Blocks of rows mostly are powers of two.
    powers = [1 << i for i in reversed(range(rows.bit_length()))]
    candidates = [*(rows // 2**i for i in range(1, 5)), *powers]
    with torch.no_grad():
        for num in candidates:
            if not 0 < num < rows:
                continue
            for cut in (lambda n: local.narrow(0, 0, n), lambda n: torch.split(local, n)[0]):
                # Classes refuse in ways of their own what does not end where a block does.
                with suppress(Exception):
                    made = cut(num)
                    if type(made) is type(local) and made.shape[0] == num:
                        return made
    return None
