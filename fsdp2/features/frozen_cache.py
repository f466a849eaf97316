"""Frozen parameters that stay gathered, within a byte limit.

Nothing changes a frozen parameter between steps, so one gather serves all forwards. The frozen
parameters of a unit have separate buckets. If such a bucket is chosen (`Bucket.cached`), it is not
freed with its unit. It is gathered again only if, at the beginning of a forward, one of its shards
has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

from torch import nn
from typing_extensions import override

from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit, units_in
from ..sharding.bucket import Bucket


# Compared by identity: two calls with the same number are two limits.
@dataclass(frozen=True, eq=False)
class KeepFrozen:
    """A byte limit that a user set for some units, which share it.

    Attributes:
        max_bytes: of gathered storage per rank; None: without limit.
    """

    max_bytes: int | None


# For a bucket that stays gathered: the writes to its shards before its gather began.
_gathered_at: WeakKeyDictionary[Bucket, tuple[int, int]] = WeakKeyDictionary()


class FrozenCache(TreePart):
    """The frozen parameters of one tree that stay gathered."""

    runtime: Runtime

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(unit.config.keep_frozen for unit in runtime.units) else None

    @override
    def planned(self, unit: Unit) -> None:
        self.choose()

    def choose(self) -> None:
        """Choose again which buckets stay gathered, from the next gather on."""
        units = self.runtime.units
        limited = {u: limit for u in units if (limit := u.config.keep_frozen) is not None}
        chosen = choose_cached((limit, unit.buckets) for unit, limit in limited.items())
        for unit in limited:
            for bucket in unit.buckets:
                bucket.cached = bucket in chosen
            dropped = [bucket for bucket in unit.buckets if not bucket.cached]
            unit.drop_cache(self.runtime.streams, dropped)

    @override
    def before_reuse(self, unit: Unit) -> None:
        held = [bucket for bucket in unit.buckets if bucket.cache_valid]
        written = [bucket for bucket in held if bucket.versions() != _gathered_at[bucket]]
        if written:
            unit.reshard(self.runtime.streams)
            unit.drop_cache(self.runtime.streams, written)

    @override
    def before_gather(self, unit: Unit) -> None:
        if unit.config.keep_frozen is None:
            return
        # Ranks gather together or hang. So only writes that happen on all ranks count here:
        # operators on DTensors are called by all ranks, but a write to the local tensor may be this
        # rank's alone. A forward checks for those when it begins.
        held = [bucket for bucket in unit.buckets if bucket.cache_valid]
        rewritten = [b for b in held if b.versions()[1] != _gathered_at[b][1]]
        unit.drop_cache(self.runtime.streams, rewritten)
        # Before the gather, not after it: a write while it runs counts as a later one.
        for bucket in unit.buckets:
            if bucket.cached and not bucket.cache_valid:
                _gathered_at[bucket] = bucket.versions()


def choose_cached(units: Iterable[tuple[KeepFrozen, Sequence[Bucket]]]) -> set[Bucket]:
    """The buckets to keep gathered.

    Args:
        units: the limit of each unit that has one, and its buckets; in module order.
    """
    # Greedily in module order: the first units have nothing before them that could hide a gather.
    # The choice depends on sizes and frozen parameters, so all ranks choose the same buckets.
    used: dict[KeepFrozen, int] = {}
    chosen: set[Bucket] = set()
    for budget, buckets in units:
        for bucket in buckets:
            nbytes = bucket.gathered_bytes
            if not nbytes or any(param.sharded.requires_grad for param in bucket.params):
                continue
            total = used.get(budget, 0) + nbytes
            if budget.max_bytes is None or total <= budget.max_bytes:
                used[budget] = total
                chosen.add(bucket)
    return chosen


def set_keep_frozen_gathered(self: nn.Module, max_bytes: int | None = None) -> None:
    """Keep frozen parameters gathered across micro-batches and steps.

    They are gathered again only after one of their shards was written or loaded. Trained parameters
    of the same unit are gathered and freed as before.

    The frozen parameters of this module and its sharded submodules are selected unit by unit, in
    module order. A unit's frozen parameters are kept together if they fit. `reshard` frees a
    module's kept parameters until their next use. Writes through ``.data`` are not detected: after
    them, call `reshard` on the sharded module that the parameter belongs to.

    Args:
        max_bytes: limit on the bytes of kept parameters per rank, in the compute dtype. 0
            keeps nothing; None: no limit.

    Raises:
        ValueError: if ``max_bytes`` is negative.

    Example:
        >>> model.requires_grad_(False)  # freeze before sharding; then add adapters
        >>> ...
        >>> fully_shard(model)
        >>> model.set_keep_frozen_gathered(8 * 2**30)
    """
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
    registry.require(FrozenCache, "set_keep_frozen_gathered")
    budget = KeepFrozen(max_bytes)
    units = units_in(self)
    for unit in units:
        unit.config.keep_frozen = budget
    # Blocks that have run alone have separate runtimes.
    for runtime in dict.fromkeys(runtime_of(u) for u in units if u.runtime is not None):
        part = runtime.part(FrozenCache)
        if part is None:
            part = FrozenCache(runtime)
            runtime.add(part)
        part.choose()


registry.add(FrozenCache)
