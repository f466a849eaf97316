"""Backward through backward: penalties on gradients, of inputs and of parameters.

What is compared is one process per rank whose gradients are averaged afterwards: a penalty is part
of each rank's own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_tensor_parallel
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from gathers import counting
from harness import cached_mesh, distributed, ours_only
from models import EVEN_MLP, MLP
from reference import (
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    gradients,
    pair,
    whole,
)

pytestmark = [ours_only("torch's fails where a second backward reads weights that were freed")]


def with_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """As of a Wasserstein critic: gradients of the output with respect to the input."""
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (grad.square().sum(-1) - 1).square().mean()


def penalty_alone(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


def penalty_around_another_forward(model: nn.Module, x: Tensor) -> Tensor:
    """Units are freed by a forward that comes between."""
    return penalty_alone(model, x) + model(x + 1).square().mean()


def of_the_third_order(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return again.square().sum()


LOSSES = [with_penalty, penalty_alone, penalty_around_another_forward, of_the_third_order]


@pytest.mark.parametrize("reshard", [None, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("loss", LOSSES)
@distributed(2, long=(1, 3))
def test_gradients_of_inputs_in_the_loss(
    loss: Callable[[nn.Module, Tensor], Tensor], reshard: bool | None
) -> None:
    model, plain = pair(MLP, reshard_after_forward=reshard)
    for step in range(2):
        (x,) = MLP.batch(step, dist.get_rank(), torch.float64)
        losses = [loss(each, x) for each in (model, plain)]
        assert_same(losses[0], losses[1], "loss")
        for each in losses:
            each.backward()
        assert_sharded(model)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:  # of the last bias there is no second derivative
                theirs.grad = torch.zeros_like(theirs)
                mine.grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        average_gradients(plain)
        assert_same_gradients(model, plain)
        for network in (model, plain):
            torch.optim.SGD(network.parameters(), lr=0.01).step()
            network.zero_grad()


@distributed(1, 2)
def test_gradients_of_unsharded_parameters_in_the_loss() -> None:
    """A penalty on the gradients of each rank's own loss."""
    model, plain = pair(EVEN_MLP, reshard_after_forward=False)
    batch = EVEN_MLP.batch(0, dist.get_rank(), torch.float64)
    for each in (model, plain):
        loss = EVEN_MLP.loss(each, *batch)
        grads = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
    average_gradients(plain)
    assert_same_gradients(model, plain)


def backward(model: nn.Module, step: int, **options: Any) -> None:
    EVEN_MLP.loss(model, *EVEN_MLP.batch(step, dist.get_rank(), torch.float64)).backward(**options)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(1, 2)
def test_gradients_that_have_a_graph_are_averaged_like_others(set_to_none: bool) -> None:
    model, plain = pair(EVEN_MLP)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        for each in (model, plain):
            backward(each, step, create_graph=step < 2)
            assert all(p.grad.requires_grad is (step < 2) for p in each.parameters())  # type: ignore[union-attr]
        average_gradients(plain)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.filterwarnings("ignore:Using backward")
@distributed(1, 2)
def test_a_penalty_on_reduced_gradients_is_refused() -> None:
    model, _ = pair(EVEN_MLP)
    backward(model, 0, create_graph=True)
    penalty = sum(p.grad.to_local().square().sum() for p in model.parameters())  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"Backward reached '.*'\.grad.*create_graph"):
        penalty.backward()  # type: ignore[union-attr]


def check_in_an_accumulation(
    model: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, int], Tensor], **options: Any
) -> None:
    """Three micro-batches, two without gradient sync, twice; then `.grad` has no graph."""
    assert isinstance(model, FSDPModule)
    for step in (0, 3):
        with model.no_sync():
            for micro in range(2):
                loss(model, step + micro).backward(**options)
        loss(model, step + 2).backward(**options)
        for micro in range(3):
            loss(plain, step + micro).backward(**options)
        average_gradients(plain)
        for name, param in model.named_parameters():
            expected = plain.get_parameter(name).grad
            assert param.grad is not None
            assert expected is not None
            assert param.grad.device == param.device
            torch.testing.assert_close(
                whole(param.grad), expected.to(param.dtype), rtol=1e-5, atol=1e-8, msg=name
            )
        assert_sharded(model)
        if options:
            penalty = sum(p.grad.to_local().square().sum() for p in model.parameters())  # type: ignore[union-attr]
            with pytest.raises(RuntimeError, match=r"Backward reached '.*'\.grad"):
                penalty.backward()  # type: ignore[union-attr]
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
@distributed(2, long=(1,))
def test_second_derivatives_in_an_accumulation() -> None:
    """With replicas, with shards on the host, with sums in another dtype."""
    settings: list[dict[str, Any]] = [
        {},
        {"mesh": cached_mesh(dist.get_world_size(), 1, names=("replicate", "shard"))},
        {"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    ]
    for options in settings:
        model, plain = pair(EVEN_MLP, **options)

        def ordinary(each: nn.Module, step: int) -> Tensor:
            return EVEN_MLP.loss(each, *EVEN_MLP.batch(step, dist.get_rank(), torch.float64))

        def penalized(each: nn.Module, step: int) -> Tensor:
            (x,) = EVEN_MLP.batch(step, dist.get_rank(), torch.float64)
            return with_penalty(each, x)

        check_in_an_accumulation(model, plain, ordinary, create_graph=True)
        check_in_an_accumulation(model, plain, penalized)


@pytest.mark.filterwarnings("ignore:Using backward")
@distributed(2, long=(4,))
def test_second_derivatives_with_tensor_parallelism_are_refused() -> None:
    """torch's DTensor alone gives wrong ones, on one rank too: terms are missing without a word."""
    for mesh in test_tensor_parallel.meshes():
        model, plain = test_tensor_parallel.build_pair(mesh)
        x = test_tensor_parallel.batch_of(mesh, 0).requires_grad_()
        y = model(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"unit 'blocks\.\d'.*'blocks\.\d\.up\.weight'"):
            (y.square().mean() + grad.square().mean()).backward()
        for step in range(2):  # the first derivatives are right, also of a graph
            for each in (model, plain):
                inputs = test_tensor_parallel.batch_of(mesh, step)
                each(inputs).square().mean().backward(create_graph=step == 0)
            average_gradients(plain, group=mesh.get_group("data"))
            assert_all_same(gradients(model), gradients(plain), "gradient")
            model.zero_grad()
            plain.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("reshard", [None, True])
@distributed(1, 2)
def test_a_penalty_on_the_gradient_that_a_backward_has_left_on_the_input(
    reshard: bool | None,
) -> None:
    """The second backward reads weights of units that the first has been through: they stay."""
    model, plain = pair(EVEN_MLP, reshard_after_forward=reshard)
    (x,) = EVEN_MLP.batch(0, dist.get_rank(), torch.float64)
    for each in (model, plain):
        given = x.clone().requires_grad_()
        each(given).square().sum().backward(create_graph=True)
        assert given.grad is not None
        penalty = given.grad.square().sum()
        for parameter in each.parameters():
            parameter.grad = None
        with counting(model) as gathers:
            penalty.backward()
        assert not gathers.backward
    average_gradients(plain)
    assert_same_gradients(model, plain)
