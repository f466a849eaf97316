"""Optimizer steps on flat tensors over the memory of many small parameters.

A step of an optimizer on the local tensors of a unit runs its operations once per parameter. An
elementwise optimizer gives the same result if it sees parameters that lie side by side as one, so
that the number of parameters no longer matters. `flat_runs` finds them; parameters that cannot be
part of a run are stepped as by `local_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .flat_runs import Plan
from .local import LocalView, elementwise_trial, step_in, step_with
from .probe import Trial
from .probe_flat import why_not_flat

T = TypeVar("T", bound=Optimizer)


def flat_step(optimizer: T, *, elementwise: bool = False) -> T:
    """Make ``optimizer.step()`` run on flat tensors, each over the shards of many parameters.

    Like `local_step`, and faster where parameters are small: parameters of a group that lie side by
    side, as those of a unit do, are one tensor during the step, so the time no longer depends on
    how many there are. For optimizers that treat every element independently of the others and of
    the shape of its parameter. Both are tested by stepping on small parameters, before anything is
    changed and again when the options change. The results are those of `local_step`
    (docs/optimizers.md).

    Parameters without a gradient in a step, plain parameters, and those whose state differs (they
    have taken fewer steps) are left out of the flat tensors of the others. Outside the step nothing
    changes: parameters, gradients and state are one DTensor per parameter for ``state_dict``,
    checkpoints, schedulers, gradient scalers, step hooks and closures.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: its class becomes a
            subclass of its class.
        elementwise: True asserts that it is elementwise and independent of shapes, and skips the
            test.

    Returns:
        The same optimizer.

    Raises:
        TypeError: if it is not elementwise or depends on shapes (raised in a step if it only shows
            there; the message says which function to use instead), or if it wraps another
            optimizer or requires a closure.
        ValueError: if it is differentiable, or if its ``step`` was replaced by something other than
            a learning rate scheduler.
        RuntimeError: in a step, if state does not have the parameter's layout: then the optimizer
            is not elementwise.

    Example:
        >>> optimizer = fsdp2.optim.flat_step(torch.optim.AdamW(model.parameters(), fused=True))
        >>> optimizer.step()
    """
    trials = []
    if not elementwise:
        trials = [elementwise_trial(), Trial("independent of shapes", _ADVICE, why_not_flat)]
    return step_with(optimizer, "Flat", _run, trials)


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

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._plans: dict[int, Plan] = {}  # by the index of the group
        self._shown_plans: list[Plan] = []
        self._num_states = 0

    def _show_group(
        self, index: int, params: list[Tensor], state: dict[Tensor, Any]
    ) -> list[Tensor]:
        grads = [param.grad for param in params]
        # Before a closure there may be none: the plan for the gradients to come is kept.
        # And torch.compile cannot trace tensors that are made of addresses.
        if torch.compiler.is_compiling() or not any(grad is not None for grad in grads):
            return super()._show_group(index, params, state)
        plan = self._plans.get(index)
        if plan is None or not plan.is_current(params, grads, state):
            plan = self._new_plan(index, params, grads, state)
        self._shown_plans.append(plan)
        return [*(run.plain for run in plan.runs), *super()._show_group(index, plan.others, state)]

    def _new_plan(
        self, index: int, params: list[Tensor], grads: list[Tensor | None], state: dict[Tensor, Any]
    ) -> Plan:
        old = self._plans.pop(index, None)
        for run in old.runs if old is not None else ():
            self._forget(run.plain)
        plan = self._plans[index] = Plan(params, grads, state)
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

    def _take_over(self, state: dict[Tensor, Any], who: str) -> None:
        plans, self._shown_plans = self._shown_plans, []
        for plan in plans:
            plan.take_over(self._state, state, who)
            # Units and autograd tell by it whether the shards were written; the flat tensor has a
            # counter of its own.
            torch.autograd.graph.increment_version(plan.sources)
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
