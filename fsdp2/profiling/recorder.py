"""Watches the units of one model while they run and makes a `Recording`.

The runtime does not know about this. During a profile, methods of these units, of their hooks and
of their runtime are replaced on the objects themselves; reductions, which live for one backward,
get transports that record their calls. A model that is not profiled therefore runs exactly the same
code as without this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..describe.bucket_bytes import BucketFacts
from ..describe.explain import facts_of, unit_name
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.plans import ReducePlan
from . import events
from . import log as kinds
from .clocks import Clock, Mark, make_clock
from .log import KINDS, MARKED, NUMBER, Log
from .memory import total_reader
from .patches import Patches
from .replay import replay
from .taps import RuntimeTap, Sizes, UnitTap


class Recorder:
    """Records everything from `start` to `stop`; `result` converts it to data.

    Args:
        model: the model, for its module names.
        units: the model's units, on one device.

    Attributes:
        taps: what records each unit.
        inside: that of the outermost unit that is profiled, in a forward.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        self._units = tuple(unit_name(unit, self._modules) for unit in units)
        self._found = list(units)
        self._device = units[0].device
        self._patches = Patches()
        self._handles: list[Any] = []
        self._runtimes: list[Runtime] = []
        self._facts: dict[Bucket, BucketFacts] = {}
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self.taps: dict[Unit, UnitTap] = {}
        self.inside: UnitTap | None = None
        self._clock: Clock | None = None
        self._log: Log | None = None
        self._recorded: events.Recording | None = None

    # -- beginning and end ------------------------------------------------------------------

    def start(self) -> None:
        """Start recording."""
        self._clock = clock = make_clock(self._device)
        often = self._device.type != "cpu"
        self._log = log = Log(clock, total_reader(self._device), often=often)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        for number, unit in enumerate(self._found):
            self.taps[unit] = UnitTap(self, log, unit, number)
        for unit, tap in self.taps.items():
            tap.install(self._patches)
            if unit.runtime is not None:
                self.watch(runtime_of(unit))
                if unit.param_group.materialized:  # else the next gather plans it anew
                    tap.prepare()
        log.read_total(mark := log.mark())
        self._note(kinds.SAMPLE, mark)

    def stop(self) -> None:
        """Stop recording and restore all methods; waits for nothing."""
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._log is not None and self._clock is not None:
            self._stopped = self._clock.mark()
            self._depths = [len(unit.enclosing) for unit in self._found]
            self._records = self._log.end()
        # Drop all references to the model.
        self._log = self.inside = None
        self.taps.clear()
        self._found.clear()
        self._modules.clear()
        self._runtimes.clear()
        self._facts.clear()

    def watch(self, runtime: Runtime) -> None:
        """Watch a runtime; the first forward of a root creates it."""
        assert self._log is not None
        if any(runtime is known for known in self._runtimes):
            return
        number = len(self._runtimes)
        self._runtimes.append(runtime)
        RuntimeTap(self, self._log, runtime, number).install(self._patches)
        for tap in self.taps.values():
            if tap.unit.runtime is runtime:
                tap.runtime = runtime
                self._log.write(NUMBER.pack(tap.code + kinds.RUNTIME, number))

    def begin_forward(self, tap: UnitTap, mark: Mark) -> None:
        """The forward of a root begins, or of the outermost unit that is profiled."""
        self.inside = tap
        self._note(kinds.ROOT, mark)
        for other in self.taps.values():  # gradients may have been dropped
            if other.unit.runtime is tap.runtime:
                other.sample(only_measure=True)

    def moment(self, kind: str) -> None:
        """Record an event that separates steps; see `events.Moment`."""
        assert self._log is not None
        self._note({"step": kinds.STEP}[kind], self._log.mark())

    def _note(self, kind: int, mark: Mark, number: int = 0) -> None:
        assert self._log is not None
        self._log.write(MARKED.pack(number * KINDS + kind, mark))

    # -- the optimizer ----------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._log is not None and self._is_ours(optimizer):
            self._note(kinds.ENTER_OPTIMIZER, self._log.mark())

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._log is not None and self._is_ours(optimizer):
            self._note(kinds.LEAVE_OPTIMIZER, self._log.mark())

    def _is_ours(self, optimizer: Optimizer) -> bool:
        """Whether it holds a parameter of the model."""
        known = self._ours.get(optimizer)
        if known is None:
            ours = {id(param.sharded) for unit in self._found for param in unit.params}
            groups = optimizer.param_groups
            known = any(id(param) in ours for group in groups for param in group["params"])
            self._ours[optimizer] = known
        return known

    # -- bytes, looked up once ----------------------------------------------------------------

    def size_gather(self, unit: Unit, held: tuple[Bucket, ...], secondary: bool) -> Sizes:
        """Ranks, bytes of the whole and bytes sent of a gather; no ranks: there was none.

        Args:
            held: buckets that were still gathered.
            secondary: whether the unit kept larger shards.
        """
        num_ranks = nbytes = sent = 0
        for bucket, transports in zip(unit.buckets, unit.param_group.transports, strict=True):
            link = transports.gather
            if bucket in held or link is None:
                continue
            if (
                secondary
                and transports.secondary_gather is not None
                and bucket.secondary is not None
            ):
                link = transports.secondary_gather
            ranks = link.group.size()
            num_ranks = max(num_ranks, ranks)
            facts = self._facts_of(unit, bucket)
            nbytes += facts.numel * facts.gather_dtype.itemsize
            sent += facts.regather(ranks).total
        return num_ranks, nbytes, sent

    def size_reduction(
        self, unit: Unit, bucket: Bucket, plan: ReducePlan
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Bytes of the whole and bytes sent: of the reduce-scatter and of the all-reduce."""
        facts = self._facts_of(unit, bucket)
        itemsize = facts.reduce_dtype.itemsize
        part = sum(numel for _, numel in plan.ranges)
        return (
            (plan.numel * itemsize, facts.reduce(plan).total),
            (part * itemsize, facts.all_reduce(plan).total),
        )

    def _facts_of(self, unit: Unit, bucket: Bucket) -> BucketFacts:
        facts = self._facts.get(bucket)
        if facts is None:
            facts = self._facts[bucket] = facts_of(unit, bucket, self._modules)
        return facts

    # -- as data ----------------------------------------------------------------------------

    def result(self) -> events.Recording:
        """The recording; waits for the device at the first call."""
        if self._recorded is None:
            assert self._clock is not None
            clock, self._clock = self._clock, None
            clock.wait()
            self._recorded = replay(
                self._records,
                clock,
                self._units,
                self._depths,
                rank=dist.get_rank() if dist.is_initialized() else 0,
                num_ranks=dist.get_world_size() if dist.is_initialized() else 1,
                device=str(self._device),
                end_s=clock.read(self._stopped),
            )
            self._records = b""
        return self._recorded
