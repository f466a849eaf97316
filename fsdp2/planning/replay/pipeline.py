"""The replay of a step of one rank of a pipeline.

As in ``torch.distributed.pipelining`` with sharded modules, gradients are summed over
micro-batches, and reduced after the last backward of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from typing_extensions import override

from ...features.deferred_weight_grads import DeferredWeightGrads
from ...features.finalization import Finalization
from ...runtime.states import RESHARDED
from ...runtime.unit import Forward
from ..trace.account import Account, HeldBytes
from ..trace.allocator import Block
from ..trace.events import Event, StartOfBackward, StartOfWeights, StepTrace
from ..trace.optimizers import PlacedOptimizer
from .replay import Player, Replay, new_state, play
from .schedules import Action
from .setups import Setup
from .stand_ins import CountedUnit


class RankStage(NamedTuple):
    """A stage of a rank.

    Attributes:
        number: number of the stage in the model.
        split: its step with gradients of inputs first and gradients of weights later; None: no
            schedule needs it.
    """

    number: int
    trace: StepTrace
    setup: Setup
    split: StepTrace | None = None


def replay_rank(
    parts: Sequence[RankStage],
    actions: Sequence[Action],
    *,
    optimizer: PlacedOptimizer,
    sends_late: bool = False,
    holds_sent: bool = True,
    **options: bool,
) -> Replay:
    """Run ``actions``, then the reduction of all gradients; arguments as in `replay.replay`.

    Nothing here waits for other ranks of the pipeline.

    Args:
        sends_late: whether sent tensors stay until all forwards, or all backwards, are over, since
            torch's GPipe does not wait for sends earlier.
        holds_sent: whether schedules with several stages hold sent tensors, as torch's do; others
            free them at once.
    """
    setup = parts[0].setup
    state = new_state(setup, **options)
    players: dict[int, StagePlayer] = {}
    streams: Any = None
    for part in parts:
        player = StagePlayer(part.trace, part.setup, state, streams)
        player.prepare(part.split, _split_micro_batches(actions, part.number))
        players[part.number] = player
        streams = player.streams
    computing = [action for action in actions if action.computes]
    starts: list[int] = []
    ends: list[int] = []

    looped = holds_sent and len(computing) < len(actions)
    sends = _Sends(state.account, players, late=sends_late, looped=looped)

    def num_launches() -> int:
        return 0 if state.device is None else len(state.device.launches)

    def step() -> None:
        starts.clear()
        ends.clear()
        for player in players.values():
            player.is_finished = False
        before = None
        for action in actions:
            if not action.computes:
                players[action.stage].manage(action.part)
                continue
            sends.before(action, before)
            starts.append(num_launches())
            players[action.stage].act(action)
            ends.append(num_launches())
            sends.after(action)
            before = action
        if sends_late and setup.device_type != "cpu":  # gloo's works hold it until they are dropped
            sends.clear()
        for player in players.values():
            if not player.is_finished:
                player.finish()
        sends.clear()
        state.account.add("activations", -state.account.now["activations"])

    micro_batches = len({action.micro_batch for action in computing})
    made = play([*players.values()], step, optimizer, micro_batches=micro_batches)
    return replace(made, actions=computing, starts=starts, ends=ends)


class _Sends:
    """The tensors that a rank has sent and still holds.

    Args:
        late: hold them until all forwards, or all backwards, are over, as GPipe does.
        looped: hold outputs until their gradients have come, and sent gradients until the end, as
            schedules with several stages do. Without both, sent tensors are dropped at once.
    """

    def __init__(
        self, account: Account, players: Mapping[int, StagePlayer], *, late: bool, looped: bool
    ) -> None:
        self._account = account
        self._players = players
        self._late, self._looped = late, looped
        self._outputs: dict[tuple[int, int], HeldBytes] = {}
        self._others: list[HeldBytes] = []

    def before(self, action: Action, last: Action | None) -> None:
        """An action begins."""
        if self._late and last is not None and last.is_forward and not action.is_forward:
            self._others.clear()

    def after(self, action: Action) -> None:
        """An action has ended, and its output is sent."""
        key = (action.stage, action.micro_batch)
        if not action.is_forward and action.part != "weight":
            self._outputs.pop(key, None)
        trace = self._players[action.stage].trace
        nbytes = trace.sent_bytes if action.is_forward else trace.returned_bytes
        there = action.stage + (1 if action.is_forward else -1)
        if not nbytes or action.part == "weight" or there in self._players:
            return
        if self._looped and action.is_forward:
            self._outputs[key] = HeldBytes(self._account, "activations", nbytes)
        elif self._late or self._looped:
            self._others.append(HeldBytes(self._account, "activations", nbytes))

    def clear(self) -> None:
        """All has been sent."""
        self._outputs.clear()
        self._others.clear()


def _split_micro_batches(actions: Sequence[Action], stage: int) -> frozenset[int]:
    """The micro-batches whose backward in this stage is split into inputs and weights."""
    return frozenset(a.micro_batch for a in actions if a.stage == stage and a.part == "weight")


class StagePlayer(Player):
    """Feeds forwards and backwards of several micro-batches, in any order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._phases = {False: _phases_of(self.trace)}
        self._is_split: frozenset[int] = frozenset()
        self._part = ""
        self.is_finished = False
        self._awaits_unshard = False  # whether a whole stage is being gathered
        self._forwards: dict[int, dict[CountedUnit, list[Forward]]] = {}
        self._of_this: dict[CountedUnit, list[Forward]] = {}
        self._blocks_of: dict[int, dict[int, Block | None]] = {}
        # Memory that micro-batches did not free: losses and their graphs.
        self._left: list[Block | None] = []
        self.finalization = Finalization(self.runtime)

    def prepare(self, split: StepTrace | None, micro_batches: frozenset[int]) -> None:
        """Play these micro-batches from the trace with gradients of inputs first."""
        self._is_split = micro_batches
        if micro_batches:
            assert split is not None
            self._phases[True] = _phases_of(split)

    def manage(self, what: str) -> None:
        """Gather, free or reduce all units, as a schedule requests."""
        if what == "reduce":
            self.finish()
            return
        self._awaits_unshard = what == "unshard"
        self.streams.before_gathers(self.runtime.optimizer_event)
        for unit in self.units:
            if what == "reshard":
                self.runtime.reshard(unit)
            elif unit.state in RESHARDED:  # as `FSDPModule.unshard`
                unit.start_unshard(self.streams)

    def act(self, action: Action) -> None:
        """Run a forward or a backward."""
        number, self._part = action.micro_batch, action.part
        if self._awaits_unshard:
            for unit in self.units:
                unit.unshard(self.streams)
            self._awaits_unshard = False
        if action.is_forward:
            self._forwards[number], self._blocks_of[number] = {}, {}
        self._of_this, self._blocks = self._forwards[number], self._blocks_of[number]
        phase = "forward" if action.is_forward else action.part or "backward"
        if not action.is_forward:
            for unit in self.units:  # as torch's stages do
                unit.config.reshard_after_backward = False
                unit.config.set_sync(False)
            if action.part and self._phases[True][phase]:
                part = self.runtime.part(DeferredWeightGrads)
                assert part is not None
                for unit in reversed(self.units):
                    part.gather(unit)
        self._play(self._phases[number in self._is_split][phase])
        if not action.is_forward:
            self.runtime.end_backward()
        if not action.is_forward and action.part != "input":
            del self._forwards[number]
            self._left += self._blocks_of.pop(number).values()
            self._of_this = {}

    @override
    def _accumulates(self) -> bool:
        return self._part != "input"

    def finish(self) -> None:
        """Reduce all gradients and free gathered parameters, as a separate phase."""
        self.is_finished = True
        self.replay.account.phase = "reduction"
        for unit in self.units:
            unit.config.set_sync(True)
            unit.config.reshard_after_backward = True
        self.finalization.finalize(wait=True)
        for block in self._left:
            self.replay.account.free(block)
        self._left.clear()

    @override
    def _ended(self, unit: CountedUnit) -> Forward | None:
        made = Forward(unit)
        self._of_this.setdefault(unit, []).append(made)
        return made

    @override
    def _reached(self, unit: CountedUnit) -> Forward | None:
        forwards = self._of_this.get(unit)
        return forwards.pop() if forwards else None


def _phases_of(trace: StepTrace) -> dict[str, Sequence[Event]]:
    """The events of a forward, of a whole backward, and of the parts of a split backward."""
    events = trace.events
    middle = next(i for i, event in enumerate(events) if isinstance(event, StartOfBackward))
    later = [i for i, event in enumerate(events) if isinstance(event, StartOfWeights)]
    border = later[0] if later else len(events)
    return {
        "forward": events[:middle],
        "backward": events[middle:],
        "input": events[middle:border],
        "weight": [events[middle], *events[border + 1 :]],
    }
