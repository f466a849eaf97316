"""Units that are planned anew in the middle of a step: what was computed before is not lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import FSDPModule
from fsdp2.runtime.unit import unit_of
from harness import cached_mesh, distributed, ours_only
from models import MLP
from program_operations import CustomGather, CustomReduceScatter
from reference import assert_same, assert_same_gradients, average_gradients, pair, run_both


def reduce_by_hand(model: FSDPModule) -> None:
    model.set_custom_reduce_scatter(CustomReduceScatter())


def gather_by_hand(model: FSDPModule) -> None:
    model.set_custom_all_gather(CustomGather())


def by_sums(model: FSDPModule) -> None:
    model.set_force_sum_reduction_for_comms(True)


def in_full(model: FSDPModule) -> None:
    model.set_comm_policy(None)


def in_other_groups(model: FSDPModule) -> None:
    model.set_separate_reduce_scatter_group(True)


COMM_SETTINGS: dict[str, Callable[[FSDPModule], None]] = {
    "custom all-gather": gather_by_hand,
    "custom reduce-scatter": reduce_by_hand,
    "sums": by_sums,
    "policy": in_full,
    "groups": in_other_groups,
}


def change_units(model: nn.Module, change: Callable[[FSDPModule], None]) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            change(module)


def move(model: nn.Module) -> None:
    """Put all parameters elsewhere in memory, as `nn.Module.to` does for another device."""
    model._apply(torch.clone)


def num_plans(model: nn.Module) -> list[int]:
    units = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return [unit_of(m).param_group.num_plans for m in units]


@ours_only("torch keeps nothing that depends on these settings")
@pytest.mark.parametrize("setting", COMM_SETTINGS)
@distributed(2)
def test_micro_batches_before_a_change_of_communication_count(setting: str) -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    run_both(MLP, model, plain, 0, average=False)
    change_units(model, COMM_SETTINGS[setting])
    model.set_requires_gradient_sync(True)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@ours_only("torch keeps nothing that depends on these settings")
@pytest.mark.parametrize("reshard", [None, False, 1])
@pytest.mark.parametrize("setting", COMM_SETTINGS)
@distributed(2)
def test_backward_after_a_change_of_communication(setting: str, reshard: Any) -> None:
    model, plain = pair(MLP, reshard_after_forward=reshard)
    for step in range(2):  # the first one has made all that could be kept
        losses = [MLP.loss(each, *MLP.batch(step, 0, torch.float64)) for each in (plain, model)]
        if step == 1:
            change_units(model, COMM_SETTINGS[setting])
        for loss in losses:
            loss.backward()
        assert_same_gradients(model, plain)
        for each in (plain, model):
            each.zero_grad()


@ours_only("torch has no CommPolicy")
@pytest.mark.parametrize("reshard", [True, 2])
@distributed(4)
def test_nothing_of_a_comm_policy_is_left_in_gathers_after_it(reshard: Any) -> None:
    """Neither rows, nor casts, nor larger shards as they are sent."""
    policy = fsdp2.CommPolicy(gather=torch.bfloat16, secondary=torch.bfloat16, block=16)
    precision = fsdp2.MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    options = {"reshard_after_forward": reshard, "mp_policy": precision, "direct_min_bytes": 0}
    model, _ = pair(MLP, comm_policy=policy, **options)
    in_full, _ = pair(MLP, **options)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        # Between forward and backward, then between steps.
        losses = [MLP.loss(each, *MLP.batch(step, 0, torch.float64)) for each in (model, in_full)]
        if step == 0:
            model.set_comm_policy(None)
        for loss in losses:
            loss.backward()
        if step == 1:
            model.set_comm_policy(policy)
            MLP.loss(model, *MLP.batch(step, 0, torch.float64)).backward()
            model.set_comm_policy(None)
        if step:
            assert_same(losses[0], losses[1], "loss", bitwise=True)
        for one, other in zip(model.parameters(), in_full.parameters(), strict=True):
            if step == 2:
                assert one.grad is not None
                assert other.grad is not None
                assert_same(one.grad.to_local(), other.grad.to_local(), "gradient", bitwise=True)
            one.grad = other.grad = None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@distributed(2)
def test_micro_batches_before_a_move_or_cast_count(dtype: torch.dtype) -> None:
    """As in plain modules, whose gradients are moved and cast with the parameters."""
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    run_both(MLP, model, plain, 0, average=False)
    for each in (plain, model):
        each.to(torch.get_default_device(), dtype) if dtype == torch.float32 else move(each)
    model.set_requires_gradient_sync(True)
    run_both(MLP, model, plain, 1, dtype=dtype)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("completes", [True, False])
@distributed(4)
def test_sums_before_a_move_reach_the_all_reduce(completes: bool) -> None:
    """HSDP: micro-batches that were reduced over shards only, complete or still in flight."""
    model, plain = pair(MLP, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    model.set_is_last_backward(completes)
    run_both(MLP, model, plain, 0, average=False)
    for each in (plain, model):
        move(each)
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(1, 2)
def test_a_move_that_moves_nothing_costs_nothing(reshard: bool) -> None:
    """Between forward and backward, too, and between micro-batches."""
    model, plain = pair(MLP, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    run_both(MLP, model, plain, 0, average=False)
    model.set_requires_gradient_sync(True)
    plans = num_plans(model)
    batch = MLP.batch(1, dist.get_rank(), torch.float64)
    losses = [MLP.loss(each, *batch) for each in (plain, model)]
    for each in (plain, model):
        each.to(torch.get_default_device(), torch.float64)
    for loss in losses:
        loss.backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)
    for each in (plain, model):
        each.to(torch.get_default_device()).zero_grad()
    run_both(MLP, model, plain, 2)
    assert_same_gradients(model, plain)
    assert num_plans(model) == plans


@ours_only("torch reads memory that is gone")
@pytest.mark.parametrize("again", [False, True])
@distributed(1, 2)
def test_a_backward_of_parameters_that_were_moved_since_is_an_error(again: bool) -> None:
    model, plain = pair(MLP)
    batch = MLP.batch(0, 0, torch.float64)
    loss = MLP.loss(model, *batch)
    move(model)
    if again:  # and planned anew
        MLP.loss(model, *batch)
    with pytest.raises(RuntimeError, match="moved, cast or replaced since"):
        loss.backward()
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@distributed(2)
def test_sums_go_on_in_a_root_that_takes_over(reduce_dtype: torch.dtype | None) -> None:
    """A graph of the time before may add to them still; each term counts once."""
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    model = copy.deepcopy(plain)
    fsdp2.fully_shard(model[0], mp_policy=policy)
    fsdp2.fully_shard(model, mp_policy=policy)
    x = torch.ones(2, 3)
    for net in (plain, model):
        inner: Any = net[0]
        if net is model:
            inner.set_requires_gradient_sync(False)
        inner(x).sum().backward()
        if net is model:
            inner.unshard()
        before = 3 * inner.weight.sum()
        loss = net(x).sum()
        before.backward()
        if net is model:
            net.set_requires_gradient_sync(True)
        loss.backward()
    grad = model[0].weight.grad
    torch.testing.assert_close(grad.full_tensor(), plain[0].weight.grad)


@pytest.mark.parametrize("assign", [True, False])
@distributed(2)
def test_a_load_that_swaps_tensors(assign: bool) -> None:
    """It keeps the Parameter objects and exchanges what is in them, so no new ones are seen."""
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    states = [
        {name: 2 * value for name, value in network.state_dict().items()}
        for network in (model, plain)
    ]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for network, state in zip((model, plain), states, strict=True):
            network.load_state_dict(state, assign=assign)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for step in (1, 2):
        model.zero_grad()
        plain.zero_grad()
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
