"""Uses that torch's own tests of `fully_shard` make of it, where no other test here does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import DataParallelMeshDims, FSDPModule, UnshardHandle, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, MLP, TRANSFORMER, Case, normal_batch
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    average_gradients,
    check_training,
    pair,
    run_both,
    whole,
)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2)
def test_the_optimizer_steps_inside_backward(name: str) -> None:
    """In a hook of every parameter, which frees its gradient at once."""
    case = BY_NAME[name]
    model, plain = pair(case)
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)

    def step_and_free(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    for step in range(3):
        run_both(case, model, plain, step)
        assert all(p.grad is None for p in model.parameters())
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert_same_parameters(model, plain)


@distributed(2)
def test_a_gradient_scaler_skips_the_step_on_every_rank() -> None:
    model, _ = pair(MLP, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model[0].weight).clone()
    for broken in (True, False):
        scaler.scale(MLP.loss(model, *MLP.batch(0, 0, torch.float32))).backward()
        if broken and dist.get_rank() == 0:
            model[0].weight.grad.to_local().fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        assert torch.equal(whole(model[0].weight), before) == broken


@distributed(2)
def test_a_state_dict_made_once_follows_training() -> None:
    model, _ = pair(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.state_dict()
    for step in range(2):
        MLP.loss(model, *MLP.batch(step, dist.get_rank(), torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            assert value.to_local().data_ptr() == state[name].to_local().data_ptr()


class Mixed(nn.Module):
    """Layers called several times, with gradients and without, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(torch.tanh(self.trained(x)))
            with torch.no_grad():
                x += torch.tanh(self.trained(x))
        return x


MIXED = Case("mixed", Mixed, lambda m: list(m.children()), normal_batch(3, 5))


@pytest.mark.parametrize("mode", [True, False, 2])
@distributed(2, 4)
def test_forwards_with_and_without_gradients_in_one(mode: bool | int) -> None:
    model, plain = pair(MIXED, reshard_after_forward=mode)
    for step in range(3):
        run_both(MIXED, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad(set_to_none=step % 2 == 0)
        plain.zero_grad(set_to_none=step % 2 == 0)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.mark.parametrize("mode", [True, False])
@distributed(2)
def test_outputs_that_the_loss_uses_in_some_steps_only(mode: bool) -> None:
    case = Case("two", TwoOutputs, lambda m: list(m.children()), normal_batch(2, 6))
    model, plain = pair(case, reshard_after_forward=mode)
    for step in range(4):
        for each in (plain, model):
            first, second = each(*case.batch(step, dist.get_rank(), torch.float64))
            (first * second if step < 2 else first).sum().backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad(set_to_none=step % 2 == 0)
        plain.zero_grad(set_to_none=step % 2 == 0)


@distributed(2)
def test_replicated_modules_with_ignored_parameters_inside() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model = copy.deepcopy(plain)
    model[0], model[2] = DistributedDataParallel(model[0]), DistributedDataParallel(model[2])
    ignored = {*model[0].parameters(), *model[2].parameters()}
    fully_shard(model[1], ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    x = torch.full((2, 4), 1.0 + dist.get_rank(), dtype=torch.float64)
    for each in (plain, model):
        each(x).sum().backward()
    average_gradients(plain)
    for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(actual, DTensor) == (actual not in ignored)
        assert_same(whole(actual.grad), expected.grad, "gradient")  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [True, False])
@distributed(2)
def test_checkpoint_wrappers_around_and_inside_units(inside: bool) -> None:
    torch.manual_seed(0)
    plain = TRANSFORMER.build().double()
    model = copy.deepcopy(plain)
    blocks: Any = model.blocks
    for i, block in enumerate(list(blocks)):
        if inside:
            blocks[i] = fully_shard(checkpoint_wrapper(block))
        else:
            blocks[i] = checkpoint_wrapper(fully_shard(block))
    fully_shard(model)
    for step in range(2):
        run_both(TRANSFORMER, model, plain, step)
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(whole(actual.grad), expected.grad, "gradient")  # type: ignore[arg-type]
        model.zero_grad()
        plain.zero_grad()
    assert list(model.state_dict()) == list(plain.state_dict())


@distributed(2)
def test_saved_tensors_kept_in_host_memory() -> None:
    model, plain = pair(MLP)
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    with torch.autograd.graph.save_on_cpu():
        loss = MLP.loss(model, *batch)
    loss.backward()
    MLP.loss(plain, *batch).backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


@ours_only("torch wants names")
@distributed(2)
def test_a_mesh_of_two_dims_without_names() -> None:
    check_training(MLP, Training(steps=1), mesh=DeviceMesh("cpu", [[0], [1]]))


@ours_only("torch: not implemented")
@distributed(4)
def test_resharding_to_fewer_ranks_with_named_dims() -> None:
    mesh = cached_mesh(4, names=("dp",))
    dims = DataParallelMeshDims(shard="dp")
    check_training(MLP, Training(steps=2), mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)


@ours_only("torch wants the root to run first")
@distributed(2)
def test_a_part_of_the_model_runs_before_the_root() -> None:
    model, plain = pair(MLP)
    (inputs,) = MLP.batch(3, dist.get_rank(), torch.float64)
    for each in (model, plain):
        each[0](inputs).sum().backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)
    for each in (model, plain):
        each.zero_grad()
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@ours_only("looks inside")
@distributed(1, 2)
def test_the_event_after_the_optimizer_step_is_used_once() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    event: Any = torch.Event("cpu")
    model.set_post_optim_event(event)
    runtime = model._fsdp2_unit.runtime  # type: ignore[attr-defined]
    assert runtime.optimizer_event is event
    run_both(MLP, model, plain, 0)
    assert runtime.optimizer_event is None
    assert_same_gradients(model, plain)


@distributed(2)
def test_handles_may_be_waited_for_twice() -> None:
    model, _ = pair(MLP)
    assert isinstance(model, FSDPModule)
    assert model.unshard() is None
    assert_sharded(model)  # it has no parameters of its own
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    assert not isinstance(model[0].weight, DTensor)
    UnshardHandle().wait()


@ours_only("torch keeps the root, here as after a forward with gradients")
@distributed(2)
def test_by_default_the_root_is_resharded_after_a_forward_without_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert_sharded(model)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
