"""Watches the units of one model while they run and makes a `Recording`.

During a profile, a part receives the events of these units' trees. Reductions, which live for one
backward, get transports that record their calls. A model that is not profiled runs the same code as
without this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
from ..observing import observing
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.gradients import ReducePlan
from . import events
from . import log as kinds
from .clocks import Clock, Mark, make_clock
from .log import MARKED, Log
from .memory import total_reader
from .replay import replay
from .taps import Sizes, TreeTap, UnitTap


class ProfileRecorder:
    """Records everything from `start` to `stop`; `result` converts it to data.

    Args:
        model: the model, for its module names.
        units: the model's units, on one device.

    Attributes:
        taps: the state of each unit.
        log: the records.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        self._units = tuple(unit_name(unit, self._modules) for unit in units)
        self._found = list(units)
        self._device = units[0].device
        self._hearing = ExitStack()
        self._facts: dict[Bucket, BucketFacts] = {}
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self.taps: dict[Unit, UnitTap] = {}
        self._clock: Clock | None = None
        self._recorded: events.Recording | None = None

    # -- beginning and end ------------------------------------------------------------------

    def start(self) -> None:
        """Start recording."""
        self._clock = clock = make_clock(self._device)
        often = self._device.type != "cpu"
        self.log = log = Log(clock, total_reader(self._device), often=often)
        for number, unit in enumerate(self._found):
            self.taps[unit] = UnitTap(self, log, unit, number)

        class Tap(TreeTap):
            recorder = self

        for handle in (
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ):
            self._hearing.callback(handle.remove)
        self._hearing.enter_context(observing(Tap))
        log.read_total(mark := log.mark())
        self._note(kinds.SAMPLE, mark)

    def stop(self) -> None:
        """Stop recording; waits for nothing."""
        self._hearing.close()
        if self._clock is not None:
            self._stopped = self._clock.mark()
            self._depths = [len(unit.enclosing) for unit in self._found]
            self._records = self.log.end()
            del self.log
        # Drop all references to the model.
        self.taps.clear()
        self._found.clear()
        self._modules.clear()
        self._facts.clear()

    def moment(self, kind: str) -> None:
        """Record an event that separates steps; see `events.Moment`."""
        self._note({"step": kinds.STEP}[kind], self.log.mark())

    def _note(self, kind: int, mark: Mark) -> None:
        self.log.write(MARKED.pack(kind, mark))

    # -- the optimizer ----------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._note(kinds.ENTER_OPTIMIZER, self.log.mark())

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_ours(optimizer):
            self._note(kinds.LEAVE_OPTIMIZER, self.log.mark())

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
                and bucket.gathered is not None
                and bucket.gathered.secondary is not None
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
