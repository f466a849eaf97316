"""What code written for torch's sharded modules finds in ours."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from fsdp2 import FSDPModule, fully_shard
from harness import cached_mesh, distributed, ours_only
from reference import assert_same, whole

pytestmark = [ours_only("torch's modules are torch's")]


@distributed(1)
def test_sharded_modules_are_instances_of_torchs_class() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = fully_shard(plain)
    assert isinstance(model, TorchFSDPModule)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert not isinstance(model[0], TorchFSDPModule)
    assert type(model).__mro__[2] is nn.Sequential


@distributed(1)
def test_no_code_of_torchs_class_can_run() -> None:
    """Every function of it is found in ours, or in the module's own class, before it."""
    model = fully_shard(nn.Linear(2, 2))
    functions = [name for name, value in vars(TorchFSDPModule).items() if inspect.isfunction(value)]
    assert len(functions) > 20
    for name in functions:
        owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
        assert owner is not TorchFSDPModule, name


class Stage(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


NUM_MICRO_BATCHES = 4


def batch_of(data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(data_rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(8, 6, generator=generator, dtype=torch.float64)


def reference_gradients(num_stages: int, num_data_ranks: int) -> list[dict[str, Tensor]]:
    """Of every stage, averaged over the data ranks and summed or averaged over micro-batches."""
    stages = nn.Sequential(*(Stage(i) for i in range(num_stages))).double()
    for rank in range(num_data_ranks):
        x, target = batch_of(rank)
        pairs = zip(x.chunk(NUM_MICRO_BATCHES), target.chunk(NUM_MICRO_BATCHES), strict=True)
        for part, wanted in pairs:
            (loss_of(stages(part), wanted) / NUM_MICRO_BATCHES / num_data_ranks).backward()
    return [{n: p.grad for n, p in s.named_parameters() if p.grad is not None} for s in stages]


def run_schedule(kind: Any, stages_per_rank: int, **options: Any) -> None:
    mesh = cached_mesh(2, 2, names=("pp", "dp"))
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    data_rank = mesh["dp"].get_local_rank()
    num_stages = 2 * stages_per_rank
    mine = [rank + 2 * i for i in range(stages_per_rank)]
    stages = []
    for index in mine:
        module = Stage(index).double()
        for layer in module.layers:
            fully_shard(layer, mesh=mesh["dp"], **options)
        fully_shard(module, mesh=mesh["dp"], **options)
        stages.append(PipelineStage(module, index, num_stages, torch.device("cpu"), group=group))
    one = stages[0] if stages_per_rank == 1 else stages
    schedule = kind(one, NUM_MICRO_BATCHES, loss_fn=loss_of)
    expected = reference_gradients(num_stages, 2)
    for _ in range(2):
        x, target = batch_of(data_rank)
        arguments = (x,) if rank == 0 else ()
        schedule.step(*arguments, target=target if rank == 1 else None)
        for index, stage in zip(mine, stages, strict=True):
            for name, parameter in stage.submod.named_parameters():
                assert parameter.grad is not None, name
                gradient = whole(parameter.grad)
                assert_same(gradient, expected[index][name], f"stage {index}, {name}")
            stage.submod.zero_grad()


@pytest.mark.parametrize("mode", [False, True])
@distributed(4, restart=True)
def test_pipelines_with_one_stage_per_rank(mode: bool) -> None:
    for kind in (ScheduleGPipe, Schedule1F1B):
        run_schedule(kind, 1, reshard_after_forward=mode)
    assert dist.get_world_size() == 4


@distributed(4, restart=True)
def test_pipelines_with_several_stages_per_rank() -> None:
    run_schedule(ScheduleInterleaved1F1B, 2, reshard_after_forward=False)
    assert dist.get_world_size() == 4
