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
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, fully_shard, merge_units
from fsdp2 import replicate as replicate_unit
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


def reset_training_state(model: nn.Module) -> int:
    """verl 0.9.1 (automodel and veomni engines) and veomni 0.1.12, before they offload a model."""
    found = 0
    for module in model.modules():
        state: Any = torch_fully_shard.state(module)
        if state is None:
            continue
        group = state._fsdp_param_group
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        found += 1
    return found


@distributed(2)
def test_what_released_clients_read_of_a_state() -> None:
    """By ``fully_shard.state`` of torch, which finds both."""
    policy = TorchPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    for shape in ((2,), (1, 2), (2, 1)):
        mesh = cached_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
        made: list[Any] = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
        for shard, model in zip((fully_shard, torch_fully_shard), made, strict=True):
            shard(model[0], mesh=mesh, mp_policy=policy)
            shard(model, mesh=mesh, reshard_after_forward=False)
            # nemo-automodel 0.7: is a module sharded already; the dtype that a head computes in.
            sharded = [torch_fully_shard.state(m) is not None for m in model.modules()]
            assert sharded == [True, True, False]
            assert model[0]._get_fsdp_state()._mp_policy.param_dtype is torch.bfloat16
            assert model._get_fsdp_state()._mp_policy.param_dtype is None
            assert torch_fully_shard.state(model[0]) is shard.state(model[0])
        ours, theirs = (model._get_fsdp_state()._fsdp_param_group.mesh_info for model in made)
        assert ours == theirs
        assert type(ours) is type(theirs)
        for name, value in vars(theirs).items():
            assert getattr(ours, name) == value, name
        assert reset_training_state(made[0]) == reset_training_state(made[1]) == 2
        # verl's copy of `set_reshard_after_forward` for older versions of torch.
        assert _get_post_forward_mesh_info(True, ours) == _get_post_forward_mesh_info(True, theirs)
        made[0].reshard()
        made[0](torch.ones(1, 2)).sum().backward()


@distributed(2)
def test_states_of_copies_merged_units_and_replicas_are_found() -> None:
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    for layer in model[:3]:
        fully_shard(layer)
    replicate_unit(model[3])
    fully_shard(model)
    info = torch_fully_shard.state(model[3]).mesh_info  # type: ignore[union-attr]
    assert (type(info).__name__, info.replicate_mesh_size) == ("DDPMeshInfo", 2)
    copied = copy.deepcopy(model)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad()
    merge_units(model, min_bytes=1 << 20)
    for tree in (model, copied):
        for module in tree.modules():
            assert torch_fully_shard.state(module) is fully_shard.state(module)  # type: ignore[attr-defined]
    assert torch_fully_shard.state(copied) is not torch_fully_shard.state(model)


@distributed(1)
def test_a_state_has_no_code_of_torch() -> None:
    state = fully_shard.state(fully_shard(nn.Linear(2, 2)))  # type: ignore[attr-defined]
    assert not isinstance(state, FSDPState)
    for name in ("fsdp_params", "_pre_forward", "_lazy_init", "unshard"):
        assert not hasattr(state, name)


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
