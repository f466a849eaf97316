"""A limit on the bytes of gathered parameters in a tree: `FSDPModule.set_max_gathered_bytes`.

The budget counts the gathered storages of all units, with padding, from the start of their gather
until they are freed: units that compute, are prefetched or are kept, and kept frozen parameters. It
does not count shards, secondary shards (``reshard_after_forward=int``), gradients, and temporary
memory of collectives (copies of offloaded shards, flat buffers of custom collectives).

All ranks must make the same gathers, so decisions follow from program order, settings and shapes.
Parameters that were freed early count until their unit is freed: early freeing depends on
references, which differ between ranks.

[Note: what may be freed to make room]

A unit may be freed if users see its shards: a later use goes through a hook, which gathers it
again. So with a budget, the modules of units that stay gathered after their forward or backward
hold shards again. The outermost unit is an exception and stays, since losses may use its weights.
Units that were gathered to recompute activations may be freed if they are not on the stack:
backward enters each of them through a hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self

from torch import nn
from typing_extensions import override

from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.schedule import Lookahead
from ..runtime.states import GATHERED, RESHARDED, State
from ..runtime.torch_modes import modules_being_called
from ..runtime.unit import Forward, Unit, unit_of, units_in
from ..sharding.bucket import Bucket
from .tensor_subclasses.extension import ExtensionBucket

# How many units may be gathered ahead, if they fit. Looking further ahead in every hook would cost
# time, and more than this hides no more.
MAX_AHEAD = 32


class GatherBudgetError(RuntimeError):
    """Units do not fit into ``max_gathered_bytes``; the message names them.

    Attributes:
        least_bytes: the lowest limit that works, as far as this can be determined now.
    """

    def __init__(self, text: str, least_bytes: int) -> None:
        super().__init__(text)
        self.least_bytes = least_bytes


class GatherBudget(TreePart):
    """The units of a tree that are gathered, within a number of bytes.

    This is not a ring of fixed blocks. Storages stay the same from forward to backward, since
    autograd saves views of them, so each block would belong to one storage forever. Storages are
    resized instead, and the allocator gives the memory of one unit to the next, in the order of the
    stream of gathers. So memory use equals the sum of sizes that is counted here.
    """

    runtime: Runtime

    def __init__(self, runtime: Runtime, max_bytes: int) -> None:
        super().__init__(runtime)
        self.max_bytes = max_bytes
        self._units, self._streams = runtime.units, runtime.streams
        # Oldest gather first. Units freed since then are removed at the next read.
        self._gathered = {unit: None for unit in self._units if unit.state not in RESHARDED}
        self._caching = {u: None for u in self._units if u.config.keep_frozen is not None}
        self._ahead = _WithinBudget(self)

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        max_bytes = runtime.root.config.max_gathered_bytes
        if max_bytes is None:
            return None
        made = cls(runtime, max_bytes)
        made.begin()
        return made

    def begin(self) -> None:
        """
        Raises:
            GatherBudgetError: if more is gathered now and cannot be freed.
        """
        self._free_until(self.max_bytes, None)
        self.runtime.lookahead = self._ahead

    # -- events of the tree -----------------------------------------------------------------

    @override
    def before_planning(self, unit: Unit) -> None:
        self._make_room(unit)

    @override
    def before_gather(self, unit: Unit) -> None:
        if unit.config.keep_frozen is not None:
            self._caching[unit] = None
        self._make_room(unit)

    @override
    def unit_kept(self, unit: Unit, forward: Forward | None) -> None:
        """Let the unit's modules hold shards, so that it may be freed: see the note above."""
        runtime = self.runtime
        is_read = unit.step.running or unit.step.is_read_outside or runtime.backward.creates_graph
        if not is_read and runtime.schedule.root is not unit:
            unit.register_sharded()

    @override
    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        # Units that did not fit when this one began may fit now.
        runtime = self.runtime
        if not unit.forward_prefetch:
            self._ahead.gather(runtime.schedule.next(MAX_AHEAD))

    @override
    def backward_leaves(self, unit: Unit) -> None:
        self._ahead.gather(units_before(self._ahead.entered))

    @override
    def backward_ends(self) -> None:
        self._ahead.entered = None

    @override
    def tree_reset(self) -> None:
        self._ahead.entered = None

    # -- counting ---------------------------------------------------------------------------

    def held(self, *, excluding: Unit | None = None) -> dict[Unit, int]:
        """The bytes of each unit that holds any, ``excluding`` one; oldest gather first."""
        gathered = self._gathered
        for unit in [unit for unit in gathered if unit.state in RESHARDED]:
            del gathered[unit]
        found = {unit: bytes_of(unit.buckets) for unit in gathered if unit is not excluding}
        for unit in self._caching:
            if unit not in found and unit is not excluding:
                cached = bytes_of(bucket for bucket in unit.buckets if bucket.cache_valid)
                if cached:
                    found[unit] = cached
        return found

    def fits(self, unit: Unit) -> bool:
        """Whether ``unit`` can be gathered without freeing anything."""
        if unit.param_group.dirty or not unit.param_group.materialized:
            return False  # its size is unknown until it is planned
        total = sum(self.held(excluding=unit).values())
        return total + bytes_of(unit.buckets) <= self.max_bytes

    # -- making room ------------------------------------------------------------------------

    def _make_room(self, unit: Unit) -> None:
        """Free units until ``unit`` fits, whose gather begins.

        Raises:
            GatherBudgetError: if it does not.
        """
        needed = bytes_of(unit.buckets)
        self._free_until(self.max_bytes - needed, unit)
        self._gathered.pop(unit, None)
        self._gathered[unit] = None

    def _free_until(self, limit: int, needed: Unit | None) -> None:
        held = self.held(excluding=needed)
        total = sum(held.values())
        if total > limit:
            for unit in self._candidates(held, needed):
                total -= held.pop(unit)
                unit.reshard(self._streams)
                unit.drop_cache(self._streams)
                if total <= limit:
                    break
        if total > limit:
            raise self._too_small(needed, held)

    def _candidates(self, held: dict[Unit, int], needed: Unit | None) -> Iterator[Unit]:
        """Units that may be freed, in the reverse order of their next use."""
        # States change while this is iterated: all are checked before the first is freed.
        coming = [u for u in held if u.state is State.GATHERING and _is_unseen(u)]
        cached = [u for u in held if u.state in RESHARDED]
        kept = [u for u in held if u.state in GATHERED and self._may_free(u, needed)]
        # Unused prefetches, later units first.
        yield from reversed(coming)
        # Kept frozen parameters: first of units with other units before them, which can hide the
        # gather.
        yield from reversed(cached)
        # Units kept for backward, or recomputed: backward reaches the oldest last.
        yield from kept

    def _may_free(self, unit: Unit, needed: Unit | None) -> bool:
        """Whether ``unit``, which is gathered, is not in use: see the note above."""
        if unit.step.running or unit.step.backward_began or unit.step.is_read_outside:
            return False
        if self.runtime.backward.creates_graph:
            return False  # a second backward may read any of them
        if not unit.step.recomputed:
            return _is_unseen(unit)
        if needed is not None and unit in needed.enclosing:
            return False
        return modules_being_called().keys().isdisjoint(unit.modules)

    # -- messages ---------------------------------------------------------------------------

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
        phase = "backward" if self.runtime.in_backward else "forward"
        beside = f"together with {others}, which cannot be freed now" if others else "alone"
        return GatherBudgetError(
            f"Unit '{needed.name}' of {size} bytes cannot be gathered in {phase} within "
            f"max_gathered_bytes={self.max_bytes} {beside}. The least budget that works is {least} "
            f"bytes: call set_max_gathered_bytes({least}) on the root, or make smaller units",
            least,
        )

    def _why(self, unit: Unit) -> str:
        if unit.step.running:
            return "its forward is running"
        if unit.step.backward_began:
            return "its backward is not over"
        if self.runtime.backward.creates_graph:
            return "kept for a second backward"
        if unit.step.is_read_outside:
            return "its weight gradients are still to be computed"
        return "recomputing" if unit.step.recomputed else "its modules hold gathered parameters"

    def least_bytes(self) -> int:
        """Bytes of the largest unit together with the units around it."""
        sizes = {unit: bytes_of(unit.buckets) for unit in self._units}
        return max(sizes[u] + sum(map(sizes.__getitem__, u.enclosing)) for u in self._units)


class _WithinBudget(Lookahead):
    """Gathers ahead as deep as the budget allows.

    Attributes:
        entered: the forward that backward reached last.
    """

    depth = MAX_AHEAD

    def __init__(self, budget: GatherBudget) -> None:
        super().__init__(budget.runtime.streams)
        self._budget = budget
        self.entered: Forward | None = None

    @override
    def gather(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.state in GATHERED and (unit.step.running or unit.step.backward_began):
                break  # it is freed before it runs again, which needs the room that is left
            if unit.state in RESHARDED:
                if not self._budget.fits(unit):
                    break
                unit.start_unshard(self._streams)

    @override
    def in_backward(self, entered: Forward | None, before: Unit | None) -> None:
        self.entered = entered
        self.gather(units_before(entered))


class _BudgetSettings(UnitPart):
    """Checks that only a root has a limit, and that everything gathered can be freed."""

    @override
    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """
        Raises:
            RuntimeError: if a unit other than ``root`` has a limit, or if there is one and a unit
                keeps its memory when it is freed.
        """
        for unit in units:
            if unit is not root and unit.config.max_gathered_bytes is not None:
                raise RuntimeError(_ONLY_ROOTS_LIMIT.format(root.name, unit.name))
            if root.config.max_gathered_bytes is not None and unit.config.keep_unsharded_storage:
                raise RuntimeError(_KEEPS_AND_LIMITS.format(unit.name))

    @override
    def before_setting(self, unit: Unit, name: str, value: object) -> None:
        limited = unit.runtime is not None and runtime_of(unit).part(GatherBudget) is not None
        if limited and name == "keep_unsharded_storage" and value:
            raise RuntimeError(_KEEPS_AND_LIMITS.format(unit.name))


_ONLY_ROOTS_LIMIT = (
    "set_max_gathered_bytes must be called on the root FSDP module '{}', not on '{}': call it with "
    "None there"
)
_KEEPS_AND_LIMITS = (
    "Unit '{}' keeps the memory of gathered parameters when they are freed "
    "(set_keep_unsharded_storage), so max_gathered_bytes cannot limit it: use one of the two"
)


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
            # The class shows only in the first gather what it makes: until then, count the size of
            # a plain parameter.
            nbytes = sum(slot.full_numel for slot in bucket.layout.slots) * bucket.itemsizes[0]
        total += nbytes
    return total


def _is_unseen(unit: Unit) -> bool:
    """Whether the modules hold shards, though the unit is gathered."""
    return unit.registration.registered != "unsharded"


def set_max_gathered_bytes(self: nn.Module, max_bytes: int | None) -> None:
    """Limit the bytes of gathered parameters in this tree, at any moment of a step.

    Units are gathered ahead as far as the limit allows; other units are gathered when memory has
    been freed. A unit that is needed makes room. It first frees unused prefetches, then kept frozen
    parameters (`set_keep_frozen_gathered`), then parameters kept for backward or between
    micro-batches, which are gathered again later.

    To make this possible, modules other than the root hold sharded parameters whenever they do not
    compute, even with ``reshard_after_forward=False``. Call this on the root, between steps.

    The limit counts unsharded parameters with padding, in the compute dtype. It does not count
    shards (nor larger shards of ``reshard_after_forward=int``), gradients, activations, and buffers
    of a collective in progress.

    Args:
        max_bytes: bytes per rank; equal on all ranks. None: no limit.

    Raises:
        ValueError: if ``max_bytes`` is not positive.
        TypeError: if ``max_bytes`` is not an int.
        RuntimeError: if this is not the root; if gathered parameters keep their memory
            (`set_keep_unsharded_storage`); or if more is gathered now and cannot be freed. Also
            during a step, if a unit does not fit; the message has the lowest limit that works.

    Example:
        >>> model.set_max_gathered_bytes(2 * 2**30)
    """
    if max_bytes is not None:
        checked_budget("max_bytes", max_bytes)
    registry.require(GatherBudget, "set_max_gathered_bytes")
    unit = unit_of(self)
    if unit.runtime is not None:
        runtime = runtime_of(unit)
        if runtime.root is not unit:
            raise RuntimeError(_ONLY_ROOTS_LIMIT.format(runtime.root.name, unit.name))
        keeping = [u for u in units_in(self) if u.config.keep_unsharded_storage]
        if max_bytes is not None and keeping:
            raise RuntimeError(_KEEPS_AND_LIMITS.format(keeping[0].name))
        _limit(runtime, max_bytes)
    unit.config.max_gathered_bytes = max_bytes


def checked_budget(name: str, nbytes: object) -> None:
    """Check a number of bytes.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is not positive.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        raise TypeError(f"{name} must be an int or None, got {nbytes!r}")
    if nbytes < 1:
        raise ValueError(f"{name} must be positive, got {nbytes}")


def _limit(runtime: Runtime, max_bytes: int | None) -> None:
    made = None if max_bytes is None else GatherBudget(runtime, max_bytes)
    if made is not None:
        made.begin()  # may raise: then the former limit stays
    before = runtime.part(GatherBudget)
    if before is not None:
        runtime.remove(before)
    if made is not None:
        runtime.add(made)
    else:
        runtime.lookahead = Lookahead(runtime.streams)


registry.add(GatherBudget)
registry.add(_BudgetSettings())
