"""Optimizer steps on flat tensors over the memory of many small parameters.

A step of an optimizer on the local tensors of a unit runs its operations once per parameter. An
elementwise optimizer gives the same result if it sees parameters that lie side by side as one, so
that the number of parameters no longer matters. `flat_runs` finds them; parameters that cannot be
part of a run are stepped as by `local_step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..dtensor.memory import ask_side_by_side
from .flat_plan import FlatPlan, History
from .local import (
    WHY_NOT_DIFFERENTIABLE,
    LocalView,
    elementwise_trial,
    step_in,
    step_with,
    steps_with,
)
from .probe import Trial
from .probe_flat import why_not_flat

T = TypeVar("T", bound=Optimizer)


def flat_step(optimizer: T, *, elementwise: bool = False) -> T:
    """Make ``optimizer.step()`` run on flat tensors, each over the shards of many parameters.

    Like `local_step`, but faster where parameters are small. Parameters of a group that lie side by
    side, as in a unit, are one tensor during the step, so the time no longer depends on their
    number. If this is called before the first forward, small units are put side by side too.

    The optimizer must treat every element independently of the others and of the shape of its
    parameter. Both are tested by stepping small parameters, before anything is changed and again
    when the options change. The results are the same as with `local_step`, with one exception (see
    docs/optimizers.md).

    The flat tensors leave out parameters without a gradient in a step, plain parameters, and
    parameters whose state differs (they have taken fewer steps). Outside the step nothing changes:
    parameters, gradients and state are one DTensor per parameter for ``state_dict``, checkpoints,
    schedulers, gradient scalers, step hooks and closures.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: it becomes an
            instance of a subclass of its class.
        elementwise: True asserts that it is elementwise and independent of shapes, and skips the
            test.

    Returns:
        The same optimizer.

    Raises:
        TypeError: if it is not elementwise or depends on shapes (raised in a step if it only shows
            there; the message names the function to use instead), or if it wraps another optimizer
            or requires a closure.
        ValueError: if it is differentiable, or if its ``step`` was replaced by something other than
            a learning rate scheduler.
        RuntimeError: in a step, if state does not have the parameter's layout, so that the
            optimizer is not elementwise.

    Example:
        >>> optimizer = fsdp2.optim.flat_step(torch.optim.AdamW(model.parameters(), fused=True))
        >>> optimizer.step()
    """
    stepping = optimizer
    if not steps_with(optimizer, _run):
        trials = []
        if not elementwise:
            trials = [elementwise_trial(), Trial("independent of shapes", _ADVICE, why_not_flat)]
        stepping = step_with(optimizer, "flat_step", "Flat", _run, trials, WHY_NOT_DIFFERENTIABLE)
    ask_side_by_side(stepping)
    return stepping


_ADVICE = (
    "It would see many parameters as one vector. fsdp2.optim.local_step shows it each parameter "
    "with its dims"
)


def _run(
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return step_in(FlatView, optimizer, raw, closure, *args, **kwargs)


class FlatView(LocalView):
    """Shows an optimizer flat tensors between `enter` and `leave`."""

    joins = True  # see `History`

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._plans: dict[int, FlatPlan] = {}  # by the index of the group
        self._histories: defaultdict[int, History] = defaultdict(partial(History, self.joins))
        self._shown_plans: list[FlatPlan] = []
        self._num_states = 0
        self._entries: tuple[list[Any], list[Any]] = ([], [])  # of the state, after the last step
        self._untouched = False  # whether it has the same entries now
        self._unsharded: list[Any] = []

    @override
    def enter(self) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        state, (keys, values) = optimizer.state, self._entries
        # To compare all in their order is much faster than to look up one after the other.
        self._untouched = (
            len(state) == len(keys)
            and all(map(is_, state, keys))
            and all(map(is_, state.values(), values))
        )
        super().enter()

    @override
    def _unsharded_keys(self, state: dict[Tensor, Any]) -> list[Any]:
        return self._unsharded if self._untouched else super()._unsharded_keys(state)

    @override
    def _show_group(
        self, index: int, params: list[Tensor], state: dict[Tensor, Any]
    ) -> list[Tensor]:
        plan = self._plans.get(index)
        if plan is None or not plan.is_current(params, state, self._untouched):
            # Before a closure there may be no gradients: the plan for those to come is kept.
            if not any(param.grad is not None for param in params):
                return super()._show_group(index, params, state)
            plan = self._new_plan(index, params, state)
        self._shown_plans.append(plan)
        return [*plan.show(), *super()._show_group(index, plan.others, state)]

    def _new_plan(self, index: int, params: list[Tensor], state: dict[Tensor, Any]) -> FlatPlan:
        old = self._plans.pop(index, None)
        for run in old.runs if old is not None else ():
            self._forget(run.plain)
        plan = self._plans[index] = FlatPlan(params, state, self._histories[index])
        for run in plan.runs:
            self._plain.add(id(run.plain))
            if run.seen:
                self._state[run.plain] = dict(run.seen)
            for param in run.params:
                stand = self._stands.pop(id(param), None)
                if stand is not None:
                    self._forget(stand.plain)
        return plan

    def _forget(self, plain: Tensor) -> None:
        self._state.pop(plain, None)
        self._plain.discard(id(plain))

    @override
    def leave(self) -> None:
        for plan in self._shown_plans:
            plan.hide()  # also if the state turns out not to be elementwise
        try:
            super().leave()
        finally:
            self._shown_plans = []
        optimizer = self._optimizer()
        assert optimizer is not None
        state, (keys, _) = optimizer.state, self._entries
        if self._untouched and len(state) == len(keys):
            return  # a step writes into entries that there are, or adds some
        if len(state) != len(keys) or not all(map(is_, state, keys)):
            self._unsharded = super()._unsharded_keys(state)
        self._entries = list(state), list(state.values())

    @override
    def _take_over(self, state: dict[Tensor, Any], who: str) -> None:
        for plan in self._shown_plans:
            plan.take_over(self._state, state, who)
        if len(state) != self._num_states:
            self._order(state)

    def _order(self, state: dict[Tensor, Any]) -> None:
        """Put the state in the order of the parameters, which is the same on all ranks."""
        # Checkpoints compare it between ranks, and runs are not the same everywhere.
        optimizer = self._optimizer()
        assert optimizer is not None
        for param in [p for group in optimizer.param_groups for p in group["params"]]:
            if param in state:
                state[param] = state.pop(param)
        self._num_states = len(state)


class InPlaceView(FlatView):
    """Shows flat tensors over memory of the shards only: nothing is held between steps."""

    joins = False
