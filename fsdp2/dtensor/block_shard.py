"""A placement for shards that only end where a block of rows ends.

`Shard` splits like `torch.chunk`, and most of torch supports no other rule: operators describe
their results with a new ``Shard(dim)``. They would replace a subclass with another rule by a plain
`Shard`, which would be wrong. `_StridedShard` has one more number, its split factor, and operators
pass it on. A positive number keeps its meaning: into how many pieces a dim was split before. A
negative number means here that shards are whole blocks of so many rows. Without this file, torch
rejects such a number wherever it splits or joins a tensor.

[Note: what torch is taught]

torch gets the position of a `_StridedShard` from one method of that class, which splits a tensor
into shards. To join shards, and to compute sizes and offsets, torch splits indices with it. The
first `block_shard` replaces the method, with the same behaviour for other split factors. So there
is one class of placement, no matter how an operator, pickle or a deep copy has made it again.

On meshes of several dims, torch plans how to redistribute a tensor, but ignores how such a
`_StridedShard` was split. The plan is made here if torch's would give a wrong tensor: if several
mesh dims split the same tensor dim before or after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.tensor._redistribute as redistribution
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..common.torch_patches import VARIABLE, patches_torch, wrap
from .boxes import split_evenly


def block_shard(dim: int, granularity: int) -> Placement:
    """The placement of a tensor dim that is split into shards of whole blocks.

    Args:
        dim: the tensor dim.
        granularity: entries along ``dim`` per block, at least 1. The last block may have fewer.

    Raises:
        NotImplementedError: if this release of torch lacks a required name, or patches are turned
            off (`common/torch_patches.py`).
    """
    _teach_torch()
    return _StridedShard(dim, split_factor=-granularity)


def granularity_of(placement: Placement) -> int:
    """Entries per block; 1 for placements that cut as `torch.chunk` does."""
    return -int(placement.split_factor) if is_block_shard(placement) else 1  # type: ignore[attr-defined]


def is_block_shard(placement: Any) -> bool:
    """Whether `block_shard` made the placement, or an operator from one that it made."""
    return isinstance(placement, _StridedShard) and int(placement.split_factor) < 0


def _split_tensor(
    self: Any,
    tensor: torch.Tensor,
    num_chunks: int,
    *,
    with_padding: bool = True,
    contiguous: bool = True,
) -> tuple[list[torch.Tensor], list[int]]:
    """The shards of a whole tensor, and the padding of each to the length of the first."""
    size, granularity = tensor.size(self.dim), granularity_of(self)
    shards = [
        tensor.narrow(self.dim, *split_evenly(size, num_chunks, index, granularity))
        for index in range(num_chunks)
    ]
    missing: list[int] = []
    if with_padding:
        missing = [shards[0].size(self.dim) - shard.size(self.dim) for shard in shards]
        shards = [_padded(s, self.dim, num) for s, num in zip(shards, missing, strict=True)]
    return [shard.contiguous() if contiguous else shard for shard in shards], missing


def _padded(shard: torch.Tensor, dim: int, num: int) -> torch.Tensor:
    if not num:
        return shard
    shape = [num if d == dim else size for d, size in enumerate(shard.shape)]
    return torch.cat([shard, shard.new_zeros(shape)], dim=dim)


def _show(self: Any) -> str:
    return f"BlockShard(dim={self.dim}, granularity={granularity_of(self)})"


_PLACEMENT = "torch.distributed.tensor.placement_types._StridedShard"
_REDISTRIBUTION = "torch.distributed.tensor._redistribute"
_TAUGHT: dict[str, Callable[..., Any]] = {
    "_split_tensor": _split_tensor,
    "__repr__": _show,
    "__str__": _show,
}


def _teach_torch() -> None:
    """Let `_StridedShard` understand the split factors of `block_shard`."""
    if not patches_torch():
        raise NotImplementedError(
            f"shard_granularity needs methods of torch that {VARIABLE}=0 in the environment keeps "
            "as they are: do not set it"
        )
    missing = [name for name in _TAUGHT if not callable(getattr(_StridedShard, name, None))]
    plan = getattr(redistribution, "_gen_transform_infos_non_cached", None)
    # Operators would treat a subclass of `Shard` as a plain one.
    if missing or plan is None or issubclass(_StridedShard, Shard):
        raise NotImplementedError(
            f"shard_granularity is not supported with torch {torch.__version__}: it was tested "
            "with torch 2.13 and 2.15, and this one describes sharded tensors otherwise"
        )
    for name, ours in _TAUGHT.items():
        wrap(f"{_PLACEMENT}.{name}", functools.partial(_either, ours))
    wrap(f"{_REDISTRIBUTION}._gen_transform_infos_non_cached", _planned)


def _planned(plan: Callable[..., Any], source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    here = source.mesh.get_coordinate() if source.mesh.ndim > 1 else None
    if here is not None and _are_nested(source.placements, target.placements):
        return _plan_through_replicas(source, target, here)
    return plan(source, target, *args, **kwargs)


def _are_nested(source: Sequence[Any], target: Sequence[Any]) -> bool:
    """Whether several mesh dims split a tensor dim, one of them in blocks."""
    cuts = {
        (p.dim, mesh_dim)
        for placements in (source, target)
        for mesh_dim, p in enumerate(placements)
        if isinstance(p, Shard | _StridedShard)
    }
    in_blocks = {p.dim for p in (*source, *target) if is_block_shard(p)}
    return any(sum(dim == cut for cut, _ in cuts) > 1 for dim in in_blocks)


def _plan_through_replicas(source: Any, target: Any, here: Sequence[int]) -> list[Any]:
    """Replicate the tensor over all mesh dims, the last first, then split it, the first first."""
    # Not the fewest bytes, but correct for every combination of splits.
    shapes, shape = [], list(source.shape)
    for mesh_dim, p in enumerate(source.placements):
        shapes.append(list(shape))
        if isinstance(p, Shard | _StridedShard):
            num = source.mesh.size(mesh_dim)
            shape[p.dim] = p.local_shard_size_and_offset(shape[p.dim], num, here[mesh_dim])[0]
    joins = [(d, p, Replicate()) for d, p in enumerate(source.placements)]
    cuts = [(d, Replicate(), p) for d, p in enumerate(target.placements)]
    return [
        redistribution._TransformInfo(d, (before, after), shapes[d])
        for d, before, after in (*reversed(joins), *cuts)
        if before != after
    ]


def _either(
    ours: Callable[..., Any], theirs: Callable[..., Any], placement: Any, *args: Any, **kwargs: Any
) -> Any:
    return (ours if is_block_shard(placement) else theirs)(placement, *args, **kwargs)
