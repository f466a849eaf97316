"""How the step of an optimizer is replaced, while all that torch wraps around it stays."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

# Gets the optimizer, its own step (without hooks), and what `step` was called with.
Runner = Callable[..., Any]


class ReplacedStep:
    """A mark on the classes that are made here; ``_runner`` is what replaced the step."""

    _runner: Runner


def raw_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class without what torch puts around it when the class is first used."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def replace_step(optimizer: Optimizer, prefix: str, runner: Runner) -> None:
    """Let ``runner(optimizer, raw, closure, *args, **kwargs)`` do the step of an optimizer.

    The optimizer's class becomes a subclass of what it was, its name with ``prefix``. Step hooks
    run outside of ``runner``, and learning rate schedulers go on counting steps.

    Raises:
        ValueError: the step was replaced already, by something else than a scheduler.
    """
    kind: Any = type(optimizer)
    replaced = vars(optimizer).get("step")
    scheduled = getattr(replaced, "_wrapped_by_lr_sched", False)
    if isinstance(optimizer, ReplacedStep) or (replaced is not None and not scheduled):
        raise ValueError(
            f"The step of this {kind.__name__} was replaced already"
            + ("" if replaced is None else f", by {replaced!r}: do that afterwards")
        )
    vars(optimizer).pop("step", None)
    optimizer.__class__ = _subclass(kind, prefix, runner)
    optimizer._patch_step_function()
    if scheduled:
        _count_for_schedulers(optimizer)


@functools.cache
def _subclass(kind: Any, prefix: str, runner: Runner) -> Any:
    raw = raw_step(kind)

    # torch puts the step hooks around this function. `wraps`: gradient scalers read signatures.
    @functools.wraps(raw)
    def step(self: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return runner(self, raw, closure, *args, **kwargs)

    names = {"step": step, "_runner": staticmethod(runner), "__module__": kind.__module__}
    return type(f"{prefix}{kind.__name__}", (ReplacedStep, kind), names)


def _count_for_schedulers(optimizer: Optimizer) -> None:
    """Do again what a scheduler did to the former step, to warn of steps in the wrong order."""
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
