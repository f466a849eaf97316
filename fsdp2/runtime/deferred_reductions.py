"""Gradients that tensor parallelism leaves as partial sums, summed once, at the end of backward.

Sequence-parallel norms work on this rank's part of the sequence, so their gradients are `Partial`
over tensor-parallel ranks. To sum each of them where it appears would make compute wait for the
other ranks two times per layer. But reductions are linear: the partial gradients are averaged over
data-parallel ranks like all others, and at the end of backward the shards of all units together
are summed in one collective. Only small parameters are treated so, and only where nobody looks at
``.grad`` before; its place in the program is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..comm.transports import sum_together
from ..sharding.param import ShardedParam

# Gradients of more bytes are summed at once: their collectives are worth overlapping.
LATE_MAX_BYTES = 256 * 1024


class DeferredReductions:
    """Of one unit: whose reduced gradients are still to be summed, and over whom."""

    def __init__(self) -> None:
        self.groups: dict[ShardedParam, dist.ProcessGroup] = {}

    def local_gradient(
        self, param: ShardedParam, grad: torch.Tensor, *, may_wait: bool
    ) -> torch.Tensor:
        """Like `ShardedParam.local_gradient`, without the sum where that is done later.

        Args:
            may_wait: whether ``.grad`` may be incomplete until the end of this backward, and no
                earlier reduction writes it.
        """
        group = self.choose_group(param, grad, may_wait=may_wait)
        if group is None:
            return param.local_gradient(grad)
        if param.summed_over(grad) is group:
            return param.local_gradient(grad, summed=False)
        return param.local_gradient(grad) / group.size()  # complete, beside partial ones

    def choose_group(
        self, param: ShardedParam, grad: torch.Tensor, *, may_wait: bool
    ) -> dist.ProcessGroup | None:
        """The ranks over which this gradient is summed at the end of backward; None: at once.

        Hooks and an earlier ``.grad``, which one rank alone may have, take part in the choice:
        `watch_ranks` compares it.
        """
        group = self.groups.get(param)
        if group is None and may_wait and _may_be_late(param, grad):
            group = param.summed_over(grad)
            if group is not None:
                self.groups[param] = group
        return group

    def forget(self) -> None:
        """Backward is over, or failed."""
        self.groups.clear()


def run_deferred(sums: Sequence[DeferredReductions]) -> None:
    """Complete the ``.grad`` of all parameters concerned, and forget them."""
    late: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for of_unit in sums:
        for param, group in of_unit.groups.items():
            grad = param.sharded.grad
            if grad is not None:
                late.setdefault(group, []).append(getattr(grad, "_local_tensor", grad))
    for group, grads in late.items():
        sum_together(group, grads)
    for of_unit in sums:
        of_unit.forget()


def _may_be_late(param: ShardedParam, grad: torch.Tensor) -> bool:
    """Whether it is small, ``.grad`` of the shard is of this backward only, and has no hooks."""
    sharded = param.sharded
    return (
        sharded.grad is None
        and not sharded._post_accumulate_grad_hooks
        and not sharded._backward_hooks
        and grad.numel() * grad.element_size() <= LATE_MAX_BYTES
    )
