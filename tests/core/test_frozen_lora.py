"""Frozen parameters: beside trainable ones, as whole units, and frozen or thawed between steps."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from harness import distributed, ours_only
from models import LORA, MLP, Case, LoraLinear, children, normal_batch
from reference import (
    Training,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    check_training,
    pair,
    run_both,
)

both_modes = pytest.mark.parametrize("mode", [True, False])


@both_modes
@distributed(1, 2, 3, 4)
def test_lora_in_every_unit(mode: bool) -> None:
    model, plain = check_training(LORA, reshard_after_forward=mode)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, p in plain.named_parameters() if not p.requires_grad]
    assert len(frozen) == 6
    assert all(model.get_parameter(name).grad is None for name in frozen)


@both_modes
@distributed(1, 2, 3)
def test_the_input_gradient_of_a_frozen_weight_comes_last(mode: bool) -> None:
    """The frozen weight is needed after the last trainable gradient of its unit is there."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen1 = nn.Linear(5, 6).requires_grad_(False)
            self.frozen2 = nn.Linear(6, 6).requires_grad_(False)
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen2(self.frozen1(x).tanh()).tanh() * self.scale

    def build() -> nn.Module:
        first = nn.Linear(5, 5)
        return nn.Sequential(first, Late(), nn.Linear(6, 5), Late(), nn.Linear(6, 2))

    case = Case("late", build, children, normal_batch(4, 5))
    check_training(case, Training(steps=3), reshard_after_forward=mode)


@distributed(1, 2, 3)
def test_only_the_last_unit_is_trained() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 2))
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        return model

    check_training(Case("last", build, children, normal_batch(4, 5)), Training(steps=3))


@distributed(1, 2, 3)
def test_only_the_first_unit_is_trained() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 2))
        model[2].requires_grad_(False)
        model[3].requires_grad_(False)
        return model

    check_training(Case("first", build, children, normal_batch(4, 5)), Training(steps=3))


@distributed(1, 2)
def test_nothing_is_trained() -> None:
    """A frozen model in the middle of others: only the gradient of its input is wanted."""
    model, plain = pair(
        Case("frozen", lambda: MLP.build().requires_grad_(False), children, MLP.batch)
    )
    (inputs,) = MLP.batch(0, dist.get_rank(), torch.float64)
    assert not model(inputs).requires_grad
    mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    for _ in range(2):
        MLP.loss(model, mine).backward()
        MLP.loss(plain, theirs).backward()
    assert mine.grad is not None
    assert theirs.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
    assert all(p.grad is None for p in model.parameters())


@both_modes
@distributed(2, 3)
def test_accumulation_without_communication(mode: bool) -> None:
    model, plain = pair(LORA, reshard_after_forward=mode)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        run_both(LORA, model, plain, step, average=step == 2)
    assert_same_gradients(model, plain)
    assert_sharded(model)


@distributed(1, 2, 3)
def test_parameters_are_frozen_and_thawed_between_steps() -> None:
    model, plain = pair(MLP)
    wanted = [["0.weight"], ["0.weight", "2.bias"], [], ["2.weight", "2.bias", "4.bias"], []]
    for step, names in enumerate(wanted):
        for network in (model, plain):
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(name not in names)
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    for parameter in model.parameters():
        assert parameter.requires_grad


@distributed(1, 2)
def test_frozen_weights_do_not_change_under_weight_decay() -> None:
    model, plain = pair(LORA)
    before = pair(LORA)[1]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
    for step in range(2):
        LORA.loss(model, *LORA.batch(step, dist.get_rank(), torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for network in (model, before):
        for name, parameter in list(network.named_parameters()):
            if parameter.requires_grad:
                owner, _, last = name.rpartition(".")
                delattr(network.get_submodule(owner), last)
    assert_same_parameters(model, before, bitwise=True)
    assert any(isinstance(layer, LoraLinear) for layer in plain.children())


@ours_only("torch keeps what is gathered as it was")
@pytest.mark.parametrize("reshard", [False, 2])
@pytest.mark.parametrize("by_hand", [False, True])
@distributed(4)
def test_parameters_are_frozen_while_modules_show_other_forms_of_them(
    reshard: bool | int, by_hand: bool
) -> None:
    """After a forward without a backward: of gathered parameters, or shards of smaller groups."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    for module in (model[1], model):
        fully_shard(module, reshard_after_forward=reshard)
    sharded = list(model.parameters())
    x = torch.ones(3, 4)
    for frozen in (True, False):
        model(x)
        shown = list(model.parameters())
        assert shown[2] is not sharded[2]
        for parameters in (shown, list(plain.parameters())):
            for i in (0, 3):
                parameters[i].requires_grad_(not frozen)
        if by_hand:
            for module in (model, model[1]):
                module.reshard()  # type: ignore[operator]
        for _ in range(2):
            for each in (model, plain):
                each.zero_grad()
                each(x).square().sum().backward()
            assert [p.requires_grad for p in sharded] == [
                p.requires_grad for p in plain.parameters()
            ]
            assert_same_gradients(model, plain)
