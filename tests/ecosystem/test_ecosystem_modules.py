"""What people do to modules around `fully_shard`: parametrizations, functional calls, parameters
that are replaced or removed, groups of parameters in optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from fsdp2 import fully_shard
from harness import distributed, ours_only
from models import MLP, Case, children, normal_batch
from reference import (
    assert_all_same,
    assert_same_gradients,
    assert_same_parameters,
    buffers,
    pair,
    run_both,
    shard_case,
)


class Skew(nn.Module):
    """A parametrization by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu(1) - x.triu(1).T


def skewed(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Skew())
    return layer


NORMS: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "register_parametrization": skewed,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": old_spectral_norm,
}


@contextmanager
def old_functions_may_warn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@pytest.mark.parametrize("name", list(NORMS))
@distributed(2, long=(1, 3))
def test_parametrizations_before_sharding(name: str) -> None:
    """Trained like the plain model: in units of their own, inside of a unit, and in the root."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        norm = NORMS[name]
        inside = nn.Sequential(norm(nn.Linear(5, 5)), nn.Tanh())
        return nn.Sequential(norm(nn.Linear(5, 5)), inside, norm(nn.Linear(5, 5)))

    with old_functions_may_warn():
        plain, model = build().double(), build().double()
        case = Case(name, build, lambda model: list(model.children())[:2], normal_batch(4, 5))
        shard_case(case, model)
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
        for step in range(5):
            run_both(case, model, plain, step)
            assert_same_gradients(model, plain)
            assert_all_same(buffers(model), buffers(plain), "buffer")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, plain)


@pytest.mark.parametrize("trained", [False, True])
@ours_only("an error of its own")
@distributed(2)
def test_parametrizations_after_sharding_are_an_error_that_says_what_to_do(trained: bool) -> None:
    """Of those that torch can register on a DTensor at all."""
    for name in ("weight_norm", "register_parametrization", "old weight_norm"):
        model, _ = pair(Case("one", lambda: nn.Sequential(nn.Linear(5, 5)), children, MLP.batch))
        if trained:
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        with old_functions_may_warn():
            NORMS[name](model[0])
        text = r"Parameter '0\.weight' of unit '0' was removed from its .*Linear after fully_shard"
        with pytest.raises(RuntimeError, match=text + r".*registered before fully_shard"):
            model(torch.ones(2, 5, dtype=torch.float64))


@ours_only("an error of its own")
@distributed(2)
def test_functional_calls_with_other_parameters_are_an_error() -> None:
    """With such as are neither sharded alike nor whole; the module is as it was after it."""
    for trained in (False, True):
        model, plain = pair(MLP)
        if trained:
            run_both(MLP, model, plain, 0)
        (x,) = MLP.batch(1, dist.get_rank(), torch.float64)
        weight = model.get_parameter("2.weight").detach()
        wrong = [
            weight.to_local().clone(),  # this rank's rows
            torch.zeros(13, 5, dtype=torch.float64),
            weight.redistribute(placements=[torch.distributed.tensor.Shard(1)]),
        ]
        for value in wrong:
            with pytest.raises(RuntimeError, match=r"'2\.weight'.*was replaced.*functional_call"):
                functional_call(model, {"2.weight": value}, (x,))
        assert_same_parameters(model, plain, bitwise=True)
        model.zero_grad()
        plain.zero_grad()
        run_both(MLP, model, plain, 1)
        assert_same_gradients(model, plain)
        with torch.no_grad():  # with none replaced
            assert torch.equal(functional_call(model, {}, (x,)), model(x))


@ours_only("an error of its own")
@distributed(2)
def test_stacked_models_are_an_error() -> None:
    models = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    stacked = stack_module_state(models)  # of shards

    def call(parameters: Any, values: Any, x: Tensor) -> Tensor:
        return functional_call(models[0], (parameters, values), (x,))

    with pytest.raises(RuntimeError, match="was replaced in its FSDPLinear"):
        torch.vmap(call, in_dims=(0, 0, None))(*stacked, torch.ones(2, 4))


@ours_only("torch keeps computing with what was there")
@distributed(2)
def test_a_whole_parameter_assigned_after_the_first_forward_counts() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    for each in (model, plain):
        each.zero_grad()
        each[2].weight = nn.Parameter(torch.full((5, 13), 0.25, dtype=torch.float64))
    run_both(MLP, model, plain, 1)
    assert_same_gradients(model, plain)


@ours_only("an error of its own")
@distributed(2)
def test_a_parameter_replaced_by_something_else_is_an_error() -> None:
    """By nothing, and in the middle of a forward."""
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    before = model[4].bias
    model[4].bias = None
    with pytest.raises(RuntimeError, match=r"'4\.bias' of unit '4' was replaced"):
        run_both(MLP, model, plain, 1)
    model[4].bias = before
    handle = model[0].register_forward_hook(
        lambda *_: setattr(model[2], "weight", nn.Parameter(torch.zeros(5, 13).double()))
    )
    with pytest.raises(RuntimeError, match=r"'2\.weight' of unit '2' was replaced.*copy_"):
        run_both(MLP, model, plain, 1)
    handle.remove()


@ours_only("state_dict takes over what was assigned")
@distributed(2)
def test_state_dict_of_a_parameter_assigned_before_the_first_forward() -> None:
    model, plain = pair(MLP)
    assigned = nn.Parameter(torch.full((5, 13), 0.25, dtype=torch.float64))
    model[2].weight = assigned
    plain[2].weight.data.copy_(assigned.data)
    model.state_dict()
    assert_same_parameters(model, plain, bitwise=True)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@distributed(2)
def test_groups_with_and_without_weight_decay() -> None:
    """The usual rule: not for vectors, told by `ndim` of the sharded parameter."""
    model, plain = pair(MLP)
    optimizers = []
    for network in (model, plain):
        groups = [
            {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": 0.3},
            {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for step in range(3):
        run_both(MLP, model, plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(model, plain)
