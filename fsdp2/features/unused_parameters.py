"""Parameters without a gradient are reduced as zeros, for ranks that use different parameters.

All ranks of a reduction must reduce the same parameters of a unit, equally often, and in the same
order: NCCL matches collectives by their order. Where ranks use different modules, neither hooks nor
graphs are the same. So with `UnitConfig.reduce_unused` the kernel reduces every unit at the end of
each backward, in reverse tree order, and none before. Here, units are reduced earlier in that order
where nothing more can come to them, and zeros are added.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import nn
from typing_extensions import override

from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.states import State
from ..runtime.unit import Forward, Unit, unit_of, units_in
from ..runtime.unit_grads import Taken
from ..sharding.param import ShardedParam


def set_reduce_scatter_unused_params(
    self: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Set whether parameters without a gradient are reduced as zeros.

    For ranks that use different parameters (experts, modalities): all ranks must reduce the
    same parameters of a unit. Each unit is reduced once per backward, in reverse tree order, and
    earlier than at the end only where all units before it in that order are complete. Units that
    did not run at all take part.

    All ranks must run the same units in the same order, in backward too: a checkpoint must not
    recompute units together with modules that only some ranks use. A checkpoint inside of a unit
    is fine.

    Args:
        reduce_scatter_unused_params: must be equal on all ranks.
        recurse: whether to set it for sharded submodules too.
    """
    registry.require(UnusedParameters, "set_reduce_scatter_unused_params")
    for unit in units_in(self) if recurse else [unit_of(self)]:
        unit.config.reduce_unused = reduce_scatter_unused_params
        runtime = None if unit.runtime is None else runtime_of(unit)
        if runtime is not None and runtime.part(UnusedParameters) is None:
            runtime.add(UnusedParameters(runtime))


class UnusedParameters(TreePart):
    """Adds zeros for parameters that only other ranks have used: those wait for this rank."""

    runtime: Runtime
    _accumulated_in: object = None  # the last backward that accumulated gradients of any unit
    _num_passed = 0  # of the units, from the last one on

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(unit.config.reduce_unused for unit in runtime.units) else None

    @override
    def backward_leaves(self, unit: Unit) -> None:
        """Reduce the next units in the order of all ranks, as far as they are complete."""
        for each in self.runtime.units[-1 - self._num_passed :: -1]:
            step, group = each.step, each.param_group
            if each.config.reduce_unused and not step.reduced:
                # Backward may come to any graph that there is, also for a second time.
                graphs = [graph for ref in step.forwards if (graph := ref()) is not None]
                over = all(graph.entered is self.runtime.backward for graph in graphs)
                over = over and not (step.running or step.backward_began or step.is_read_outside)
                if not over or group.dirty or not group.materialized:
                    return
                self.runtime.reduce(each, keep=self.runtime.held_open)
            self._num_passed += 1

    @override
    def backward_enters(
        self, unit: Unit, forward: Forward | None, accumulates: bool | None
    ) -> None:
        if accumulates and not unit.step.backward_began:
            self._accumulated_in = self.runtime.backward

    @override
    def gradients_taken(self, unit: Unit, taken: Taken) -> None:
        if not unit.config.reduce_unused:
            return
        trained = unit.of_parts.get(UnusedParameters, frozenset())
        for bucket, grads in zip(unit.buckets, taken, strict=True):
            if unit.gradients.follows_autograd(bucket):
                raise ValueError(
                    "Reducing unused parameters with grad_dtype=None requires an explicit "
                    "MixedPrecisionPolicy.reduce_dtype so that every rank can build zero gradients "
                    f"of the same dtype: {', '.join(p.fqn for p in bucket.params)}. Set "
                    "reduce_dtype to the dtype its gradients already have"
                )
            dtype = next(iter(grads.values())).dtype if grads else bucket.gather_dtype
            for i, param in enumerate(bucket.params):
                if i not in grads and (param.sharded.requires_grad or param in trained):
                    grads[i] = torch.zeros(param.full_shape, dtype=dtype, device=bucket.device)

    @override
    def backward_reduced(self) -> None:
        runtime = self.runtime
        self._num_passed = 0
        accumulates = self._accumulated_in is runtime.backward
        for unit in (unit for unit in runtime.units if unit.config.reduce_unused):
            if runtime.ends_iteration or not accumulates:
                # Ranks come to other units, and must agree on what may be freed.
                runtime.on.gradients_apart(unit, accumulates)
                if not accumulates and unit.state is State.UNSHARDED:
                    unit.register_unsharded()
            # Other ranks may hold sums of what users freeze next.
            before: frozenset[ShardedParam] = unit.of_parts.get(UnusedParameters, frozenset())
            trained = (param for param in unit.params if param.sharded.requires_grad)
            holds = unit.gradients.holds_earlier
            unit.of_parts[UnusedParameters] = before.union(trained) if holds else frozenset()

    @override
    def gradients_dropped(self, unit: Unit) -> None:
        unit.of_parts.pop(UnusedParameters, None)


registry.add(UnusedParameters)
