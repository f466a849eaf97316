"""Watches the units of one model while they run and makes a `Recording`.

The runtime does not know about this. During a profile, methods of these units, of their hooks and
of their runtime are replaced on the objects themselves; reductions, which live for one backward,
get transports that record their calls. A model that is not profiled therefore runs exactly the same
code as without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..comm.streams import Streams
from ..describe.bucket_bytes import BucketFacts
from ..describe.explain import facts_of, unit_name
from ..runtime.reduction import Reduction
from ..runtime.root import Runtime, runtime_of
from ..runtime.states import State
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from . import events
from .clocks import Mark, make_clock
from .events import ALL_GATHER, ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, REDUCE_SCATTER
from .memory import PARTS, Held, total_of, total_reader
from .patches import Patches
from .timed import Operation, TimedTransport


@dataclass
class _OnItsWay:
    """One reduction: its bytes, and the operations that it has launched so far."""

    nbytes: int
    operations: list[Operation]


class Recorder:
    """Records everything from `start` to `stop`; `result` converts it to data.

    Args:
        model: the model, for its module names.
        units: the model's units, on one device.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        self._names = {unit: unit_name(unit, self._modules) for unit in units}
        self._units = tuple(self._names.values())
        self._device = units[0].device
        self._patches = Patches()
        self._handles: list[Any] = []
        self._runtimes: list[Runtime] = []
        self._recorded: events.Recording | None = None
        # What has been recorded.
        self._borders: list[tuple[bool, str, str, int, Mark]] = []
        self._operations: list[Operation] = []
        self._waits: list[tuple[Operation, Mark, Mark]] = []
        self._samples: list[tuple[Mark, tuple[int, ...], Any]] = []
        self._moments: list[tuple[str, Mark]] = []
        # The current state.
        self._open: list[tuple[Unit | None, str]] = []
        self._gathering: dict[Unit, Operation] = {}
        self._facts: dict[Bucket, BucketFacts] = {}
        self._gather_sizes: dict[tuple[Bucket, int], tuple[int, int]] = {}  # and number of ranks
        self._held = Held()
        self._noted: Unit | None = None  # whose memory the last sample measured
        self._total = total_reader(self._device)
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    # -- beginning and end ------------------------------------------------------------------

    def start(self) -> None:
        """Start recording."""
        self.clock = make_clock(self._device)
        self._last: Mark = self.clock.mark()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        for unit in self._names:
            wrap = partial(self._patches.wrap, unit)
            wrap("start_unshard", self._start_unshard)
            wrap("wait_unshard", self._wait_unshard)
            wrap("reshard", self._reshard)
            make_reductions = partial(self._make_reductions, unit)
            self._patches.wrap(unit.gradients, "make_reductions", make_reductions)
            self._patches.wrap(unit.hooks, "_gather", partial(self._forward_begins, unit))
            self._patches.set(unit.hooks, "marks_all", True)
            if unit.runtime is not None:
                self._watch(runtime_of(unit))
                self._held.measure(unit)
                for bucket in unit.buckets:  # here, and not in the first step that is recorded
                    self._facts_of(unit, bucket)
        self._sample(self._last)

    def stop(self) -> None:
        """Stop recording and restore all methods; waits for nothing."""
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stopped = self.clock.mark()
        for unit, phase in reversed(self._open):
            self._borders.append((False, *self._key(unit, phase), self._last))
        # Drop all references to the model.
        self._open.clear()
        self._names.clear()
        self._modules.clear()
        self._runtimes.clear()
        self._gathering.clear()
        self._facts.clear()
        self._gather_sizes.clear()
        self._noted = None
        self._held = Held()
        self._total = lambda: None

    def _watch(self, runtime: Runtime) -> None:
        """Watch a runtime; the first forward of a root creates it."""
        if any(runtime is known for known in self._runtimes):
            return
        self._runtimes.append(runtime)
        for name in ("post_forward", "pre_backward", "post_backward", "reduce"):
            self._patches.wrap(runtime, name, getattr(self, f"_{name}"))
        self._patches.wrap(runtime, "end_backward", self._end_backward)
        self._patches.wrap(runtime, "reset", self._reset)

    def moment(self, kind: str) -> None:
        """Record an event that separates steps; see `events.Moment`."""
        self._moments.append((kind, self.clock.mark()))

    def operation(self, unit: Unit, kind: str, num_ranks: int, sizes: tuple[int, int]) -> Operation:
        """Begin an operation on the current stream; ``sizes``: bytes of the whole, bytes sent."""
        backward = unit.runtime is not None and unit.runtime.in_backward
        return Operation(
            self._names.get(unit, ""),  # (a reduction may outlast the profile)
            kind,
            BACKWARD if backward else FORWARD,
            num_ranks,
            *sizes,
            launched_s=self.clock.host_s(),
            begin=self.clock.mark(),
        )

    def launched(self, operation: Operation, *, end: Mark = None) -> None:
        """Record that the host has launched it; ``end``: its end on its stream, if known."""
        operation.launch_s = self.clock.host_s() - operation.launched_s
        operation.end = end
        self._operations.append(operation)

    def waited(self, operation: Operation, begin: Mark, end: Mark) -> None:
        """Record that compute waited for it."""
        self._waits.append((operation, begin, end))

    # -- compute ----------------------------------------------------------------------------

    def _forward_begins(
        self, unit: Unit, hooks: Any, original: Callable[..., Any], module: nn.Module
    ) -> None:
        mark = self.clock.mark()
        original(module)
        runtime = runtime_of(unit)
        self._watch(runtime)
        if not runtime.in_backward and self._begins_forward(unit):
            self._moments.append(("root", mark))
            for other in self._names:
                if other.runtime is runtime:
                    self._held.measure(other)
        self._enter(unit, RECOMPUTE if runtime.in_backward else FORWARD, mark)
        self._note_memory(unit)

    def _begins_forward(self, unit: Unit) -> bool:
        """Whether this is the forward of a root, or of the outermost unit that is profiled."""
        root = runtime_of(unit).forward_root
        if root in self._names:
            return root is unit
        return not any(phase == FORWARD for _, phase in self._open)

    def _post_forward(
        self, runtime: Runtime, original: Callable[..., Any], unit: Unit, **kwargs: Any
    ) -> None:
        mark = self.clock.mark()
        self._leave(unit, RECOMPUTE if runtime.in_backward else FORWARD, mark)
        before = len(self._samples)
        original(unit, **kwargs)
        self._note_memory_unless_noted(unit, before)

    def _pre_backward(
        self,
        runtime: Runtime,
        original: Callable[..., Any],
        unit: Unit,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        mark = self.clock.mark()
        original(unit, *args, **kwargs)
        self._leave(unit, RECOMPUTE, mark)  # recomputation stopped early: its forward does not end
        if (unit, BACKWARD) not in self._open:
            self._enter(unit, BACKWARD, mark)
        self._note_memory(unit)

    def _post_backward(self, runtime: Runtime, original: Callable[..., Any], unit: Unit) -> None:
        before = len(self._samples)
        original(unit)
        self._leave(unit, BACKWARD, self.clock.mark())
        self._note_memory_unless_noted(unit, before)

    def _reduce(
        self, runtime: Runtime, original: Callable[..., Any], unit: Unit, **kwargs: Any
    ) -> None:
        original(unit, **kwargs)
        if not kwargs.get("direct_only"):
            # A unit whose inputs need no gradient ends with its last gradient.
            self._leave(unit, BACKWARD, self.clock.mark())
        self._held.note_accumulated(unit)
        self._note_memory(unit)

    def _end_backward(self, runtime: Runtime, original: Callable[..., Any]) -> None:
        original()
        self._leave_all(runtime, (BACKWARD, RECOMPUTE), self.clock.mark())

    def _reset(self, runtime: Runtime, original: Callable[..., Any], **kwargs: Any) -> None:
        original(**kwargs)
        for unit in list(self._gathering):
            if unit.runtime is runtime:
                del self._gathering[unit]
        # The time of the failure is unknown: end it with the last known event.
        self._leave_all(runtime, (FORWARD, BACKWARD, RECOMPUTE), self._last)

    def _enter(self, unit: Unit | None, phase: str, mark: Mark) -> None:
        if unit is None or unit in self._names:
            self._open.append((unit, phase))
            self._borders.append((True, *self._key(unit, phase), mark))
            self._last = mark

    def _leave(self, unit: Unit | None, phase: str, mark: Mark) -> None:
        if (unit, phase) in self._open:
            self._open.remove((unit, phase))
            self._borders.append((False, *self._key(unit, phase), mark))
            self._last = mark

    def _leave_all(self, runtime: Runtime, phases: tuple[str, ...], mark: Mark) -> None:
        for unit, phase in reversed(self._open):
            if unit is not None and unit.runtime is runtime and phase in phases:
                self._leave(unit, phase, mark)

    def _key(self, unit: Unit | None, phase: str) -> tuple[str, str, int]:
        """Name, phase and depth of a border. The optimizer is inside all units."""
        if unit is None:
            return "", phase, len(self._names)
        return self._names[unit], phase, len(unit.enclosing)

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._enter(None, OPTIMIZER, self.clock.mark())

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._leave(None, OPTIMIZER, self.clock.mark())
            self._moments.append(("optimizer", self._last))

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it holds a parameter of the model."""
        known = self._ours.get(optimizer)
        if known is None:
            ours = {id(param.sharded) for unit in self._names for param in unit.params}
            groups = optimizer.param_groups
            known = any(id(param) in ours for group in groups for param in group["params"])
            self._ours[optimizer] = known
        return known

    # -- gathers ----------------------------------------------------------------------------

    def _start_unshard(self, unit: Unit, original: Callable[..., Any], streams: Streams) -> None:
        held = [b for b in unit.buckets if b.cache_valid]
        secondary = unit.state is State.SECONDARY
        end = None
        if streams.stream_ordered:
            # Marks on the gather stream, before and after.
            with streams.gathering():
                operation = self.operation(unit, ALL_GATHER, 0, (0, 0))
            original(streams)
            with streams.gathering():
                end = self.clock.mark()
        else:
            operation = self.operation(unit, ALL_GATHER, 0, (0, 0))
            original(streams)
        num_ranks, nbytes, sent = 0, 0, 0
        for bucket, transports in zip(unit.buckets, unit.param_group.transports, strict=True):
            if bucket in held or transports.gather is None:
                continue
            link = transports.gather
            if (
                secondary
                and transports.secondary_gather is not None
                and bucket.secondary is not None
            ):
                link = transports.secondary_gather
            ranks = link.group.size()
            num_ranks = max(num_ranks, ranks)
            sizes = self._gather_sizes.get((bucket, ranks)) or self._size_gather(
                unit, bucket, ranks
            )
            nbytes += sizes[0]
            sent += sizes[1]
        if num_ranks:
            operation.num_ranks, operation.nbytes, operation.sent_bytes = num_ranks, nbytes, sent
            self.launched(operation, end=end)
            self._gathering[unit] = operation
        self._note_memory(unit)

    def _wait_unshard(self, unit: Unit, original: Callable[..., Any], streams: Streams) -> None:
        operation = self._gathering.pop(unit, None)
        begin = self.clock.mark()
        original(streams)
        if operation is not None:
            end = self.clock.mark()
            self.waited(operation, begin, end)
            if not streams.stream_ordered:
                operation.end = end

    def _reshard(self, unit: Unit, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._note_memory(unit)

    def _size_gather(self, unit: Unit, bucket: Bucket, ranks: int) -> tuple[int, int]:
        """Bytes of the whole and bytes sent; the same for all gathers of a profile."""
        facts = self._facts_of(unit, bucket)
        sizes = facts.numel * facts.gather_dtype.itemsize, facts.regather(ranks).total
        self._gather_sizes[bucket, ranks] = sizes
        return sizes

    def _facts_of(self, unit: Unit, bucket: Bucket) -> BucketFacts:
        facts = self._facts.get(bucket)
        if facts is None:
            facts = self._facts[bucket] = facts_of(unit, bucket, self._modules)
        return facts

    # -- reductions -------------------------------------------------------------------------

    def _make_reductions(
        self, unit: Unit, _: Any, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> list[Reduction]:
        reductions = original(*args, **kwargs)
        for reduction in reductions:
            if reduction.scatter is not None or reduction.replicate is not None:
                self._follow(unit, reduction)
        return reductions

    def _follow(self, unit: Unit, reduction: Reduction) -> None:
        facts, plan = self._facts_of(unit, reduction.bucket), reduction.plan
        itemsize = facts.reduce_dtype.itemsize
        on_its_way = _OnItsWay(reduction.nbytes, [])
        if reduction.scatter is not None:
            sizes = (plan.numel * itemsize, facts.reduce(plan).total)
            reduction.scatter = TimedTransport(
                reduction.scatter, self, unit, REDUCE_SCATTER, sizes, on_its_way.operations
            )
        if reduction.replicate is not None:
            numel = sum(numel for _, numel in plan.ranges)
            sizes = (numel * itemsize, facts.all_reduce(plan).total)
            reduction.replicate = TimedTransport(
                reduction.replicate, self, unit, ALL_REDUCE, sizes, on_its_way.operations
            )
        for name in ("complete", "discard"):
            vars(reduction)[name] = partial(self._end_reduction, reduction, name, unit, on_its_way)
        self._held.take(on_its_way.nbytes)

    def _end_reduction(
        self, reduction: Reduction, name: str, unit: Unit, on_its_way: _OnItsWay, streams: Streams
    ) -> Any:
        # First, so that this profile leaves no references to the reduction.
        del vars(reduction)["complete"], vars(reduction)["discard"]
        begin = self.clock.mark()
        result = getattr(reduction, name)(streams)
        if streams.stream_ordered and on_its_way.operations:
            self.waited(on_its_way.operations[-1], begin, self.clock.mark())
        self._held.take(-on_its_way.nbytes)
        self._note_memory(unit)
        return result

    # -- memory -----------------------------------------------------------------------------

    def _note_memory(self, unit: Unit) -> None:
        if unit in self._names:
            self._noted = unit
            self._held.measure(unit)
            self._samples.append((self.clock.mark(), self._held.now, self._total()))

    def _note_memory_unless_noted(self, unit: Unit, before: int) -> None:
        """Note it unless the last sample is of this unit, and later than the first ``before``."""
        if len(self._samples) == before or self._noted is not unit:
            self._note_memory(unit)

    def _sample(self, mark: Mark) -> None:
        self._samples.append((mark, self._held.now, self._total()))

    # -- as data ----------------------------------------------------------------------------

    def result(self) -> events.Recording:
        """The recording; waits for the device at the first call."""
        if self._recorded is None:
            self.clock.wait()
            self._recorded = self._read()
            self._borders.clear()
            self._operations.clear()
            self._waits.clear()
            self._samples.clear()
        return self._recorded

    def _read(self) -> events.Recording:
        read = self.clock.read
        waits = [
            events.Wait(operation.unit, operation.kind, read(begin), read(end))
            for operation, begin, end in self._waits
        ]
        borders = [
            events.Border(enters, unit, phase, depth, read(mark))
            for enters, unit, phase, depth, mark in self._borders
        ]
        return events.Recording(
            rank=dist.get_rank() if dist.is_initialized() else 0,
            device=str(self._device),
            stream_ordered=self.clock.stream_ordered,
            units=self._units,
            compute=events.exclusive(borders, waits),
            communications=tuple(
                operation.read(read) for operation in self._operations if operation.end is not None
            ),
            waits=tuple(waits),
            memory=tuple(
                events.Sample(read(mark), dict(zip(PARTS, parts, strict=True)), total_of(total))
                for mark, parts, total in self._samples
            ),
            moments=tuple(events.Moment(kind, read(mark)) for kind, mark in self._moments),
            end_s=read(self._stopped),
        )
