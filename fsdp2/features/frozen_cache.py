"""Which frozen parameters stay gathered, within a byte limit.

Nothing changes a frozen parameter between steps, so one gather serves all forwards. The frozen
parameters of a unit have buckets of their own. If such a bucket is ``cached``, it is not freed with
its unit, and is gathered again only if one of its shards has been written when a forward begins:
see `Bucket.cache_is_current`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..comm.streams import Streams
from ..sharding.bucket import Bucket


# Compared by identity: two calls with the same number are two limits.
@dataclass(frozen=True, eq=False)
class KeepFrozen:
    """A byte limit that a user set for some units, which share it.

    Attributes:
        max_bytes: of gathered storage per rank; None: without limit.
    """

    max_bytes: int | None


def free_cached(buckets: Iterable[Bucket], streams: Streams) -> None:
    """Free the gathered storages of cached buckets."""
    for bucket in buckets:
        # A unit whose buckets are all cached is freed without a wait for compute's last use.
        bucket.cache_valid = False
        streams.free((bucket,))


def mixes_frozen(buckets: Sequence[Bucket]) -> bool:
    """Whether a bucket has frozen and trained parameters: some were frozen or thawed since."""
    # Buckets that are planned anew lose the sums that wait in them for an all-reduce.
    if any(bucket.partial_present for bucket in buckets):
        return False
    kinds = ({p.sharded.requires_grad for p in bucket.params} for bucket in buckets)
    return any(len(kind) > 1 for kind in kinds)


def choose_cached(units: Iterable[tuple[KeepFrozen | None, Sequence[Bucket]]]) -> set[Bucket]:
    """The buckets to keep gathered.

    Args:
        units: the limit of each unit, if it has one, and its buckets; in module order.
    """
    # Greedily in module order: what runs first has nothing before it that could hide its gather.
    # Sizes and what is frozen decide, so all ranks choose the same buckets.
    used: dict[KeepFrozen, int] = {}
    chosen: set[Bucket] = set()
    for budget, buckets in units:
        if budget is None:
            continue
        for bucket in buckets:
            nbytes = bucket.gathered_bytes
            if not nbytes or any(param.sharded.requires_grad for param in bucket.params):
                continue
            total = used.get(budget, 0) + nbytes
            if budget.max_bytes is None or total <= budget.max_bytes:
                used[budget] = total
                chosen.add(bucket)
    return chosen
