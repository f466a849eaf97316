"""What happens to an optimizer between steps, with `local_step` and `whole_step`.

Groups with their own options, schedulers, states that are saved and loaded, copies, gradient
scalers: training goes on as on one process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from fsdp2.optim import local_step, whole_step
from harness import distributed, ours_only
from models import MLP
from optimizers import assert_same_training, feed
from reference import assert_same_parameters, pair, run_both, whole

pytestmark = ours_only("local_step and whole_step")

WAYS = {"local_step": local_step, "whole_step": whole_step}


class Decoupled(torch.optim.Optimizer):
    """AdamW that counts in its groups, with a norm of each update that `whole_step` sees whole."""

    whole = False

    def __init__(self, params: Any, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 0.05)
                update = state["m"] / (state["v"].sqrt() + 1e-6) / group["count"]
                if self.whole:
                    update = update / (1 + update.norm())
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * group["lr"])


class DecoupledByNorm(Decoupled):
    whole = True


KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "local_step": Decoupled,
    "whole_step": DecoupledByNorm,
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay and have a learning rate of their own."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": 0.3, "lr": 0.05},
        {"params": others[:1], "lr": 0.5},
        {"params": others[1:]},
    ]


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(
        optimizer, [lambda n: 0.5**n, lambda n: 1.0 + n, lambda n: float(n != 1)]
    )


def rounds(
    way: str,
    between: Callable[[nn.Module, Any, Any], tuple[nn.Module, Any, Any]],
    make: Any = None,
) -> None:
    """Six steps beside one process; after the third ``between`` gives what goes on."""
    kind = make or KINDS[way]
    model, plain = pair(MLP)
    optimizer, reference = WAYS[way](kind(groups(model))), kind(groups(plain))
    ours, theirs = scheduler(optimizer), scheduler(reference)
    for step in range(6):
        if step == 3:
            model, optimizer, ours = between(model, optimizer, ours)
        run_both(MLP, model, plain, step)
        feed(model, plain)
        for each, following in ((optimizer, ours), (reference, theirs)):
            each.step()
            each.zero_grad()
            following.step()
    assert_same_training(model, plain, optimizer, reference)
    for group, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }


@distributed(2, long=(3,))
def test_groups_schedulers_and_states_that_come_and_go() -> None:
    def nothing(model: nn.Module, optimizer: Any, ours: Any) -> Any:
        return model, optimizer, ours

    def loaded(model: nn.Module, optimizer: Any, ours: Any) -> Any:
        """Into an optimizer of its own, with a scheduler of its own."""
        fresh = WAYS[way](type(optimizer).__mro__[1](groups(model)))
        following = scheduler(fresh)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        following.load_state_dict(ours.state_dict())
        return model, fresh, following

    def itself(model: nn.Module, optimizer: Any, ours: Any) -> Any:
        optimizer.load_state_dict(optimizer.state_dict())
        return model, optimizer, ours

    def wrapped_late(model: nn.Module, optimizer: Any, ours: Any) -> Any:
        """The state was made without our step."""
        plain_kind = type(optimizer).__mro__[1]
        fresh = plain_kind(groups(model))
        following = scheduler(fresh)
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        following.load_state_dict(ours.state_dict())
        return model, WAYS[way](fresh), following

    def copied(model: nn.Module, optimizer: Any, ours: Any) -> Any:
        """The copy goes on, and what it was made of too, elsewhere."""
        twin, other, following = copy.deepcopy((model, optimizer, ours))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = [whole(p) for p in twin.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        assert all(
            torch.equal(whole(p), old) for p, old in zip(twin.parameters(), before, strict=True)
        )
        return twin, other, following

    for way in WAYS:
        for between in (nothing, loaded, itself, wrapped_late, copied):
            rounds(way, between)
            if dist.get_world_size() > 2:
                rounds(way, between, torch.optim.AdamW)


@distributed(2)
def test_a_gradient_scaler_skips_the_whole_step_on_every_rank() -> None:
    """One rank finds an infinite gradient; then all go on as if that step had never been."""
    for fused in (False, True):
        model, plain = pair(MLP, dtype=torch.float32)
        optimizer = whole_step(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = {name: whole(p) for name, p in model.named_parameters()}
        for step, broken in enumerate((True, False, False)):
            batch = MLP.batch(step, 0, torch.float32)
            scaler.scale((model(*batch) - 1).square().mean()).backward()
            weight = model.get_parameter("0.weight")
            assert isinstance(weight.grad, DTensor)
            if broken and dist.get_rank() == 1:
                weight.grad.to_local().fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 2.0
            if broken:
                for name, p in model.named_parameters():
                    assert torch.equal(whole(p), before[name])
                continue
            (plain(*batch) - 1).square().mean().backward()
            reference.step()
            reference.zero_grad()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(p), q.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_a_group_that_is_added_later_trains_too(way: str) -> None:
    kind = KINDS[way]
    model, plain = pair(MLP)
    first = (
        [p for p in model.parameters() if p.ndim > 1],
        [p for p in plain.parameters() if p.ndim > 1],
    )
    optimizers = WAYS[way](kind(first[0])), kind(first[1])
    for step in range(4):
        if step == 2:
            for each, network in zip(optimizers, (model, plain), strict=True):
                added = [p for p in network.parameters() if p.ndim <= 1]
                each.add_param_group({"params": added, "lr": 0.2})
        run_both(MLP, model, plain, step)
        feed(model, plain)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for network in (model, plain):
            network.zero_grad()
    assert_same_parameters(model, plain)
