"""Optimizer steps on the local tensors of DTensors.

Every operation on a DTensor passes through its dispatch, which for an optimizer's small operations
takes several times as long as the operation itself. An elementwise optimizer needs no dispatch. So
while its step runs, the optimizer sees plain tensors instead of DTensors: in its parameter groups,
their gradients, and its state. They share memory, so nothing is copied. Before and after the step,
and in hooks and closures, everything is a DTensor.

The plain tensors are kept from step to step. They are rebuilt if an object that they were made from
has been replaced, for example after parameters were moved or state was loaded.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..dtensor.parts import laid_out_like, local_part, placed_like
from .probe import Trial, why_not_elementwise
from .stepping import KEPT, Runner, check_optimizer, original_name, raw_step, replace_step
from .values import SCALARS, is_container, map_tensors

T = TypeVar("T", bound=Optimizer)


def local_step(optimizer: T, *, elementwise: bool = False) -> T:
    """Make ``optimizer.step()`` run on the local tensors of its DTensors.

    Use it for elementwise optimizers, which treat every element independently, as most of torch's
    do. Any implementation works (for-loop, foreach, fused, capturable), and the results are the
    same. A test steps small parameters, whole and in parts, before anything is changed and again
    when the options change. docs/optimizers.md lists the optimizers of several libraries.

    Outside the step nothing changes: parameters, gradients and state are DTensors for
    ``state_dict``, checkpoints, schedulers, gradient scalers, step hooks and closures.

    Args:
        optimizer: over DTensors, plain parameters, or both. Changed in place: it becomes an
            instance of a subclass of its class.
        elementwise: True asserts that it is elementwise and skips the test.

    Returns:
        The same optimizer.

    Raises:
        TypeError: if it is not elementwise (raised in a step if it only shows there), wraps
            another optimizer, or requires a closure.
        ValueError: if it is differentiable, which needs the graph of the DTensors, or if its
            ``step`` was replaced by something other than a learning rate scheduler.
        RuntimeError: in a step, if state does not have the parameter's layout, so that the
            optimizer is not elementwise.

    Example:
        >>> optimizer = fsdp2.optim.local_step(torch.optim.AdamW(model.parameters(), fused=True))
        >>> optimizer.step()
    """
    if steps_with(optimizer, _run):
        return optimizer
    trials = [] if elementwise else [elementwise_trial()]
    return step_with(optimizer, "local_step", "Local", _run, trials, WHY_NOT_DIFFERENTIABLE)


def dtensor_step(optimizer: T) -> T:
    """Make ``optimizer.step()`` run over DTensors, as in torch's FSDP2.

    By default torch's own elementwise optimizers (Adam, AdamW, SGD and others) step on local shards
    if all of their parameters were sharded by `fully_shard`. The results are bitwise the same. This
    turns the default off for one optimizer, for example to see DTensor's operators in a trace.

    Args:
        optimizer: changed in place: it becomes an instance of a subclass of its class.

    Returns:
        The same optimizer.

    Raises:
        TypeError, ValueError: if its step cannot be replaced, as for `local_step`.

    Example:
        >>> optimizer = fsdp2.optim.dtensor_step(torch.optim.AdamW(model.parameters()))
        >>> optimizer.step()
    """
    if not steps_with(optimizer, _run_raw):
        check_optimizer(optimizer, "dtensor_step")
        replace_step(optimizer, "DTensor", _run_raw, "dtensor_step")
    return optimizer


def _run_raw(optimizer: Any, raw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return raw(optimizer, *args, **kwargs)


# Of optimizers that see plain tensors in their step.
WHY_NOT_DIFFERENTIABLE = (
    "A differentiable optimizer cannot step on local tensors: its graph would not lead to the "
    "DTensors"
)


def step_with(
    optimizer: T,
    caller: str,
    prefix: str,
    runner: Runner,
    trials: Sequence[Trial],
    why_not_differentiable: str,
    **kept: Any,
) -> T:
    """Replace the step by ``runner``, after the trials.

    Args:
        caller: the public function, for messages.
        prefix: of the name of the optimizer's class from now on.
        trials: passed now, and to be passed by ``runner`` again, as options may change.
        why_not_differentiable: the beginning of the message.
        kept: what ``runner`` finds next to the trials under `KEPT`, also in copies.

    Raises:
        TypeError, ValueError: as `local_step`.
    """
    check_optimizer(optimizer, caller)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"{why_not_differentiable}. Leave out differentiable=True or {caller}")
    for trial in trials:
        trial.check(optimizer, raw_step(type(optimizer)), False, in_step=False)
    replace_step(optimizer, prefix, runner, caller)
    vars(optimizer)[KEPT] = {"trials": trials, **kept}
    return optimizer


def steps_with(optimizer: Any, runner: Runner) -> bool:
    """Whether ``runner`` does the step of this optimizer already."""
    return getattr(type(optimizer), "_runner", None) is runner


def elementwise_trial() -> Trial:
    """Whether an optimizer treats every element on its own."""
    return Trial("elementwise", _ADVICE, why_not_elementwise)


_ADVICE = (
    "It would see only this rank's part of each parameter. fsdp2.optim.whole_step runs an "
    "optimizer on whole parameters; if this one treats every element on its own, pass "
    "elementwise=True"
)


def _run(
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return step_in(LocalView, optimizer, raw, closure, *args, **kwargs)


def step_in(
    kind: type[LocalView],
    optimizer: Any,
    raw: Callable[..., Any],
    closure: Callable[[], Any] | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the step while the optimizer sees plain tensors, and the closure while it does not.

    Args:
        kind: of the view, which is kept from step to step.
    """
    for trial in vars(optimizer).get(KEPT, {}).get("trials", ()):
        trial.check(optimizer, raw, closure is not None)  # does something if the options changed
    view = vars(optimizer).get("_local_view")
    if type(view) is not kind:
        view = vars(optimizer)["_local_view"] = kind(optimizer)
    if closure is not None:
        with_dtensors = closure

        def closure() -> Any:
            view.leave()
            try:
                return with_dtensors()
            finally:
                view.enter()

    if closure is not None or args:
        args = (closure, *args)
    view.enter()
    try:
        return raw(optimizer, *args, **kwargs)
    finally:
        view.leave()


class Stand:
    """The plain stand-in for one DTensor parameter during a step.

    Attributes:
        param: the parameter.
        source: its local tensor, from which ``plain`` was made.
        plain: what the optimizer sees.
        outer: the parameter's state, if there is any.
        pairs: for each key of the state, the value there and the value that the optimizer sees.
    """

    __slots__ = ("outer", "pairs", "param", "plain", "source")

    def __init__(self, param: DTensor, *, counts_apart: bool = False) -> None:
        """
        Args:
            counts_apart: writes to ``plain`` do not count as writes to ``source``.
        """
        self.param = param
        self.source = param._local_tensor
        data = self.source.data if counts_apart else self.source
        self.plain = nn.Parameter(data, requires_grad=param.requires_grad)
        # Attributes that a user attached. Those that exist already belong to the class: a tensor
        # subclass keeps its inner tensors there.
        own = vars(self.plain)
        own.update((name, v) for name, v in vars(param).items() if name not in own)
        self.outer: dict[Any, Any] | None = None
        self.pairs: dict[Any, tuple[Any, Any]] = {}

    def is_current(self, outer: dict[Any, Any] | None) -> bool:
        """Whether the state is what it was after the last step."""
        if outer is not self.outer:
            return False
        pairs = self.pairs
        if outer is None:
            return True
        if len(outer) != len(pairs):
            return False
        for key, value in outer.items():
            pair = pairs.get(key)
            if pair is None or pair[0] is not value:
                return False
        return True

    def read(self, outer: dict[Any, Any] | None) -> dict[Any, Any]:
        """The state as the optimizer should see it."""
        self.outer = outer
        self.pairs = {}
        for key, value in (outer or {}).items():
            seen = value
            if isinstance(value, DTensor):
                outer[key] = value = placed_like(value, self.param)  # type: ignore[index]
                seen = local_part(value)
            elif is_container(value):
                seen = map_tensors(value, lambda t: local_part(placed_like(t, self.param)))
            self.pairs[key] = (value, seen)
        return {key: seen for key, (_, seen) in self.pairs.items()}

    def write(self, inner: dict[Any, Any], state: dict[Tensor, dict[Any, Any]], who: str) -> None:
        """Copy new entries of the optimizer's state to the state outside."""
        pairs = self.pairs
        for key, value in inner.items():
            pair = pairs.get(key)
            # A container is the same object even if the step replaced values in it.
            if pair is None or pair[1] is not value or is_container(value):
                outer = state[self.param]
                outer[key] = new = state_outside(key, value, self.param, who)
                pairs[key] = (new, value)
                self.outer = outer
        if len(pairs) > len(inner):
            for key in pairs.keys() - inner.keys():
                del pairs[key], state[self.param][key]


def state_outside(key: Any, value: Any, param: DTensor, who: str) -> Any:
    """State that a step made for the local tensor of ``param``, as state of ``param``.

    Raises:
        RuntimeError: if it does not have the parameter's layout.
    """
    if is_container(value):
        return map_tensors(value, lambda tensor: state_outside(key, tensor, param, who))
    if not isinstance(value, Tensor):
        return value
    source = param._local_tensor
    if value.ndim == 0 and (source.ndim > 0 or key in SCALARS):
        return value
    if value.shape != source.shape:
        raise not_elementwise(who, key, value, source)
    return laid_out_like(value, param)


def not_elementwise(who: str, key: Any, value: Tensor, param: Tensor) -> RuntimeError:
    """The error for state that does not have the shape of the parameter that it was made for."""
    return RuntimeError(
        f"{who} keeps '{key}' of shape {tuple(value.shape)} for a parameter of local shape "
        f"{tuple(param.shape)}: it is not elementwise, so it cannot step on local "
        "tensors; fsdp2.optim.whole_step runs it on whole parameters"
    )


class LocalView:
    """Shows an optimizer plain tensors between `enter` and `leave`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._stands: dict[int, Stand] = {}  # by the parameter's id
        self._plain: set[int] = set()  # ids of what they show
        self._state: defaultdict[Any, Any] = defaultdict(dict)  # what the optimizer sees
        self._shown: list[Stand] = []
        self._outside: tuple[Any, list[list[Tensor]]] | None = None

    def enter(self) -> None:
        """Put plain tensors in place of DTensors."""
        optimizer = self._optimizer()
        assert optimizer is not None
        assert self._outside is None
        state = optimizer.state
        groups = [group["params"] for group in optimizer.param_groups]
        shown = [self._show_group(i, params, state) for i, params in enumerate(groups)]
        for key in self._unsharded_keys(state):
            self._state[key] = state[key]
        for group, params in zip(optimizer.param_groups, shown, strict=True):
            group["params"] = params
        optimizer.state = self._state
        self._outside = (state, groups)

    def _unsharded_keys(self, state: dict[Tensor, Any]) -> list[Any]:
        """Of entries that the optimizer sees as they are: plain parameters', and its own."""
        return [key for key in state if not isinstance(key, DTensor)]

    def _show_group(
        self, index: int, params: list[Tensor], state: dict[Tensor, Any]
    ) -> list[Tensor]:
        """What the optimizer sees in place of a group's parameters."""
        return [self._show(param, state) for param in params]

    def _show(self, param: Tensor, state: dict[Tensor, Any]) -> Tensor:
        if not isinstance(param, DTensor):
            return param
        stand = self._stands.get(id(param))
        if stand is None or stand.source is not param._local_tensor:
            if stand is not None:
                self._state.pop(stand.plain, None)
                self._plain.remove(id(stand.plain))
            stand = self._stands[id(param)] = Stand(param)
            self._plain.add(id(stand.plain))
        self._shown.append(stand)
        plain = stand.plain
        outer = state.get(param)
        if not stand.is_current(outer):
            self._state[plain] = stand.read(outer)
            if outer is None:
                del self._state[plain]
        grad = param.grad
        if grad is not None:
            plain.grad = local_part(placed_like(grad, param))
        return plain

    def leave(self) -> None:
        """Put the DTensors back, and take over new state."""
        optimizer = self._optimizer()
        assert optimizer is not None
        assert self._outside is not None
        state, groups = self._outside
        self._outside = None
        optimizer.state = state
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        who = original_name(optimizer)
        inner = self._state
        shown, self._shown = self._shown, []
        for stand in shown:
            stand.plain.grad = None  # code that reuses its memory counts references
            seen = inner.get(stand.plain)
            if seen:
                stand.write(seen, state, who)
        self._take_over(state, who)
        for key in [key for key in inner if id(key) not in self._plain]:
            state[key] = inner.pop(key)

    def _take_over(self, state: dict[Tensor, Any], who: str) -> None:
        """Take over the state of what `_show_group` shows in addition to stand-ins."""
