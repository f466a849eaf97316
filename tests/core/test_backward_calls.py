"""The ways in which users call backward, each beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from fsdp2.testing import GradientLostError
from harness import distributed, ours_only
from models import MLP, run_backward
from reference import assert_same_gradients, assert_sharded, average_gradients, pair

pytestmark = [ours_only("torch's FSDP2 gives nothing for sharded parameters as inputs")]

Parameters = dict[str, nn.Parameter]


def batch(step: int) -> Tensor:
    return MLP.batch(step, dist.get_rank(), torch.float64)[0]


def loss_of(each: nn.Module, step: int = 0) -> Tensor:
    return MLP.loss(each, batch(step))


def twice_through_one_graph(each: nn.Module, params: Parameters) -> None:
    loss = loss_of(each)
    loss.backward(retain_graph=True)
    loss.backward()


def two_graphs_at_once(each: nn.Module, params: Parameters) -> None:
    torch.autograd.backward([loss_of(each, 0), 3 * loss_of(each, 1)])


def two_graphs_one_by_one(each: nn.Module, params: Parameters) -> None:
    losses = [loss_of(each, 0), loss_of(each, 1)]
    for loss in reversed(losses):
        loss.backward()


def two_losses_of_one_output(each: nn.Module, params: Parameters) -> None:
    out = each(batch(0))
    first, second = out.square().mean(), out.sin().sum()
    first.backward(retain_graph=True)
    second.backward()


def two_heads_on_one_trunk(each: Any, params: Parameters) -> None:
    hidden = each[1](each[0](batch(0)))
    first, second = each[2](hidden).square().sum(), each[4](each[2](hidden + 1)).mean()
    first.backward(retain_graph=True)
    second.backward()


def a_gradient_of_the_input_first(each: nn.Module, params: Parameters) -> None:
    x = batch(0).requires_grad_()
    loss = MLP.loss(each, x)
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss + (grad.detach() * each(x + 1)[:, :1]).sum()).backward()


def all_parameters_as_inputs(each: nn.Module, params: Parameters) -> None:
    loss_of(each).backward(inputs=list(params.values()))


def some_parameters_as_inputs(each: nn.Module, params: Parameters) -> None:
    loss = loss_of(each)
    loss.backward(inputs=[params["2.weight"], params["4.bias"]], retain_graph=True)
    loss.backward(inputs=params["2.bias"])


def inputs_as_they_are_in_between(each: nn.Module, params: Parameters) -> None:
    """Some are unsharded between forward and backward, others not."""
    loss = loss_of(each)
    loss.backward(inputs=[p for name, p in each.named_parameters() if name != "2.weight"])


def inputs_and_a_penalty_on_them(each: nn.Module, params: Parameters) -> None:
    weight = params["2.weight"]
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    (loss_of(each) + local.square().sum()).backward(inputs=[weight])


def inputs_of_one_backward_of_two(each: nn.Module, params: Parameters) -> None:
    """As of a generator whose loss goes through a discriminator."""
    loss_of(each, 0).backward(inputs=[params["0.weight"], params["0.bias"]])
    loss_of(each, 1).backward()


CALLS: list[Callable[[Any, Parameters], None]] = [
    twice_through_one_graph,
    two_graphs_at_once,
    two_graphs_one_by_one,
    two_losses_of_one_output,
    two_heads_on_one_trunk,
    a_gradient_of_the_input_first,
    all_parameters_as_inputs,
    some_parameters_as_inputs,
    inputs_as_they_are_in_between,
    inputs_and_a_penalty_on_them,
    inputs_of_one_backward_of_two,
]


@pytest.mark.parametrize("accumulates", [False, True])
@distributed(2, long=(1, 3))
def test_gradients_are_those_of_one_process(accumulates: bool) -> None:
    """Freed after forward and kept; with sums of earlier backwards, reduced and not."""
    for reshard in (None, False, True):
        model, plain = pair(MLP, reshard_after_forward=reshard)
        assert isinstance(model, FSDPModule)
        optimizer = torch.optim.SGD(model.parameters())  # holds the sharded ones
        names = [name for name, _ in model.named_parameters()]
        sharded = dict(zip(names, optimizer.param_groups[0]["params"], strict=True))
        run_backward(MLP, model, 9)
        model.zero_grad()
        for call in CALLS:
            for each, params in ((model, sharded), (plain, dict(plain.named_parameters()))):
                if accumulates:
                    run_backward(MLP, each, 5)
                call(each, params)
            average_gradients(plain)
            try:
                assert_same_gradients(model, plain)
            except AssertionError as error:
                raise AssertionError(f"{call.__name__}, reshard={reshard}: {error}") from error
            assert_sharded(model)
            model.zero_grad()
            plain.zero_grad()


@distributed(2)
def test_inputs_without_gradient_sync() -> None:
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    sharded = dict(model.named_parameters())
    with model.no_sync():
        some_parameters_as_inputs(model, sharded)
        run_backward(MLP, model, 1)
    all_parameters_as_inputs(model, sharded)
    some_parameters_as_inputs(plain, dict(plain.named_parameters()))
    run_backward(MLP, plain, 1)
    run_backward(MLP, plain, 0)
    average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(2)
def test_gradients_that_are_returned_are_not_those_of_shards() -> None:
    model, plain = pair(MLP)
    sharded = dict(model.named_parameters())
    weight = sharded["2.weight"]
    for unused in (False, True):
        text = r"asked for the gradient of the sharded parameter '2\.weight' and 1 more\..*inputs="
        asked = [weight, sharded["0.bias"]]
        with pytest.raises(RuntimeError, match=text):
            torch.autograd.grad(loss_of(model), asked, allow_unused=unused)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    (grad,) = torch.autograd.grad(local.sum(), weight)  # the shard itself has computed this
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.to_local(), torch.ones_like(local))
    x = batch(0)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(x.requires_grad_().sum(), weight)
    assert torch.autograd.grad(x.sum(), weight, allow_unused=True) == (None,)
    run_backward(MLP, model, 0)
    run_backward(MLP, plain, 0)
    average_gradients(plain)
    assert_same_gradients(model, plain)


@distributed(2)
def test_gradients_assigned_to_unsharded_parameters() -> None:
    """Nothing is called then: what comes next reduces them, and a step before that is found."""
    model, plain = pair(MLP, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters())
    run_backward(MLP, model, 9)
    model.zero_grad()
    for each in (model, plain):
        loss = loss_of(each)
        params = list(each.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
    with pytest.raises(GradientLostError, match=r"'0\.weight', micro-batch .* still on the unsh"):
        optimizer.step()
    for each in (model, plain):
        loss_of(each, 1).backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


class Supervised(nn.Module):
    """A loss at each of two layers, which compute from layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))
        self.first, self.second, *inside = layers
        self.inside = nn.ModuleList(inside)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inside[0](self.first(x)), self.inside[1](self.second(x).sin())
        self.losses = [a.square().sum(), b.square().sum()]
        return self.inside[2](a + b)


@pytest.mark.parametrize("output", ["dropped", "kept", "kept on one rank", "used before"])
@distributed(2)
def test_losses_inside_of_a_unit_one_by_one(output: str) -> None:
    """Backward comes to what that unit computed before the layer of a loss, not to its output."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), Supervised())
    model = copy.deepcopy(plain)
    for module in (*model[1].inside, model[1], model):
        fully_shard(module, reshard_after_forward=True)
    for each in (model, plain):
        out = each(batch(0)[:, :6])
        if output == "used before":
            out.sum().backward(retain_graph=True)
        if output == "dropped" or (output == "kept on one rank" and dist.get_rank()):
            del out
        losses, each[1].losses = each[1].losses, []
        while losses:
            losses.pop().backward(retain_graph=bool(losses))
    average_gradients(plain)
    assert_same_gradients(model, plain)
    assert_sharded(model)
