"""How a mean is made of a sum, in dtypes that overflow and in others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

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


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "is_sum"),
    [(8, 1, True), (64, 8, True), (72, 18, True), (4, 1, False), (4, 4, False), (16, 16, False)],
)
def test_nccl_gets_sums_where_a_switch_may_add(
    num_ranks: int, num_hosts: int, is_sum: bool
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        mean = mean_over(num_ranks, dtype, sum_only=False, num_hosts=num_hosts)
        if is_sum:
            assert (mean.operation, mean.before, mean.after) == (dist.ReduceOp.SUM, 1, num_ranks)
        else:
            assert mean.operation == dist.ReduceOp.AVG
    fp16 = mean_over(num_ranks, torch.float16, sum_only=False, num_hosts=num_hosts)
    assert fp16 == mean_over(num_ranks, torch.float16, sum_only=False)


def in_ring(terms: Tensor) -> Tensor:
    """Their sum, rounded to their dtype after each addition, as a ring adds."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def nccl_average(terms: Tensor) -> Tensor:
    """``ncclAvg``: each term times 1/n, which is rounded to their dtype; then a sum (PreMulSum)."""
    factor = torch.tensor(1 / len(terms)).to(terms.dtype)
    return in_ring(terms * factor)


def of_sums(terms: Tensor) -> Tensor:
    mean = mean_over(len(terms), terms.dtype, sum_only=False, num_hosts=1)
    assert mean.operation == dist.ReduceOp.SUM
    total = in_ring(terms)
    mean.finish([total])
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_are_divided_equal_the_average_of_nccl(dtype: torch.dtype) -> None:
    """Bit for bit for powers of two; of others, both are as near to the mean."""
    torch.manual_seed(0)
    for num_ranks in (8, 16, 64, 512):
        terms = torch.randn(num_ranks, 1000).to(dtype)
        assert torch.equal(of_sums(terms), nccl_average(terms))
    for num_ranks in (12, 24, 40, 72):
        terms = torch.randn(num_ranks, 1000).to(dtype)
        exact = terms.double().mean(0)
        error, of_nccl = (
            (got.double() - exact).square().mean().item()
            for got in (of_sums(terms), nccl_average(terms))
        )
        assert error < 1.3 * of_nccl
