"""Estimates the time and memory of a pipeline from its stages alone.

The time of a pipeline's simulation grows with the number of micro-batches; the time of this
estimate does not. Each kind of stage is simulated with a few micro-batches. The duration of an
action depends on the stage's action before it: after a forward, parameters may have to be gathered;
after a backward, they are present; the first gradients are stored, and later ones are added. So
each action is assumed to take as long as a simulated action after the same kind of action.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..replay.pipeline import RankStage
from ..replay.schedules import LOOPED, Action, order_of
from ..trace.events import Compute, StartOfBackward
from .costs import stragglers_s
from .pipeline_times import RankTimes, begins, durations_of, end_of, sends_of, stages_of, stalls_of
from .simulate import SimulatedStep, Simulator

# The actions of a stage alone, by micro-batch: every kind of action after every kind that may come
# before it in a schedule, but with at most two micro-batches in flight.
_WHOLE = "F0 F1 B0 F2 B1 B2"
_SPLIT = "F0 F1 I0 W0 I1 W1 F2 F3 I2 F4 W2 I3 I4 W3 W4"
_IN_FLIGHT = 2

_KINDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


class Duration(NamedTuple):
    """The duration of an action.

    Attributes:
        stall_s: the part of ``seconds`` in which it waits for earlier launches of its rank.
    """

    seconds: float
    stall_s: float


class StageAlone(NamedTuple):
    """The times and the memory of a stage alone.

    Attributes:
        durations: the duration of each kind of action ("forward", "backward", and "input" and
            "weight" of a split backward), by kind of the stage's previous action; "" for the first.
        gather_s: seconds of a gather of all its parameters, if the schedule gathers them before the
            first forward.
        end_s: seconds from its last backward to the end of its reductions.
        kernels_s: seconds of a micro-batch's kernels, if nothing slows them down.
        optimizer_s: as in `SimulatedStep`.
        kept_bytes: activations of each micro-batch in flight.
        brief_bytes: further activations, and buffers of collectives, while it computes.
        gathered_bytes: its gathered parameters, if the schedule determines when they are freed.
        gradient_bytes: its unreduced gradients, if the schedule determines when they are reduced.
        other_bytes: other bytes that the allocator holds.
        library_bytes: bytes that CUDA, cuBLAS and NCCL hold.
    """

    durations: dict[tuple[str, str], Duration]
    gather_s: float
    end_s: float
    kernels_s: float
    optimizer_s: float
    kept_bytes: int
    brief_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    other_bytes: int
    library_bytes: int

    def duration(self, kind: str, before: str) -> Duration:
        """The duration of an action; if it was not simulated, the mean of its kind."""
        found = self.durations.get((kind, before))
        if found is not None:
            return found
        alike = [each for (other, after), each in self.durations.items() if other == kind and after]
        return Duration(fmean(e.seconds for e in alike), fmean(e.stall_s for e in alike))


class PipelineEstimate(NamedTuple):
    """The estimated time and memory of a pipeline's step.

    Attributes:
        optimizer_s: the optimizer's part of ``seconds``.
        needed_bytes: bytes that the fullest rank needs.
    """

    seconds: float
    optimizer_s: float
    needed_bytes: int


def stages_alone(
    simulator: Simulator, parts: Sequence[RankStage], schedule: str, speed: float = 1.0
) -> list[StageAlone]:
    """The times and memory of each stage alone; equal stages are simulated once."""
    made: dict[int, StageAlone] = {}
    for part in parts:
        if id(part.trace) not in made:
            made[id(part.trace)] = stage_alone(simulator, part, schedule, speed)
    return [made[id(part.trace)] for part in parts]


def stage_alone(simulator: Simulator, part: RankStage, schedule: str, speed: float) -> StageAlone:
    """Simulate a stage with a few micro-batches."""
    looped = schedule in LOOPED
    durations, end_s, step = _run(simulator, part, _WHOLE, speed, looped=looped)
    if part.split is not None:
        apart, end_s, _ = _run(simulator, part, _SPLIT, speed, looped=looped)
        durations |= apart
    gather_s = 0.0
    if looped:
        first, gathered_before = durations["forward", ""], durations["forward", "backward"]
        gather_s = max(0.0, first.seconds - gathered_before.seconds)
    kept = _kept(part)
    peak = step.peak.parts
    brief = max(0, peak.get("activations", 0) - _IN_FLIGHT * kept)
    brief += peak.get("communication buffers", 0)
    gathered = peak.get("gathered parameters", 0) if looped else 0
    gradients = peak.get("unreduced gradients", 0) if looped else 0
    return StageAlone(
        durations=durations,
        gather_s=gather_s,
        end_s=end_s,
        kernels_s=(step.compute_s - step.contention_s) / _WHOLE.count("F"),
        optimizer_s=step.optimizer_s,
        kept_bytes=kept,
        brief_bytes=brief,
        gathered_bytes=gathered,
        gradient_bytes=gradients,
        other_bytes=step.reserved - _IN_FLIGHT * kept - brief - gathered - gradients,
        library_bytes=step.libraries,
    )


def _run(
    simulator: Simulator, part: RankStage, order: str, speed: float, *, looped: bool
) -> tuple[dict[tuple[str, str], Duration], float, SimulatedStep]:
    """The durations of actions in this order, the seconds of the reductions, and the step.

    Among actions after the same kind of action, the last one counts, because the state before the
    first ones may be unusual.
    """
    actions = _actions(order, part.number)
    managed = [Action(part.number, -1, False, what) for what in ("unshard", "reduce", "reshard")]
    whole = [managed[0], *actions, *managed[1:]] if looped else actions
    made = simulator.replay_stages([part], whole)
    step = simulator.time_stages(made, speed=speed)
    seconds = durations_of(step, made.ends)
    durations = map(Duration, seconds, stalls_of(step, made))
    found = dict(zip(_contexts(actions), durations, strict=True))
    return found, end_of(step) - sum(seconds), step


def _actions(order: str, stage: int) -> list[Action]:
    found = []
    for each in order.split():
        kind = _KINDS[each[0]]
        part = "" if kind in ("forward", "backward") else kind
        found.append(Action(stage, int(each[1:]), kind == "forward", part))
    return found


def _contexts(actions: Sequence[Action]) -> list[tuple[str, str]]:
    """For each action its kind, and the kind of its stage's previous action; "" for the first."""
    last: dict[int, str] = {}
    seen: set[tuple[int, str]] = set()
    found = []
    for action in actions:
        stage = action.stage
        kind = "forward" if action.is_forward else action.part or "backward"
        found.append((kind, last[stage] if (stage, kind) in seen else ""))
        seen.add((stage, kind))
        last[stage] = kind
    return found


def _kept(part: RankStage) -> int:
    """The bytes of activations that a forward leaves for its backward."""
    kept = 0
    for event in part.trace.events:
        if isinstance(event, StartOfBackward):
            break
        if isinstance(event, Compute):
            kept += event.net
    return kept


def estimate_pipeline(
    simulator: Simulator, parts: Sequence[RankStage], schedule: str, stages: Sequence[StageAlone]
) -> PipelineEstimate:
    """The time of a step, and the bytes that the fullest rank needs; ``stages`` belong to
    ``parts``."""
    setup = parts[0].setup
    ranks, micro_batches = setup.workload.pipeline_ranks, setup.workload.micro_batches
    stages_per_rank = len(parts) // ranks
    times, tails, needed, of_ranks = [], [], [], []
    for rank in range(ranks):
        order = order_of(schedule, rank, ranks, micro_batches, stages_per_rank)
        own = [stages[part.number] for part in stages_of(parts, schedule, rank)]
        of_ranks.append(own)
        made, tail = _rank_times(order, stages)
        times.append(made)
        tails.append(tail if schedule in LOOPED else own[0].end_s)
        held = sum(stage.other_bytes for stage in own) + max(stage.brief_bytes for stage in own)
        needed.append(held + _most_kept(order, stages) + own[0].library_bytes)
    found = begins(times, sends_of(simulator, parts, schedule), waits_for_sends=schedule == "1F1B")
    ends = [
        began[-1] + rank.durations[-1] + tail
        for began, rank, tail in zip(found, times, tails, strict=True)
    ]
    # The end of the step on the slowest rank; several stages end one after the other.
    late = max(sum(stage.optimizer_s for stage in own) for own in of_ranks)
    busiest_s = max(sum(stage.kernels_s for stage in own) for own in of_ranks)
    wait = stragglers_s(micro_batches * busiest_s, setup.num_all_ranks, simulator.hardware)
    return PipelineEstimate(max(ends) + late + wait, late, max(needed))


def _rank_times(order: Sequence[Action], stages: Sequence[StageAlone]) -> tuple[RankTimes, float]:
    """The duration of each action of a rank, and of the reductions after the last action.

    If the schedule determines when gathers and reductions of a whole stage begin, stages are
    gathered one after the other, and an action begins after its stage is gathered. Actions after a
    reduction wait for its end. Both continue while the rank waits for others.
    """
    actions = [action for action in order if action.computes]
    contexts = iter(_contexts(actions))
    durations: list[float] = []
    stalls: list[float] = []
    gathered_s = reducing_s = now = 0.0
    come: dict[int, float] = {}
    for action in order:
        stage = stages[action.stage]
        if action.part == "unshard":
            gathered_s += stage.gather_s
            come[action.stage] = gathered_s
        elif action.part == "reduce":
            reducing_s += stage.end_s
        elif action.computes:
            kind, before = next(contexts)
            late = come.pop(action.stage, None)
            waits = reducing_s
            if late is None:
                own = stage.duration(kind, before)
            else:  # the whole stage is gathered, as after a backward
                own = stage.duration("forward", "backward")
                waits += max(0.0, late - now)
            durations.append(waits + own.seconds)
            stalls.append(waits + own.stall_s)
            now, reducing_s = now + durations[-1], 0.0
    return RankTimes(actions, durations, stalls), reducing_s


def _most_kept(order: Sequence[Action], stages: Sequence[StageAlone]) -> int:
    """The peak of a rank's temporary bytes: activations of all micro-batches, and whole parameters
    and gradients of stages."""
    now = most = 0
    summed: set[int] = set()  # stages that have gradients
    for action in order:
        stage = stages[action.stage]
        if action.part in ("unshard", "reshard"):
            now += (1 if action.part == "unshard" else -1) * stage.gathered_bytes
        elif action.part == "reduce":
            now -= stage.gradient_bytes
        elif action.part != "input":
            now += (1 if action.is_forward else -1) * stage.kept_bytes
            if not action.is_forward and action.stage not in summed:
                summed.add(action.stage)
                now += stage.gradient_bytes
        most = max(most, now)
    return most
