"""Sharded stages under the schedules of ``torch.distributed.pipelining``, beside one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
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

from counted import CountedReduceScatter, counting_reductions
from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import TRANSFORMER
from reference import assert_same, assert_same_gradients, gathering, pair, run_both

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

    def __init__(
        self, index: int, num_stages: int, recompute: bool = False, norm: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.layers = nn.ModuleList(Layer(recompute) for _ in range(2))
        last = index == num_stages - 1
        self.norm = nn.LayerNorm(WIDTH) if last and norm else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None
        self.skips_head = False  # the loss calls it instead
        torch.manual_seed(99)  # for both: some tests tie them
        for module in (self.embedding, self.head):
            if module is not None:
                nn.init.normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None or self.skips_head else self.head(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(step: int, data_rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    ids = torch.randint(VOCABULARY, (2 * NUM_MICRO_BATCHES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # torch 2.11 compares strides


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
    compute_dtype: torch.dtype = torch.float64

    @classmethod
    def make(
        cls,
        kind: Any,
        pipeline: DeviceMesh,
        data: DeviceMesh,
        *,
        rounds: int = 2,
        recompute: bool = False,
        norm: bool = False,
        dtype: torch.dtype = torch.float64,
        compute_dtype: torch.dtype = torch.float64,
        prepare: Callable[[nn.Module], Any] = lambda stage: None,
        shard_first: Callable[[nn.Module], Any] = lambda stage: None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_of,
        build: Any = None,
        **options: Any,
    ) -> Pipeline:
        """
        Arguments:
            rounds: stages per rank of looped schedules.
            recompute: activation checkpointing of the layers.
            norm: whether the last stage has one before its head.
            dtype, compute_dtype: of the parameters, and of the computation.
            prepare: called with every stage, of this rank sharded and of the reference plain.
            shard_first: called with every stage of this rank before it is sharded.
            loss_fn: of the sharded pipeline; the reference has the usual one.
            build: makes the schedule; None: ``kind``.
            options: passed on to `fully_shard`.
        """
        rank, num_ranks = pipeline.get_local_rank(), pipeline.size()
        own = [rank]
        if kind in LOOPED:
            own = [rank + i * num_ranks for i in range(rounds)]
        elif kind in V_SHAPED:
            if torch.__version__ < "2.12":
                pytest.skip("V-shaped schedules of torch 2.11 send to their own rank: not on gloo")
            own = [rank, 2 * num_ranks - 1 - rank]
        num_stages = num_ranks * len(own)
        plain = nn.Sequential(*(Stage(i, num_stages, norm=norm) for i in range(num_stages)))
        plain.to(dtype)
        modules, stages, device = {}, [], torch.get_default_device()
        for index in own:
            module = Stage(index, num_stages, recompute, norm).to(dtype)
            for layer in module.layers:
                fully_shard(layer, mesh=data, **gathering(), **options)
            shard_first(module)
            modules[index] = fully_shard(module, mesh=data, **gathering(), **options)
            stages.append(
                PipelineStage(module, index, num_stages, device, group=pipeline.get_group())
            )
        for module in (*modules.values(), *plain):
            prepare(module)
        chosen: Any = stages[0] if kind in SINGLE else stages
        schedule = (build or kind)(chosen, NUM_MICRO_BATCHES, loss_fn=loss_fn)
        coordinates = data.get_coordinate()
        assert coordinates is not None
        data_rank = (
            coordinates[0] if data.ndim == 1 else data.size(1) * coordinates[0] + coordinates[1]
        )
        ends = (0 in own, num_stages - 1 in own)
        return cls(schedule, modules, plain, *ends, data_rank, data.size(), compute_dtype)

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
        """The same on one process: gradients of all data ranks, averaged; this rank's losses."""
        own: list[Tensor] = []
        factor = NUM_MICRO_BATCHES * self.num_data_ranks
        for data_rank in range(self.num_data_ranks):
            x, target = batch_of(step, data_rank)
            pairs = zip(x.chunk(NUM_MICRO_BATCHES), target.chunk(NUM_MICRO_BATCHES), strict=True)
            for part, wanted in pairs:
                computing = copy.deepcopy(self.plain).to(self.compute_dtype)
                computing.zero_grad()
                loss = loss_of(computing(part), wanted)
                loss.backward()
                for mine, theirs in zip(
                    self.plain.parameters(), computing.parameters(), strict=True
                ):
                    if theirs.grad is not None:
                        grad = theirs.grad.to(mine.dtype) / factor
                        mine.grad = grad if mine.grad is None else mine.grad + grad
                if data_rank == self.data_rank:
                    own.append(loss.detach())
        return own

    def compare_gradients(self) -> None:
        for index, module in self.stages.items():
            expected = dict(self.plain[index].named_parameters())
            for name, parameter in module.named_parameters():
                grad, wanted = parameter.grad, expected[name].grad
                assert (grad is None) == (wanted is None), f"stage {index}: {name}"
                if grad is not None and wanted is not None:
                    assert_same(grad, wanted, f"gradient of {name} in stage {index}")

    def compare_parameters(self) -> None:
        for index, module in self.stages.items():
            expected = dict(self.plain[index].named_parameters())
            for name, parameter in module.named_parameters():
                assert_same(parameter, expected[name], f"{name} in stage {index}")


def sgd(modules: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)


def data_and_pipeline() -> tuple[DeviceMesh, DeviceMesh]:
    mesh = cached_mesh(2, 2, names=("pp", "dp"))
    return mesh["pp"], mesh["dp"]


def check(it: Pipeline, steps: int) -> None:
    """Trains both and compares losses and gradients of every step, and the parameters."""
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


@pytest.mark.parametrize(
    "mode",
    [None, pytest.param(True, marks=pytest.mark.long), pytest.param(False, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "kind",
    [
        *SINGLE,
        ScheduleLoopedBFS,
        # The next test has these two in every run.
        pytest.param(ScheduleInterleaved1F1B, marks=pytest.mark.long),
        pytest.param(ScheduleInterleavedZeroBubble, marks=pytest.mark.long),
        *V_SHAPED,
    ],
)
@distributed(4)
def test_training(kind: Any, mode: bool | None) -> None:
    """Every schedule, whatever is freed after forward."""
    check(Pipeline.make(kind, *data_and_pipeline(), reshard_after_forward=mode), 5)


@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@distributed(4)
def test_stages_that_the_schedule_frees_and_gathers_again(kind: Any) -> None:
    """It keeps three stages of a rank gathered; with four it reshards some in the middle."""
    it = Pipeline.make(kind, *data_and_pipeline(), rounds=4, reshard_after_forward=False)
    actions = [str(a) for a in it.schedule.pipeline_order_with_comms[it.schedule.rank]]
    assert sum("UNSHARD" in action for action in actions) > 4
    check(it, 2)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBVZeroBubble])
@distributed(4)
def test_activation_checkpointing(kind: Any) -> None:
    check(Pipeline.make(kind, *data_and_pipeline(), recompute=True), 2)


def freeze(stage: nn.Module) -> None:
    for parameter in stage.layers[0].parameters():  # type: ignore[index,union-attr]
        parameter.requires_grad_(False)
    stage.layers[1].up.weight.requires_grad_(False)  # type: ignore[index,union-attr]


@pytest.mark.parametrize("kind", [ScheduleGPipe, ScheduleInterleavedZeroBubble])
@distributed(4)
def test_frozen_parameters(kind: Any) -> None:
    it = Pipeline.make(kind, *data_and_pipeline(), prepare=freeze)
    it.step(0)
    it.plain_step(0)
    it.compare_gradients()


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize("sharded", [False, True])
@distributed(4)
def test_mixed_precision(kind: Any, sharded: bool) -> None:
    """Sums over micro-batches are in float32, of whole gradients and of shards."""
    it = Pipeline.make(
        kind,
        *data_and_pipeline(),
        dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        prepare=accumulating(sharded),
        mp_policy=BF16,
    )
    check(it, 2)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
@distributed(4)
def test_evaluation_between_steps(kind: Any) -> None:
    it = Pipeline.make(kind, *data_and_pipeline())
    optimizer = sgd(it.stages.values())  # after an evaluation the root is gathered
    it.step(0)
    x, target = batch_of(1, it.data_rank)
    inputs = (x,) if it.is_first else ()
    output = it.schedule.eval(*inputs, target=target if it.is_last else None)
    if it.is_last:
        assert_same(output, it.plain(x), "output")
    optimizer.zero_grad()
    it.step(2)
    it.plain_step(2)
    it.compare_gradients()


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBVZeroBubble])
@distributed(4)
def test_tied_embedding_and_head(kind: Any) -> None:
    """Each stage has a copy of the weight; after the step the two gradients are added up."""
    pipeline, data = data_and_pipeline()
    it = Pipeline.make(kind, pipeline, data)
    it.plain[-1].head.weight = it.plain[0].embedding.weight  # type: ignore[union-attr]
    optimizer, plain_optimizer = sgd(it.stages.values()), sgd([it.plain])
    for step in range(3):
        it.step(step)
        it.plain_step(step)
        own = [stage.embedding for stage in it.stages.values() if stage.embedding is not None]
        own += [stage.head for stage in it.stages.values() if stage.head is not None]
        grads = [module.weight.grad.to_local() for module in own]  # type: ignore[operator,union-attr]
        if len(grads) == 2:  # the schedule is V-shaped: one rank has the first and the last stage
            total = grads[0] + grads[1]
            for grad in grads:
                grad.copy_(total)
        elif grads:
            dist.all_reduce(grads[0], group=pipeline.get_group())
        it.compare_gradients()
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    it.compare_parameters()


def check_hybrid(kind: Any, replicas: int, shards: int) -> None:
    """Gradients are reduce-scattered once per step or micro-batch, and all-reduced once."""
    mesh = cached_mesh(2, replicas, shards, names=("pp", "replicate", "shard"))
    num_parts = []
    for sharded in (False, True):
        parts: list[int] = []

        def watch(stage: nn.Module, sharded: bool = sharded, parts: list[int] = parts) -> None:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.set_all_reduce_hook(lambda part: parts.append(part.numel()))
            accumulating(sharded)(stage)

        it = Pipeline.make(kind, mesh["pp"], mesh["replicate", "shard"], prepare=watch)
        check(it, 3)
        num_parts.append(len(parts))
    assert num_parts[0] > 0
    assert num_parts[0] == num_parts[1]


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleZBVZeroBubble])
@distributed(4)
def test_replicated_stages(kind: Any) -> None:
    check_hybrid(kind, 2, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
@distributed(8)
def test_hybrid_sharding_of_stages(kind: Any) -> None:
    check_hybrid(kind, 2, 2)


# --------------------------------------------------------------- when gradients are reduced


def accumulating(sharded: bool) -> Callable[[nn.Module], None]:
    def prepare(stage: nn.Module) -> None:
        if isinstance(stage, FSDPModule):
            stage.set_accumulate_sharded(sharded)

    return prepare


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
@pytest.mark.parametrize("sharded", [False, True])
@distributed(4)
def test_reductions_per_step(kind: Any, sharded: bool) -> None:
    """One for each unit and step; or, where gradients accumulate sharded, one per micro-batch."""
    counted: dict[FSDPModule, CountedReduceScatter] = {}

    def count(stage: nn.Module) -> None:
        counted.update(counting_reductions(stage))
        accumulating(sharded)(stage)

    it = Pipeline.make(kind, *data_and_pipeline(), prepare=count)
    per_step = NUM_MICRO_BATCHES if sharded else 1
    for step in range(2):
        it.step(step)
        it.plain_step(step)
        it.compare_gradients()
        for module, counter in counted.items():
            assert counter.calls == (step + 1) * per_step * bool(own_parameters(module))
        sgd(it.stages.values()).zero_grad()
        it.plain.zero_grad()


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those that the module's own call of `fully_shard` took."""
    inside = {
        p
        for child in module.modules()
        if child is not module and isinstance(child, FSDPModule)
        for p in child.parameters()
    }
    return [p for p in module.parameters() if p not in inside]


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@distributed(4)
def test_the_all_reduce_alone_at_the_end(num_micro_batches: int) -> None:
    """Shards accumulate over micro-batches; what a stage calls last all-reduces them once."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(TRANSFORMER, mesh=mesh)
    scattered = counting_reductions(model)
    reduced: list[int] = []
    for unit in scattered:
        unit.set_all_reduce_hook(lambda part: reduced.append(part.numel()))
    assert isinstance(model, FSDPModule)
    model.set_accumulate_sharded(True)
    for step in range(2):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        for micro in range(num_micro_batches):
            run_both(TRANSFORMER, model, plain, 3 * step + micro)
        assert not reduced
        calls = [counter.calls for counter in scattered.values()]
        assert sum(calls) >= num_micro_batches * len(scattered)
        # As PipelineStage.perform_reduce_grad does it.
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        state: Any = fully_shard.state(model)  # type: ignore[attr-defined]
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()
        assert [counter.calls for counter in scattered.values()] == calls
        assert sum(reduced) == sum(-(-p.shape[0] // 2) * p[0].numel() for p in plain.parameters())
        assert_same_gradients(model, plain)
        reduced.clear()
        model.zero_grad()
        plain.zero_grad()


# ------------------------------------------------------------------- what torch 2.15 has added

FROM_2_15 = pytest.mark.skipif(
    not hasattr(PipelineStage, "start_gradient_reduction"),
    reason="schedules with finalize_gradients and defer_reduce_grad_wait: torch 2.15",
)


@FROM_2_15
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble])
@distributed(4)
def test_gradients_of_several_steps_are_reduced_in_the_last(kind: Any) -> None:
    """``step(finalize_gradients=False)``; the last one divides by its own micro-batches only."""
    it = Pipeline.make(kind, *data_and_pipeline())
    for step in range(2):
        for part in range(3):
            x, target = batch_of(3 * step + part, it.data_rank)
            it.schedule.step(
                *((x,) if it.is_first else ()),
                target=target if it.is_last else None,
                finalize_gradients=part == 2,
            )
            it.plain_step(3 * step + part)
        it.compare_gradients()
        sgd(it.stages.values()).zero_grad()
        it.plain.zero_grad()


@FROM_2_15
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@distributed(4)
def test_reductions_of_a_stage_while_the_next_one_computes(kind: Any) -> None:
    """``defer_reduce_grad_wait``: a stage's reduction is waited for before the next one's."""
    deferring = functools.partial(kind, defer_reduce_grad_wait=True)
    it = Pipeline.make(kind, *data_and_pipeline(), build=deferring)
    actions = [str(a) for a in it.schedule.pipeline_order_with_comms[it.schedule.rank]]
    reduces = [i for i, action in enumerate(actions) if action.endswith("REDUCE_GRAD")]
    assert len(reduces) == 4, actions  # of two stages: to begin, and to wait
    check(it, 3)
