"""Gradients that tensor parallelism leaves as partial sums, summed once, at the end of backward.

Sequence-parallel norms work on this rank's part of the sequence, so their gradients are `Partial`
over tensor-parallel ranks. Summing each of them at once would make compute wait for the other ranks
twice per layer. But reductions are linear. So partial gradients are first averaged over
data-parallel ranks like all others. At the end of backward, which all ranks reach at the same point
of their program, one collective sums the shards of all units. Only small parameters are deferred,
and only if nothing reads ``.grad`` earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.distributed as dist
from typing_extensions import override

from ..comm.means import as_real
from ..common.collectives import sum_over
from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.param import ShardedParam

# Gradients of more bytes are summed at once: their collectives are worth overlapping.
LATE_MAX_BYTES = 256 * 1024


class DeferredSums:
    """The deferred sums of one unit.

    Attributes:
        groups: by parameter, the ranks to sum over.
        observer: called before each sum, with the gradient and whether the sum is deferred.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.groups: dict[ShardedParam, dist.ProcessGroup] = {}
        self.observer: Callable[[ShardedParam, torch.Tensor, bool], None] | None = None

    @classmethod
    def of(cls, unit: Unit) -> DeferredSums:
        """The deferred sums of ``unit``, which may have no tensor-parallel parameters."""
        if cls not in unit.of_parts:
            unit.of_parts[cls] = cls(unit)
        return unit.of_parts[cls]

    def local_gradient(self, bucket: Bucket, i: int, grad: torch.Tensor) -> torch.Tensor:
        """`ShardedParam.local_gradient`, without the sum if that is deferred."""
        param = bucket.params[i]
        group = self._choose_group(bucket, i, grad)
        if self.observer is not None:
            self.observer(param, grad, group is not None)
        if group is None:
            return param.local_gradient(grad)
        if group_of_sum(param, grad) is group:
            return param.local_gradient(grad, summed=False)
        # An earlier gradient of this backward was partial, this one is complete (a unit that ran
        # twice). Both are in the sum over the group at the end, which counts a complete one once
        # per rank.
        return param.local_gradient(grad) / group.size()

    def _choose_group(self, bucket: Bucket, i: int, grad: torch.Tensor) -> dist.ProcessGroup | None:
        """The ranks over which this gradient is summed at the end of backward; None: at once.

        The choice depends on hooks and on an earlier ``.grad``, which one rank alone may have:
        `watch_ranks` compares it across ranks.
        """
        param = bucket.params[i]
        group = self.groups.get(param)
        if group is None and self._may_wait(bucket, i) and _may_be_late(param, grad):
            group = group_of_sum(param, grad)
            if group is not None:
                self.groups[param] = group
        return group

    def _may_wait(self, bucket: Bucket, i: int) -> bool:
        """Whether ``.grad`` may be incomplete until this backward ends."""
        # It must be the last one before users read it. No hook may see it, no later all-reduce may
        # be due, and it may contain nothing complete, which would be summed over the ranks again.
        # So no earlier reduction may be in flight, or wait for an all-reduce. And the sum needs it
        # on the device.
        config = self._unit.config
        return (
            runtime_of(self._unit).ends_iteration
            and config.all_reduce_grads
            and config.all_reduce_hook is None
            and not config.offload
            and i not in bucket.in_flight
            and i not in bucket.partial.present
        )


class PartialGradients(TreePart):
    """Sums gradients of tensor-parallel parameters at the end of backward."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._sums = [DeferredSums.of(unit) for unit in runtime.units]
        for unit, sums in zip(runtime.units, self._sums, strict=True):
            unit.gradients.local_gradient = sums.local_gradient

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        params = (param for unit in runtime.units for param in unit.params)
        return cls(runtime) if any(param.tensor_parallel for param in params) else None

    @override
    def iteration_ends(self) -> None:
        """Complete the ``.grad`` of all deferred parameters, and forget them."""
        # Units come in the order of the tree and parameters in the order of their buckets, so all
        # ranks of a group sum the same tensors in the same order.
        late: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for of_unit in self._sums:
            for param, group in of_unit.groups.items():
                grad = param.sharded.grad
                if grad is not None:
                    late.setdefault(group, []).append(getattr(grad, "_local_tensor", grad))
        for group, grads in late.items():
            sum_together(group, grads)
        self._forget()

    @override
    def backward_abandoned(self, errors: list[RuntimeError]) -> None:
        self._forget()

    def _forget(self) -> None:
        for of_unit in self._sums:
            of_unit.groups.clear()


def _may_be_late(param: ShardedParam, grad: torch.Tensor) -> bool:
    """Whether the gradient is small, and the first one in a ``.grad`` without hooks."""
    sharded = param.sharded
    # An earlier ``.grad`` is complete: added to a partial one it would be summed over ranks again.
    # Hooks on the sharded parameter run when its reduction is done, before the sum.
    return (
        sharded.grad is None
        and not sharded._post_accumulate_grad_hooks
        and not sharded._backward_hooks
        and grad.numel() * grad.element_size() <= LATE_MAX_BYTES
    )


def group_of_sum(param: ShardedParam, grad: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks over which ``grad`` must be summed to be laid out like ``param``.

    For example, gradients of sequence-parallel norms are `Partial` over tensor-parallel ranks.

    Returns:
        None if no sum is needed, or more than one.
    """
    has, spec = param.gradient_placements(grad), param.tensor_parallel
    if has is None or spec is None:
        return None
    dims = [dim for dim, wanted in enumerate(spec.of_gradient(has)) if has[dim] != wanted]
    if len(dims) != 1 or not spec.placements[dims[0]].is_replicate():
        return None
    return spec.mesh.get_group(dims[0]) if has[dims[0]].is_partial("sum") else None


def sum_together(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Replace small tensors by their sums over ``group``, in one collective per dtype.

    On the current stream; if the host orders the work, the call returns when it is done.
    """
    # Flattened: for so few bytes, the cost is the number of messages.
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        chosen = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in chosen])
        sum_over(group, as_real(flat), "the sum of gradients over tensor-parallel ranks")
        parts = flat.split([tensor.numel() for tensor in chosen])
        torch._foreach_copy_(chosen, [p.view(t.shape) for p, t in zip(parts, chosen, strict=True)])


registry.add(PartialGradients)
