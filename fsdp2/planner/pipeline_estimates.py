"""About how fast a pipeline is and what it needs, from each of its stages alone.

A simulation of a pipeline takes a time that grows with its micro-batches; this one does not: each
kind of stage is simulated with two micro-batches, and all others are taken to be like the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..estimation.events import Compute, StartOfBackward
from ..estimation.pipeline import Part
from ..estimation.schedules import Action, actions_of, rank_of_stage
from .candidates import Pipeline
from .costs import stragglers_s
from .pipeline_times import RankTimes, begins, durations_of, end_of, sends_of
from .simulate import Simulator

_PARTS = ("input", "weight")  # of a backward


class StageAlone(NamedTuple):
    """What a stage takes and needs alone.

    Attributes:
        first_s: of its first forward, which may gather more than others.
        forward_s, backward_s: of the others.
        input_s, weight_s: of the parts of a backward that is split; 0 if none is.
        end_s: from its last backward to the end of its reductions.
        kernels_s: of both micro-batches, if nothing slows kernels down.
        optimizer_s: as of `SimulatedStep`.
        two_bytes: that the allocator holds with two micro-batches in flight.
        kept_bytes: of the activations of each micro-batch in flight.
        library_bytes: that CUDA, cuBLAS and NCCL hold besides.
    """

    first_s: float
    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    end_s: float
    kernels_s: float
    optimizer_s: float
    two_bytes: int
    kept_bytes: int
    library_bytes: int


class PipelineEstimate(NamedTuple):
    """About what a step of a pipeline comes to."""

    seconds: float
    needed_bytes: int


def stage_alone(simulator: Simulator, part: Part, speed: float) -> StageAlone:
    """Simulate a stage with two micro-batches."""
    stage = part.number
    actions = [Action(stage, i, forward) for forward in (True, False) for i in range(2)]
    made = simulator.replay_stages([part], actions)
    step = simulator.time_stages(made, speed=speed)
    first, forward, before, backward = durations_of(step, made.ends)
    of_input, of_weight = 0.0, 0.0
    if part.split is not None:
        parts = [Action(stage, i, False, which) for i in range(2) for which in _PARTS]
        apart = simulator.replay_stages([part], [*actions[:2], *parts])
        ends = simulator.time_stages(apart, speed=speed)
        *_, of_input, of_weight = durations_of(ends, apart.ends)
    return StageAlone(
        first_s=first,
        forward_s=forward,
        backward_s=min(before, backward),
        input_s=of_input,
        weight_s=of_weight,
        end_s=end_of(step) - (first + forward + before + backward),
        kernels_s=step.compute_s - step.contention_s,
        optimizer_s=step.optimizer_s,
        two_bytes=step.reserved,
        kept_bytes=_kept(part),
        library_bytes=step.libraries,
    )


def _kept(part: Part) -> int:
    """The bytes of activations that a forward leaves for its backward."""
    kept = 0
    for event in part.trace.events:
        if isinstance(event, StartOfBackward):
            break
        if isinstance(event, Compute):
            kept += event.net
    return kept


def estimate_pipeline(
    simulator: Simulator,
    parts: Sequence[Part],
    pipeline: Pipeline,
    stages: Sequence[StageAlone],
) -> PipelineEstimate:
    """The time of a step, and the bytes that the fullest rank needs; ``stages`` are those of
    ``parts``."""
    setup = parts[0].setup
    ranks, schedule = setup.pipeline_ranks, pipeline.schedule
    times, tails, needed = [], [], []
    for rank in range(ranks):
        actions = actions_of(schedule, rank, ranks, setup.micro_batches, pipeline.stages_per_rank)
        own = [
            stages[part.number]
            for part in parts
            if rank_of_stage(schedule, part.number, ranks) == rank
        ]
        times.append(RankTimes(actions, [_seconds(action, stages) for action in actions]))
        tails.append(sum(stage.end_s for stage in own))
        held = sum(stage.two_bytes - 2 * stage.kept_bytes for stage in own)
        needed.append(held + _most_kept(actions, stages) + own[0].library_bytes)
    found = begins(times, sends_of(simulator, parts, schedule), waits_for_sends=schedule == "1F1B")
    ends = [
        began[-1] + rank.durations[-1] + tail
        for began, rank, tail in zip(found, times, tails, strict=True)
    ]
    # What all ranks do at the end, the slowest of them; of several stages, one after the other.
    per_rank = pipeline.stages_per_rank
    late = per_rank * max(stage.optimizer_s for stage in stages)
    kernels_s = setup.micro_batches / 2 * per_rank * max(stage.kernels_s for stage in stages)
    num_ranks = setup.num_ranks * setup.tensor_ranks * setup.pipeline_ranks
    wait = stragglers_s(kernels_s, num_ranks, simulator.hardware)
    return PipelineEstimate(max(ends) + late + wait, max(needed))


def _seconds(action: Action, stages: Sequence[StageAlone]) -> float:
    stage = stages[action.stage]
    if not action.is_forward:
        return {"": stage.backward_s, "input": stage.input_s, "weight": stage.weight_s}[action.part]
    return stage.first_s if action.micro_batch == 0 else stage.forward_s


def _most_kept(actions: Sequence[Action], stages: Sequence[StageAlone]) -> int:
    """The most bytes of activations that a rank has at any moment, of all micro-batches."""
    now = most = 0
    for action in actions:
        if action.part != "input":
            now += (1 if action.is_forward else -1) * stages[action.stage].kept_bytes
        most = max(most, now)
    return most
