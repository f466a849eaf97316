"""Collectives and memory that users bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, MLP
from reference import Training, assert_same_gradients, check_training, pair, run_both

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Pool:
    """Gives the same memory again, as a user's allocator would."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self.given: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = 1
        for length in size:
            numel *= length
        self.given.append(numel)
        if (numel, dtype) not in self.buffers:
            self.buffers[numel, dtype] = torch.empty(numel, dtype=dtype, device=device)
        return self.buffers[numel, dtype].view(tuple(size))


class Gather(Pool):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, torch.dtype]] = []

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        assert output_tensor.ndim == input_tensor.ndim == 1
        self.calls.append((output_tensor.numel(), input_tensor.numel(), input_tensor.dtype))
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class Scatter(Pool):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, torch.dtype]] = []
        self.ops: list[Any] = []

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel(), input_tensor.dtype))
        self.ops.append(op)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def customize(model: nn.Module, gather: Any = None, scatter: Any = None) -> None:
    for unit in [*MLP.units(model), model]:
        if gather is not None:
            unit.set_custom_all_gather(gather)
        if scatter is not None:
            unit.set_custom_reduce_scatter(scatter)


@pytest.mark.parametrize("which", ["gather", "scatter", "both"])
@distributed(2, 3, 4)
def test_training(which: str) -> None:
    gather = Gather() if which != "scatter" else None
    scatter = Scatter() if which != "gather" else None
    model, plain = pair(MLP)
    customize(model, gather, scatter)
    world_size = dist.get_world_size()
    for step in range(3):
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
        for each in (model, plain):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad
            each.zero_grad()
    if gather is not None:
        assert len(gather.calls) >= 9  # three units, three steps
        assert all(out == world_size * given for out, given, _ in gather.calls)
        assert len(gather.given) == len(gather.calls)
    if scatter is not None:
        assert len(scatter.calls) >= 9
        assert all(given == world_size * out for out, given, _ in scatter.calls)
        assert set(scatter.ops) == {dist.ReduceOp.AVG}


@distributed(2, 4)
def test_sums_only() -> None:
    model, plain = pair(MLP)
    scatter = Scatter()
    customize(model, scatter=scatter)
    for unit in [*MLP.units(model), model]:
        unit.set_force_sum_reduction_for_comms(True)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)
    assert set(scatter.ops) == {dist.ReduceOp.SUM}


@distributed(2)
def test_mixed_precision() -> None:
    """Gathered in bfloat16, reduced in float32: close to the same without a custom collective."""
    gather, scatter = Gather(), Scatter()
    model, _ = pair(MLP, dtype=torch.float32, mp_policy=BF16)
    other, _ = pair(MLP, dtype=torch.float32, mp_policy=BF16)
    customize(model, gather, scatter)
    for each in (model, other):
        MLP.loss(each, *MLP.batch(0, dist.get_rank(), torch.float32)).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
    assert {dtype for *_, dtype in gather.calls} == {torch.bfloat16}
    assert {dtype for *_, dtype in scatter.calls} == {torch.float32}


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_reshard_modes_and_replicas(mode: bool | int) -> None:
    gather, scatter = Gather(), Scatter()
    for mesh in (None, cached_mesh(2, 2, names=("replicate", "shard"))):
        if mesh is not None and mode == 2:
            continue  # shards over two ranks only
        model, plain = pair(MLP, mesh=mesh, reshard_after_forward=mode)
        customize(model, gather, scatter)
        for step in range(2):
            run_both(MLP, model, plain, step)
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()
    assert gather.calls
    assert scatter.calls


@pytest.mark.parametrize("mode", [True, 2])
@distributed(4)
def test_a_collective_set_between_steps(mode: bool | int) -> None:
    model, plain = pair(MLP, reshard_after_forward=mode)
    run_both(MLP, model, plain, 0)
    gather = Gather()
    customize(model, gather)
    assert_same_gradients(model, plain)  # those of the step before stay
    model.zero_grad()
    plain.zero_grad()
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)
    assert gather.calls


@distributed(2)
def test_other_models_are_not_affected() -> None:
    check_training(BY_NAME["transformer"], Training(steps=1))
    model, _ = pair(MLP)
    gather = Gather()
    MLP.units(model)[0].set_custom_all_gather(gather)
    model(torch.ones(6, 7, dtype=torch.float64)).sum().backward()
    assert len(gather.calls) in (1, 2)  # of that unit only, in forward and perhaps in backward


@distributed(2)
def test_memory_of_the_group_excludes_custom_collectives() -> None:
    model = fully_shard(nn.Linear(2, 2))
    model.set_custom_all_gather(Gather())
    with pytest.raises(RuntimeError, match="cannot be combined with a custom"):
        model.set_symm_mem_for_comm()


test_memory_of_the_group_excludes_custom_collectives = ours_only("another error type")(
    test_memory_of_the_group_excludes_custom_collectives
)
