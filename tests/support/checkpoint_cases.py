"""Models and meshes for the tests of checkpoints, and what they should give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import fully_shard
from harness import cached_mesh


class Block(nn.Module):
    """Two matrices with odd sizes, which tensor parallelism divides all the same."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    """Embedding and head are one tensor; an empty one, buffers, and dims that nobody divides."""

    def __init__(self, dim: int = 12, hidden: int = 20, vocabulary: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.Sequential(Block(dim, hidden), Block(dim, hidden))
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.empty: Tensor
        self.register_buffer("empty", torch.zeros(0, 3))
        self.bn = nn.BatchNorm1d(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embed(tokens)) * self.scale + self.empty.sum()
        return self.head(self.bn(x.flatten(0, 1)))


def build(kind: str, seed: int = 0) -> nn.Module:
    """A sharded model.

    Args:
        kind: "plain", "1d", "hsdp" (2 x n), "tp" (n x 2, data x tensor), "columns" (`Shard(1)`),
            "torch" (torch's own FSDP2).
    """
    torch.manual_seed(seed)
    model = Tied().to(torch.float32)
    world_size = dist.get_world_size()
    shard: Callable[..., Any] = fully_shard
    options: dict[str, Any] = {}
    if kind == "plain":
        return model
    if kind == "torch":
        from torch.distributed.fsdp import fully_shard as shard
    if kind == "hsdp":
        options["mesh"] = cached_mesh(2, world_size // 2)
    elif kind == "tp":
        mesh = cached_mesh(world_size // 2, 2, names=("dp", "tp"))
        _tensor_parallel(model, mesh["tp"])
        options["mesh"] = mesh["dp"]
    else:
        options["mesh"] = cached_mesh(world_size)
    if kind == "columns":
        options["shard_placement_fn"] = _columns
    for block in model.blocks:
        shard(block, **options)
    return shard(model, **options)


def _columns(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.ndim == 2 and parameter.numel() else None


def _tensor_parallel(model: Tied, mesh: DeviceMesh) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def tokens(step: int) -> Tensor:
    """The same on every rank, so that every world size trains alike."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 37, (4, 5), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Some steps; returns their losses."""
    losses = []
    for step in steps:
        batch = tokens(step)
        loss = F.cross_entropy(model(batch), batch.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With two groups, and options that are not the defaults."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=3e-3, betas=(0.8, 0.9)
    )


def whole(tensor: Tensor) -> Tensor:
    """Of any placement, as a plain tensor."""
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Every tensor of a model and an optimizer, gathered; a tied one under each of its names."""
    state = {name: whole(t) for name, t in model.state_dict().items()}
    if optimizer is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        for param, values in optimizer.state.items():
            for key, value in values.items():
                state[f"optim.{key}.{names[id(param)]}"] = whole(value)
    return state


def assert_equal_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        same = [tensor.reshape(-1).view(torch.uint8).cpu() for tensor in (actual[name], value)]
        assert torch.equal(*same), name
