"""Gradients that tensor parallelism leaves as partial sums, summed once, at the end of backward.

Sequence-parallel norms work on this rank's part of the sequence, so their gradients are `Partial`
over tensor-parallel ranks. Summing each of them where it appears would make compute wait for the
other ranks twice per layer. But reductions are linear: the partial gradients are averaged over
data-parallel ranks like all others, and the shards of all units are summed in one collective at the
end of backward, which is at the same place in the program of all ranks. Only small parameters are
deferred, and only where nothing reads ``.grad`` earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from typing_extensions import override

from ..comm.transports import sum_together
from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit
from ..sharding.param import ShardedParam

# Gradients of more bytes are summed at once: their collectives are worth overlapping.
LATE_MAX_BYTES = 256 * 1024


class DeferredSums:
    """The deferred sums of one unit: of which parameters, over which ranks."""

    def __init__(self) -> None:
        self.groups: dict[ShardedParam, dist.ProcessGroup] = {}

    def local_gradient(
        self, param: ShardedParam, grad: torch.Tensor, may_wait: bool
    ) -> torch.Tensor:
        """`ShardedParam.local_gradient`, without the sum where that is deferred."""
        group = self.choose_group(param, grad, may_wait=may_wait)
        if group is None:
            return param.local_gradient(grad)
        if param.summed_over(grad) is group:
            return param.local_gradient(grad, summed=False)
        # An earlier gradient of this backward was partial, this one is complete (a unit that ran
        # twice). Both are in the sum over the group at the end, where a complete one counts once
        # per rank.
        return param.local_gradient(grad) / group.size()

    def choose_group(
        self, param: ShardedParam, grad: torch.Tensor, *, may_wait: bool
    ) -> dist.ProcessGroup | None:
        """The ranks over which this gradient is summed at the end of backward; None: at once.

        The choice depends on hooks and on an earlier ``.grad``, which one rank alone may have:
        `watch_ranks` compares it across ranks.
        """
        group = self.groups.get(param)
        if group is None and may_wait and _may_be_late(param, grad):
            group = param.summed_over(grad)
            if group is not None:
                self.groups[param] = group
        return group


def deferred_in(unit: Unit) -> DeferredSums:
    """The deferred sums of ``unit``."""
    return unit.of_parts.setdefault(DeferredSums, DeferredSums())


class PartialGradients(TreePart):
    """Sums gradients of tensor-parallel parameters at the end of backward."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        for unit in runtime.units:
            unit.gradients.local_gradient = deferred_in(unit).local_gradient

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        params = (param for unit in runtime.units for param in unit.params)
        return cls(runtime) if any(param.tensor_parallel for param in params) else None

    @override
    def iteration_ends(self) -> None:
        sums = [deferred_in(unit).groups for unit in self.runtime.units]
        if any(sums):
            _run(sums)

    @override
    def backward_abandoned(self) -> None:
        for unit in self.runtime.units:
            deferred_in(unit).groups.clear()


def _run(sums: Sequence[dict[ShardedParam, dist.ProcessGroup]]) -> None:
    """Complete the ``.grad`` of all deferred parameters, and forget them."""
    # Units come in the order of the tree and parameters in that of their buckets, so all ranks of
    # a group sum the same tensors in the same order.
    late: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for of_unit in sums:
        for param, group in of_unit.items():
            grad = param.sharded.grad
            if grad is not None:
                late.setdefault(group, []).append(getattr(grad, "_local_tensor", grad))
    for group, grads in late.items():
        sum_together(group, grads)
    for of_unit in sums:
        of_unit.clear()


def _may_be_late(param: ShardedParam, grad: torch.Tensor) -> bool:
    """Whether the gradient is small, and the first thing to come into a ``.grad`` without hooks."""
    sharded = param.sharded
    # An earlier ``.grad`` is complete: added to a partial one it would be summed over ranks again.
    # Hooks on the sharded parameter run when its reduction is done, before the sum.
    return (
        sharded.grad is None
        and not sharded._post_accumulate_grad_hooks
        and not sharded._backward_hooks
        and grad.numel() * grad.element_size() <= LATE_MAX_BYTES
    )


registry.add(PartialGradients)
