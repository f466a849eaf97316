"""Hybrid sharding: a 2-D mesh that replicates on its first dim and shards on its second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import RUNS_ON_TORCH, cached_mesh, distributed
from models import BY_NAME, MLP, TRANSFORMER, Case, normal_batch
from reference import (
    Training,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    check_training,
    pair,
    run_both,
)

SHAPES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (1, 4), (4, 1)]}


def hybrid_meshes() -> list[DeviceMesh]:
    """Every split of this world into replicas and shards."""
    names = ("replicate", "shard")
    return [cached_mesh(*shape, names=names) for shape in SHAPES[dist.get_world_size()]]


@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent", "lora", "conditional"])
@distributed(2, 4, long=(1, 3))
def test_training(name: str) -> None:
    for mesh in hybrid_meshes():
        check_training(BY_NAME[name], Training(steps=2), mesh=mesh)


@distributed(2, 4)
def test_training_in_fp32() -> None:
    for mesh in hybrid_meshes():
        check_training(MLP, Training(dtype=torch.float32), mesh=mesh)


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_reshard_modes(mode: bool | int) -> None:
    for shape in [(2, 2), (1, 4)]:
        mesh = cached_mesh(*shape, names=("replicate", "shard"))
        check_training(TRANSFORMER, Training(steps=2), mesh=mesh, reshard_after_forward=mode)


@distributed(4)
def test_layout_of_parameters_and_gradients() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh)
    run_both(MLP, model, plain, 0)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(), Shard(0)), name
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == (Replicate(), Shard(0)), name
        full = plain.get_parameter(name)
        rows = torch.chunk(full, 2)
        rank = mesh.get_local_rank("shard")
        mine = rows[rank] if rank < len(rows) else full[:0]
        assert torch.equal(parameter.to_local(), mine), name


@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent"])
@distributed(2, 4)
def test_accumulation_with_reduce_scatter_only(name: str) -> None:
    """Replicas are summed once, in the last micro-batch."""
    case = BY_NAME[name]
    for mesh in hybrid_meshes():
        model, plain = pair(case, mesh=mesh)
        assert isinstance(model, FSDPModule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        for step in range(2):
            for micro in range(3):
                model.set_requires_all_reduce(micro == 2)
                model.set_is_last_backward(micro == 2)
                run_both(case, model, plain, 3 * step + micro, average=micro == 2)
            assert_sharded(model)
            assert_same_gradients(model, plain)
            for each in (optimizer, plain_optimizer):
                each.step()
                each.zero_grad()
        assert_same_parameters(model, plain)


class Either(nn.Module):
    """A unit that uses one of its layers in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x).tanh()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.either = Either()

    def forward(self, x: Tensor) -> Tensor:
        return self.either(self.either(x, 0), 1)


@distributed(4)
def test_one_call_of_a_unit_is_reduced_before_the_other() -> None:
    """What waits for the all-reduce of the other one is not lost; all parameters are packed."""
    options: dict[str, Any] = {} if RUNS_ON_TORCH else {"direct_min_bytes": 1 << 30}
    case = Case("both", Both, lambda model: [model.either], normal_batch(4, 6))  # type: ignore[attr-defined,list-item]
    for mesh in hybrid_meshes():
        model, plain = pair(case, mesh=mesh, **options)
        assert isinstance(model, FSDPModule)
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            run_both(case, model, plain, step, average=step == 2)
        assert_same_gradients(model, plain)


class OfNothing(nn.Module):
    """Its weight has no elements, and a gradient all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.nothing = nn.Linear(6, 6), OfNothing()

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        x = self.linear(x)
        return self.nothing(x) if all_of_it else x


@distributed(4)
def test_sums_of_no_elements_wait_for_an_all_reduce() -> None:
    """Of a unit that runs in a backward that reduces over shards only, and in no later one."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = Sometimes(), Sometimes()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.nothing, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    for last in (False, True):
        model.set_requires_all_reduce(last)
        for each in (model, plain):
            each(torch.ones(2, 6), not last).sum().backward()
    assert model.nothing.weight.grad is not None
    assert_same_gradients(model, plain)


@distributed(4)
def test_no_sharded_gradient_appears_before_the_all_reduce() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh)
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    run_both(MLP, model, plain, 0, average=False)
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_all_reduce(True)
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@distributed(4)
def test_accumulation_without_communication_and_with_all_of_it() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    for every_time in (True, False):
        model, plain = pair(TRANSFORMER, mesh=mesh)
        assert isinstance(model, FSDPModule)
        for step in range(3):
            reduce = every_time or step == 2
            model.set_requires_gradient_sync(reduce)
            run_both(TRANSFORMER, model, plain, step, average=reduce)
        assert_same_gradients(model, plain)


@distributed(4)
def test_accumulation_of_all_three_kinds_in_one_step() -> None:
    """Nothing, then reduce-scatter only, then everything."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(MLP, mesh=mesh)
    assert isinstance(model, FSDPModule)
    for step in range(2):
        for micro, (scatter, replicas) in enumerate(
            [(False, False), (True, False), (True, False), (True, True)]
        ):
            model.set_requires_gradient_sync(scatter)
            model.set_requires_all_reduce(replicas)
            run_both(MLP, model, plain, 4 * step + micro, average=replicas)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2, 4)
def test_all_reduce_is_switched_off_for_one_unit() -> None:
    for mesh in hybrid_meshes():
        model, plain = pair(MLP, mesh=mesh)
        layer = model[2]
        assert isinstance(layer, FSDPModule)
        layer.set_requires_all_reduce(False, recurse=False)
        run_both(MLP, model, plain, 0)
        layer.set_requires_all_reduce(True, recurse=False)
        run_both(MLP, model, plain, 1)
        assert_same_gradients(model, plain)


@distributed(4)
def test_replicas_hold_equal_gradients_and_parameters() -> None:
    """Bitwise, or they would drift apart in time."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": policy}):
        model, _ = pair(TRANSFORMER, dtype=torch.float32, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        group = mesh.get_group("replicate")
        for step in range(3):
            batch = TRANSFORMER.batch(step, dist.get_rank(), torch.float32)
            TRANSFORMER.loss(model, *batch).backward()
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                assert isinstance(parameter.grad, DTensor)
                for local in (parameter.to_local().detach(), parameter.grad.to_local()):
                    both = [torch.empty_like(local) for _ in range(2)]
                    dist.all_gather(both, local.contiguous(), group=group)
                    assert torch.equal(both[0], both[1]), name
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(4)
def test_zero_grad_drops_sums_that_wait_for_an_all_reduce(set_to_none: bool) -> None:
    model, plain = pair(MLP, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    assert isinstance(model, FSDPModule)
    run_both(MLP, model, plain, 0)
    model.set_requires_all_reduce(False)
    run_both(MLP, model, plain, 1, average=False)
    model.set_requires_all_reduce(True)
    for each in (model, plain):
        each.zero_grad(set_to_none=set_to_none)
    run_both(MLP, model, plain, 2)
    assert_same_gradients(model, plain)
