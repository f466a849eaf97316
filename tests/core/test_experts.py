"""Mixtures of experts: experts on another mesh than the rest, beside one process with all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.experts import TokenExchange, local_experts, shard_experts
from harness import DEVICE, cached_mesh, distributed, ours_only, run_on
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
    # Different numbers of tokens on different ranks, one of them with none at times.
    numbers = [7 * dist.get_rank() % 5 if step % 2 else 7 for step in range(steps)]
    batches = [batch(step, dist.get_rank(), n) for step, n in enumerate(numbers)]
    train_beside(model, plain, batches, lambda y: y.square().sum())
    return model


def train_beside(
    model: nn.Module, plain: nn.Module, batches: list[Tensor], loss_of: Callable[[Tensor], Tensor]
) -> None:
    """A step of both on each of this rank's batches; ``plain`` averages its gradients."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for step, x in enumerate(batches):
        loss, expected = loss_of(model(x)), loss_of(plain(x))
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


@pytest.mark.parametrize("favourite", [0, 3])
@distributed(4)
def test_all_tokens_on_two_experts(favourite: int) -> None:
    """The other ranks' experts get nothing, and take part in every collective all the same."""
    data = cached_mesh(4, names=("dp",))
    train(4, expert_mesh(1, 4), data, steps=3, favourite=favourite)


@distributed(4)
def test_a_dense_part_with_replicas() -> None:
    train(4, expert_mesh(2, 2), cached_mesh(2, 2, names=("replicate", "shard")), steps=3)


@distributed(4)
def test_experts_with_replicas() -> None:
    """Two ranks of experts, each with a replica."""
    model = train(4, expert_mesh(2, 1, 2), cached_mesh(4, names=("dp",)), steps=3)
    up = model[0].experts.up  # type: ignore[union-attr]
    assert isinstance(up, DTensor)
    assert up.placements[0] == Replicate()


@distributed(4)
def test_offload() -> None:
    model = train(
        5,
        expert_mesh(2, 2),
        cached_mesh(2, 2, names=("replicate", "shard")),
        steps=3,
        offload_policy=CPUOffloadPolicy(),
    )
    x = batch(9, dist.get_rank())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(copied(x), model(x))


@pytest.mark.long
@distributed(8)
def test_experts_with_replicas_and_shards() -> None:
    for num_experts in (5, 8):
        train(num_experts, expert_mesh(2, 2, 2), cached_mesh(8, names=("dp",)), steps=3)


@distributed(4)
def test_activation_checkpointing() -> None:
    data = cached_mesh(4, names=("dp",))
    train(4, expert_mesh(2, 2), data, steps=2, recompute=True)
    train(4, expert_mesh(1, 4), data, steps=2, recompute=True, favourite=1)


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_other_reshard_modes(mode: bool | int) -> None:
    data = cached_mesh(4, names=("dp",))
    train(4, expert_mesh(2, 2), data, steps=2, reshard_after_forward=mode)


@pytest.mark.parametrize("sharded", [False, True])
@distributed(4)
def test_accumulation(sharded: bool) -> None:
    """Three micro-batches, the last of which reduces; in the second some experts get no token."""
    model, plain = build(Block, 4).double(), build(PlainBlock, 4).double()
    shard(model, expert_mesh(2, 2), cached_mesh(4, names=("dp",)))
    assert isinstance(model, FSDPModule)
    model.set_accumulate_sharded(sharded)
    for step in range(2):
        for micro in range(3):
            x = batch(3 * step + micro, dist.get_rank())
            for each in (model, plain):
                for block in each:
                    block.favourite = 0 if micro == 1 else None
            model.set_requires_gradient_sync(micro == 2)
            model(x).square().sum().backward()
            plain(x).square().sum().backward()
        average_gradients(plain)
        compare(model, plain, "gradient")
        model.zero_grad()
        plain.zero_grad()


@distributed(4)
def test_mixed_precision() -> None:
    """Beside a plain model in bf16: what is sent is bf16, sums over ranks are float32."""
    model, plain = build(Block, 4), build(PlainBlock, 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, expert_mesh(2, 2), cached_mesh(4, names=("dp",)), mp_policy=policy)
    seen = set()
    model[0].experts.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))  # type: ignore[union-attr]
    x = batch(0, dist.get_rank()).float()
    low = copy.deepcopy(plain).bfloat16()
    loss, expected = model(x).square().sum(), low(x.bfloat16()).square().sum()
    assert abs(loss.item() - expected.item()) <= 0.02 * abs(expected.item())
    assert seen == {torch.bfloat16}
    loss.backward()
    expected.backward()
    for to, of in zip(plain.parameters(), low.parameters(), strict=True):
        to.grad = None if of.grad is None else of.grad.float()
    average_gradients(plain)
    for (name, a), b in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        grad, wanted = whole(a.grad), b[1].grad  # type: ignore[arg-type]
        assert wanted is not None
        assert grad.dtype == torch.float32
        # Sums over tokens are made in another order, in bf16.
        assert (grad - wanted).norm() <= 0.03 * wanted.norm(), name


# ------------------------------------------------------------------------------- layout


@distributed(4)
def test_layout() -> None:
    """Each rank has its part only, of experts that are numbered as a user numbers them."""
    mesh = expert_mesh(2, 2)
    experts = Experts(4)
    full = {name: p.detach().clone() for name, p in experts.named_parameters()}
    assert shard_experts(experts, mesh=mesh) is experts
    assert isinstance(experts, FSDPModule)
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == ("efsdp", "ep")
        assert parameter.to_local().shape[0] == 1
        assert torch.equal(whole(parameter), full[name])
        first = 2 * mesh.get_local_rank("ep") + mesh.get_local_rank("efsdp")
        assert torch.equal(parameter.to_local()[0], full[name][first])


@distributed(4)
def test_experts_on_the_meta_device() -> None:
    data = cached_mesh(4, names=("dp",))
    with torch.device("meta"):
        model = build(Block, 4)
    shard(model, expert_mesh(2, 2), data)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device=DEVICE)
    for p in model.parameters():
        nn.init.constant_(p, 0.5)
    assert model(torch.ones(3, DIM)).isfinite().all()


def test_experts_that_cannot_be_dealt_out() -> None:
    run_on(4, refuse)


def refuse() -> None:
    mesh = expert_mesh(2, 2)
    with pytest.raises(ValueError, match="needs a mesh with a dim 'experts'"):
        shard_experts(Experts(4), mesh=mesh, expert_dim="experts")
    with pytest.raises(ValueError, match="one or two more"):
        shard_experts(Experts(4), mesh=mesh["ep"])
    block = nn.Module()
    block.router, block.experts = nn.Linear(6, 4), Experts(3)
    with pytest.raises(ValueError, match=r"number of experts.*'router.weight': 4"):
        shard_experts(block, mesh=mesh)
    with pytest.raises(ValueError, match="one dim"):
        TokenExchange(torch.zeros(2, 1, dtype=torch.int64), 4, mesh)
    with pytest.raises(ValueError, match=r"\(tokens, choices\)"):
        TokenExchange(torch.zeros(2, dtype=torch.int64), 4)


# ------------------------------------------------------------------------------- checkpoints


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def save_experts(folder: str, shape: tuple[int, ...]) -> list[Tensor]:
    model = build(Block, 5)
    shard(model, expert_mesh(*shape), cached_mesh(dist.get_world_size(), names=("dp",)))
    optimizer = adam(model)
    model(batch(0, dist.get_rank()).float()).square().sum().backward()
    optimizer.step()
    Checkpointer(folder).save(1, model=model, optimizer=optimizer)
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [whole(t) for t in (*model.parameters(), *states)]


def load_experts(folder: str, shape: tuple[int, ...], expected: list[Tensor]) -> None:
    model = build(Block, 5)
    for p in model.parameters():
        nn.init.zeros_(p)
    shard(model, expert_mesh(*shape), cached_mesh(dist.get_world_size(), names=("dp",)))
    optimizer = adam(model)
    Checkpointer(folder).load(model=model, optimizer=optimizer)
    states = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    loaded = [whole(t) for t in (*model.parameters(), *states)]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(loaded, expected, strict=True))


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_checkpoints_of_other_numbers_of_expert_ranks(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Saved with one number, loaded with others; model and optimizer, bit for bit."""
    expected = run_on(4, save_experts, str(tmp_path), shape)[0]
    for num_ranks, other in ((4, (4, 1)), (4, (1, 4)), (4, (2, 2)), (2, (1, 2))):
        if other != shape:
            run_on(num_ranks, load_experts, str(tmp_path), other, expected)


# ------------------------------------------------------------------------------- tokens


@distributed(2)
def test_tokens_reach_their_experts_and_come_back() -> None:
    mesh = cached_mesh(2, names=("ep",))
    rank = dist.get_rank()
    ids = torch.tensor([[2, 0], [1, 2], [2, 2]]) if rank == 0 else torch.tensor([[0, 1]])
    tokens = torch.arange(len(ids) * 2.0).view(-1, 2) + 100 * rank
    exchange = TokenExchange(ids, 3, mesh)  # experts 0 and 1 on rank 0, 2 on rank 1
    rows = exchange.dispatch(tokens)
    assert exchange.counts == ([2, 2] if rank == 0 else [4])
    expected = [[0, 1], [100, 101], [2, 3], [100, 101]] if rank == 0 else [[0, 1], [2, 3], [4, 5]]
    expected += [] if rank == 0 else [[4, 5]]
    assert rows.tolist() == expected
    first = 0 if rank == 0 else 2
    experts = torch.arange(first, first + len(exchange.counts)).repeat_interleave(
        torch.tensor(exchange.counts)
    )
    back = exchange.combine(rows * 10.0 ** experts.unsqueeze(1))
    assert torch.equal(back, tokens * (10.0**ids).sum(1, keepdim=True))
