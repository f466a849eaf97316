"""What code written for torch's sharded modules finds in ours."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard
from harness import cached_mesh, distributed, ours_only
from reference import assert_same, average_gradients, whole

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


@distributed(2)
def test_the_state_of_a_module() -> None:
    """One object for each call of `fully_shard`, which torch's function finds too."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    pair_of_layers = [model[0], model[1]]
    assert fully_shard(pair_of_layers) is pair_of_layers
    fully_shard(model[2])
    assert fully_shard.state(model) is None
    fully_shard(model)
    states = [fully_shard.state(module) for module in (model, model[0], model[2])]
    assert len(set(states)) == 3
    assert fully_shard.state(model[1]) is fully_shard.state(model[0])
    assert fully_shard.state(model[3]) is None
    assert model._get_fsdp_state() is states[0] is torch_fully_shard.state(model)
    model(torch.ones(1, 2)).sum().backward()
    assert set(states[0]._state_ctx.all_states) == set(states)


@pytest.mark.parametrize("inner", ["replicated", "sharded"])
@distributed(2)
def test_replicate_beside_sharding(inner: str) -> None:
    """Each leaves to the other what the other was applied to."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model = copy.deepcopy(plain)
    if inner == "replicated":
        replicate(model[0])
        fully_shard(model)
    else:
        fully_shard(model[1])
        replicate(model)
    assert not isinstance(model[0].weight, DTensor)
    assert isinstance(model[1].weight, DTensor)
    x = torch.full((2, 3), 1.0 + dist.get_rank(), dtype=torch.float64)
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
        average_gradients(plain)
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert actual.grad is not None
            assert expected.grad is not None
            assert_same(whole(actual.grad), expected.grad, "gradient")
            actual.grad = expected.grad = None


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
