"""Which frozen parameters stay gathered, within a number of bytes.

Nothing changes a frozen parameter between steps, so what one gather brought is good for the next
forward too. A unit's frozen parameters are buckets of their own; such a bucket that is ``cached``
is not freed with its unit, and is gathered again only when a forward begins and one of its shards
was written: see `Bucket.cache_is_current`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.streams import Streams
from ..sharding.bucket import Bucket


@dataclass(frozen=True, eq=False)
class KeepFrozen:
    """A choice of a user's for some units, which share the bytes.

    Attributes:
        max_bytes: of gathered storage per rank; None: without limit.
    """

    max_bytes: int | None


def free_cached(buckets: Iterable[Bucket], streams: Streams) -> None:
    """Give back gathered storages that were held beyond their units' use."""
    for bucket in buckets:
        bucket.cache_valid = False
        streams.before_free()
        with streams.gathering():
            bucket.free()


def mixes_frozen(buckets: Sequence[Bucket]) -> bool:
    """Whether parameters were frozen or thawed since the buckets were made, which separate them.

    They go on as they are while sums of gradients wait in them.
    """
    if any(bucket.partial_present for bucket in buckets):
        return False
    kinds = ({p.sharded.requires_grad for p in bucket.params} for bucket in buckets)
    return any(len(kind) > 1 for kind in kinds)


def choose_cached(units: Iterable[Any]) -> dict[Any, list[Bucket]]:
    """For each unit that a choice was made for, the buckets to keep gathered.

    Greedy, in the order of the modules: each that still fits. The units that run first come first,
    since nothing runs before them that could hide their gathers.
    """
    used: dict[KeepFrozen, int] = {}
    chosen: dict[Any, list[Bucket]] = {}
    for unit in units:
        budget: KeepFrozen | None = unit.config.keep_frozen
        if budget is None:
            continue
        chosen[unit] = []
        for bucket in unit.buckets:
            nbytes = bucket.gathered_bytes
            if not nbytes or any(param.sharded.requires_grad for param in bucket.params):
                continue
            total = used.get(budget, 0) + nbytes
            if budget.max_bytes is None or total <= budget.max_bytes:
                used[budget] = total
                chosen[unit].append(bucket)
    return chosen
