"""Parameters without a gradient are reduced as zeros, for ranks that use different parameters.

All ranks of a reduction must reduce the same parameters of a unit. With `UnitConfig.reduce_unused`
the kernel reduces no unit before its backward is over, and every unit in each backward; the zeros
are added here.
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
from ..sharding.bucket import Bucket
from ..sharding.param import ShardedParam


def set_reduce_scatter_unused_params(
    self: nn.Module, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Set whether parameters without a gradient are reduced as zeros.

    Use it if ranks use different parameters (experts, modalities), as all ranks must reduce the
    same parameters of a unit. Units that did not run at all take part at the end of backward.

    All ranks must still run the same units in the same order, in forward and in backward. An
    activation checkpoint must therefore not contain both units and modules that only some ranks use
    (a checkpoint inside a unit is fine). Nor may only some ranks change a unit's output in place.

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
    """Adds zeros for parameters that only other ranks have used: these ranks wait for this one."""

    runtime: Runtime
    _accumulated_in: object = None  # the last backward that accumulated gradients of any unit

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        units = runtime.units
        return cls(runtime) if any(unit.config.reduce_unused for unit in units) else None

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
                raise _no_dtype(bucket)
            dtype = next(iter(grads.values())).dtype if grads else bucket.gather_dtype
            for i, param in enumerate(bucket.params):
                if i not in grads and (param.sharded.requires_grad or param in trained):
                    grads[i] = torch.zeros(param.full_shape, dtype=dtype, device=bucket.device)

    @override
    def backward_reduced(self) -> None:
        runtime = self.runtime
        accumulates = self._accumulated_in is runtime.backward
        for unit in runtime.units:
            if not unit.config.reduce_unused:
                continue
            if runtime.ends_iteration or not accumulates:
                # Ranks run different units, but must agree on what may be freed.
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


def _no_dtype(bucket: Bucket) -> ValueError:
    return ValueError(
        "Reducing unused parameters with grad_dtype=None requires an explicit "
        "MixedPrecisionPolicy.reduce_dtype so that every rank can build zero gradients of "
        f"the same dtype: {', '.join(p.fqn for p in bucket.params)}. Set reduce_dtype to "
        "the dtype its gradients already have"
    )


registry.add(UnusedParameters)
