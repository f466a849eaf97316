"""Weight gradients that a schedule computes separately from input gradients: zero-bubble pipelines.

``autograd.grad`` for the inputs of a stage accumulates nothing in its units. Another run computes
the weight gradients later, and the schedule assigns them to the unsharded parameters, so no hook of
the unit is called. Gathered parameters therefore stay in use (`StepState.is_read_outside`). This
part looks for gradients when the next forward or backward of the tree begins, or at the end of the
step.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.states import RESHARDED, State
from ..runtime.unit import Unit


class DeferredWeightGrads(TreePart):
    """Reduces weight gradients that no hook has reported."""

    runtime: Runtime

    @override
    def gradients_apart(self, unit: Unit, accumulates: bool | None) -> None:
        if accumulates is False:
            unit.step.is_read_outside = True
            if self.runtime.part(_AtForwards) is None:
                self.runtime.add(_AtForwards(self.runtime, self))
        elif self.runtime.ends_iteration:
            unit.step.is_read_outside = False

    def reduce(self, unit: Unit) -> None:
        """Reduce gradients that no hook has seen, or add them up in the reduce dtype."""
        if unit.step.is_read_outside and unit.gradients.has_unsharded():
            # Other ranks may have none: they meet at the end of the next backward with a reduction.
            self.runtime.reduce(unit, keep=unit.config.reduce_unused)

    def gather(self, unit: Unit) -> None:
        """Register the unsharded parameters between forward and backward, and start the gather.

        Backward waits for it. But separately computed weight gradients call no hook, so for these
        this call waits.
        """
        runtime = self.runtime
        if runtime.ends_iteration or runtime.in_backward:
            return
        if any(other.step.is_read_outside for other in runtime.units):
            unit.unshard(runtime.streams)
            return
        if not runtime.schedule.outstanding:
            return
        if unit.state is State.PARTLY_FREED:
            unit.reshard(runtime.streams)
        if unit.state in RESHARDED:
            unit.start_unshard(runtime.streams)
        unit.register_unsharded()


class _AtForwards(TreePart):
    """Reduces them at the beginning of a forward, in trees that have had such gradients."""

    def __init__(self, runtime: Runtime, found: DeferredWeightGrads) -> None:
        super().__init__(runtime)
        self._found = found

    @override
    def root_forward_begins(self) -> None:
        for unit in self.runtime.units:
            self._found.reduce(unit)


class _Schedules(UnitPart):
    """Pipeline schedules change these settings before each backward."""

    @override
    def setting_changed(self, units: Sequence[Unit], name: str, value: object) -> None:
        if value:
            return
        if name == "sync_grads":
            # Before other gradients are added to gradients computed since the last backward.
            for unit in units:
                if part := _part_of(unit):
                    part.reduce(unit)
        elif name == "reshard_after_backward":
            # They ask for ``parameters()`` next, and look for them in the graph.
            for unit in reversed(units):  # in the order in which backward will want them
                if part := _part_of(unit):
                    part.gather(unit)


def _part_of(unit: Unit) -> DeferredWeightGrads | None:
    return None if unit.runtime is None else runtime_of(unit).part(DeferredWeightGrads)


registry.add(DeferredWeightGrads)
registry.add(_Schedules())
