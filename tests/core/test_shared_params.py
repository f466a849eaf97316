"""Tied parameters: inside one unit, across units, and across units that have no common parent."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from harness import distributed, ours_only
from models import Case, Transformer, children, no_units, normal_batch, token_batch, token_loss
from reference import Training, assert_same_gradients, check_training, run_both

ACROSS = "weights tied across units"


def embedding_and_head(model: nn.Module) -> list[nn.Module]:
    """Blocks, and the two modules that share one weight: each a unit."""
    blocks = list(model.get_submodule("blocks").children())
    return [*blocks, model.get_submodule("embedding"), model.get_submodule("head")]


TIED_TRANSFORMER = Case("tied", Transformer, embedding_and_head, token_batch, token_loss)


class Twins(nn.Module):
    """Two layers that share a weight, with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) + x


def build_twins() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), Twins(), Twins(), nn.Linear(5, 2))


def twins_inside(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


def twins_across(model: nn.Module) -> list[nn.Module]:
    """The layers of each pair are units, and the pair around them is one too."""
    pairs = [child for child in model.children() if isinstance(child, Twins)]
    return [unit for twins in pairs for unit in (twins.first, twins.second, twins)]


@pytest.mark.parametrize("mode", [True, False])
@distributed(1, 2, 3)
def test_tied_inside_one_unit(mode: bool) -> None:
    case = Case("twins", build_twins, twins_inside, normal_batch(3, 4))
    check_training(case, Training(steps=3), reshard_after_forward=mode)
    case = Case("twins", build_twins, no_units, normal_batch(3, 4))
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@distributed(2)
def test_one_module_registered_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x).tanh())

    def units(model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("first")]

    check_training(Case("twice", Twice, units, normal_batch(3, 4)), Training(steps=2))


@ours_only(ACROSS)
@pytest.mark.parametrize("mode", [None, True, False])
@distributed(2, 3, long=(1, 4))
def test_an_embedding_and_a_head_in_units_of_their_own(mode: bool | None) -> None:
    model, plain = check_training(TIED_TRANSFORMER, Training(steps=3), reshard_after_forward=mode)
    weight = model.get_parameter("embedding.weight")
    assert weight is model.get_parameter("head.weight")
    assert isinstance(weight, DTensor)
    assert len(list(model.parameters())) == len(list(plain.parameters()))


@ours_only(ACROSS)
@distributed(2, 3)
def test_tied_across_units_inside_a_unit() -> None:
    """The weight goes to the pair around the two layers, not to the root."""
    case = Case("twins", build_twins, twins_across, normal_batch(3, 4))
    model, _ = check_training(case, Training(steps=3), reshard_after_forward=True)
    twins = model[1]
    assert isinstance(twins, FSDPModule)
    twins.unshard()
    assert not isinstance(twins.first.weight, DTensor)
    assert twins.first.weight is twins.second.weight
    assert isinstance(twins.first.bias, DTensor)
    twins.reshard()


@ours_only(ACROSS)
@distributed(2)
def test_tied_three_times() -> None:
    class Triplets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            for layer in list(self.layers)[1:]:
                layer.weight = self.layers[0].weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    def units(model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("layers").children())

    check_training(Case("triplets", Triplets, units, normal_batch(3, 4)), Training(steps=3))


@ours_only(ACROSS)
@distributed(2)
def test_the_optimizer_may_be_built_before_the_first_forward() -> None:
    """And sees the tied weight once, as the object that later gets the gradient."""
    torch.manual_seed(0)
    model = Transformer().double()
    for unit in embedding_and_head(model):
        fully_shard(unit)
    fully_shard(model)
    parameters = list(model.parameters())
    tokens, targets = token_batch(0, dist.get_rank(), torch.float64)
    token_loss(model, tokens, targets).backward()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is not None for parameter in parameters)


@distributed(2)
def test_state_dict_has_both_names() -> None:
    torch.manual_seed(0)
    plain = Transformer()
    model = copy.deepcopy(plain)
    for unit in embedding_and_head(model):
        fully_shard(unit)
    fully_shard(model)
    states = model.state_dict()
    assert list(states) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(states[name].full_tensor(), value), name


class Parts(nn.Module):
    """Not sharded itself: only its children are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@ours_only(ACROSS)
@distributed(1, 2)
def test_tied_across_units_without_a_common_sharded_parent() -> None:
    model = Parts()
    fully_shard(model.embedding)
    fully_shard(model.head)
    with pytest.raises(ValueError) as caught:
        model(torch.tensor([1, 2, 3]))
    text = str(caught.value)
    assert "weight" in text
    assert "fully_shard" in text
    assert "tied" in text or "shared" in text


def tie_later(model: nn.Module) -> None:
    model.get_submodule("second").bias = model.get_submodule("first").bias


@ours_only(ACROSS)
@distributed(2)
def test_biases_and_weights_tied_between_different_units() -> None:
    class Cross(nn.Module):
        """Layers whose weight is tied to one neighbour and whose bias to another."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.third = nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.third.bias = self.second.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.third(self.second(self.first(x).tanh()).tanh()))

    check_training(Case("cross", Cross, children, normal_batch(3, 4)), Training(steps=3))


def no_change(model: nn.Module) -> None:
    """Ties nothing."""


@pytest.mark.parametrize("change", [no_change, tie_later])
@distributed(2)
def test_ties_made_before_sharding_count(change: Callable[[nn.Module], None]) -> None:
    """The same class, tied or not: what matters is what is tied when it is sharded."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh())

    torch.manual_seed(0)
    plain = Two().double()
    change(plain)
    model = fully_shard(copy.deepcopy(plain))
    case = Case("two", Two, no_units, normal_batch(3, 4))
    for step in range(2):
        run_both(case, model, plain, step)
    assert_same_gradients(model, plain)
