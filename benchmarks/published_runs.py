"""Published training runs, and what the planner says of them.

A run is simulated, as `predict` does it. Pipelines whose stages are replicated are estimated, as
`plan` does it before it simulates: hundreds of micro-batches over dozens of ranks take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy
from fsdp2.planning import Kernels, Sharding, SimulatedStep, Simulator, Workload, find_hardware
from fsdp2.planning.predictor import Configuration, Predictor
from fsdp2.planning.replay.pipeline import RankStage
from fsdp2.planning.simulation.pipeline_estimates import estimate_pipeline, stages_alone
from fsdp2.planning.simulation.pipeline_times import replay_pipeline, simulate_pipeline
from fsdp2.planning.workload import default_checkpoint_modules
from fsdp2.wrap import units_of

from .models import lm_loss
from .published_llama import Llama405B, Llama405BBlock, parallelize_llama_405b, split_llama_405b
from .published_megatron import (
    SIZES_OF_MEGATRON,
    MegatronBlock,
    MegatronGPT,
    cores_of,
    parallelize_megatron,
    split_megatron,
)
from .published_models import GPT, T5, Llama


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        batch: sequences per GPU; with tensor or pipeline parallelism, of a micro-batch.
        checkpointing: "full" of each block, "attention" of what it does between its linear layers,
            "selective" as of `estimate`, or "none".
        reduce_dtype: of gradients.
        compiled: whether each block is compiled.
        tensor_ranks, pipeline_ranks: GPUs that share operators, and that have other stages.
        parts: whether tensor ranks have parts of the sequence between linear layers.
        stages_per_rank, micro_batches: of the pipeline, whose schedule is 1F1B, interleaved if a
            rank has several stages.
        holds_sent: whether a rank holds what it sent, as schedules of torch do with several stages.
        blocks: of the model; None: all that it has.
    """

    model: str
    hardware: str
    num_gpus: int
    batch: int
    checkpointing: str
    reduce_dtype: str = "float32"
    compiled: bool = False
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    parts: bool = True
    stages_per_rank: int = 1
    micro_batches: int = 1
    holds_sent: bool = True
    blocks: int | None = None

    @property
    def num_stages(self) -> int:
        return self.pipeline_ranks * self.stages_per_rank


class Figures(NamedTuple):
    """What the planner says of a step.

    Attributes:
        optimizer_s: the part of ``step_s`` that is the optimizer's.
        flops: FLOPs with recomputation, of a rank; of a pipeline, of the mean rank.
        needed_bytes: of the fullest GPU, with what CUDA, cuBLAS and NCCL hold.
        reserved_bytes: without that; None for estimates.
    """

    step_s: float
    optimizer_s: float
    flops: float
    needed_bytes: int
    reserved_bytes: int | None


class Family(NamedTuple):
    """How a source ran its models.

    Attributes:
        make: a model on the device of the context; gets a number of blocks, None: all.
        length, num_inputs: tokens of a sequence, and how many tensors of tokens there are.
        block: the class of the units; None: found by `units_of`.
        split: makes stages of it.
        parallelize: distributes it over tensor ranks; gets `Run.parts`.
        strategy: of `shard_model`.
        dtype: of compute.
    """

    make: Callable[[int | None], nn.Module]
    length: int
    num_inputs: int = 1
    block: type[nn.Module] | None = None
    split: Callable[..., Any] | None = None
    parallelize: Callable[..., Any] | None = None
    strategy: str = "full"
    dtype: torch.dtype = torch.bfloat16
    loss: Callable[[Tensor], Tensor] = torch.mean
    kernels: Kernels = Kernels()
    optimizer: Any = "adamw"


def _loss(logits: Tensor) -> Tensor:
    return lm_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))


def fused_adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Reads and writes everything once, as apex's does."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def _family_of_megatron(width: int, num_layers: int, num_heads: int) -> Family:
    return Family(
        lambda blocks: MegatronGPT(width, blocks or num_layers, num_heads),
        2048,
        block=MegatronBlock,
        split=split_megatron,
        parallelize=parallelize_megatron,
        strategy="none",
        dtype=torch.float16,
        optimizer=fused_adamw,
    )


# torch had no fused RMS norm when these were made.
_plain = partial(Family, loss=_loss, kernels=Kernels(fused_norms=False))
FAMILIES: dict[str, Family] = {
    "Llama 3 8B": _plain(lambda blocks: Llama(), 8192),
    "GPT-175B": _plain(lambda blocks: GPT(), 2048),
    "T5-11B": _plain(lambda blocks: T5(), 512, num_inputs=2),
    "Llama 3 405B": Family(
        lambda blocks: Llama405B(),
        8192,
        block=Llama405BBlock,
        split=split_llama_405b,
        parallelize=lambda model, mesh, parts: parallelize_llama_405b(model, mesh),
        strategy="grad",
        optimizer=fused_adamw,
    ),
    **{name: _family_of_megatron(*sizes) for name, sizes in SIZES_OF_MEGATRON.items()},
}


def policy_of(run: Run) -> MixedPrecisionPolicy:
    """Its precision."""
    return MixedPrecisionPolicy(FAMILIES[run.model].dtype, getattr(torch, run.reduce_dtype))


@cache
def _steps(
    name: str, batch: int, checkpointing: str, policy: MixedPrecisionPolicy, parts: bool,
    blocks: int | None, hardware: str,
) -> Predictor:  # fmt: skip
    family = FAMILIES[name]
    with torch.device("meta"):
        model = family.make(blocks)
        tokens = torch.empty(batch, family.length, dtype=torch.long)
    wrap: Any = family.block or "auto"
    recomputed = default_checkpoint_modules(model, units_of(model, wrap))
    if checkpointing == "attention":
        recomputed = cores_of(len(recomputed))
    workload = Workload(
        model,
        (tokens,) * family.num_inputs,
        loss_fn=family.loss,
        optimizer=family.optimizer,
        kernels=family.kernels,
        split_stages=family.split,
        checkpoint_modules=recomputed,
        parallelize=family.parallelize and partial(family.parallelize, parts=parts),
    )
    sharding = Sharding(family.strategy, wrap=wrap, mp_policy=policy)
    return Predictor(workload, sharding, find_hardware(hardware))


def _predictor(run: Run) -> Predictor:
    checkpointing, policy = run.checkpointing, policy_of(run)
    return _steps(run.model, run.batch, checkpointing, policy, run.parts, run.blocks, run.hardware)


@cache
def simulator_of(run: Run) -> Simulator:
    """Of its hardware, with its optimizer."""
    return Simulator(find_hardware(run.hardware), FAMILIES[run.model].optimizer)


@cache
def parts_of(run: Run) -> list[RankStage]:
    """The stages of its pipeline, or all of its model."""
    mode = "full" if run.checkpointing == "attention" else run.checkpointing
    predictor = _predictor(run)
    workload = replace(
        predictor.workload,
        activation_checkpointing=mode,
        compiled=run.compiled,
        tensor_ranks=run.tensor_ranks,
        pipeline_ranks=run.pipeline_ranks,
        stages_per_rank=run.stages_per_rank,
        micro_batches=run.micro_batches,
    )
    mesh = (run.num_gpus // (run.tensor_ranks * run.pipeline_ranks),)
    return predictor.parts(Configuration(workload, predictor.sharding, mesh))


@cache
def figures_of(run: Run) -> Figures:
    """A step of a run."""
    parts, simulator = parts_of(run), simulator_of(run)
    schedule = "Interleaved1F1B" if run.stages_per_rank > 1 else "1F1B"
    if run.pipeline_ranks == 1:
        return _of_steps([simulator.run(parts[0].trace, parts[0].setup)])
    if FAMILIES[run.model].strategy != "none":
        replays = replay_pipeline(simulator, parts, schedule, holds_sent=run.holds_sent)
        return _of_steps(simulate_pipeline(simulator, parts, schedule, replays))
    stages = stages_alone(simulator, parts, schedule)
    made = estimate_pipeline(simulator, parts, schedule, stages)
    flops = sum(part.trace.flops for part in parts) * run.micro_batches / run.pipeline_ranks
    return Figures(made.seconds, made.optimizer_s, flops, made.needed_bytes, None)


def _of_steps(steps: Sequence[SimulatedStep]) -> Figures:
    """The figures of the ranks of a pipeline, or of one rank."""
    return Figures(
        max(step.seconds for step in steps),
        max(step.optimizer_s for step in steps),
        sum(step.flops for step in steps) / len(steps),
        max(step.needed_bytes for step in steps),
        max(step.reserved for step in steps),
    )
