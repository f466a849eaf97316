"""Mixtures of experts: experts on another mesh than the rest, beside one process with all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.experts import TokenExchange, local_experts, shard_experts
from harness import cached_mesh, distributed, ours_only, run_on
from reference import assert_same, average_gradients, gathering, whole

pytestmark = [ours_only("experts")]

DIM, HIDDEN = 6, 5


class Experts(nn.Module):
    """Grouped weights, and a bias per expert."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, DIM, HIDDEN))
        self.bias = nn.Parameter(torch.randn(num_experts, HIDDEN))
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, DIM))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        up, bias, down = map(local_experts, (self.up, self.bias, self.down))
        parts = [
            torch.tanh(part @ up[i] + bias[i]) @ down[i]
            for i, part in enumerate(rows.split(counts))
            if len(part)  # so a parameter may have no gradient
        ]
        return torch.cat(parts) if parts else rows.new_zeros(0, DIM)


class Block(nn.Module):
    """A dense layer, then the two best of some experts, both residual."""

    def __init__(self, num_experts: int, favourite: int | None, recompute: bool) -> None:
        super().__init__()
        self.num_experts, self.favourite, self.recompute = num_experts, favourite, recompute
        self.mesh: DeviceMesh | None = None
        self.dense = nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, num_experts, bias=False)
        self.experts = Experts(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.dense(x))
        if self.recompute:
            return checkpoint(self.mixture, x, use_reentrant=False)
        return self.mixture(x)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        if self.favourite is not None:
            # All tokens choose this one first, and the one after it.
            bonus = F.one_hot(torch.tensor(self.favourite), self.num_experts)
            scores = scores + 1e3 * (bonus + bonus.roll(1)).to(scores.dtype)
        weights, ids = scores.softmax(-1).topk(min(2, self.num_experts))
        return weights, ids

    def mixture(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        exchange = TokenExchange(ids, self.num_experts, self.mesh)
        rows = self.experts(exchange.dispatch(x), exchange.counts)
        return x + exchange.combine(rows, weights)


class PlainBlock(Block):
    """The same without any exchange: every expert computes every token."""

    def mixture(self, x: Tensor) -> Tensor:
        weights, ids = self.choose(x)
        e = self.experts
        hidden = torch.tanh(torch.einsum("ti,eij->tej", x, e.up) + e.bias)
        every = torch.einsum("tej,ejk->tek", hidden, e.down)
        chosen = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, DIM))
        return x + (chosen * weights.unsqueeze(-1)).sum(1)


def build(
    kind: type[Block], num_experts: int, favourite: int | None = None, recompute: bool = False
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(num_experts, favourite, recompute) for _ in range(2)))


def expert_mesh(*shape: int) -> DeviceMesh:
    names = ("replicate", "efsdp", "ep")
    return cached_mesh(*shape, names=names[-len(shape) :])


def shard(model: nn.Sequential, mesh: DeviceMesh, data: DeviceMesh, **options: Any) -> None:
    for block in model:
        assert isinstance(block, Block)
        block.mesh = mesh["ep"]
        shard_experts(block.experts, mesh=mesh, **gathering(), **options)
        fully_shard(block, mesh=data, **gathering(), **options)
    fully_shard(model, mesh=data, **gathering(), **options)


def batch(step: int, rank: int, num_tokens: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(num_tokens, DIM, generator=generator, dtype=torch.float64)


def compare(model: nn.Module, plain: nn.Module, what: str) -> None:
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert b.grad is not None
        assert a.grad is not None, f"{name} has no gradient"
        assert_same(whole(a.grad), b.grad, f"{what} of {name}")


def train(
    num_experts: int,
    mesh: DeviceMesh,
    data: DeviceMesh,
    *,
    steps: int = 5,
    favourite: int | None = None,
    recompute: bool = False,
    **options: Any,
) -> nn.Sequential:
    """Trains beside one process that averages the gradients over all ranks' batches."""
    model = build(Block, num_experts, favourite, recompute).double()
    plain = build(PlainBlock, num_experts, favourite).double()
    shard(model, mesh, data, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for step in range(steps):
        # Different numbers of tokens on different ranks, one of them with none at times.
        num_tokens = 7 * dist.get_rank() % 5 if step % 2 else 7
        x = batch(step, dist.get_rank(), num_tokens)
        loss, expected = model(x).square().sum(), plain(x).square().sum()
        assert_same(loss, expected, f"loss of step {step}")
        loss.backward()
        expected.backward()
        average_gradients(plain)
        compare(model, plain, "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(whole(a), whole(b), name)
    return model


@pytest.mark.parametrize(
    ("num_experts", "shape"),
    [
        (8, (2, 2)),  # four on each rank, two after sharding
        (2, (2, 2)),  # one on each rank: sharded on dim 1
        (5, (2, 2)),  # uneven
        (3, (1, 4)),  # fewer than ranks: one rank has none
        (3, (4, 1)),  # no expert parallelism
    ],
)
@distributed(4)
def test_training(num_experts: int, shape: tuple[int, ...]) -> None:
    data = cached_mesh(4, names=("dp",))
    train(num_experts, expert_mesh(*shape), data)
