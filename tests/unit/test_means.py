"""How a mean is made of a sum, in dtypes that overflow and in others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp2.comm.means import mean_over


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 6, 8, 64, 100, 512, 4096])
def test_float16_is_divided_before_and_after(num_ranks: int) -> None:
    mean = mean_over(num_ranks, torch.float16, sum_only=False)
    assert mean.operation == dist.ReduceOp.SUM
    assert mean.before * mean.after == num_ranks
    assert int(mean.before).bit_count() == 1, "a power of two divides without rounding"
    assert 0.5 < mean.before / num_ranks**0.5 < 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes_are_left_to_the_backend(dtype: torch.dtype) -> None:
    mean = mean_over(8, dtype, sum_only=False)
    assert (mean.operation, mean.before, mean.after) == (dist.ReduceOp.AVG, 1, 1)
    mean = mean_over(8, dtype, sum_only=True)
    assert (mean.operation, mean.before, mean.after) == (dist.ReduceOp.SUM, 1, 8)
