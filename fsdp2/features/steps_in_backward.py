"""Which parameters `fsdp2.optim.step_in_backward` may step during backward.

[Note: gradients that do not change any more]

A complete reduction need not be the last one of its parameters in a backward. A unit may run twice,
a tied weight gets gradients from the head and from the embedding, and a loss may use a parameter
outside of its module. Later gradients cannot be predicted in general, so:

- A unit is not stepped if backward may still reach it through another forward, according to
  `Forward` objects.
- A parameter is stepped only after as many reductions as its last backward had in earlier
  iterations. In the first iteration, all parameters are left to ``step()``.
- A wrong prediction raises: a later gradient would be added to a `SteppedGradient`, and a gather of
  stepped parameters asks here.

Also left out are gradients and parameters that something else changes or reads at the end of
backward: gradients that tensor parallelism has yet to sum, gradients of
``backward(create_graph=True)``, and parameters that compute on their shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self
from weakref import WeakSet

from typing_extensions import override

from ..common.steppers import (
    SteppedBackward,
    Stepper,
    call_at_first,
    not_stepped,
    partly_stepped,
    steppers,
)
from ..runtime.events import TreePart, registry
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.param import ShardedParam
from .partial_gradients import DeferredSums


class EarlySteps(TreePart):
    """The steps in backward of one tree of units."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._backward = SteppedBackward()
        self._launched: WeakSet[Reduction] = WeakSet()  # in this backward
        self._completed: dict[ShardedParam, int] = {}  # how many of these are complete
        self._expected: dict[ShardedParam, int] = {}  # the most of them in earlier iterations
        self._begun: dict[Unit, WeakSet[Stepper]] = {}
        self._stepped: list[Bucket] = []  # that may be freed during backward
        self._dropped: set[int] = set()  # ids of parameters whose gradients nothing reads any more

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        """Where an optimizer steps in backward; see `_follow_all`."""
        return cls(runtime) if steppers() else None

    # -- in backward ------------------------------------------------------------------------

    @override
    def backward_begins(self) -> None:
        """
        Raises:
            RuntimeError: if ``step()`` was not called after the last one.
        """
        if self._begun and self._are_pending(list(self._begun)):
            raise not_stepped("A backward ran")
        self._backward = SteppedBackward()
        self._launched = WeakSet()
        self._completed, self._stepped, self._dropped = {}, [], set()

    @override
    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        self._launched.update(reductions)

    @override
    def reduction_completed(self, unit: Unit, reduction: Reduction) -> None:
        if reduction not in self._launched:
            return  # of an earlier backward: it is unknown how many this one adds
        runtime, bucket, completed = self.runtime, reduction.bucket, self._completed
        params = [bucket.params[i] for i in reduction.plan.present]
        for param in params:
            completed[param] = completed.get(param, 0) + 1
        if reduction.waits:
            return
        if self._stepped:
            self._free_gradients()
        if bucket.shard_device.type != "cpu" or bucket.aliases_shards:
            return
        # (Without sync, more gradients follow: with `set_accumulate_sharded`, this one reduces.)
        if not (runtime.ends_iteration and unit.config.sync_grads):
            return
        if runtime.backward.creates_graph:
            return
        if unit.awaits_backward or DeferredSums.of(unit).groups:
            return
        final = [p for p in params if 0 < self._expected.get(p, 0) <= completed[p]]
        if not final:
            return
        sharded, names = [p.sharded for p in final], [p.fqn for p in final]
        wait = partial(reduction.wait_on_host, runtime.streams)
        for steps in steppers():
            if steps.begin(sharded, names, wait, self._backward):
                self._begun.setdefault(unit, WeakSet()).add(steps)
                if bucket not in self._stepped:
                    self._stepped.append(bucket)

    def _free_gradients(self) -> None:
        """Free gradients that completed steps have read, if optimizers do not keep them."""
        # In this thread, not in the steps' thread: then no reduction can start to write there.
        for steps in steppers():
            self._dropped.update(map(id, steps.drop_gradients(self._backward)))
        for bucket in self._stepped:
            shown = (param.sharded for param in bucket.params if param.sharded.grad is not None)
            if all(id(sharded) in self._dropped for sharded in shown):
                bucket.release_gradients(attached=True)
        self._stepped = [b for b in self._stepped if b.grads is not None and not b.grads.is_free]

    @override
    def iteration_ends(self) -> None:
        """All gradients are complete."""
        self._free_gradients()
        for param, count in self._completed.items():
            self._expected[param] = max(count, self._expected.get(param, 0))
        self._backward.ended = True

    # -- after it ---------------------------------------------------------------------------

    def _are_pending(self, units: Sequence[Unit]) -> bool:
        """Whether parameters of ``units`` were stepped, and ``step()`` was not called since."""
        begun = {steps for unit in units for steps in self._begun.get(unit, ())}
        if any(steps.is_stepping(self._backward) for steps in begun):
            return True
        for unit in units:
            self._begun.pop(unit, None)
        return False

    @override
    def root_forward_begins(self) -> None:
        """Raise RuntimeError if a forward would compute with some parameters of the next step."""
        if self._begun and self._are_pending(list(self._begun)):
            raise not_stepped("A forward ran")

    @override
    def gather_requested(self, unit: Unit) -> None:
        """Raise RuntimeError if ``unit`` was stepped in a running backward or iteration."""
        if unit in self._begun and self._are_pending([unit]):
            raise not_stepped(f"Unit '{unit.name}' was gathered")

    @override
    def before_shards_read(self, unit: Unit, what: str) -> None:
        """Raise RuntimeError if ``unit`` or others were stepped, and more steps may follow."""
        if self._begun and self._are_pending(list(self._begun)):
            raise not_stepped(f"Unit '{unit.name}' was {what}")

    @override
    def before_shards_written(self, unit: Unit) -> None:
        """Values are about to be loaded: wait for the steps of a backward that raised.

        Raises:
            RuntimeError: if the backward is over, and ``step()`` was not called.
        """
        if self.runtime.in_backward:
            self.backward_abandoned([])  # the load replaces the stepped parameters
        elif self._begun and self._are_pending(list(self._begun)):
            raise not_stepped("Values were loaded")

    @override
    def backward_abandoned(self, errors: list[RuntimeError]) -> None:
        """After a backward that raised: wait for threads; an error if any of them has stepped."""
        begun = {steps for found in self._begun.values() for steps in found}
        self._begun.clear()
        self._stepped = []
        names = [name for steps in begun for name in steps.abandon(self._backward)]
        self._expected, self._completed = {}, {}
        if names:
            errors.append(partly_stepped(names))


def _follow_all() -> None:
    """The first optimizer steps in backward: from now on trees follow such steps."""
    registry.require(EarlySteps, "step_in_backward")
    # Not before: without such an optimizer, gathers and reductions have no extra cost.
    for runtime in list(registry.trees):
        if runtime.part(EarlySteps) is None:
            runtime.add(EarlySteps(runtime))


call_at_first(_follow_all)
registry.add(EarlySteps)
