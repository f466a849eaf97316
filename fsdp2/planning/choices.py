"""Checks of what `plan` is given to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from .candidates import SEARCHED, Degrees, Fixed, Pipeline, expert_ranks_of
from .hardware.hardware import Hardware
from .model_steps import ModelSteps
from .replay.schedules import SCHEDULES, STAGES_PER_RANK, check_schedule_name
from .replay.setups import check_accumulation, check_number, checked_mesh
from .trace.checkpointing import MODES
from .traces import TracedSteps, check_expert_ranks


@dataclass(frozen=True)
class Choices:
    """What a search chooses from, beside the kinds of activation checkpointing.

    Attributes:
        num_ranks: all of them.
        micro_batches: of a step.
        accumulations: ways to sum gradients; None: there is one micro-batch.
        fixed: what is not searched.
        expert_ranks: beside a pipeline over each number of ranks; None: experts have no mesh of
            their own.
        degrees: of tensor, context and pipeline parallelism.
        pipelines: how pipelines run.
        asked: which of "tensor", "context" and "pipeline" the user has asked for.
        compiled: whether blocks are.
    """

    num_ranks: int
    micro_batches: int
    accumulations: Sequence[str | None]
    fixed: Fixed
    expert_ranks: Mapping[int, Sequence[int | None]]
    degrees: Sequence[Degrees]
    pipelines: Sequence[Pipeline]
    asked: frozenset[str]
    compiled: bool = False

    def pairs(self, pipeline: int) -> list[tuple[int | None, int | None]]:
        """Numbers of tensor and context ranks beside a pipeline over so many ranks; None: nobody
        asks for them."""
        return [
            (
                each.tensor if "tensor" in self.asked else None,
                each.context if "context" in self.asked else None,
            )
            for each in self.degrees
            if each.pipeline == pipeline
        ]

    @property
    def pipeline_ranks(self) -> list[int]:
        """All numbers of them, the smallest first."""
        return sorted({each.pipeline for each in self.degrees})


def degrees_of(
    tensor_ranks: int | Sequence[int],
    context_ranks: int | Sequence[int],
    pipeline_ranks: int | Sequence[int],
    steps: ModelSteps,
    num_ranks: int,
) -> list[Degrees]:
    """All combinations of numbers of tensor, context and pipeline ranks to choose from.

    Raises:
        ValueError: for none, or one that does not divide ``num_ranks``; see
            `ModelSteps.check_degrees`.
    """
    given = {"tensor": tensor_ranks, "context": context_ranks, "pipeline": pipeline_ranks}
    lists = {k: [v] if isinstance(v, int) else list(v) for k, v in given.items()}
    for name, numbers in lists.items():
        if not numbers:
            raise ValueError(f"{name}_ranks is empty: give a number, or several to choose from")
        for each in numbers:
            steps.check_degrees(Degrees(**{name: each}))
            if num_ranks % each:
                raise ValueError(f"{name}_ranks={each} must divide num_ranks={num_ranks}")
    made = [Degrees(1, *each) for each in product(*lists.values())]
    found = [each for each in made if num_ranks % each.ranks_per_batch == 0]
    if not found:
        told = " times ".join(f"{k}_ranks={v}" for k, v in lists.items() if v != [1])
        raise ValueError(f"{told} must divide num_ranks={num_ranks}")
    return found


def pipeline_ranks_of(
    ranks: int | Sequence[int] | None, steps: ModelSteps, num_ranks: int, micro_batches: int
) -> list[int]:
    """Numbers of ranks of pipelines to choose from.

    None stands for 1, 2, 4, ..., as far as each rank has a block and a micro-batch of its own, if
    it is known how to make stages.
    """
    if ranks is not None:
        return [ranks] if isinstance(ranks, int) else list(ranks)
    most, found = 1 if steps.staged is None else min(len(steps.whole.blocks), micro_batches), [1]
    while 2 * found[-1] <= most and num_ranks % (2 * found[-1]) == 0:
        found.append(2 * found[-1])
    return found


def pipelines_of(
    schedules: str | Sequence[str] | None, stages_per_rank: int | Sequence[int] | None
) -> list[Pipeline]:
    """How pipelines may run: schedules with as many stages on a rank as they have.

    Raises:
        ValueError: for an unknown schedule, numbers less than 1, or a number of stages that no
            schedule has.
    """
    names = [schedules] if isinstance(schedules, str) else list(schedules or SCHEDULES)
    numbers = [stages_per_rank] if isinstance(stages_per_rank, int) else stages_per_rank
    for name in names:
        check_schedule_name(name)
    for number in numbers or ():
        check_number("stages_per_rank", number)
    made = []
    for name in names:
        allowed = STAGES_PER_RANK[name]
        own = min(2, allowed.stop - 1)
        made += [Pipeline(name, n) for n in numbers or [own] if n in allowed]
    if not made:
        raise ValueError(
            f"stages_per_rank={stages_per_rank!r} goes with none of the schedules {names}"
        )
    return made


def within_samples(degrees: Sequence[Degrees], samples: int, most: int) -> list[Degrees]:
    """Those with which a step has at most ``most`` samples.

    Args:
        samples: of a step in which each rank has a batch of its own.

    Raises:
        ValueError: if there are none.
    """
    found = [each for each in degrees if samples // each.ranks_per_batch <= most]
    if not found:
        least = samples // max(each.ranks_per_batch for each in degrees)
        raise ValueError(
            f"A step has {least:,} samples or more, and max_samples={most:,}: give fewer ranks, "
            "more tensor_ranks or context_ranks, fewer micro-batches, or a sample_input with fewer "
            "samples"
        )
    return found


def asked(degrees: Sequence[Degrees], parallelizes: bool) -> frozenset[str]:
    """Which degrees the user has asked for."""
    found = {
        "tensor": parallelizes,
        "context": any(each.context > 1 for each in degrees),
        "pipeline": any(each.pipeline > 1 for each in degrees),
    }
    return frozenset(name for name, is_asked in found.items() if is_asked)


def checked_ways(accumulation: Sequence[str], micro_batches: int) -> tuple[str | None, ...]:
    if isinstance(accumulation, str) or not accumulation:
        raise TypeError(f"accumulation must be a sequence of names, got {accumulation!r}")
    for way in accumulation:
        check_accumulation(way)
    return tuple(accumulation) if micro_batches > 1 else (None,)


def checked_modes(modes: Sequence[str], only: str | None) -> tuple[str, ...]:
    chosen = tuple(modes) if only is None else (only,)
    for mode in chosen:
        if mode not in MODES:
            name = "activation_checkpointing" if only is None else "checkpoint"
            hint = did_you_mean(str(mode), MODES)
            raise ValueError(f"{name} must be one of {MODES}, got {mode!r}{hint}")
    return chosen


def checked_expert_ranks(
    ranks: int | Sequence[int] | None,
    traces: TracedSteps,
    num_ranks: int,
    hardware: Hardware,
    pipelines: Sequence[int] = (1,),
) -> dict[int, list[int | None]]:
    """The numbers of ranks over which experts may be distributed; None: not at all.

    Args:
        pipelines: numbers of ranks of pipelines, each of whose stages has a mesh of experts.

    Returns:
        Them by number of ranks of the pipeline; none of them may go with some of these.

    Raises:
        ValueError: for none, for more than there are experts, and for a number that divides the
            ranks of no stage.
    """
    given = [ranks] if isinstance(ranks, int) else list(ranks or ())
    if ranks is not None and not given:
        raise ValueError("expert_ranks is empty: give a number, or several to choose from")
    for each in given:
        check_expert_ranks(each, traces)
        if all(num_ranks // number % each for number in pipelines):
            least = min(pipelines)
            what = f"num_ranks={num_ranks}"
            if least > 1:
                what = f"the ranks of a stage, {num_ranks // least} with pipeline_ranks={least}"
            raise ValueError(f"expert_ranks={each} must divide {what}")
    if not traces.experts:
        return {number: [None] for number in pipelines}
    if ranks is None:
        node, experts = hardware.ranks_per_node, traces.num_experts
        return {n: [*expert_ranks_of(num_ranks // n, node, experts)] for n in pipelines}
    return {n: [each for each in given if num_ranks // n % each == 0] for n in pipelines}


def checked_fixed(
    strategy: str | None,
    mesh: Any,
    reshard: Any,
    prefetch: int | None,
    num_ranks: int,
    degrees: Sequence[Degrees],
) -> Fixed:
    """What is not searched.

    Raises:
        ValueError: for an unknown strategy, or a mesh of another number of ranks.
        TypeError: for values of other types.
    """
    if strategy is not None:
        find_strategy(strategy)
    if mesh is not None:
        mesh = checked_mesh(mesh)
        shape = " x ".join(map(str, mesh))
        if all(prod(mesh) * each.tensor * each.pipeline != num_ranks for each in degrees):
            found = {n: sorted({getattr(d, n) for d in degrees}) for n in ("tensor", "pipeline")}
            told = " and ".join(f"{n}_ranks={v}" for n, v in found.items() if v != [1])
            beside = f" beside {told}" if told else ""
            raise ValueError(
                f"mesh_shape {shape} is not a mesh of num_ranks={num_ranks} ranks{beside}"
            )
        if all(mesh[-1] % each.context for each in degrees):
            context = sorted({each.context for each in degrees})
            raise ValueError(
                f"context_ranks={context} must divide the last dim of mesh_shape {shape}: "
                "parameters are sharded over data and context ranks together"
            )
    if prefetch is not None:
        check_number("prefetch", prefetch)
    if not (reshard is SEARCHED or reshard is None or isinstance(reshard, bool | int)):
        raise TypeError(
            "reshard_after_forward must be a bool, a number of ranks or None (the default), got "
            f"{reshard!r}: leave it out to have it searched"
        )
    return Fixed(strategy, mesh, reshard, prefetch)
