"""The order in which a rank of a pipeline works, as torch's schedules compute it.

Names are as in ``torch.distributed.pipelining``. 1F1B and GPipe, which have one stage per rank, are
loops in torch, and are repeated here. For the other schedules, torch's classes are created with
stages that only have numbers, and return their actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from ...common.suggestions import did_you_mean

_ONE, _TWO, _SEVERAL = range(1, 2), range(2, 3), range(1, 1 << 16)
# The schedules, and the possible numbers of stages per rank.
STAGES_PER_RANK = {
    "1F1B": _ONE,
    "GPipe": _ONE,
    "Interleaved1F1B": _SEVERAL,
    "LoopedBFS": _SEVERAL,
    "InterleavedZeroBubble": _SEVERAL,
    "ZBVZeroBubble": _TWO,
    "DualPipeV": _TWO,
}
SCHEDULES = tuple(STAGES_PER_RANK)
# Schedules that compute gradients of inputs first, and gradients of weights later.
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# Schedules that determine when a stage is gathered and its gradients are reduced.
LOOPED = tuple(name for name in SCHEDULES if name not in ("1F1B", "GPipe"))
# The first rank has the first and the last stage.
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Action(NamedTuple):
    """An action of a rank with one stage: computation, or an operation on the whole stage.

    Attributes:
        micro_batch: the micro-batch; -1 for operations on the whole stage.
        part: for a backward, "" (all of it), "input" or "weight" (one kind of gradients); for the
            whole stage, "unshard", "reshard" or "reduce".
    """

    stage: int
    micro_batch: int
    is_forward: bool
    part: str = ""

    @property
    def computes(self) -> bool:
        return self.micro_batch >= 0


_KINDS = {
    "FORWARD": (True, ""),
    "FULL_BACKWARD": (False, ""),
    "BACKWARD_INPUT": (False, "input"),
    "BACKWARD_WEIGHT": (False, "weight"),
    "UNSHARD": (False, "unshard"),
    "RESHARD": (False, "reshard"),
    "REDUCE_GRAD": (False, "reduce"),
}


def order_of(
    schedule: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[Action]:
    """All actions of a rank of a pipeline in order, except sends and receives.

    Raises:
        ValueError: for numbers that torch refuses.
    """
    if schedule in ("1F1B", "GPipe"):
        return _single(schedule, rank, ranks, micro_batches)
    return list(_looped(schedule, ranks, micro_batches, stages_per_rank)[rank])


def actions_of(
    schedule: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[Action]:
    """The computing actions of a rank of a pipeline, in order.

    Example:
        >>> ["BF"[a.is_forward] + str(a.micro_batch) for a in actions_of("1F1B", 0, 2, 3)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    order = order_of(schedule, rank, ranks, micro_batches, stages_per_rank)
    return [action for action in order if action.computes]


def _single(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = micro_batches if schedule == "GPipe" else min(micro_batches, ranks - rank)
    made = [Action(rank, i, True) for i in range(ahead)]
    for i in range(micro_batches):
        made.append(Action(rank, i, False))
        if ahead + i < micro_batches:
            made.append(Action(rank, ahead + i, True))
    return made


@cache
def _looped(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int
) -> tuple[tuple[Action, ...], ...]:
    """The orders of all ranks."""
    from torch.distributed.pipelining import schedules

    stages: Sequence[Any] = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=i * ranks,
            submod=nn.Identity(),
        )
        for i in range(stages_per_rank)
    ]
    make: Callable[..., Any] = getattr(schedules, f"Schedule{schedule}")
    made = make(stages, micro_batches, loss_fn=lambda output, target: output)
    return tuple(tuple(_translated(made.pipeline_order_with_comms[rank])) for rank in range(ranks))


def _translated(actions: Sequence[Any]) -> list[Action]:
    found = []
    for action in actions:
        for each in getattr(action, "sub_actions", None) or (action,):
            kind = _KINDS.get(each.computation_type.name)
            if kind is not None:  # else a message
                number = -1 if each.microbatch_index is None else each.microbatch_index
                found.append(Action(each.stage_index, number, *kind))
    return found


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """The rank of a pipeline that has a stage."""
    if schedule in V_SHAPED:
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


def check_schedule_name(schedule: Any) -> None:
    """Check that there is such a schedule.

    Raises:
        ValueError: for an unknown one.
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(str(schedule), SCHEDULES)
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}{hint}")


def check_schedule(
    schedule: Any, ranks: int, micro_batches: int, stages_per_rank: int, *, compiled: bool = False
) -> None:
    """Check a schedule and its numbers.

    Args:
        compiled: whether blocks of stages are compiled.

    Raises:
        ValueError: for an unknown schedule, or one that torch refuses with these numbers.
    """
    check_schedule_name(schedule)
    allowed = STAGES_PER_RANK[schedule]
    if allowed is _ONE and stages_per_rank > 1:
        raise ValueError(
            f"stages_per_rank={stages_per_rank} needs a schedule with several stages on a rank, "
            f"such as schedule='Interleaved1F1B': '{schedule}' has one"
        )
    if stages_per_rank not in allowed:
        raise ValueError(
            f"schedule='{schedule}' has two stages on each rank: pass stages_per_rank=2, got "
            f"{stages_per_rank}"
        )
    if compiled and schedule in SPLIT:
        raise ValueError(
            f"schedule='{schedule}' splits backwards, and a compiled block has one graph for all: "
            "pass compiled=False, or a schedule that does not split them"
        )
    least = {"1F1B": ranks, "DualPipeV": 2 * ranks}.get(schedule, 1)
    if micro_batches < least:
        stages = "stages, " if schedule == "DualPipeV" else "pipeline_ranks="
        raise ValueError(
            f"schedule='{schedule}' needs at least as many micro_batches as {stages}{least}, got "
            f"{micro_batches}"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and micro_batches % rounds:
        raise ValueError(
            f"schedule='{schedule}' needs micro_batches that divide into {rounds} equal "
            f"rounds over pipeline_ranks={ranks}, got {micro_batches}: choose a multiple of {ranks}"
        )
