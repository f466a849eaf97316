"""Shards that are tensor subclasses: their inner tensors (``__tensor_flatten__``) and their rows.

An inner tensor may have a row for each row of the shard (codes), one for a block of rows (scales),
or be the same for all of them (a table). Only the class knows which.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .parts import local_part


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
