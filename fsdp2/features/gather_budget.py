"""A limit on the bytes of gathered parameters in a tree: `FSDPModule.set_max_gathered_bytes`.

Counted are the gathered storages of all units, with padding, from the start of their gather until
they are freed: of units that compute, are prefetched or are kept, and of kept frozen parameters.
Not counted: shards, secondary shards (``reshard_after_forward=int``), gradients, and what a
collective allocates for its own run (copies of offloaded shards, flat buffers of custom
collectives).

All ranks must make the same gathers, so decisions follow from program order, settings and shapes.
What was freed early counts until its unit is freed: references, which one rank knows, decide that.

[Note: what may be freed to make room]
Whatever users see as shards: a later use goes through a hook, which gathers it again. So with a
budget, the modules of units that stay gathered after their forward or backward hold shards again.
Those of the outermost unit do not, since losses may use its weights: it stays. Of units that were
gathered to recompute activations, those that are not on the stack go: backward enters each of them
through a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..comm.streams import Streams
from ..runtime.forwards import modules_being_called
from ..runtime.states import GATHERED, RESHARDED, State
from ..runtime.unit import Forward, TreeRuntime, Unit
from ..sharding.bucket import Bucket
from .tensor_subclasses.extension import ExtensionBucket

# How many units may be gathered ahead, if they fit. Looking further ahead in every hook would cost
# time, and more than this hides no more.
MAX_AHEAD = 32


class GatherBudgetError(RuntimeError):
    """Units do not fit into ``max_gathered_bytes``: names them.

    Attributes:
        least_bytes: the least limit that works, as far as this moment tells.
    """

    def __init__(self, text: str, least_bytes: int) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class GatherBudget:
    """The units of a tree that are gathered, within a number of bytes.

    No ring of fixed blocks: storages stay the same from forward to backward, since autograd saves
    views of them, so a block would have to be a storage's for good. They are resized instead, and
    the allocator gives the memory that one unit frees to the next one, in the order of the stream
    of gathers: the sum of sizes, which is counted here, is all that is taken from it.
    """

    def __init__(self, max_bytes: int, runtime: TreeRuntime, units: Sequence[Unit]) -> None:
        self.max_bytes = max_bytes
        self._runtime = runtime
        self._units = units
        # Oldest gather first. Those that were freed since are taken out when it is next read.
        self._gathered = {unit: None for unit in units if unit.state not in RESHARDED}
        self._caching: list[Unit] = []
        self.follow_cached()

    def follow_cached(self) -> None:
        """Note which units may keep frozen parameters gathered."""
        self._caching = [unit for unit in self._units if unit.config.keep_frozen is not None]

    # -- counting ---------------------------------------------------------------------------

    def held(self, *, beside: Unit | None = None) -> dict[Unit, int]:
        """The bytes of each unit that holds any, beside one; oldest gather first."""
        gathered = self._gathered
        for unit in [unit for unit in gathered if unit.state in RESHARDED]:
            del gathered[unit]
        found = {unit: bytes_of(unit.buckets) for unit in gathered if unit is not beside}
        for unit in self._caching:
            if unit not in found and unit is not beside:
                cached = bytes_of(bucket for bucket in unit.buckets if bucket.cache_valid)
                if cached:
                    found[unit] = cached
        return found

    def fits(self, unit: Unit) -> bool:
        """Whether ``unit`` can be gathered without freeing anything."""
        if unit.param_group.dirty or not unit.param_group.materialized:
            return False  # how large it will be is known when it is planned
        total = sum(self.held(beside=unit).values())
        return total + bytes_of(unit.buckets) <= self.max_bytes

    def gather_ahead(self, units: Iterable[Unit], streams: Streams) -> None:
        """Gather ``units``, which are expected in this order, as far as they fit."""
        for unit in units:
            if unit.state in GATHERED and (unit.running or unit.backward_began):
                break  # it is freed before it runs again, which needs the room that is left
            if unit.state in RESHARDED:
                if not self.fits(unit):
                    break
                unit.start_unshard(streams)

    # -- making room ------------------------------------------------------------------------

    def make_room(self, unit: Unit, streams: Streams) -> None:
        """Free what may be freed until ``unit``, whose gather begins, fits.

        Raises:
            GatherBudgetError: if it does not.
        """
        needed = bytes_of(unit.buckets)
        self._free_until(self.max_bytes - needed, unit, streams)
        self._gathered.pop(unit, None)
        self._gathered[unit] = None

    def shrink(self, streams: Streams) -> None:
        """Free what may be freed until all that is gathered fits.

        Raises:
            GatherBudgetError: if it does not.
        """
        self._free_until(self.max_bytes, None, streams)

    def _free_until(self, limit: int, needed: Unit | None, streams: Streams) -> None:
        held = self.held(beside=needed)
        total = sum(held.values())
        if total > limit:
            for unit in self._candidates(held, needed):
                total -= held.pop(unit)
                unit.reshard(streams)
                unit.drop_cache(streams)
                if total <= limit:
                    break
        if total > limit:
            raise self._too_small(needed, held)

    def _candidates(self, held: dict[Unit, int], needed: Unit | None) -> Iterator[Unit]:
        """What may be freed: what is needed last comes first."""
        # States change while this is read: all are looked at before the first is freed.
        coming = [u for u in held if u.state is State.GATHERING and _is_unseen(u)]
        cached = [u for u in held if u.state in RESHARDED]
        kept = [u for u in held if u.state in GATHERED and self._may_free(u, needed)]
        # Unused prefetches, those for later units first.
        yield from reversed(coming)
        # Kept frozen parameters: first those of units that have others before them to compute
        # meanwhile.
        yield from reversed(cached)
        # What is kept for backward, or was recomputed: backward comes to the oldest last.
        yield from kept

    def _may_free(self, unit: Unit, needed: Unit | None) -> bool:
        """Whether ``unit``, which is gathered, is not in use: see the note above."""
        if unit.running or unit.backward_began or unit.weight_grads_deferred:
            return False
        if self._runtime.creates_graph:
            return False  # a second backward may read any of them
        if not unit.recomputed:
            return _is_unseen(unit)
        if needed is not None and unit in needed.enclosing:
            return False
        return modules_being_called().keys().isdisjoint(unit.modules)

    # -- what to say ------------------------------------------------------------------------

    def _too_small(self, needed: Unit | None, held: dict[Unit, int]) -> GatherBudgetError:
        others = ", ".join(f"'{u.name}' ({n} bytes, {self._why(u)})" for u, n in held.items())
        total = sum(held.values())
        if needed is None:
            return GatherBudgetError(
                f"max_gathered_bytes is {self.max_bytes}, but {total} bytes are gathered and cannot"
                f" be freed now: {others}. Set it between steps, after reshard() of what was "
                "gathered by hand",
                total,
            )
        size = bytes_of(needed.buckets)
        least = max(total + size, self.least_bytes())
        phase = "backward" if self._runtime.in_backward else "forward"
        beside = f"beside {others}, which cannot be freed now" if others else "alone"
        return GatherBudgetError(
            f"Unit '{needed.name}' of {size} bytes cannot be gathered in {phase} within "
            f"max_gathered_bytes={self.max_bytes} {beside}. The least budget that works is {least} "
            f"bytes: call set_max_gathered_bytes({least}) on the root, or make smaller units",
            least,
        )

    def _why(self, unit: Unit) -> str:
        if unit.running:
            return "its forward is running"
        if unit.backward_began:
            return "its backward is not over"
        if self._runtime.creates_graph:
            return "kept for a second backward"
        if unit.weight_grads_deferred:
            return "its weight gradients are still to be computed"
        return "recomputing" if unit.recomputed else "its modules hold gathered parameters"

    def least_bytes(self) -> int:
        """What the largest unit needs together with the units around it."""
        sizes = {unit: bytes_of(unit.buckets) for unit in self._units}
        return max(sizes[u] + sum(map(sizes.__getitem__, u.enclosing)) for u in self._units)


def units_before(forward: Forward | None) -> list[Unit]:
    """The units that backward is expected to reach after ``forward``, as far as one looks ahead."""
    found: list[Unit] = []
    before = None if forward is None else forward.previous
    while before is not None and not before.entered and len(found) < MAX_AHEAD:
        if before.unit.config.unshard_in_backward:
            found.append(before.unit)
        before = before.previous
    return found


def bytes_of(buckets: Iterable[Bucket]) -> int:
    """Bytes of the gathered storages of ``buckets``; the same on all ranks."""
    total = 0
    for bucket in buckets:
        nbytes = bucket.gathered_bytes
        if not nbytes and isinstance(bucket, ExtensionBucket):
            # The class says only in the first gather what it makes: until then, what a plain
            # parameter would take.
            nbytes = sum(slot.full_numel for slot in bucket.layout.slots) * bucket.itemsizes[0]
        total += nbytes
    return total


def _is_unseen(unit: Unit) -> bool:
    """Whether the modules hold shards, though the unit is gathered."""
    return unit.registration.registered != "unsharded"
