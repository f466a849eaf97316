"""How the mean of a gradient over ranks is made by a backend that adds in the gradient's dtype."""

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
        operation: of the backend.
        before: what each term is divided by before they are added; 1: nothing.
        after: what the sum is divided by; 1: nothing.
    """

    operation: Any
    before: float = 1
    after: float = 1

    def begin(self, terms: Sequence[torch.Tensor]) -> None:
        """Divide in place what is to be added."""
        if self.before != 1:
            torch._foreach_div_(list(terms), self.before)

    def finish(self, sums: Sequence[torch.Tensor]) -> None:
        """Divide in place what was added."""
        if self.after != 1:
            torch._foreach_div_(list(sums), self.after)


@lru_cache  # each reduction asks
def mean_over(
    num_ranks: int, dtype: torch.dtype, *, sum_only: bool, num_hosts: int | None = None
) -> Mean:
    """The mean over ``num_ranks`` of terms in ``dtype``.

    Args:
        sum_only: add with SUM whatever the dtype, and divide afterwards.
        num_hosts: on which these ranks are, if NCCL adds; None: another backend does.
    """
    if num_ranks == 1:
        return Mean(dist.ReduceOp.SUM)
    # bfloat16 has the exponents of float32: what it loses are digits, however it is divided.
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


# An all-reduce of so few bytes by messages is one exchange of the whole: half as many steps, one
# after the other, and (n-1) instead of 2 (n-1)/n times the bytes. Where several ranks are on each
# of several hosts, of fewer than:
WHOLE_BYTES = 64 * 1024
# Else, of no more than: by whether all ranks are on one host, and by how many they are at most.
# Measured: a test compares with what ``python -m benchmarks.phases --write`` has kept.
MEASURED_WHOLE_BYTES = {
    True: {4: 1024 * 1024, 8: 512 * 1024, 16: 128 * 1024, 32: 128 * 1024},
    False: {4: 64 * 1024, 8: 128 * 1024, 16: 128 * 1024},
}


def whole_bytes(num_ranks: int, *, one_host: bool) -> int:
    """Up to which an all-reduce by messages between all ranks is one exchange of the whole."""
    measured = MEASURED_WHOLE_BYTES[one_host]
    most = max(measured)
    if num_ranks > most:  # as much is sent as by those
        return measured[most] * most // num_ranks
    return measured[min(n for n in measured if n >= num_ranks)]


# Elements added up at a time: few enough to stay in a core's cache until they are divided.
BLOCK_NUMEL = 64 * 1024


def mean_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor, divide_by: int = 0) -> None:
    """``out`` = mean of ``terms``, added one after the other in the dtype of ``out``.

    Args:
        terms: 1-D tensors of the same length.
        out: 1-D tensor of that length; may be one of the first two terms, no later one.
        divide_by: what the sum is divided by, if not by the number of ``terms``; 1 leaves a sum.
    """
    divide_by = divide_by or len(terms)
    blocks = [term.split(BLOCK_NUMEL) for term in terms]
    for i, block in enumerate(out.split(BLOCK_NUMEL)):
        # With a wider ``out`` the first term is copied into it: ``add`` of two narrow ones would
        # round their sum before it is widened.
        if len(terms) > 1 and terms[0].dtype == terms[1].dtype == out.dtype:
            torch.add(blocks[0][i], blocks[1][i], out=block)
            rest = blocks[2:]
        else:
            block.copy_(blocks[0][i])
            rest = blocks[1:]
        for term in rest:
            block.add_(term[i])
        if divide_by != 1:
            block.div_(divide_by)


def cut(tensor: torch.Tensor, num: int) -> list[torch.Tensor]:
    """``num`` views of a 1-D tensor, which come to the whole; see `cut_length`."""
    length = cut_length(len(tensor), num)
    return [tensor[i * length : (i + 1) * length] for i in range(num)]


def cut_length(numel: int, num: int) -> int:
    """Elements of each of ``num`` parts; the last ones may be shorter or empty."""
    length = -(-numel // num)
    return length + -length % 16  # parts begin on 16 bytes if the whole does
