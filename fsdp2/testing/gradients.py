"""Follows every gradient to its sharded parameter: see `account_gradients`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from ..observing import observing
from ..runtime.events import TreePart
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.unit import Forward, Unit
from ..runtime.unit_grads import Taken
from .ledger import PLACES, GradientAccount, GradientLostError, GradientRecord, open_account, watch

_UNREDUCED = ("on_param", "taken")


@contextmanager
def account_gradients() -> Iterator[None]:
    """Follow every gradient that autograd produces, and raise if one does not arrive.

    The context covers all sharded modules of this process, including existing ones. It may begin
    and end anywhere in training, also between forward and backward or between micro-batches;
    earlier gradients are not tracked. Each accumulation into an unsharded parameter is recorded, by
    parameter and micro-batch, and followed through accumulation and reductions to the ``.grad`` of
    the sharded parameter. All gradients must have arrived at the end of a backward with gradient
    sync (or of `FSDPModule.finalize_backward`, or of a pipeline's step) and at each optimizer step.
    The context costs a few microseconds per parameter and micro-batch, but no memory and no
    communication.

    Micro-batches are numbered from 0 in every iteration, in the order of the root's forwards.

    Raises:
        GradientLostError: from ``backward()``, ``finalize_backward()`` or ``optimizer.step()``.
            The message names the unit, the parameter, the micro-batch, and the place where the
            gradient was last seen.
        RuntimeError: if such a context is already active.

    Example:
        >>> with fsdp2.testing.account_gradients():
        ...     for batch in loader:
        ...         loss_of(model, batch).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    if _accounts:
        raise RuntimeError("account_gradients() is already active")
    _accounts.append(weakref.WeakSet())
    with ExitStack() as stack:
        stack.callback(_close)
        stack.callback(register_optimizer_step_pre_hook(_check_step).remove)
        stack.enter_context(observing(_Accounts))
        yield


_accounts: list[weakref.WeakSet[GradientAccount]] = []  # one set while active


def _close() -> None:
    for account in list(_accounts.pop()):
        account.close()


class _Accounts(TreePart):
    """The accounts of one tree; receives the events of its gradients."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._of = {unit: open_account(unit) for unit in runtime.units}
        self._in_flight: dict[Reduction, list[GradientRecord]] = {}
        for unit, account in self._of.items():
            watch(account, unit, _made)
        _accounts[0].update(self._of.values())

    # -- the path of a gradient -------------------------------------------------------------

    @override
    def planned(self, unit: Unit) -> None:
        watch(self._of[unit], unit, _made)

    @override
    def before_gather(self, unit: Unit) -> None:
        watch(self._of[unit], unit, _made)  # others may be frozen since

    @override
    def forward_ends(self, unit: Unit, forward: Forward | None) -> None:
        if forward is not None:
            self._of[unit].forward_ended(forward)

    @override
    def backward_begins(self) -> None:
        for account in self._of.values():  # what users have done since the last one
            account.observe(may_drop=True)

    @override
    def backward_enters(
        self, unit: Unit, forward: Forward | None, accumulates: bool | None
    ) -> None:
        if unit.step.backward_began:
            return
        # (Hooks on outputs may run again in the backward for the weights.)
        first = forward is None or not forward.entered
        owes = first and accumulates is False and not self.runtime.ends_iteration
        shown = unit.registration.registered == "unsharded"
        self._of[unit].backward_entered(forward, owes=owes, shown=shown)

    @override
    def before_reduce(self, unit: Unit) -> None:
        self._of[unit].observe()

    @override
    def gradients_taken(self, unit: Unit, taken: Taken) -> None:
        for bucket, grads in zip(unit.buckets, taken, strict=True):
            self._of[unit].took([bucket.params[i] for i in grads])

    @override
    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        for reduction in reductions:
            params = [reduction.bucket.params[i] for i in reduction.plan.present]
            self._in_flight[reduction] = self._of[unit].launched(params)

    @override
    def after_reduce(self, unit: Unit, direct_only: bool) -> None:
        self._of[unit].stayed()

    @override
    def before_completion(self, unit: Unit, reduction: Reduction) -> None:
        for record in self._in_flight.get(reduction, ()):
            # (An optimizer in backward may step during the completion.)
            record.attaching, record.flying = record.flying, []

    @override
    def reduction_completed(self, unit: Unit, reduction: Reduction) -> None:
        for record in self._in_flight.pop(reduction, ()):
            sharded = record.param.sharded
            if reduction.waits:
                record.partial += record.attaching
            else:
                record.num_reduced += len(record.attaching)
                if reduction.replicate is not None:
                    record.partial.clear()
                if sharded.grad is None and not sharded._post_accumulate_grad_hooks:
                    record.lose(record.attaching, "it was reduced, but not attached to the shard")
            record.attaching.clear()

    @override
    def gradients_dropped(self, unit: Unit) -> None:
        self._of[unit].forget()

    @override
    def tree_reset(self) -> None:
        self._in_flight.clear()

    @override
    def iteration_ends(self) -> None:
        if not self.runtime.in_backward:  # the caller ends it
            self._check(ended=True, explicit=True)

    @override
    def backward_ends(self) -> None:
        explicit = torch._C._current_graph_task_id() == -1  # called by a pipeline, not in backward
        made = any(account.has_made for account in self._of.values())
        for account in self._of.values():
            account.backward_ended(made=made)
        self._check(ended=self.runtime.ends_iteration, explicit=explicit)

    def _check(self, *, ended: bool, explicit: bool) -> None:
        """Check at the end of a backward or an iteration."""
        problems = []
        for unit, account in self._of.items():
            config = unit.config
            account.observe()
            places: list[str] = []
            waits_for_caller = self.runtime.held_open and config.sync_grads and not explicit
            if config.reduce_grads and not waits_for_caller:
                places += _UNREDUCED
            if ended:
                places.append("flying")
                if config.all_reduce_grads and config.reduce_grads:
                    places.append("partial")
            problems += account.problems(places, all_owed=ended and explicit)
            if ended:
                account.settle()
        _raise(problems)


# -- checks ---------------------------------------------------------------------------------


def _made(account: GradientAccount) -> None:
    """After the first gradient of a backward, queue a check at its end, which also covers gradients
    and ends of backward for which no hook of the unit runs."""
    if account.is_queued:
        return
    account.is_queued = True
    Variable._execution_engine.queue_callback(partial(_check_noticed, weakref.ref(account)))


def _check_noticed(ref: weakref.ref[GradientAccount]) -> None:
    account = ref()
    unit = None if account is None else account.unit()
    if account is None or unit is None:
        return
    account.is_queued = False
    runtime = runtime_of(unit)
    if not unit.config.reduce_grads or runtime.held_open:
        return
    if not runtime.in_backward:
        _raise(account.problems(_UNREDUCED, all_owed=False))
    elif not runtime.will_end_backward:  # outside autograd's run
        places = (*_UNREDUCED, "flying") if runtime.ends_iteration else _UNREDUCED
        _raise(account.problems(places, all_owed=False))


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before an optimizer step, check that all gradients of its parameters have arrived."""
    stepped: set[int] = set()
    problems = []
    for account in list(_accounts[0]) if _accounts else ():
        account.observe()
        for record in account.records.values():
            left = record.left(PLACES)
            if left and not stepped:
                groups = optimizer.param_groups
                stepped = {id(p) for group in groups for p in group["params"]}
            if left and id(record.param.sharded) in stepped:
                name = record.param.fqn
                problems += [
                    f"parameter '{name}', {text}, but the optimizer steps now" for text in left
                ]
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if not problems:
        return
    for account in list(_accounts[0]) if _accounts else ():
        account.forget()
    shown = "\n  ".join(problems[:20])
    more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
    raise GradientLostError(f"Gradients did not reach the sharded parameters:\n  {shown}{more}")
