"""Replaces the step of an optimizer but keeps everything that torch wraps around it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from ..common.classes import class_for, original_class
from .values import copied

# Called with the optimizer, its own step (without hooks), and the arguments of `step`.
Runner = Callable[..., Any]
# Attributes of an optimizer that torch or this package set: not part of what it remembers.
_NOT_ITS_OWN = {"param_groups", "state", "defaults", "step", "_local_view"}
# An attribute that copies of the optimizer keep.
KEPT = "_fsdp2_options"


def raw_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class, without the wrapper that torch adds when the class is first used."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def check_optimizer(optimizer: Any, caller: str) -> None:
    """Refuse objects that wrap an optimizer, and optimizers that require a closure.

    Raises:
        TypeError: with advice on what to do instead.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller} expects a torch.optim.Optimizer, but {name} is not one. If it wraps one, "
            f"apply {caller} to that one before wrapping it"
        )
    for attribute in ("param_groups", "state"):
        if isinstance(getattr(type(optimizer), attribute, None), property):
            raise TypeError(
                f"{name} computes its {attribute} in a property, which {caller} cannot replace. "
                "If it wraps an optimizer, apply it to that one before wrapping it"
            )
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            raise TypeError(
                f"{name} wraps another optimizer ({type(value).__name__}, its attribute "
                f"'{attribute}') and steps that: apply {caller} to the inner one before wrapping it"
            )
    parameters = [*inspect.signature(raw_step(type(optimizer))).parameters.values()][1:]
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(
                f"{name}.step() requires a {parameter.name}, which it calls any number of times "
                f"while it changes all parameters: {caller} cannot run that. See docs/optimizers.md"
            )


_ADVICE = {
    frozenset({"step_in_backward", "flat_step"}): "step_in_backward steps what is reduced together "
    "in one call, with fused=True or foreach=True: leave out flat_step",
    frozenset({"step_in_backward", "offload_optimizer"}): "the state of parameters in host memory "
    "is there anyway, so leave out offload_optimizer; for state in files leave out "
    "step_in_backward, and give parameters on a device to a separate optimizer",
    frozenset(
        {"offload_optimizer", "flat_step"}
    ): "offload_optimizer steps its parts with one call each: leave out flat_step",
}


def replace_step(optimizer: Optimizer, prefix: str, runner: Runner, caller: str) -> None:
    """Let ``runner(optimizer, raw, closure, *args, **kwargs)`` do the step of an optimizer.

    The optimizer's class becomes a subclass of its class, with ``prefix`` before its name. Step
    hooks run outside ``runner``, and learning rate schedulers keep counting steps.

    Raises:
        ValueError: if something other than a scheduler has already replaced the step.
        TypeError: if the class cannot be extended.
    """
    kind: Any = type(optimizer)
    replaced = vars(optimizer).get("step")
    scheduled = getattr(replaced, "_wrapped_by_lr_sched", False)
    if hasattr(kind, "_runner"):
        by = kind.stepped_by
        advice = _ADVICE.get(frozenset({by, caller}), f"build it anew for {caller}")
        raise ValueError(
            f"The step of this {kind.__name__} has already been replaced by {by}, and {caller} "
            f"cannot replace it again. Use one of the two: {advice}"
        )
    if replaced is not None and not scheduled:
        raise ValueError(
            f"The step of this {kind.__name__} has already been replaced by {replaced!r}: do that "
            f"after {caller}"
        )
    made = _subclass(optimizer, prefix, runner)
    made.stepped_by = caller  # type: ignore[attr-defined]
    vars(optimizer).pop("step", None)
    optimizer.__class__ = made
    optimizer._patch_step_function()
    if scheduled:
        _count_for_schedulers(optimizer)


# Weak: a class that was made in a function goes with its optimizers.
_classes: WeakValueDictionary[tuple[type, Runner], type] = WeakValueDictionary()


def _subclass(optimizer: Optimizer, prefix: str, runner: Runner) -> type:
    kind: Any = type(optimizer)
    known = _classes.get((kind, runner))
    if known is not None:
        return known
    raw = raw_step(kind)

    # torch puts the step hooks around this function. `wraps`: gradient scalers read signatures.
    @functools.wraps(raw)
    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # The tensors that it would trace are made in the step. The graph breaks here; functions
            # that the optimizer compiles stay compiled.
            return torch.compiler.disable(runner)(self, raw, closure, *args, **kwargs)
        return runner(self, raw, closure, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        state = self.__getstate__()
        if isinstance(state, dict) and KEPT in vars(self):
            state = {**state, KEPT: vars(self)[KEPT]}
        return _remake, (kind, prefix, runner), state

    names: dict[str, Any] = {"step": step, "_runner": staticmethod(runner)}
    if kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        names["__reduce_ex__"] = reduce
    made = _classes[kind, runner] = class_for(optimizer, f"{prefix}{kind.__name__}", names)
    return made


def _remake(kind: type[Optimizer], prefix: str, runner: Runner) -> Optimizer:
    """An empty optimizer with its step replaced, for pickles and copies."""
    new = kind.__new__(kind)
    new.__class__ = _subclass(new, prefix, runner)
    return new


def original_name(optimizer: Optimizer) -> str:
    """The name of the optimizer's class before its step was replaced."""
    kind = type(optimizer)
    return (original_class(kind) if hasattr(kind, "_runner") else kind).__name__


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's own attributes, except groups and state."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _NOT_ITS_OWN
        and not name.startswith(("_optimizer_", "_fsdp2_", "_zero_grad", "_warned"))
        and name != "_opt_called"
    }


def remembered_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """`own_attributes` that a step might change to remember something."""
    # torch notes there that it has seen the device and the dtypes.
    return {k: v for k, v in own_attributes(optimizer).items() if not k.startswith("_need_device")}


@contextmanager
def isolated(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: Any, *, copy: bool = True
) -> Iterator[None]:
    """Give an optimizer other groups and another state for a while, and leave no trace of it.

    Args:
        optimizer: its attributes are restored afterwards too.
        groups, state: what it has in the meantime.
        copy: give it copies of containers in its attributes, so that changes inside them are
            undone as well; otherwise only assignments to attributes are.
    """
    before = own_attributes(optimizer)
    outer = optimizer.param_groups, optimizer.state
    if copy:
        vars(optimizer).update({name: copied(value) for name, value in before.items()})
    optimizer.param_groups, optimizer.state = groups, state
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = outer
        for name in own_attributes(optimizer):
            if name not in before:
                del vars(optimizer)[name]
        vars(optimizer).update(before)


def _count_for_schedulers(optimizer: Optimizer) -> None:
    """Repeat what a scheduler did to the former step: it warns if steps come in the wrong order."""
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer = reference()
        assert optimizer is not None
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return function(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
