"""Parameters that are frozen or thawed between a forward and its backward: as in a plain model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import MLP
from reference import (
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    pair,
    run_both,
)

pytestmark = ours_only("in torch, what is frozen while it is gathered is trained after backward")


def freeze_one(model: Any) -> None:
    model[2].weight.requires_grad_(False)


def freeze_unit(model: Any) -> None:
    model[2].requires_grad_(False)


def freeze_all(model: Any) -> None:
    model.requires_grad_(False)


def freeze_and_thaw(model: Any) -> None:
    for trained in (False, True):
        model[2].requires_grad_(trained)


def thaw(model: Any) -> None:
    """Two that were frozen in the forward, of which one is all of a unit that is trained."""
    model[0].requires_grad_(True)
    model[2].weight.requires_grad_(True)


CHANGES: dict[str, Callable[[Any], None]] = {
    change.__name__: change for change in (freeze_one, freeze_unit, freeze_all, freeze_and_thaw)
}


def losses_of(model: nn.Module, plain: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    batch = MLP.batch(step, dist.get_rank(), torch.float64)
    return MLP.loss(plain, *batch), MLP.loss(model, *batch)


def check_midway(
    model: Any, plain: Any, step: int, change: Callable[[Any], None], *, average: bool = True
) -> None:
    """Forward, ``change`` of both models, backward: then both have the same gradients."""
    losses = losses_of(model, plain, step)
    change(plain)
    change(model)
    for loss in losses:
        loss.backward()
    if average:
        average_gradients(plain)
        assert_sharded(model)
        assert_same_gradients(model, plain)


def check_steps_after(model: nn.Module, plain: nn.Module) -> None:
    """Steps with what is frozen now, and with everything thawed."""
    for trained in (None, True):
        for each in (plain, model):
            each.zero_grad()
            if trained:
                each.requires_grad_(True)
        if not any(parameter.requires_grad for parameter in plain.parameters()):
            continue
        run_both(MLP, model, plain, 7)
        assert_same_gradients(model, plain)
        trains = [parameter.requires_grad for parameter in plain.parameters()]
        assert [parameter.requires_grad for parameter in model.parameters()] == trains


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("reshard", [True, False, 2])
@distributed(2, 4, long=(1, 3))
def test_what_is_frozen_after_its_forward_gets_no_gradient(reshard: bool | int, name: str) -> None:
    if dist.get_world_size() == 3 and reshard == 2:
        reshard = True
    model, plain = pair(MLP, reshard_after_forward=reshard)
    for step in range(2):  # planned in the first one
        check_midway(model, plain, step, CHANGES[name])
        check_steps_after(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2, 3)
def test_what_is_thawed_after_its_forward_gets_no_gradient(reshard: bool) -> None:
    model, plain = pair(MLP, reshard_after_forward=reshard)
    model.set_keep_frozen_gathered()  # type: ignore[operator]
    for step in range(2):
        for each in (model, plain):
            each[0].requires_grad_(False)  # type: ignore[index]
            each[2].weight.requires_grad_(False)  # type: ignore[index]
        check_midway(model, plain, step, thaw)
        check_steps_after(model, plain)


@pytest.mark.parametrize("thaws", [True, False])
@distributed(2)
def test_a_unit_that_changes_whole_computes_no_weight_gradients_apart(thaws: bool) -> None:
    """As units of pipelines may, after backward: then modules show what they do that with."""
    model: Any
    model, plain = pair(MLP)

    def change(each: Any) -> None:
        each[2].requires_grad_(thaws)

    for each in (model, plain):
        each[2].requires_grad_(not thaws)
    check_midway(model, plain, 0, change)
    for step in range(2):
        for ends in (False, True):
            model.set_is_last_backward(ends)
            model.set_reshard_after_backward(ends)
            assert_sharded(model)
        for each in (model, plain):
            each.zero_grad()
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("name", CHANGES)
@distributed(2, 4)
def test_replicas(name: str) -> None:
    for shape in [(2, dist.get_world_size() // 2), (dist.get_world_size(), 1)]:
        model, plain = pair(MLP, mesh=cached_mesh(*shape, names=("replicate", "shard")))
        check_midway(model, plain, 0, CHANGES[name])
        check_steps_after(model, plain)


@pytest.mark.parametrize("offload", [CPUOffloadPolicy(), OffloadPolicy()])
@distributed(2)
def test_direct_gathers_and_offload(offload: OffloadPolicy) -> None:
    model, plain = pair(MLP, direct_min_bytes=0, offload_policy=offload)
    check_midway(model, plain, 0, freeze_one)
    check_steps_after(model, plain)


# -- accumulation --------------------------------------------------------------------------------

MODES = ("reduce", "skip", "no_sync", "sharded", "shards only", "not last")


@contextlib.contextmanager
def accumulating(model: Any, mode: str) -> Any:
    context = model.no_sync() if mode == "no_sync" else contextlib.nullcontext()
    model.set_accumulate_sharded(mode == "sharded")
    model.set_requires_gradient_sync(mode not in ("skip", "sharded"))
    model.set_requires_all_reduce(mode != "shards only")
    model.set_is_last_backward(mode != "not last")
    with context:
        yield
    model.set_accumulate_sharded(False)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(True)
    model.set_is_last_backward(True)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", MODES)
@distributed(2, 4)
def test_gradients_of_earlier_micro_batches_stay(mode: str, late: bool) -> None:
    """``late``: between the forward and backward of the last micro-batch, not of the first."""
    replicas = dist.get_world_size() // 2
    model, plain = pair(MLP, mesh=cached_mesh(replicas, 2, names=("replicate", "shard")))
    for name in ("freeze_one", "freeze_unit", "freeze_all"):
        nothing = lambda each: None  # noqa: E731
        changes = [CHANGES[name], nothing]
        with accumulating(model, mode):
            check_midway(model, plain, 0, changes[late], average=False)
        if not late and name == "freeze_all":
            for each in (model, plain):
                each[4].requires_grad_(True)  # type: ignore[index]
        check_midway(model, plain, 1, changes[not late])
        check_steps_after(model, plain)


class Branches(nn.Module):
    """Ranks use other branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.branches = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.first(x))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("mode", ["skip", "no_sync", "sharded", "not last"])
@distributed(2, 3)
def test_unused_parameters(mode: str, late: bool) -> None:
    """What only one rank holds of an earlier micro-batch is reduced by all, frozen or not."""
    torch.manual_seed(0)
    plain = Branches().double()
    model: Any = copy.deepcopy(plain)
    for unit in (model.first, model):
        fully_shard(unit)
    model.set_reduce_scatter_unused_params(True)
    mine = int(dist.get_rank() == 0)
    (x,) = MLP.batch(0, dist.get_rank(), torch.float64)
    for each in (plain, model):
        context = accumulating(each, mode) if each is model else contextlib.nullcontext()
        with context:
            each(x, mine).square().mean().backward()
        if not late:
            each.branches[1].weight.requires_grad_(False)
        loss = each(x, 0).square().mean()
        if late:
            each.branches[1].weight.requires_grad_(False)
        loss.backward()
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_gradients(plain)
    assert_same_gradients(model, plain)
    # What is frozen from the beginning gets none.
    for each in (plain, model):
        each.zero_grad()
        with accumulating(model, mode):
            each(x, 0).square().mean().backward()
        each(x, 0).square().mean().backward()
    assert model.branches[1].weight.grad is None
    assert model.branches[1].bias.grad is not None


# -- beside other features -----------------------------------------------------------------------


@distributed(2)
def test_a_unit_whose_input_needs_no_gradient_is_reduced_before_backward_ends() -> None:
    model, plain = pair(MLP)
    check_midway(model, plain, 0, lambda each: each[0].weight.requires_grad_(False))
    check_steps_after(model, plain)


@distributed(2)
def test_recomputation_computes_with_what_is_frozen_now() -> None:
    """A reentrant checkpoint makes the graph in backward only."""
    model, plain = pair(MLP)
    for step, trained in enumerate((False, True)):
        losses = []
        for each in (plain, model):
            each.zero_grad()
            (x,) = MLP.batch(step, dist.get_rank(), torch.float64)
            first = each[0]  # type: ignore[index]
            y = checkpoint(first, x.clone().requires_grad_(), use_reentrant=True)
            losses.append(y.square().mean())
            first.weight.requires_grad_(trained)
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)


@distributed(2)
def test_second_backwards_of_one_graph() -> None:
    model, plain = pair(MLP)
    losses = losses_of(model, plain, 0)
    for frozen in (True, False):
        for each, loss in zip((plain, model), losses, strict=True):
            each[2].weight.requires_grad_(not frozen)  # type: ignore[index]
            loss.backward(retain_graph=True)
    average_gradients(plain)
    assert_same_gradients(model, plain)
    assert isinstance(model, FSDPModule)
    check_steps_after(model, plain)


@pytest.mark.parametrize("fails", [False, True])
@distributed(2)
def test_a_forward_after_one_that_was_frozen_away(fails: bool) -> None:
    """The graph of what was frozen is dropped, or backward through it raises."""
    model, plain = pair(MLP)

    def raise_error(_grad: Tensor) -> None:
        raise KeyError("planned")

    first: Any = next(model.children())
    with first.register_forward_hook(lambda *args: args[2].register_hook(raise_error) and None):
        losses = losses_of(model, plain, 0)
    freeze_one(model)
    freeze_one(plain)
    if fails:
        with pytest.raises(KeyError):
            losses[1].backward()
    del losses
    check_steps_after(model, plain)
