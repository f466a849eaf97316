"""How to compute the mean of a gradient over ranks if the backend adds in the gradient's dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mean:
    """A sum over ranks that is divided.

    Attributes:
        operation: the backend's operation.
        before: divides each term before the sum; 1: no division.
        after: divides the sum; 1: no division.
    """

    operation: Any
    before: float = 1
    after: float = 1

    def begin(self, terms: Sequence[torch.Tensor]) -> None:
        """Divide the terms in place."""
        if self.before != 1:
            torch._foreach_div_(list(terms), self.before)

    def finish(self, sums: Sequence[torch.Tensor]) -> None:
        """Divide the sums in place."""
        if self.after != 1:
            torch._foreach_div_(list(sums), self.after)


@lru_cache  # each reduction asks
def mean_over(
    num_ranks: int, dtype: torch.dtype, *, sum_only: bool, num_hosts: int | None = None
) -> Mean:
    """The mean over ``num_ranks`` of terms in ``dtype``.

    Args:
        sum_only: add with SUM whatever the dtype, and divide afterwards.
        num_hosts: number of hosts of these ranks, if NCCL adds; None: another backend adds.
    """
    if num_ranks == 1:
        return Mean(dist.ReduceOp.SUM)
    # bfloat16 has the exponents of float32: it only loses digits, wherever the division is.
    if dtype.is_floating_point and torch.finfo(dtype).max < 1e30:
        # A sum in float16 overflows at 65,504, and terms divided by all ranks underflow at 6e-8.
        # AVG divides all before (NCCL) or all after (gloo). So divide by about the root of the
        # number of ranks before, and by the rest after; before by a power of two, which is exact.
        before = 1 << num_ranks.bit_length() // 2
        return Mean(dist.ReduceOp.SUM, before, num_ranks / before)
    # For AVG the backend divides as it adds; after SUM it takes one more kernel over the result.
    # But NVSwitches (NVLS) add for NCCL with SUM only: its AVG is a sum of multiplied terms. The
    # result of a reduce-scatter is 1/num_ranks of the bytes: of 8 ranks and more, to divide it is
    # about 4 % of its time at most. Ranks on a host each have no switch between them.
    has_switches = num_hosts is not None and num_ranks >= 8 and num_ranks > num_hosts
    if sum_only or has_switches:
        return Mean(dist.ReduceOp.SUM, 1, num_ranks)
    return Mean(dist.ReduceOp.AVG)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as one of real numbers on the same memory, which every backend adds."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
