"""Puts the shards of small buckets side by side, where an optimizer has asked for it.

This happens at the first forward of a root. By then the parameters have their values and devices,
nothing has gathered them yet, and the order of units is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from ...dtensor.memory import asked_side_by_side, storage_part
from ...runtime.events import UnitPart, registry
from ...runtime.unit import Unit
from ...sharding.bucket import Bucket
from ...sharding.gradients import FREE_MIN_BYTES
from ...sharding.param import shard_of
from .neighbours import NEIGHBOURS_BYTES, Neighbours, Place, is_held


def place_side_by_side(units: Sequence[Unit], asked: set[int]) -> None:
    """Move small buckets of ``units`` next to each other, in this order.

    Args:
        asked: ids of the parameters for which an optimizer has asked; other parameters of their
            units are moved with them.
    """
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Bucket]] = {}
    for unit in units:
        group = unit.param_group
        if asked.isdisjoint(id(param.sharded) for param in group.params):
            continue
        if not group.materialized:  # else gathers read the shards where they are
            group.apply_pending_changes()
            for bucket in filter(_may_move, group.buckets):
                kind = (bucket.shard_device, bucket.orig_dtype, bucket.grad_dtype)
                kinds.setdefault(kind, []).append(bucket)
    # The first forward may be an evaluation in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        for buckets in kinds.values():
            for few in _in_blocks(buckets):
                _place(few)


def _may_move(bucket: Bucket) -> bool:
    # Some parameters choose their memory. Pinned memory has a separate arena.
    if bucket.params[0].extension or bucket.is_meta or bucket.pin_memory or bucket.place:
        return False
    nbytes = bucket.shards.nbytes
    small = 0 < nbytes <= min(NEIGHBOURS_BYTES // 2, FREE_MIN_BYTES * len(bucket.params))
    trained = bucket.params[0].sharded.requires_grad  # all of a bucket, or none
    if not (small and trained and bucket.grads is None):
        return False
    # A tensor that a user holds would keep memory that nothing trains.
    return not any(is_held(param.local) for param in bucket.params if param.local.numel())


def _in_blocks(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    blocks: list[list[Bucket]] = [[]]
    for bucket in buckets:
        if sum(b.shards.nbytes for b in blocks[-1]) + bucket.shards.nbytes > NEIGHBOURS_BYTES:
            blocks.append([])
        blocks[-1].append(bucket)
    return [block for block in blocks if len(block) > 1]


def _place(buckets: Sequence[Bucket]) -> None:
    first = buckets[0]
    neighbours = Neighbours(
        [bucket.shards.numel() for bucket in buckets],
        [len(bucket.params) for bucket in buckets],
        first.orig_dtype,
        first.grad_dtype,
        first.shard_device,
    )
    for i, bucket in enumerate(buckets):
        _move(bucket, Place(neighbours, i))


def _move(bucket: Bucket, place: Place) -> None:
    # The tensor objects stay, since users may hold them (without gradients, ``to_local()`` returns
    # them). `is_held` has seen that nothing else refers to their memory.
    shards = place.shards()
    shards.copy_(bucket.shards)
    for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
        if param.local.numel():
            part = storage_part(shard_of(shards, slot, bucket.rank))
            param.local.set_(part, 0, param.local.shape, param.local.stride())
    bucket.shards, bucket.place = shards, place


class _SideBySide(UnitPart):
    @override
    def before_materialize(self, units: Sequence[Unit]) -> None:
        if asked := asked_side_by_side():
            place_side_by_side(units, asked)


registry.add(_SideBySide())
