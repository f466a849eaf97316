"""Sharded stages under the schedules of ``torch.distributed.pipelining``, beside one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from reference import assert_same, gathering, whole

pytestmark = [ours_only("torch's stages walk torch's own state")]

NUM_MICRO_BATCHES = 4
VOCABULARY, WIDTH, LENGTH = 11, 7, 3
SINGLE: list[Any] = [ScheduleGPipe, Schedule1F1B]
LOOPED: list[Any] = [ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble]
V_SHAPED: list[Any] = [ScheduleZBVZeroBubble, ScheduleDualPipeV]
SPLIT = [ScheduleInterleavedZeroBubble, *V_SHAPED]  # gradients of inputs and weights apart


class Layer(nn.Module):
    """Residual; 7 rows do not divide by 2."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stage(nn.Module):
    """Two layers; the first stage has an embedding before, the last a head after them."""

    def __init__(self, index: int, num_stages: int, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(2))
        last = index == num_stages - 1
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(VOCABULARY, (2 * NUM_MICRO_BATCHES, LENGTH + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@dataclasses.dataclass
class Pipeline:
    """This rank's stages of a pipeline, and the same model whole."""

    schedule: Any
    stages: dict[int, nn.Module]
    plain: nn.Sequential
    is_first: bool
    is_last: bool
    data_rank: int
    num_data_ranks: int

    @classmethod
    def make(
        cls,
        kind: Any,
        pipeline: DeviceMesh,
        data: DeviceMesh,
        *,
        recompute: bool = False,
        prepare: Callable[[nn.Module], Any] = lambda module: None,
        **options: Any,
    ) -> Pipeline:
        rank, num_ranks = pipeline.get_local_rank(), pipeline.size()
        own = [rank]
        if kind in LOOPED:
            own = [rank, rank + num_ranks]
        elif kind in V_SHAPED:
            own = [rank, 2 * num_ranks - 1 - rank]
        num_stages = num_ranks * len(own)
        plain = nn.Sequential(*(Stage(i, num_stages) for i in range(num_stages))).double()
        modules, stages = {}, []
        for index in own:
            module = Stage(index, num_stages, recompute).double()
            for layer in module.layers:
                fully_shard(layer, mesh=data, **gathering(), **options)
            modules[index] = fully_shard(module, mesh=data, **gathering(), **options)
            prepare(module)
            stages.append(
                PipelineStage(
                    module, index, num_stages, torch.device("cpu"), group=pipeline.get_group()
                )
            )
        schedule = kind(
            stages[0] if kind in SINGLE else stages, NUM_MICRO_BATCHES, loss_fn=loss_of
        )
        flat = data.get_local_rank() if data.ndim == 1 else _rank_in(data)
        return cls(
            schedule, modules, plain, 0 in own, num_stages - 1 in own, flat, data.size()
        )

    def step(self, step: int) -> list[Tensor]:
        """Forward and backward of the pipeline; the losses of the micro-batches, where known."""
        x, target = batch_of(step, self.data_rank)
        losses: list[Tensor] = []
        self.schedule.step(
            *((x,) if self.is_first else ()),
            target=target if self.is_last else None,
            losses=losses if self.is_last else None,
        )
        return losses

    def plain_step(self, step: int) -> list[Tensor]:
        """The same by one process: the gradients of all data ranks, averaged."""
        own: list[Tensor] = []
        for data_rank in range(self.num_data_ranks):
            x, target = batch_of(step, data_rank)
            pairs = zip(x.chunk(NUM_MICRO_BATCHES), target.chunk(NUM_MICRO_BATCHES), strict=True)
            losses = [loss_of(self.plain(part), wanted) for part, wanted in pairs]
            (sum(losses) / NUM_MICRO_BATCHES / self.num_data_ranks).backward()  # type: ignore[union-attr]
            if data_rank == self.data_rank:
                own = losses
        return own

    def compare_gradients(self) -> None:
        for index, module in self.stages.items():
            expected = dict(self.plain[index].named_parameters())
            for name, parameter in module.named_parameters():
                grad, wanted = parameter.grad, expected[name].grad
                assert grad is not None, f"stage {index}: {name} has no gradient"
                assert wanted is not None
                assert_same(grad, wanted, f"gradient of {name} in stage {index}")

    def compare_parameters(self) -> None:
        for index, module in self.stages.items():
            expected = dict(self.plain[index].named_parameters())
            for name, parameter in module.named_parameters():
                assert_same(whole(parameter), whole(expected[name]), f"{name} in stage {index}")


def _rank_in(mesh: DeviceMesh) -> int:
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    return coordinates[0] * mesh.size(1) + coordinates[1]


def sgd(modules: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def check_pipeline(kind: Any, steps: int = 5, **options: Any) -> None:
    mesh = cached_mesh(2, 2, names=("pp", "dp"))
    it = Pipeline.make(kind, mesh["pp"], mesh["dp"], **options)
    optimizer, plain_optimizer = sgd(it.stages.values()), sgd([it.plain])
    for step in range(steps):
        losses, expected = it.step(step), it.plain_step(step)
        for actual, wanted in zip(losses, expected if it.is_last else [], strict=True):
            assert_same(actual, wanted, f"loss of step {step}")
        it.compare_gradients()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    it.compare_parameters()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("kind", [*SINGLE, *LOOPED, *V_SHAPED])
@distributed(4)
def test_training(kind: Any, mode: bool) -> None:
    check_pipeline(kind, reshard_after_forward=mode)
