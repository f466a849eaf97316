"""Where a gradient could be dropped without a word: each case beside a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chunked_losses import ChunkedLoss, in_a_function, in_backward, in_the_loss
from fsdp2 import FSDPModule, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import MLP, TRANSFORMER
from reference import assert_same_gradients, average_gradients, gathering, pair

pytestmark = [ours_only("torch's FSDP2 drops some of these")]


@distributed(2)
def test_a_penalty_on_the_shards_beside_the_reduced_gradients() -> None:
    """Autograd accumulates it into ``.grad`` of the shards while reductions are on their way."""
    model, plain = pair(TRANSFORMER)
    for step in range(2):
        batch = TRANSFORMER.batch(step, dist.get_rank(), torch.float64)
        shards = [p for p in model.parameters() if isinstance(p, DTensor)]
        penalty = sum((p.to_local() ** 2).sum() for p in shards)
        (TRANSFORMER.loss(model, *batch) + 0.1 * penalty).backward()
        TRANSFORMER.loss(plain, *batch).backward()
        average_gradients(plain)
        for p in plain.parameters():
            assert p.grad is not None
            p.grad += 0.2 * p.detach()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_parameters_that_are_gathered_and_used_by_hand() -> None:
    """No forward of the unit, and so none of its hooks."""
    model, plain = pair(MLP)
    assert isinstance(model, FSDPModule)
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    MLP.loss(model, *batch).backward()
    MLP.loss(plain, *batch).backward()
    average_gradients(plain)
    model.zero_grad()
    plain.zero_grad()
    for each in (model, plain):
        layer: Any = each[0]  # type: ignore[index]
        if isinstance(layer, FSDPModule):
            layer.unshard()
        (layer.weight * (1 + dist.get_rank())).pow(2).sum().backward()
        if isinstance(layer, FSDPModule):
            layer.reshard()
    average_gradients(plain)
    assert_same_gradients(model, plain)


class Head(nn.Module):
    """A language model whose head is called by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.block = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.loss: ChunkedLoss | None = None

    def forward(self, ids: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.norm(torch.tanh(self.block(self.embedding(ids))))
        if target is None:
            return x
        assert self.loss is not None
        loss = self.loss(self.head, x, target)
        return loss * (1 + 0 * self.norm.weight.sum())  # the root's own, after a backward inside


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("loss", [in_the_loss, in_a_function, in_backward])
@distributed(2)
def test_backward_inside_of_the_loss_or_of_forward(loss: ChunkedLoss, inside: bool) -> None:
    mesh = cached_mesh(2)
    torch.manual_seed(0)
    plain = Head().double()
    torch.manual_seed(0)
    model = Head().double()
    for unit in (model.block, model.head, model):
        fully_shard(unit, mesh=mesh, **gathering())
    plain.loss = model.loss = loss
    for step in range(3):
        ids = torch.randint(
            11, (4, 7), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        for each in (model, plain):
            args = (ids[:, :-1], ids[:, 1:])
            out = each(*args) if inside else loss(each.head, each(args[0]), args[1])
            out.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
