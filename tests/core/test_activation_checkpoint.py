"""Activation checkpointing of units, inside units, around units, of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counted import counting_reductions
from fsdp2 import FSDPModule
from harness import distributed, ours_only
from models import Case, normal_batch
from reference import Training, assert_same_gradients, check_training, pair, run_both

both_kinds = pytest.mark.parametrize("reentrant", [False, True])
both_modes = pytest.mark.parametrize("mode", [True, False])
PLACES = ["around units", "inside units", "around two units", "nested"]


class Inner(nn.Module):
    """Two linear layers; with `inside`, their forward runs under a checkpoint."""

    def __init__(self, inside: bool, reentrant: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        self.inside = inside
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            return run_checkpointed(self.body, x, self.reentrant)
        return self.body(x)


def run_checkpointed(function: Any, x: Tensor, reentrant: bool) -> Tensor:
    result = checkpoint(function, x, use_reentrant=reentrant)
    assert isinstance(result, Tensor)
    return result


class Outer(nn.Module):
    """Four inner modules, called with checkpoints at the places that are asked for."""

    def __init__(self, place: str, reentrant: bool) -> None:
        super().__init__()
        self.place = place
        self.reentrant = reentrant
        self.first = nn.Linear(5, 6)
        inside = place in ("inside units", "nested")
        self.blocks = nn.ModuleList(Inner(inside, reentrant) for _ in range(4))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.place == "around two units":
            first_half, second_half = self.halves()
            x = run_checkpointed(first_half, x, self.reentrant)
            return self.last(run_checkpointed(second_half, x, self.reentrant))
        for block in self.blocks:
            if self.place == "inside units":
                x = block(x)
            else:
                x = run_checkpointed(block, x, self.reentrant)
        return self.last(x)

    def halves(self) -> tuple[Any, Any]:
        blocks = list(self.blocks)
        return (
            lambda x: blocks[1](blocks[0](x)),
            lambda x: blocks[3](blocks[2](x)),
        )


def case_of(place: str, reentrant: bool, deep: bool = False) -> Case:
    def units(model: nn.Module) -> list[nn.Module]:
        blocks = list(model.get_submodule("blocks").children())
        inner = [child for block in blocks for child in block.children()] if deep else []
        return [*inner, *blocks]

    return Case("outer", lambda: Outer(place, reentrant), units, normal_batch(4, 5))


@both_modes
@both_kinds
@pytest.mark.parametrize("place", PLACES)
@distributed(3, long=(1, 2))
def test_training(place: str, reentrant: bool, mode: bool) -> None:
    case = case_of(place, reentrant)
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@both_kinds
@pytest.mark.parametrize("place", PLACES)
@distributed(2)
def test_training_with_units_inside_the_checkpointed_units(place: str, reentrant: bool) -> None:
    case = case_of(place, reentrant, deep=True)
    check_training(case, Training(steps=3), reshard_after_forward=True)


@both_kinds
@distributed(2, 3)
def test_accumulation_without_communication(reentrant: bool) -> None:
    case = case_of("around units", reentrant)
    model, plain = pair(case)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        run_both(case, model, plain, step, average=step == 2)
    assert_same_gradients(model, plain)


@both_kinds
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("place", PLACES)
@distributed(2)
def test_accumulation_reduces_once_per_unit(place: str, deep: bool, reentrant: bool) -> None:
    """In the backward with gradient sync, wherever the checkpoints are."""
    case = case_of(place, reentrant, deep)
    model, plain = pair(case)
    assert isinstance(model, FSDPModule)
    counted = counting_reductions(model)
    for micro in range(6):
        model.set_requires_gradient_sync(micro % 3 == 2)
        run_both(case, model, plain, micro, average=micro % 3 == 2)
        for unit, counter in counted.items():
            has_own = not (deep and unit in model.get_submodule("blocks").children())
            assert counter.calls == (micro + 1) // 3 * has_own
        if micro % 3 == 2:
            assert_same_gradients(model, plain)
            model.zero_grad()
            plain.zero_grad()


@both_kinds
@distributed(4)
def test_parameters_kept_on_two_ranks_after_forward(reentrant: bool) -> None:
    case = case_of("around units", reentrant)
    check_training(case, Training(steps=2), reshard_after_forward=2)


@pytest.mark.parametrize(
    "reentrant", [False, pytest.param(True, marks=ours_only("units stay gathered after it"))]
)
@distributed(2, 3)
def test_several_forwards_before_one_backward(reentrant: bool) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x[:2]) - 1).square().mean() + (model(x[2:]) + 1).square().mean()

    base = case_of("around units", reentrant)
    case = Case("twice", base.build, base.units, base.batch, loss)
    training = Training(steps=2, bitwise=not reentrant)
    check_training(case, training, reshard_after_forward=True)


@distributed(2)
def test_dropout_is_recomputed_with_the_same_mask() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear1 = nn.Linear(6, 6)
            self.drop = nn.Dropout(0.5)
            self.linear2 = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear2(self.drop(self.linear1(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Dropped() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = run_checkpointed(block, x, reentrant=False)
            return x

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(5)  # the same masks in both models
        return model(x).square().mean()

    case = Case("dropout", Model, lambda m: list(m.blocks), normal_batch(4, 6), loss)
    check_training(case, Training(steps=2))
