"""Mixtures of experts beside tensor parallelism: ranks that share a batch send parts of it."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from test_experts import DIM, Block, Experts, PlainBlock, expert_mesh, train_beside
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2 import fully_shard
from fsdp2.experts import shard_experts
from harness import cached_mesh, distributed, ours_only, run_on
from reference import gathering

pytestmark = [ours_only("experts")]

LENGTH = 6


class Mixture(nn.Module):
    """Router and experts of a block, on sequences."""

    def __init__(self, kind: type[Block], num_experts: int) -> None:
        super().__init__()
        self.block = kind(num_experts, None, False)
        del self.block.dense

    def forward(self, x: Tensor) -> Tensor:
        return self.block.mixture(x.flatten(0, 1)).view_as(x)


class Layer(nn.Module):
    """A feed-forward layer, then experts."""

    def __init__(self, kind: type[Block], num_experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)
        self.mixture = Mixture(kind, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x + self.down(torch.tanh(self.up(x))))


def build(kind: type[Block], num_experts: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(kind, num_experts) for _ in range(2))).double()


def parallelize(layer: Layer, mesh: DeviceMesh, *, in_parts: bool) -> None:
    """Feed-forward layers by columns and rows; with ``in_parts``, a mixture gets a part of each
    sequence, and so does its router, whose weights every rank has."""
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if in_parts:
        plan["mixture"] = PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
        plan["mixture.block.router"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(layer, mesh, plan)


def shard(
    model: nn.Sequential, experts: DeviceMesh, dense: DeviceMesh, *, in_parts: bool
) -> DeviceMesh:
    """Shard all but experts over all dims of ``dense`` but "tp"; returns this mesh."""
    names = dense.mesh_dim_names
    assert names is not None
    data = dense[names[:-1]]
    for layer in model:
        assert isinstance(layer, Layer)
        block = layer.mixture.block
        parallelize(layer, dense["tp"], in_parts=in_parts)
        block.mesh = experts["ep"]
        data_ranks = data.size() if in_parts else None
        shard_experts(block.experts, mesh=experts, data_ranks=data_ranks, **gathering())
        fully_shard(layer, mesh=data, **gathering())
    fully_shard(model, mesh=data, **gathering())
    return data


def train(
    num_experts: int, experts: DeviceMesh, dense: DeviceMesh, *, in_parts: bool = True
) -> None:
    """Beside one process that averages the gradients over the batches; no rank warns."""
    model, plain = build(Block, num_experts), build(PlainBlock, num_experts)
    shard(model, experts, dense, in_parts=in_parts)
    batch = dist.get_rank() // dense["tp"].size()
    generators = [torch.Generator().manual_seed(10 * step + batch) for step in range(3)]
    batches = [
        torch.randn(3, LENGTH, DIM, generator=each, dtype=torch.float64) for each in generators
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train_beside(model, plain, batches, lambda y: y.square().mean())


@pytest.mark.parametrize(
    ("num_experts", "shape", "in_parts"),
    [
        (4, (2, 2), True),  # tokens travel between the two ranks that share a batch
        (5, (1, 4), True),  # between all of them; one rank has no expert
        (4, (4, 1), True),  # not at all: experts are sharded over all ranks
        (4, (2, 2), False),  # both ranks send the whole batch
    ],
)
@distributed(4)
def test_training(num_experts: int, shape: tuple[int, ...], in_parts: bool) -> None:
    dense = cached_mesh(2, 2, names=("dp", "tp"))
    train(num_experts, expert_mesh(*shape), dense, in_parts=in_parts)


@pytest.mark.parametrize("shape", [(4, 1, 1), (2, 1, 2)])
@distributed(4)
def test_replicas(shape: tuple[int, ...]) -> None:
    """Of experts, and of all else, over other ranks."""
    train(4, expert_mesh(*shape), cached_mesh(2, 1, 2, names=("replicate", "shard", "tp")))


@pytest.mark.long
@distributed(8)
def test_replicas_and_shards() -> None:
    dense = cached_mesh(2, 2, 2, names=("replicate", "shard", "tp"))
    for shape in ((2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 4), (1, 8)):
        train(8, expert_mesh(*shape), dense)
    train(4, expert_mesh(2, 4), cached_mesh(2, 4, names=("dp", "tp")), in_parts=False)


def test_what_cannot_be_dealt_out() -> None:
    run_on(4, refuse)


def refuse() -> None:
    mesh, tensor = expert_mesh(2, 2), cached_mesh(2, 2, names=("dp", "tp"))["tp"]
    for number in (0, 3, 8):
        with pytest.raises(ValueError, match=f"data_ranks must divide the 4 ranks .* got {number}"):
            shard_experts(Experts(4), mesh=mesh, data_ranks=number)
    experts = Experts(4)
    experts.down = nn.Parameter(DTensor.from_local(experts.down.detach(), tensor, [Shard(1)]))
    with pytest.raises(ValueError, match=r"'down' of shard_experts is a DTensor .* leave them out"):
        shard_experts(experts, mesh=mesh)
    assert not isinstance(experts.up, DTensor)
