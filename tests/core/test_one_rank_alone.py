"""What one rank alone writes or keeps makes it gather no more and no less than the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2 import RanksDisagreeError, check_ranks_agree, fully_shard, watch_ranks
from fsdp2.checkpoint import load_model, save_model
from gathers import counting
from harness import cached_mesh, distributed, ours_only, shared_folder
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


def keep_gathered(model: Any, kind: str) -> None:
    if kind == "kept across micro-batches":
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
    else:
        model.layers[2].requires_grad_(False)
        model.set_keep_frozen_gathered(None)


KINDS = pytest.mark.parametrize("kind", ["kept across micro-batches", "frozen and kept"])


@KINDS
@distributed(2, restart=True)  # ranks have met a different number of times then
def test_a_write_on_one_rank_to_what_is_gathered_is_named(kind: str) -> None:
    model = sharded()
    shard = model.layers[2].weight
    keep_gathered(model, kind)
    step_with(model, 0)
    writes = dist.get_rank() == 1
    with watch_ranks(model, timeout_s=2), counting(model) as gathers:
        step_with(model, 1)
        assert not gathers.forward["layers.2.weight"]
        if writes:
            write_here(shard)
        if kind == "frozen and kept":
            match = r"gather 'layers.2' in forward \(only what it has already\) \(rank 0\), "
            match += r"gather 'layers.2' in forward \(rank 1\)"
            with pytest.raises(RanksDisagreeError, match=match):
                step_with(model, 2)
        elif writes:  # the other rank has no more to gather
            match = "Rank 1 is about to gather 'layers.2' in forward, .* but rank 0 did not come"
            with pytest.raises(RanksDisagreeError, match=match):
                step_with(model, 2)
        dist.barrier()


@KINDS
@distributed(3)
def test_a_checkpoint_without_rows_for_a_rank(kind: str) -> None:
    """It is loaded into what is kept gathered: all ranks gather again."""
    mesh = cached_mesh(3)
    model = Branches()
    few = nn.Linear(6, 2)  # rows for two ranks of three
    model.layers[2] = nn.Sequential(few, nn.Linear(2, 6))
    for unit in (few, *model.layers, model):
        fully_shard(unit, mesh=mesh)
    keep_gathered(model, kind)
    with shared_folder() as path:
        save_model(model, f"{path}/saved")
        step_with(model, 0)
        with counting(model) as gathers:
            step_with(model, 1)
        assert not gathers.forward["layers.2.0.weight"]
        load_model(model, f"{path}/saved")
    with counting(model) as gathers:
        step_with(model, 2)
    assert gathers.forward["layers.2.0.weight"] == 1


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


# ----------------------------------------------------------- what checks between ranks name


def step_after_freezing(model: Any, odd: bool) -> None:
    """Too late for the comparison before the first forward."""
    if odd:
        model.layers[3].bias.requires_grad_(False)
    step_with(model, 1)


def step_frozen_after_its_forward(model: Any, odd: bool) -> None:
    loss = loss_of(model, 1)
    if odd:
        model.layers[3].bias.requires_grad_(False)
    loss.backward()


def step_of_a_pipeline(model: Any, odd: bool) -> None:
    """Gathers between forward and backward, where gradients of weights are computed apart."""
    loss = loss_of(model, 1)
    if odd:
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
    loss.backward()


REDUCES = r"reduce 'layers.3' \(weight, bias\) \(rank 0\), reduce 'layers.3' \(weight\) \(rank 1\)"
ODD: dict[str, tuple[Any, str]] = {
    "freezing": (step_after_freezing, REDUCES),
    "freezing after a forward": (step_frozen_after_its_forward, REDUCES),
    "a pipeline's gather": (
        step_of_a_pipeline,
        r"gather 'layers.2' in backward \(rank 0\), gather 'unused' in forward \(rank 1\)",
    ),
}


@pytest.mark.parametrize("what", ODD)
@distributed(2, restart=True)
def test_what_one_rank_alone_does_to_a_model_is_named(what: str) -> None:
    step, match = ODD[what]
    model = sharded()
    step_with(model, 0)
    with watch_ranks(model, timeout_s=5), pytest.raises(RanksDisagreeError, match=match):
        step(model, dist.get_rank() == 1)


def tensor_parallel() -> Any:
    """A norm whose gradients are partial sums, between layers that are split over two ranks."""
    mesh = cached_mesh(1, 2, names=("data", "tensor"))
    model: Any = nn.Sequential(
        nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
    )
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=Shard(0)),
    }
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return model


@distributed(2, restart=True)
def test_a_hook_on_a_tensor_parallel_parameter_of_one_rank_is_named() -> None:
    """It wants the whole gradient at once, where the other rank sums it late."""
    model = tensor_parallel()
    if dist.get_rank() == 1:
        model[2].bias.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(RanksDisagreeError, match=r"hooks on '2.bias': False \(rank 0\), True "):
        check_ranks_agree(model)


@pytest.mark.parametrize("what", ["a late hook", "a left-over gradient"])
@distributed(2, restart=True)
def test_a_gradient_that_one_rank_sums_at_once_is_named(what: str) -> None:
    """After the comparison before the first forward; the other rank sums it late."""
    model = tensor_parallel()
    x = torch.ones(6, 4, device=model[3].weight.device)
    match = r"sum the gradient of '3.weight' at the end of backward \(rank 0\), "
    match += r"sum the gradient of '3.weight' at once \(rank 1\)"
    with watch_ranks(model, timeout_s=5):
        model(x).sum().backward()
        if what == "a late hook" or dist.get_rank() == 0:
            model.zero_grad()
        if what == "a late hook" and dist.get_rank() == 1:
            model[3].weight.register_post_accumulate_grad_hook(lambda param: None)
        loss = model(x).sum()
        with pytest.raises(RanksDisagreeError, match=match):
            loss.backward()
