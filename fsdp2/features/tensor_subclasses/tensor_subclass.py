"""Tensor subclasses as parameters: how to split them, and how to write into them.

Such classes implement the operators that torch's FSDP2 calls on them, and often no others. So only
these are used here: ``split`` (by `torch.chunk`), ``new_zeros``, ``slice``, ``copy_``,
``as_strided``, ``view``, ``detach`` and ``_to_copy`` (by ``.to``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...dtensor.boxes import entries_per_part
from ...dtensor.subclasses import copy_of, dispatches, tensor_attributes
from ...sharding.layout import Slot


def own_shard(
    whole: torch.Tensor, slot: Slot, rank: int, num_shards: int, name: str
) -> torch.Tensor:
    """The part of a whole parameter that ``rank`` holds, in separate memory.

    Args:
        name: of the parameter.

    Raises:
        ValueError: on every rank, if the class does not split it into the shards of all of them.
    """
    if slot.dim is None:
        return copy_of(whole)
    dim = slot.dim
    wanted = [slot.local_shape(other)[dim] for other in range(num_shards)]
    if dim and min(wanted) != max(wanted):
        # The tensors of the class are joined along that dim, and may be shorter than the shard
        # (packed bits). Only the class can determine where the padding is.
        raise ValueError(
            f"FSDP does not support uneven sharding on dim {dim} of a tensor subclass: parameter "
            f"'{name}' ({type(whole).__name__}) would have shards of {wanted}. Shard it on dim 0"
        )
    # ``chunk`` and a full-sized ``new_zeros``, as in torch's FSDP2: every such class supports these
    # sizes. Each rank also makes the shorter shards of others: a class that rejects one (NF4, whose
    # blocks do not end there) would otherwise raise on one rank only, and the rest would wait.
    try:
        in_blocks = slot.chunk != entries_per_part(whole.shape[dim], num_shards)
        cut = torch.split if in_blocks else torch.chunk
        chunks = cut(whole, slot.chunk if in_blocks else num_shards, dim)
        # Classes round differently: NF4 splits 80 rows for 3 ranks into two parts of 40.
        found = [chunk.shape[dim] for chunk in chunks]
        found += [0] * (num_shards - len(found))
        if found != wanted:
            raise ValueError(f"torch.{cut.__name__} gave {found} of dim {dim}")
        padded = whole.new_zeros(chunks[0].shape)
        parts = {
            size: padded if size == wanted[0] else padded.narrow(dim, 0, size) for size in wanted
        }
    except Exception as error:
        raise ValueError(
            f"Parameter '{name}' of shape {tuple(whole.shape)} ({type(whole).__name__}) cannot be "
            f"split into shards of {wanted} on dim {dim}: {type(error).__name__}: {error}. If its "
            "class only splits where blocks end, use a number of ranks for which shards end there "
            "too, or pass the parameter in ignored_params, which keeps it whole on every rank"
        ) from error
    own = parts[wanted[rank]]
    if wanted[rank]:
        own.copy_(chunks[rank])
    return own


def write_into(old: torch.Tensor, new: torch.Tensor) -> None:
    """Make ``old`` equal to ``new``, in the memory of ``old`` if both have the same layout."""
    if new is old:
        return
    if not dispatches(old) or not dispatches(new):
        if not _is_same_memory(old, new):
            old.copy_(new)
        return
    # By attribute: ``old.copy_(new)`` would leave out attributes that are no tensors (a block size,
    # a flag), and inner tensors with a new shape or dtype.
    for name, value in {**vars(new), **tensor_attributes(new)}.items():
        before: Any = getattr(old, name, None)
        if _are_alike(before, value):
            write_into(before, value)
        else:
            setattr(old, name, value)


def _are_alike(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return both and (type(a), a.shape, a.dtype, a.device) == (type(b), b.shape, b.dtype, b.device)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        not dispatches(a)
        and not dispatches(b)
        and a.data_ptr() == b.data_ptr()
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor, as torch gives them."""
    # Unlike `dtensor.boxes.strides`, these are never 0, even for a tensor without elements: classes
    # get them as ``outer_stride``, and their results are compared with them.
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
