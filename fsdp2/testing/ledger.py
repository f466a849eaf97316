"""Tracks the gradients of one unit: each one that autograd produced is in exactly one place.

The account of a unit follows each gradient (of one parameter and one micro-batch) along this path::

    made -> on the parameter -> taken -> in a reduction -> (partial) -> reduced

Without gradient sync, the gradients of several micro-batches are on the parameter, as one sum. The
step in brackets is optional: reduction over shards only, before an all-reduce over replicas. A
gradient that leaves this path is lost, unless it was dropped on purpose: after a failed backward,
or by `FSDPModule.reset_iter_state`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..runtime.unit import Forward, Unit
from ..sharding.param import ShardedParam

# The places of gradients that are not reduced yet, with the text of the error.
PLACES = {
    "on_param": "it is still on the unsharded parameter: no reduction took it",
    "taken": "it was taken from the parameter, but no reduction has it",
    "flying": "its reduction was never completed",
    "partial": "it was reduced over shards only, and never all-reduced over replicas",
}


class GradientLostError(RuntimeError):
    """A gradient that autograd produced did not reach the ``.grad`` of its sharded parameter."""


class GradientRecord:
    """The gradients of one parameter: the micro-batches in each place."""

    __slots__ = (*PLACES, "attaching", "lost", "num_reduced", "param", "seen", "watching", "whose")

    def __init__(self, param: ShardedParam) -> None:
        self.param = param
        self.whose = id(param.sharded)  # torch swaps no tensor that has a weak reference
        self.watching: Any = None  # the handle of the hook on the unsharded parameter
        self.seen: Any = None  # identity and version of its `.grad` when last seen
        self.num_reduced = 0
        self.lost: list[str] = []
        self.on_param: list[int] = []
        self.taken: list[int] = []
        self.flying: list[int] = []
        self.partial: list[int] = []
        self.attaching: list[int] = []

    @property
    def tensor(self) -> Any:
        """The unsharded parameter, if it is the watched one.

        Looked up each time, because a parameter that Python code refers to is not freed early.
        """
        tensor = self.param.unsharded
        hooks = None if tensor is None else tensor._post_accumulate_grad_hooks
        watched = self.watching is not None and hooks and self.watching.id in hooks
        return tensor if watched else None

    def now(self) -> Any:
        """Identity and version of the unsharded ``.grad``, which change with every write to it."""
        tensor = self.tensor
        grad = None if tensor is None else tensor.grad
        return None if grad is None else (id(grad), grad._version)

    def see(self) -> None:
        """Find a gradient that was removed."""
        self.seen = self.now()
        if self.seen is None and self.on_param:
            self.lose(self.on_param, "it was removed from the unsharded parameter")

    def lose(self, micro_batches: list[int], why: str) -> None:
        self.lost += [f"micro-batch {m}: {why}" for m in micro_batches]
        micro_batches.clear()

    def left(self, places: Any = PLACES) -> list[str]:
        """Descriptions of the gradients in any of ``places``."""
        return [
            f"micro-batch {m}: {PLACES[place]}" for place in places for m in getattr(self, place)
        ]

    def forget(self) -> None:
        """Forget all gradients, as they were dropped on purpose."""
        for place in (*PLACES, "lost", "attaching"):
            getattr(self, place).clear()
        self.seen = self.now()


class GradientAccount:
    """The gradients of one unit.

    Attributes:
        current: the micro-batch whose backward is in the unit.
        owed: micro-batches of a pipeline whose backward computed only gradients of inputs.
        unseen: those micro-batches of ``owed`` in whose backward the modules did not hold the
            unsharded parameters, so that no code could request their gradients.
        has_made: whether autograd has accumulated any gradient since the last backward ended.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = weakref.ref(unit)
        self.records: dict[int, GradientRecord] = {}
        self.generation = -1
        self.current = 0
        self.owed: list[int] = []
        self.unseen: list[int] = []
        self.is_queued = False
        self.has_made = False
        self._passed: list[tuple[int, bool]] = []  # for `owed` and `unseen`, if it belongs there
        self._handles: list[Any] = []  # of hooks
        self._numbers: dict[int, int] = {}  # of micro-batches, by number of the root's forward

    # -- micro-batches ----------------------------------------------------------------------

    def forward_ended(self, forward: Forward) -> None:
        self._numbers.setdefault(forward.number, len(self._numbers))

    def backward_entered(self, forward: Forward | None, *, owes: bool, shown: bool) -> None:
        if forward is not None:
            self.current = self._numbers.get(forward.number, self.current)
        if owes:
            self._passed.append((self.current, shown))

    def backward_ended(self, *, made: bool) -> None:
        """
        Args:
            made: whether it has accumulated gradients of any unit. If so, it was a whole backward,
                and units without gradients have not used their parameters.
        """
        if not made:
            self.owed += [micro_batch for micro_batch, _ in self._passed]
            self.unseen += [micro_batch for micro_batch, shown in self._passed if not shown]
        self._passed.clear()
        self.has_made = False

    # -- from place to place ----------------------------------------------------------------

    def follow(self, tensor: torch.Tensor, hook: Any) -> Any:
        """Call ``hook`` before all other hooks when a gradient of ``tensor`` is accumulated.

        In a model that has already trained, the unit has its own hook, which may take the gradient
        away before a later hook can see it.

        Returns:
            The handle of the hook.
        """
        handle = tensor.register_post_accumulate_grad_hook(hook)
        self._handles.append(handle)
        # (The engine follows insertion order, which `OrderedDict.move_to_end` does not change.)
        hooks: Any = tensor._post_accumulate_grad_hooks
        earlier = [(key, hooks.pop(key)) for key in list(hooks) if key != handle.id]
        hooks.update(earlier)
        return handle

    def leave(self, handle: Any) -> None:
        """Drop the handle of a hook on a replaced tensor: the hook ends with the tensor."""
        self._handles.remove(handle)

    def close(self) -> None:
        """Stop following gradients and forget the account.

        Gradients are not seen from now on. If the account were reused later, a gradient that was
        reduced in the meantime would seem lost.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        unit = self.unit()
        if unit is not None:
            unit.of_parts.pop(GradientAccount, None)

    def made(self, record: GradientRecord) -> None:
        """Record a gradient that autograd accumulated."""
        found = record.now()
        if found is None:  # a function's backward has returned None, or a compiled graph's
            return
        record.on_param.append(self.current)
        record.seen = found
        self.has_made = True

    def observe(self, *, may_drop: bool = False) -> None:
        """Find gradients that were assigned or removed by hand, as zero-bubble pipelines do.

        Args:
            may_drop: between two backwards: users may drop the sums that they see.
        """
        by_hand = []
        for record in self.records.values():
            before = record.seen
            if may_drop and record.now() is None:
                record.on_param.clear()
            record.see()
            if record.seen not in (None, before):
                by_hand.append(record)
        if by_hand:
            micro_batch = self.owed.pop(0) if self.owed else self.current
            for record in by_hand:
                record.on_param.append(micro_batch)

    def took(self, params: list[ShardedParam]) -> None:
        for param in params:
            record = self.records.get(id(param))
            if record is not None:
                record.taken += record.on_param
                record.on_param.clear()
                record.seen = record.now()

    def stayed(self) -> None:
        """Record that gradients which no reduction took may have been cast."""
        for record in self.records.values():
            record.see()

    def launched(self, params: list[ShardedParam]) -> list[GradientRecord]:
        """Record that a reduction of these parameters' gradients was launched."""
        records = [self.records[id(p)] for p in params if id(p) in self.records]
        for record in records:
            record.flying += record.taken
            record.taken.clear()
        return records

    # -- checks -----------------------------------------------------------------------------

    def problems(self, places: Any, *, all_owed: bool) -> list[str]:
        """Describe lost gradients, and those in ``places``, which should be empty by now."""
        unit = self.unit()
        found = [
            (record.param.fqn, text)
            for record in self.records.values()
            for text in (*record.lost, *record.left(places))
        ]
        if all_owed and self.owed:
            missing = (self.unseen or self.owed)[: len(self.owed)]
            names = ", ".join(record.param.fqn for record in self.records.values())
            found += [
                (
                    names,
                    f"micro-batch {m}: backward computed only the gradients of inputs, but never "
                    "the gradients of these parameters",
                )
                for m in missing
            ]
        if all_owed:
            self.owed.clear()
            self.unseen.clear()
        name = "" if unit is None else unit.name
        return [f"unit '{name}', parameter '{param}', {text}" for param, text in found]

    def settle(self) -> None:
        """Restart the numbering of micro-batches at 0 if none is in progress."""
        unit = self.unit()
        if unit is None or unit.awaits_backward or unit.step.running:
            return
        if not any(record.left() for record in self.records.values()):
            self._numbers.clear()

    def forget(self) -> None:
        self._passed.clear()
        self.owed.clear()
        self.unseen.clear()
        for record in self.records.values():
            record.forget()


def open_account(unit: Unit) -> GradientAccount:
    """The account of ``unit``, created if needed; both live equally long."""
    if GradientAccount not in unit.of_parts:
        unit.of_parts[GradientAccount] = GradientAccount(unit)
    return unit.of_parts[GradientAccount]


def watch(account: GradientAccount, unit: Unit, on_made: Any) -> None:
    """Call ``on_made`` when autograd accumulates a gradient of the unit's current parameters."""
    if account.generation == unit.param_group.generation:
        return
    account.generation = unit.param_group.generation
    before = account.records
    account.records = {}
    for param in unit.params:
        record = account.records[id(param)] = before.get(id(param)) or GradientRecord(param)
        if record.whose != id(param.sharded):  # a user's; the old gradients do not belong to it
            record.forget()
            record.whose = id(param.sharded)
        tensor = param.unsharded
        if tensor is None or record.tensor is tensor:
            continue
        if tensor.grad is None:
            record.lose(record.on_param, "its unsharded parameter was replaced by another")
        if record.watching is not None:
            account.leave(record.watching)
        record.watching = record.seen = None
        if tensor.requires_grad:  # else it may be thawed later
            record.watching = account.follow(tensor, _reporting(account, record, on_made))
            record.seen = record.now()


def _reporting(account: GradientAccount, record: GradientRecord, on_made: Any) -> Any:
    # The garbage collector does not see references held by hooks of tensors.
    of_account, key = weakref.ref(account), id(record.param)

    def hook(param: torch.Tensor) -> None:
        there = of_account()
        if there is not None and key in there.records:
            there.made(there.records[key])
            on_made(there)

    return hook
