"""What replaces methods of units and their runtime during a profile: each calls its original and
writes a record or two.

Around twenty of these calls and eight samples of memory are what a unit costs in a step. So there
is one Python function per call, which keeps nothing that it could look up afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import nn

from ..comm.streams import Streams
from ..comm.transports import Finish, Transport, done
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..runtime.states import State
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.plans import ReducePlan
from . import log as kinds
from .events import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from .log import FIVE, FIVE_MARKED, KINDS, MARKED, NUMBER, OPERATION, UNKNOWN, WAITED, Log
from .memory import NOTHING, accumulated_bytes
from .patches import Patches

_MARKED, _NUMBER, _FIVE, _CHANGED = MARKED.pack, NUMBER.pack, FIVE.pack, FIVE_MARKED.pack
_OPERATION, _WAITED = OPERATION.pack, WAITED.pack
_SECONDARY = State.SECONDARY

Sizes = tuple[int, int, int]  # ranks, bytes of the whole, bytes sent


class Watcher(Protocol):
    """What taps need of a recorder, in rare cases only."""

    taps: dict[Unit, UnitTap]
    inside: UnitTap | None  # the outermost one that is profiled, in a forward

    def watch(self, runtime: Runtime) -> None: ...

    def begin_forward(self, tap: UnitTap, mark: float) -> None: ...

    def size_gather(self, unit: Unit, held: tuple[Bucket, ...], secondary: bool) -> Sizes: ...

    def size_reduction(
        self, unit: Unit, bucket: Bucket, plan: ReducePlan
    ) -> tuple[tuple[int, int], tuple[int, int]]: ...


class UnitTap:
    """Records one unit.

    Args:
        number: of the unit, in the records.

    Attributes:
        runtime: the unit's runtime, as far as it is watched.
        pending: where the record of the gather begins that is on its way; -1: none is.
        accumulated: bytes of gradients that a backward has left, and not reduced.
        changes_at_borders: whether memory is sampled as compute enters the unit: on devices, and
            where parts of what was gathered are freed by themselves.
        operations: codes of the unit's operations in forward, by kind; one more: in backward.
    """

    def __init__(self, recorder: Watcher, log: Log, unit: Unit, number: int) -> None:
        self.recorder, self.log, self.unit = recorder, log, unit
        self.runtime: Any = None
        self.pending = -1
        self._param_group = unit.param_group
        self._planned: list[Bucket] = []  # what the sizes are of
        self._sizes: dict[tuple[Any, ...], Sizes] = {}
        self._reductions: dict[ReducePlan, Any] = {}
        self._parts: tuple[int, ...] = NOTHING
        self._took = False  # whether what reductions hold has changed since the last sample
        self.accumulated = 0
        self.changes_at_borders = True
        code = number * KINDS
        self.number, self.code = number, code
        self._sample, self._all_parts, self._change, self._take = (
            code + kind for kind in (kinds.SAMPLE, kinds.PARTS, kinds.CHANGED, kinds.TAKE)
        )
        self.enter_forward, self.leave_forward = code, code + kinds.LEAVE_FORWARD
        self.enter_recompute = code + kinds.ENTER_RECOMPUTE
        self.leave_recompute = code + kinds.LEAVE_RECOMPUTE
        self.enter_backward = code + kinds.ENTER_BACKWARD
        self.leave_backward = code + kinds.LEAVE_BACKWARD
        self.operations = {kind: code + first for kind, first in kinds.OPERATIONS.items()}
        self._gather_code = self.operations[ALL_GATHER]
        self._wait, self.wait_to_end = code + kinds.WAIT, code + kinds.WAIT_TO_END

    def install(self, patches: Patches) -> None:
        """Replace the unit's methods, until ``patches`` are undone."""
        unit = self.unit
        self._start_unshard, self._wait_unshard = unit.start_unshard, unit.wait_unshard
        self._reshard, self._gather = unit.reshard, unit.hooks._gather  # type: ignore[attr-defined]
        self._make_reductions = unit.gradients.make_reductions
        patches.set(unit, "start_unshard", self.start_unshard)
        patches.set(unit, "wait_unshard", self.wait_unshard)
        patches.set(unit, "reshard", self.reshard)
        patches.set(unit.hooks, "_gather", self.forward_begins)
        patches.set(unit.hooks, "marks_all", True)
        patches.set(unit.gradients, "make_reductions", self.make_reductions)

    def prepare(self) -> None:
        """Before the first step: what it would have to work out otherwise."""
        unit, group, recorder = self.unit, self._param_group, self.recorder
        self._follow_plan()
        self._sizes[(), False] = recorder.size_gather(unit, (), False)
        for (index, *_), plan in group.reduce_plans.items():
            bucket = group.buckets[index]
            self._reductions[plan] = recorder.size_reduction(unit, bucket, plan)
        self.sample(only_measure=True)

    def _follow_plan(self) -> None:
        self._planned = buckets = self._param_group.buckets
        # Elsewhere, all that changes the unit's memory between two of its gathers and frees is a
        # reduction, which is sampled; and units with neither have no memory of their own.
        in_pieces = any(b.gathered is not None and len(b.gathered.storages) > 1 for b in buckets)
        self.changes_at_borders = self.log.often or in_pieces

    # -- memory -----------------------------------------------------------------------------

    def sample(self, *, only_measure: bool = False) -> None:
        """Record what has changed of the unit's memory, and when this was."""
        shards = grads = gathered = secondary = 0
        unreduced = self.accumulated
        for bucket in self._param_group.buckets:
            if bucket.shard_device == bucket.device:  # else in host memory
                shards += bucket.shards.nbytes
                if bucket.grads is not None:
                    grads += bucket.grads.storage.nbytes()
            if bucket.gathered is not None:
                for storage in bucket.gathered.storages:
                    gathered += storage.nbytes()
            if bucket.secondary is not None:
                secondary += bucket.secondary.storage.nbytes()
            if bucket.partial is not None:
                unreduced += bucket.partial.nbytes
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
        # To write a record costs more than to find out that it would say nothing new.
        if changed:
            log.write(_CHANGED(self._change, *parts, mark))
        elif due or log.often or self._took:
            log.write(_MARKED(self._sample, mark))
        self._took = False

    # -- forward and gathers ----------------------------------------------------------------

    def forward_begins(self, module: nn.Module) -> None:
        log = self.log
        mark = log.mark()
        self._gather(module)
        runtime: Any = self.unit.runtime
        if runtime is not self.runtime:
            self.recorder.watch(runtime)
        if runtime.in_backward:
            log.write(_MARKED(self.enter_recompute, mark))
        else:
            # The forward of a root, or of the outermost unit that is profiled.
            recorder, root = self.recorder, runtime.schedule.root
            if root is self.unit or (recorder.inside is None and root not in recorder.taps):
                recorder.begin_forward(self, mark)
            log.write(_MARKED(self.enter_forward, mark))
        if self.changes_at_borders:
            self.sample()

    def start_unshard(self, streams: Streams) -> None:
        unit, log = self.unit, self.log
        held: tuple[Bucket, ...] = ()
        for bucket in self._param_group.buckets:
            if bucket.cache_valid:
                held = (*held, bucket)
        secondary, end = unit.state is _SECONDARY, UNKNOWN
        backward = unit.runtime is not None and unit.runtime.in_backward
        if streams.stream_ordered:
            # Marks on the gather stream, before and after.
            with streams.gathering():
                launched, begin = log.host(), log.mark()
            self._start_unshard(streams)
            with streams.gathering():
                end = log.mark()
        else:
            launched, begin = log.host(), log.mark()
            self._start_unshard(streams)
        launch_s = log.host() - launched
        if self._planned is not self._param_group.buckets:  # planned anew
            self._follow_plan()
            self._sizes.clear()
        sizes = self._sizes.get((held, secondary))
        if sizes is None:
            sizes = self.recorder.size_gather(unit, held, secondary)
            self._sizes[held, secondary] = sizes
        if sizes[0]:
            self.pending = log.tell()
            code = self._gather_code + backward
            log.write(_OPERATION(code, *sizes, launched, launch_s, begin, end))
        self.sample()

    def wait_unshard(self, streams: Streams) -> None:
        log, pending = self.log, self.pending
        self.pending = -1
        begin = log.mark()
        self._wait_unshard(streams)
        if pending >= 0:
            code = self._wait if streams.stream_ordered else self.wait_to_end
            log.write(_WAITED(code, pending, begin, log.mark()))

    def reshard(self, *args: Any, **kwargs: Any) -> None:
        self._reshard(*args, **kwargs)
        self.sample()

    # -- reductions -------------------------------------------------------------------------

    def make_reductions(self, *args: Any, **kwargs: Any) -> list[Reduction]:
        made = self._make_reductions(*args, **kwargs)
        log = self.log
        for reduction in made:
            scatter, replicate = reduction.scatter, reduction.replicate
            if scatter is None and replicate is None:
                continue
            sizes = self._reductions.get(reduction.plan)
            if sizes is None:
                sizes = self.recorder.size_reduction(self.unit, reduction.bucket, reduction.plan)
                self._reductions[reduction.plan] = sizes
            timed = []
            if scatter is not None:
                reduction.scatter = TimedTransport(scatter, self, REDUCE_SCATTER, sizes[0])
                timed.append(reduction.scatter)
            if replicate is not None:
                reduction.replicate = TimedTransport(replicate, self, ALL_REDUCE, sizes[1])
                timed.append(reduction.replicate)
            own = vars(reduction)
            own["complete"] = partial(self.end_reduction, reduction, "complete", timed)
            own["discard"] = partial(self.end_reduction, reduction, "discard", timed)
            log.write(_NUMBER(self._take, reduction.nbytes))
            self._took = True
        return made

    def end_reduction(
        self, reduction: Reduction, name: str, timed: list[TimedTransport], streams: Streams
    ) -> Any:
        # First, so that this profile leaves no references to the reduction.
        del reduction.complete, reduction.discard
        log, nbytes = self.log, reduction.nbytes
        begin = log.mark()
        result = getattr(reduction, name)(streams)
        if streams.stream_ordered:
            launched = max(each.record for each in timed)
            if launched >= 0:
                log.write(_WAITED(self._wait, launched, begin, log.mark()))
        log.write(_NUMBER(self._take, -nbytes))
        self._took = True
        self.sample()
        return result


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


class RuntimeTap:
    """Records what a runtime tells of units; of those that are not profiled nothing."""

    def __init__(self, recorder: Watcher, log: Log, runtime: Runtime, number: int) -> None:
        self._recorder, self._log, self._runtime = recorder, log, runtime
        self._taps = recorder.taps
        self._number = number

    def install(self, patches: Patches) -> None:
        """Replace the runtime's methods."""
        runtime = self._runtime
        self._post_forward, self._pre_backward = runtime.post_forward, runtime.pre_backward
        self._post_backward, self._reduce = runtime.post_backward, runtime.reduce
        self._end_backward, self._reset = runtime.end_backward, runtime.reset
        patches.set(runtime, "post_forward", self.post_forward)
        patches.set(runtime, "pre_backward", self.pre_backward)
        patches.set(runtime, "post_backward", self.post_backward)
        patches.set(runtime, "reduce", self.reduce)
        patches.set(runtime, "end_backward", self.end_backward)
        patches.set(runtime, "reset", self.reset)

    def post_forward(self, unit: Unit, **kwargs: Any) -> None:
        tap = self._taps.get(unit)
        if tap is None:
            self._post_forward(unit, **kwargs)
            return
        log = self._log
        leave = tap.leave_recompute if self._runtime.in_backward else tap.leave_forward
        log.write(_MARKED(leave, log.mark()))
        before = log.samples
        self._post_forward(unit, **kwargs)
        if self._recorder.inside is tap and not unit.running:
            self._recorder.inside = None
        if log.samples == before or log.noted is not tap:
            tap.sample()

    def pre_backward(self, unit: Unit, *args: Any, **kwargs: Any) -> None:
        tap, log = self._taps.get(unit), self._log
        mark = log.mark()
        self._pre_backward(unit, *args, **kwargs)
        if tap is not None:
            log.write(_MARKED(tap.enter_backward, mark))
            if tap.changes_at_borders:
                tap.sample()

    def post_backward(self, unit: Unit) -> None:
        tap, log = self._taps.get(unit), self._log
        before = log.samples
        self._post_backward(unit)
        if tap is not None:
            log.write(_MARKED(tap.leave_backward, log.mark()))
            if log.samples == before or log.noted is not tap:
                tap.sample()

    def reduce(self, unit: Unit, **kwargs: Any) -> None:
        self._reduce(unit, **kwargs)
        tap, log = self._taps.get(unit), self._log
        if tap is None:
            return
        if not kwargs.get("direct_only"):
            # A unit whose inputs need no gradient ends with its last gradient.
            log.write(_MARKED(tap.leave_backward, log.mark()))
        tap.accumulated = 0 if unit.config.reduce_grads else accumulated_bytes(unit)
        tap.sample()

    def end_backward(self) -> None:
        self._end_backward()
        code = self._number * KINDS + kinds.END_BACKWARD
        self._log.write(_MARKED(code, self._log.mark()))

    def reset(self, **kwargs: Any) -> None:
        self._reset(**kwargs)
        for tap in self._taps.values():
            if tap.unit.runtime is self._runtime:
                tap.pending = -1
        self._recorder.inside = None
        self._log.write(kinds.CODE.pack(self._number * KINDS + kinds.RESET))
