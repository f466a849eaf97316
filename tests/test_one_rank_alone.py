"""What one rank alone writes or keeps makes it gather no more and no less than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import fully_shard
from gathers import counting
from harness import cached_mesh, distributed, ours_only
from reference import assert_same

pytestmark = ours_only("decisions that follow from what one rank knows")


class Branches(nn.Module):
    """Four units in a row; a fifth computes something that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.unused = nn.Linear(6, 6)
        self.kept: list[Tensor] = []
        self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if i == 1:
                aside = self.unused(x)
                if self.keeps:
                    self.kept.append(aside)
        return x


def sharded(**options: Any) -> Any:
    torch.manual_seed(3)
    model = Branches()
    mesh = cached_mesh(dist.get_world_size())
    for unit in (*model.layers, model.unused, model):
        fully_shard(unit, mesh=mesh, **options)
    return model


def loss_of(model: Any, step: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator("cpu").manual_seed(step), device="cpu")
    return model(x.to(model.unused.weight.device)).square().sum()


def step_with(model: Any, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def expected_loss(shards: dict[str, Any], step: int) -> Tensor:
    """Of a plain model with all ranks' rows as they are now."""
    plain = Branches()
    plain.load_state_dict({name: shard.detach().full_tensor() for name, shard in shards.items()})
    return loss_of(plain, step).detach()


def write_here(param: Any) -> None:
    """To this rank's rows. (Operators on DTensors are for all ranks to call.)"""
    with torch.no_grad():
        param.to_local().mul_(-2)


@pytest.mark.parametrize("kind", ["kept across micro-batches", "frozen and kept", "freed"])
@distributed(2, 3)
def test_one_rank_writes_to_its_rows(kind: str) -> None:
    """All ranks compute with what it wrote."""
    model = sharded()
    shards = dict(model.named_parameters())
    if kind == "kept across micro-batches":
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
    elif kind == "frozen and kept":
        model.layers[2].requires_grad_(False)
        model.set_keep_frozen_gathered(None)
    for step in range(4):
        with counting(model) as gathers:
            expected = expected_loss(shards, step)
            assert_same(step_with(model, step), expected, "loss")
        again = gathers.forward["layers.2.weight"]
        if kind != "freed":
            assert again == (step in (0, 2)), (step, again)
        if step == 1 and dist.get_rank() == 1:
            write_here(shards["layers.2.weight"])


@distributed(2)
def test_one_rank_writes_between_forward_and_backward() -> None:
    """To the unit that backward begins with, whose memory forward has kept."""
    model = sharded()
    shards = dict(model.named_parameters())
    for step in range(4):
        loss = loss_of(model, step)
        if step == 2 and dist.get_rank() == 1:
            write_here(shards["layers.3.weight"])
        with counting(model) as gathers:
            loss.backward()
        assert not gathers.backward["layers.3.weight"] or step == 0
    assert_same(step_with(model, 5), expected_loss(shards, 5), "loss")


@distributed(2)
def test_one_rank_keeps_a_graph() -> None:
    """Of what the loss does not depend on: backward never comes to the unit that made it."""
    model = sharded()
    model.keeps = dist.get_rank() == 0
    gathered: list[Any] = []
    for step in range(3):
        with counting(model) as gathers:
            step_with(model, step)
        gathered.append((dict(gathers.forward), dict(gathers.backward)))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, gathered)
    assert everywhere[0] == everywhere[1]
