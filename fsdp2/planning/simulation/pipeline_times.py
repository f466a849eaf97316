"""The time of a pipeline's step: ranks wait for messages of other stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..replay.pipeline import RankStage
from ..replay.replay import Replay
from ..replay.schedules import Action, order_of, rank_of_stage
from .schedule import Span
from .simulate import SimulatedStep, Simulator


@dataclass(frozen=True)
class RankTimes:
    """The actions of one rank and their times.

    Attributes:
        actions: the actions in order.
        durations: their durations in seconds.
        stalls: the first part of each duration, in which compute waits for the rank's own earlier
            launches; it may overlap with the wait for a message. None: there are none.
    """

    actions: Sequence[Action]
    durations: Sequence[float]
    stalls: Sequence[float] | None = None

    def come_to(self, i: int, come: float) -> float:
        """When action ``i`` must begin for its work to begin at ``come``."""
        return come if self.stalls is None else come - self.stalls[i]


def begins(
    ranks: Sequence[RankTimes],
    sends: Sequence[tuple[float, float]],
    *,
    waits_for_sends: bool = False,
) -> list[list[float]]:
    """When each action of each rank begins, in seconds after the first.

    An action begins when the previous action of its rank has ended. Its work begins when its input
    has arrived: for a forward, the output of the stage before; for a backward, the gradient from
    the stage after.

    Args:
        sends: for each stage, the seconds in which it sends its output to the next stage, and its
            input's gradient to the previous one; 0 if that is on the same rank.
        waits_for_sends: whether a rank completes a send before it continues, between its first
            backward and its last forward, as torch's 1F1B does.

    Raises:
        ValueError: if ranks wait for each other forever.
    """
    num_stages = len(sends)
    ended: dict[Action, float] = {}
    found: list[list[float]] = [[] for _ in ranks]
    free = [0.0] * len(ranks)
    steady = [_steady(rank.actions) for rank in ranks]
    left = sum(len(rank.actions) for rank in ranks)
    while left:
        before = left
        for number, rank in enumerate(ranks):
            first, last = steady[number]
            done = found[number]
            while len(done) < len(rank.actions):
                i = len(done)
                action = rank.actions[i]
                come = _come(action, ended, sends)
                if come is None:
                    break
                done.append(max(free[number], rank.come_to(i, come)))
                free[number] = done[-1] + rank.durations[i]
                if action.part != "weight":  # what others wait for
                    ended[action._replace(part="")] = free[number]
                if waits_for_sends and first <= i < last:
                    free[number] += _send_s(action, sends, num_stages)
                left -= 1
        if left == before:
            raise ValueError("The ranks of the pipeline wait for each other: no action can begin")
    return found


def _steady(actions: Sequence[Action]) -> tuple[int, int]:
    """The last action before the first backward, and the last forward."""
    backward = next(i for i, action in enumerate(actions) if not action.is_forward)
    forward = max(i for i, action in enumerate(actions) if action.is_forward)
    return backward - 1, forward


def _come(
    action: Action, ended: dict[Action, float], sends: Sequence[tuple[float, float]]
) -> float | None:
    """When the input of an action has arrived; None if that is not known yet."""
    if action.part == "weight":  # of the same rank, after the gradients of inputs
        return 0.0
    other = action.stage - 1 if action.is_forward else action.stage + 1
    if not 0 <= other < len(sends):
        own = Action(action.stage, action.micro_batch, True)
        return 0.0 if action.is_forward else ended.get(own)
    end = ended.get(Action(other, action.micro_batch, action.is_forward))
    return None if end is None else end + sends[other][0 if action.is_forward else 1]


def _send_s(action: Action, sends: Sequence[tuple[float, float]], num_stages: int) -> float:
    if action.part == "weight":
        return 0.0
    if action.is_forward:
        return sends[action.stage][0] if action.stage < num_stages - 1 else 0.0
    return sends[action.stage][1] if action.stage else 0.0


def replay_pipeline(
    simulator: Simulator, parts: Sequence[RankStage], schedule: str, **options: bool
) -> list[Replay]:
    """The replays of all ranks of a pipeline, which do not depend on speeds.

    Args:
        parts: all stages.
        options: of `replay_rank`.
    """
    workload = parts[0].setup.workload
    ranks = workload.pipeline_ranks
    found = []
    for rank in range(ranks):
        order = order_of(schedule, rank, ranks, workload.micro_batches, len(parts) // ranks)
        own = stages_of(parts, schedule, rank)
        late = schedule == "GPipe"
        found.append(simulator.replay_stages(own, order, sends_late=late, **options))
    return found


def stages_of(parts: Sequence[RankStage], schedule: str, rank: int) -> list[RankStage]:
    """The stages of a rank of the pipeline; without one, the whole model."""
    ranks = parts[0].setup.workload.pipeline_ranks
    if ranks == 1:
        return [*parts]
    return [part for part in parts if rank_of_stage(schedule, part.number, ranks) == rank]


def simulate_pipeline(
    simulator: Simulator,
    parts: Sequence[RankStage],
    schedule: str,
    replays: Sequence[Replay],
    *,
    speed: float = 1.0,
) -> list[SimulatedStep]:
    """The steps of the ranks of a pipeline, which end together.

    Each rank is first simulated without messages of others (its kernels, gathers, reductions and
    memory). Then the waits from `begins` are added. Launches before an action (gathers of a stage,
    reductions of another one) continue while the rank waits; gathers within the action do not count
    as hidden.

    Args:
        replays: from `replay_pipeline`, on hardware that differs only in speeds.
    """
    alone = [simulator.time_stages(each, speed=speed) for each in replays]
    times = [
        RankTimes(each.actions, durations_of(step, each.ends), stalls_of(step, each))
        for each, step in zip(replays, alone, strict=True)
    ]
    sends = sends_of(simulator, parts, schedule)
    found = begins(times, sends, waits_for_sends=schedule == "1F1B")
    last = [began[-1] + rank.durations[-1] for began, rank in zip(found, times, strict=True)]
    tails = [end_of(s) - sum(rank.durations) for s, rank in zip(alone, times, strict=True)]
    whole = max(end + tail for end, tail in zip(last, tails, strict=True))
    return [
        _in_pipeline(step, rank, began, sends, whole)
        for step, rank, began in zip(alone, times, found, strict=True)
    ]


def sends_of(
    simulator: Simulator, parts: Sequence[RankStage], schedule: str
) -> list[tuple[float, float]]:
    """For each stage, the seconds in which it sends its output, and its input's gradient; 0 for a
    stage of the same rank."""
    setup = parts[0].setup
    ranks = setup.workload.pipeline_ranks

    def seconds(nbytes: int, stage: int, other: int) -> float:
        here, there = (rank_of_stage(schedule, s, ranks) for s in (stage, other))
        return 0.0 if here == there else simulator.send_s(nbytes, setup)

    return [
        (
            seconds(part.trace.sent_bytes, part.number, part.number + 1),
            seconds(part.trace.returned_bytes, part.number, part.number - 1),
        )
        for part in parts
    ]


def end_of(step: SimulatedStep) -> float:
    """The time when all streams are done; the optimizer steps afterwards."""
    return max((span.end for span in step.spans), default=0.0)


def durations_of(step: SimulatedStep, ends: Sequence[int]) -> list[float]:
    """The seconds of each action: the time from compute's previous end to its end."""
    made, begin, ended = [], 0, 0.0
    for end in ends:
        launched = zip(step.launches[begin:end], step.spans[begin:end], strict=True)
        last = max((s.end for launch, s in launched if launch.stream == "compute"), default=ended)
        made.append(max(0.0, last - ended))
        ended, begin = max(ended, last), end
    return made


def stalls_of(step: SimulatedStep, made: Replay) -> list[float]:
    """For each action, the seconds that it waits for launches before it."""
    found, ended = [], 0.0
    for start, end in zip(made.starts, made.ends, strict=True):
        began, last = ended, ended
        free: dict[str, float] = {}
        ends: list[float] = []
        for launch, span in zip(step.launches[start:end], step.spans[start:end], strict=True):
            come = max((ends[j - start] for j in launch.after if j >= start), default=began)
            free[launch.stream] = max(come, free.get(launch.stream, began)) + span.end - span.begin
            ends.append(free[launch.stream])
            if launch.stream == "compute":
                ended = max(ended, span.end)
                last = free["compute"]
        found.append(max(0.0, ended - last))
    return found


def _in_pipeline(
    step: SimulatedStep,
    rank: RankTimes,
    began: Sequence[float],
    sends: Sequence[tuple[float, float]],
    whole: float,
) -> SimulatedStep:
    """The step of a rank that waits for others until ``whole``."""
    bubble = whole - end_of(step)
    seconds = step.seconds + bubble
    sent_s = sum(_send_s(action, sends, len(sends)) for action in rank.actions)
    streams = {**step.stream_s, "pipeline": sent_s} if sent_s else step.stream_s
    return replace(
        step,
        seconds=seconds,
        exposed_s=step.exposed_s + bubble,
        bubble_s=bubble,
        stream_s=streams,
        spans=_moved(step, rank, began),
    )


def _moved(step: SimulatedStep, rank: RankTimes, began: Sequence[float]) -> list[Span]:
    """The spans of all launches: each action is moved to its time, with concurrent launches."""
    moved, now, borders = [], 0.0, []
    for begin, seconds in zip(began, rank.durations, strict=True):
        borders.append((now, begin - now))
        now += seconds
    starts = [border for border, _ in borders]
    for span in step.spans:
        later = borders[max(0, bisect_right(starts, span.begin + 1e-12) - 1)][1]
        moved.append(Span(span.begin + later, span.end + later))
    return moved
