"""Receives the events of units during a profile: each event writes a record or two.

A unit has around twenty events and eight samples of memory in a step. So there is one Python
function per event, which keeps nothing that can be computed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self, cast

from typing_extensions import override

from ..comm.transports import Finish, Transport, done
from ..features.secondary_shards import SecondaryShards
from ..runtime.events import TreePart
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..runtime.states import State
from ..runtime.unit import Forward, Unit
from ..sharding.bucket import Bucket
from ..sharding.gradients import ReducePlan
from . import log as kinds
from .events import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from .log import FIVE, FIVE_MARKED, KINDS, MARKED, NUMBER, OPERATION, UNKNOWN, WAITED, Log
from .memory import NOTHING, accumulated_bytes

_MARKED, _NUMBER, _FIVE, _CHANGED = MARKED.pack, NUMBER.pack, FIVE.pack, FIVE_MARKED.pack
_OPERATION, _WAITED = OPERATION.pack, WAITED.pack
_SECONDARY = State.SECONDARY

Sizes = tuple[int, int, int]  # ranks, bytes of the whole, bytes sent


class Watcher(Protocol):
    """What taps need of a recorder, in rare cases only."""

    taps: dict[Unit, UnitTap]
    log: Log

    def size_gather(self, unit: Unit, held: tuple[Bucket, ...], secondary: bool) -> Sizes: ...

    def size_reduction(
        self, unit: Unit, bucket: Bucket, plan: ReducePlan
    ) -> tuple[tuple[int, int], tuple[int, int]]: ...


class UnitTap:
    """The state of one unit during a profile.

    Args:
        number: of the unit, in the records.

    Attributes:
        pending: where the record of the gather in flight begins; -1: there is none.
        launching: what the record of the gather that is being launched needs.
        waiting: ``pending`` of the gather that compute waits for, and since when.
        sizes: of gathers of the buckets ``planned``, by the buckets that they leave out;
            ``reductions``: of reductions, by plan.
        accumulated: bytes of gradients that a backward has left without reducing them.
        changes_at_borders: whether memory is sampled as compute enters the unit: on devices, and
            where some gathered parameters are freed early.
        took: whether the memory of reductions has changed since the last sample.
        operations: codes of the unit's operations in forward, by kind; one more: in backward.
    """

    def __init__(self, recorder: Watcher, log: Log, unit: Unit, number: int) -> None:
        self.recorder, self.log, self.unit = recorder, log, unit
        self.pending = -1
        self.launching: tuple[Any, ...] = ()
        self.waiting = (-1, 0.0)
        self.param_group = unit.param_group
        self.planned: list[Bucket] = []
        self.sizes: dict[tuple[Any, ...], Sizes] = {}
        self.reductions: dict[ReducePlan, Any] = {}
        self._parts: tuple[int, ...] = NOTHING
        self.took = False
        self.accumulated = 0
        self.changes_at_borders = True
        code = number * KINDS
        self.number, self.code = number, code
        self._sample, self._all_parts, self._change, self.take = (
            code + kind for kind in (kinds.SAMPLE, kinds.PARTS, kinds.CHANGED, kinds.TAKE)
        )
        self.enter_forward, self.leave_forward = code, code + kinds.LEAVE_FORWARD
        self.enter_recompute = code + kinds.ENTER_RECOMPUTE
        self.leave_recompute = code + kinds.LEAVE_RECOMPUTE
        self.enter_backward = code + kinds.ENTER_BACKWARD
        self.leave_backward = code + kinds.LEAVE_BACKWARD
        self.operations = {kind: code + first for kind, first in kinds.OPERATIONS.items()}
        self.gather_code = self.operations[ALL_GATHER]
        self.wait, self.wait_to_end = code + kinds.WAIT, code + kinds.WAIT_TO_END

    def prepare(self) -> None:
        """Before the first step: compute in advance what the step would have to compute."""
        unit, group, recorder = self.unit, self.param_group, self.recorder
        self.follow_plan()
        self.sizes[(), False] = recorder.size_gather(unit, (), False)
        for (index, *_), plan in group.reduce_plans.items():
            bucket = group.buckets[index]
            self.reductions[plan] = recorder.size_reduction(unit, bucket, plan)
        self.sample(only_measure=True)

    def follow_plan(self) -> None:
        """The unit was planned anew, and gathers have other sizes."""
        self.planned = buckets = self.param_group.buckets
        self.sizes.clear()
        # Elsewhere, only reductions, which are sampled, change the unit's memory between two of its
        # gathers and frees; and units with neither have no memory.
        in_pieces = any(b.gathered is not None and len(b.gathered.storages) > 1 for b in buckets)
        self.changes_at_borders = self.log.often or in_pieces

    # -- memory -----------------------------------------------------------------------------

    def sample(self, *, only_measure: bool = False) -> None:
        """Record changes of the unit's memory, and the time."""
        shards = grads = gathered = secondary = 0
        unreduced = self.accumulated
        for bucket in self.param_group.buckets:
            if bucket.shard_device == bucket.device:  # else in host memory
                shards += bucket.shards.nbytes
                if bucket.grads is not None:
                    grads += bucket.grads.storage.nbytes()
            if bucket.gathered is not None:
                for storage in bucket.gathered.storages:
                    gathered += storage.nbytes()
                if bucket.gathered.secondary is not None:
                    secondary += cast(SecondaryShards, bucket.gathered.secondary).nbytes
            if bucket.partial.flat is not None:
                unreduced += bucket.partial.flat.nbytes
        log, parts = self.log, (shards, grads, gathered, secondary, unreduced)
        changed = parts != self._parts
        self._parts = parts
        if only_measure:
            if changed:
                log.write(_FIVE(self._all_parts, *parts))
            return
        log.samples += 1
        log.noted = self
        mark = log.mark()
        due = mark >= log.next_total
        if due:
            log.read_total(mark)
        # Writing a record costs more than finding out that nothing has changed.
        if changed:
            log.write(_CHANGED(self._change, *parts, mark))
        elif due or log.often or self.took:
            log.write(_MARKED(self._sample, mark))
        self.took = False


class TimedTransport:
    """The transport of one reduction, which records the one call that it gets.

    Args:
        sizes: bytes of the whole, and bytes sent.

    Attributes:
        record: where the record of that call begins; -1: there was none, or it raised.
    """

    def __init__(
        self, transport: Transport, tap: UnitTap, kind: str, sizes: tuple[int, int]
    ) -> None:
        self._transport, self._tap, self._sizes = transport, tap, sizes
        self._kind = kind
        scatters = kind == REDUCE_SCATTER
        self._launch = transport.reduce_scatter if scatters else transport.all_reduce
        self.out_dtype = transport.out_dtype  # asked of each; `__getattr__` would be a call more
        self.record = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _timed(self, *args: Any) -> Finish:
        tap = self._tap
        log, runtime = tap.log, tap.unit.runtime
        code = tap.operations[self._kind] + runtime.in_backward
        launched, begin, end = log.host(), log.mark(), UNKNOWN
        finish = self._launch(*args)
        if finish is done:  # on a stream
            end = log.mark()
        launch_s = log.host() - launched
        self.record = log.tell()
        ranks = self._transport.group.size()
        log.write(_OPERATION(code, ranks, *self._sizes, launched, launch_s, begin, end))
        if finish is done:
            return done
        self._launched = finish
        return self._finish

    # A reduction calls the one of them that is its kind.
    reduce_scatter = all_reduce = _timed

    def _finish(self) -> None:
        tap = self._tap
        log = tap.log
        begin = log.mark()
        self._launched()
        log.write(_WAITED(tap.wait_to_end, self.record, begin, log.mark()))


class TreeTap(TreePart):
    """Records a tree's events of the units that are profiled.

    Attributes:
        recorder: the profile's recorder, an attribute of the subclass that is made for it.
    """

    recorder: ClassVar[Watcher]
    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._log, self._streams = self.recorder.log, runtime.streams
        self._taps = {u: tap for u in runtime.units if (tap := self.recorder.taps.get(u))}
        self._inside: Unit | None = None  # the outermost one that is profiled, in a forward
        self._samples = 0  # when the last forward had computed
        self._in_flight: dict[Reduction, tuple[UnitTap, list[TimedTransport]]] = {}
        self._completing = 0.0
        self._number = next(iter(self._taps.values())).number
        for tap in self._taps.values():
            self._log.write(_NUMBER(tap.code + kinds.RUNTIME, self._number))
            if tap.unit.param_group.materialized:  # else the next gather plans it anew
                tap.prepare()

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(unit in cls.recorder.taps for unit in runtime.units) else None

    # -- forward ----------------------------------------------------------------------------

    @override
    def forward_begins(self, unit: Unit) -> None:
        tap, log, runtime = self._taps.get(unit), self._log, self.runtime
        if tap is None:
            return
        mark = log.mark()
        if runtime.in_backward:
            log.write(_MARKED(tap.enter_recompute, mark))
        else:
            # The forward of a root, or of the outermost unit that is profiled.
            root = runtime.schedule.root
            if root is unit or (self._inside is None and root not in self._taps):
                self._inside = unit
                log.write(_MARKED(kinds.ROOT, mark))
                for other in self._taps.values():  # gradients may have been dropped
                    other.sample(only_measure=True)
            log.write(_MARKED(tap.enter_forward, mark))
        if tap.changes_at_borders:
            tap.sample()

    @override
    def forward_computed(self, unit: Unit) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is None:
            return
        self._samples = log.samples
        if self.runtime.in_backward:
            log.write(_MARKED(tap.leave_recompute, log.mark()))
            tap.sample()
        else:
            log.write(_MARKED(tap.leave_forward, log.mark()))

    @override
    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        tap, log = self._taps.get(unit), self._log
        if self._inside is unit and not unit.step.running:
            self._inside = None
        if tap is not None and (log.samples == self._samples or log.noted is not tap):
            tap.sample()

    # -- gathers ----------------------------------------------------------------------------

    @override
    def before_gather(self, unit: Unit) -> None:
        tap, log, streams = self._taps.get(unit), self._log, self._streams
        if tap is None:
            return
        buckets = tap.param_group.buckets
        if tap.planned is not buckets:
            tap.follow_plan()
        held: tuple[Bucket, ...] = ()
        for bucket in buckets:
            if bucket.cache_valid:
                held = (*held, bucket)
        if streams.stream_ordered:
            # Marks on the gather stream, before and after.
            with streams.gathering():
                tap.launching = ((held, unit.state is _SECONDARY), log.host(), log.mark())
        else:
            tap.launching = ((held, unit.state is _SECONDARY), log.host(), log.mark())

    @override
    def gather_started(self, unit: Unit) -> None:
        tap, log, streams = self._taps.get(unit), self._log, self._streams
        if tap is None:
            return
        what, launched, begin = tap.launching
        end = UNKNOWN
        if streams.stream_ordered:
            with streams.gathering():
                end = log.mark()
        launch_s = log.host() - launched
        sizes = tap.sizes.get(what)
        if sizes is None:
            sizes = tap.sizes[what] = self.recorder.size_gather(unit, *what)
        if sizes[0]:
            tap.pending = log.tell()
            code = tap.gather_code + self.runtime.in_backward
            log.write(_OPERATION(code, *sizes, launched, launch_s, begin, end))
        tap.sample()

    @override
    def before_wait(self, unit: Unit) -> None:
        tap = self._taps.get(unit)
        if tap is not None:
            tap.waiting = (tap.pending, self._log.mark())
            tap.pending = -1

    @override
    def gathered(self, unit: Unit) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is not None and tap.waiting[0] >= 0:
            code = tap.wait if self._streams.stream_ordered else tap.wait_to_end
            log.write(_WAITED(code, *tap.waiting, log.mark()))

    @override
    def resharded(self, unit: Unit) -> None:
        tap = self._taps.get(unit)
        if tap is not None:
            tap.sample()

    # -- backward ---------------------------------------------------------------------------

    @override
    def backward_enters(
        self, unit: Unit, forward: Forward | None, accumulates: bool | None
    ) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is not None:
            log.write(_MARKED(tap.enter_backward, log.mark()))
            if tap.changes_at_borders:
                tap.sample()

    @override
    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is None:
            return
        for reduction in reductions:
            scatter, replicate = reduction.scatter, reduction.replicate
            if scatter is None and replicate is None:
                continue
            sizes = tap.reductions.get(reduction.plan)
            if sizes is None:
                sizes = self.recorder.size_reduction(unit, reduction.bucket, reduction.plan)
                tap.reductions[reduction.plan] = sizes
            timed = []
            if scatter is not None:
                reduction.scatter = TimedTransport(scatter, tap, REDUCE_SCATTER, sizes[0])
                timed.append(reduction.scatter)
            if replicate is not None:
                reduction.replicate = TimedTransport(replicate, tap, ALL_REDUCE, sizes[1])
                timed.append(reduction.replicate)
            self._in_flight[reduction] = tap, timed
            log.write(_NUMBER(tap.take, reduction.nbytes))
            tap.took = True

    @override
    def after_reduce(self, unit: Unit, direct_only: bool) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is None:
            return
        if not direct_only:
            # A unit whose inputs need no gradient ends with its last gradient.
            log.write(_MARKED(tap.leave_backward, log.mark()))
        reduces = unit.config.reduce_grads and not self.runtime.held_open
        tap.accumulated = 0 if reduces else accumulated_bytes(unit)
        tap.sample()

    @override
    def before_completion(self, unit: Unit, reduction: Reduction) -> None:
        self._completing = self._log.mark()

    @override
    def reduction_completed(self, unit: Unit, reduction: Reduction) -> None:
        if reduction not in self._in_flight:
            return
        log = self._log
        tap, timed = self._in_flight.pop(reduction)
        if self._streams.stream_ordered:
            launched = max(each.record for each in timed)
            if launched >= 0:
                log.write(_WAITED(tap.wait, launched, self._completing, log.mark()))
        log.write(_NUMBER(tap.take, -reduction.nbytes))
        tap.took = True
        tap.sample()

    @override
    def backward_leaves(self, unit: Unit) -> None:
        tap, log = self._taps.get(unit), self._log
        if tap is not None:
            log.write(_MARKED(tap.leave_backward, log.mark()))
            if log.noted is not tap:
                tap.sample()

    @override
    def backward_ends(self) -> None:
        self._log.write(_MARKED(self._number * KINDS + kinds.END_BACKWARD, self._log.mark()))

    @override
    def tree_reset(self) -> None:
        for reduction, (tap, _) in self._in_flight.items():
            self._log.write(_NUMBER(tap.take, -reduction.nbytes))
        self._in_flight.clear()
        for tap in self._taps.values():
            tap.pending = -1
        self._inside = None
        self._log.write(kinds.CODE.pack(self._number * KINDS + kinds.RESET))
