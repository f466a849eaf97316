"""A step of one rank of a pipeline: the order of its forwards and backwards, and their replay.

The schedules are those of ``torch.distributed.pipelining``, with its names. Gradients are summed
over micro-batches, and reduced when the last backward is over, as its stages do with sharded
modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..common.suggestions import did_you_mean
from ..runtime.by_hand import finalize_backward
from ..runtime.unit import Forward
from .account import Held
from .allocator import Block
from .events import StartOfBackward, StepTrace
from .paged_state import PlacedOptimizer
from .replay import Player, Replay, new_state, play
from .shards import Setup
from .stand_ins import CountedUnit

# The schedules, and how many stages they may have on a rank.
_ONE, _SEVERAL = range(1, 2), range(1, 1 << 16)
STAGES_PER_RANK = {"1F1B": _ONE, "GPipe": _ONE, "Interleaved1F1B": _SEVERAL}
SCHEDULES = tuple(STAGES_PER_RANK)


class Action(NamedTuple):
    """A forward or a backward of one stage and micro-batch."""

    stage: int
    micro_batch: int
    is_forward: bool


def actions_of(
    schedule: str, rank: int, ranks: int, micro_batches: int, stages_per_rank: int = 1
) -> list[Action]:
    """What a rank of a pipeline does, in order.

    Example:
        >>> ["BF"[a.is_forward] + str(a.micro_batch) for a in actions_of("1F1B", 0, 2, 3)]
        ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    if schedule == "Interleaved1F1B":
        return _interleaved(rank, ranks, micro_batches, stages_per_rank)
    ahead = micro_batches if schedule == "GPipe" else min(micro_batches, ranks - rank)
    made = [Action(rank, i, True) for i in range(ahead)]
    for i in range(micro_batches):
        made.append(Action(rank, i, False))
        if ahead + i < micro_batches:
            made.append(Action(rank, ahead + i, True))
    return made


def _interleaved(rank: int, ranks: int, micro_batches: int, stages_per_rank: int) -> list[Action]:
    """Rounds of micro-batches go through all stages of a rank (arXiv 2104.04473)."""
    per_round = micro_batches // max(1, micro_batches // ranks)
    total = micro_batches * stages_per_rank
    ahead = min((stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank), total)
    done: dict[tuple[int, bool], int] = {}

    def action(number: int, is_forward: bool) -> Action:
        turn = (number // per_round) % stages_per_rank
        stage = (turn if is_forward else stages_per_rank - 1 - turn) * ranks + rank
        done[stage, is_forward] = (micro_batch := done.get((stage, is_forward), 0)) + 1
        return Action(stage, micro_batch, is_forward)

    made = [action(i, True) for i in range(ahead)]
    for i in range(total):
        if ahead + i < total:
            made.append(action(ahead + i, True))
        made.append(action(i, False))
    return made


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """The rank of a pipeline that has a stage."""
    return stage % ranks


def check_schedule_name(schedule: Any) -> None:
    """Check that there is such a schedule.

    Raises:
        ValueError: for an unknown one.
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(str(schedule), SCHEDULES)
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}{hint}")


def check_schedule(schedule: Any, ranks: int, micro_batches: int, stages_per_rank: int) -> None:
    """Check a schedule and numbers that go with it.

    Raises:
        ValueError: for an unknown schedule, or one that torch refuses with these numbers.
    """
    check_schedule_name(schedule)
    if schedule != "Interleaved1F1B" and stages_per_rank > 1:
        raise ValueError(
            f"stages_per_rank={stages_per_rank} needs schedule='Interleaved1F1B': '{schedule}' has "
            "one stage on each rank"
        )
    if schedule == "1F1B" and micro_batches < ranks:
        raise ValueError(
            f"schedule='1F1B' needs at least as many micro_batches as pipeline_ranks={ranks}, got "
            f"{micro_batches}"
        )
    rounds = max(1, micro_batches // ranks)
    if schedule == "Interleaved1F1B" and micro_batches % rounds:
        raise ValueError(
            f"schedule='Interleaved1F1B' needs micro_batches that divide into {rounds} equal "
            f"rounds over pipeline_ranks={ranks}, got {micro_batches}: choose a multiple of {ranks}"
        )


class Part(NamedTuple):
    """A stage of a rank.

    Attributes:
        number: of the stage in the model.
    """

    number: int
    trace: StepTrace
    setup: Setup


class RankReplay(NamedTuple):
    """The replay of a rank, and after how many launches each of its actions ends."""

    replay: Replay
    ends: list[int]


def replay_rank(
    parts: Sequence[Part],
    actions: Sequence[Action],
    *,
    optimizer: PlacedOptimizer,
    sends_late: bool = False,
    keep_samples: bool = False,
    reserves: bool = True,
    in_order: bool = False,
) -> RankReplay:
    """Run ``actions``, then the reduction of all gradients; arguments as in `replay.replay`.

    Nothing here waits for other ranks of the pipeline.

    Args:
        sends_late: whether what is sent stays until all forwards are over, or all backwards, as
            torch's GPipe waits for sends no earlier.
    """
    setup = parts[0].setup
    state = new_state(setup, keep_samples=keep_samples, reserves=reserves, in_order=in_order)
    players: dict[int, StagePlayer] = {}
    streams: Any = None
    for part in parts:
        player = StagePlayer(part.trace, part.setup, state, streams)
        players[part.number] = player
        streams = player.streams
    ends: list[int] = []

    def step() -> None:
        ends.clear()
        sent: list[Held] = []
        for i, action in enumerate(actions):
            if i and actions[i - 1].is_forward and not action.is_forward:
                sent.clear()
            players[action.stage].act(action)
            ends.append(0 if state.device is None else len(state.device.launches))
            trace = players[action.stage].trace
            nbytes = trace.sent_bytes if action.is_forward else trace.returned_bytes
            if sends_late and nbytes:
                sent.append(Held(state.account, "activations", nbytes))
        if setup.device_type != "cpu":  # gloo's works hold it until they are dropped
            sent.clear()
        for player in players.values():
            player.finish()
        sent.clear()
        state.account.add("activations", -state.account.now["activations"])

    micro_batches = len({action.micro_batch for action in actions})
    made = play([*players.values()], step, optimizer, micro_batches=micro_batches)
    return RankReplay(made, ends)


class StagePlayer(Player):
    """Feeds forwards and backwards of several micro-batches, in any order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        events = self.trace.events
        middle = next(i for i, event in enumerate(events) if isinstance(event, StartOfBackward))
        self._halves = {True: events[:middle], False: events[middle:]}
        self._forwards: dict[int, dict[CountedUnit, list[Forward]]] = {}
        self._of_this: dict[CountedUnit, list[Forward]] = {}
        self._blocks_of: dict[int, dict[int, Block | None]] = {}
        self._left: list[
            Block | None
        ] = []  # what micro-batches did not free: losses, and their graphs
        self.runtime.finalization.manual = True

    def act(self, action: Action) -> None:
        """Run a forward or a backward."""
        number = action.micro_batch
        if action.is_forward:
            self._forwards[number], self._blocks_of[number] = {}, {}
        self._of_this, self._blocks = self._forwards[number], self._blocks_of[number]
        if not action.is_forward:
            for unit in self.units:  # as torch's stages do
                unit.config.reshard_after_backward = False
                unit.config.set_sync(False)
        self._play(self._halves[action.is_forward])
        if not action.is_forward:
            self.runtime.end_backward()
            del self._forwards[number]
            self._left += self._blocks_of.pop(number).values()
            self._of_this = {}

    def finish(self) -> None:
        """Reduce all gradients, and free what is gathered: a phase of its own."""
        self.replay.account.phase = "reduction"
        for unit in self.units:
            unit.config.set_sync(True)
            unit.config.reshard_after_backward = True
        finalize_backward(self.runtime, wait=True)
        for block in self._left:
            self.replay.account.free(block)
        self._left.clear()

    def _ended(self, unit: CountedUnit) -> Forward | None:
        made = Forward(unit)
        self._of_this.setdefault(unit, []).append(made)
        return made

    def _reached(self, unit: CountedUnit) -> Forward | None:
        forwards = self._of_this.get(unit)
        return forwards.pop() if forwards else None
