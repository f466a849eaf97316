"""The interface between the runtime and optimizers that step parameters during backward.

The runtime detects when a gradient is complete, and the optimizer uses it. Neither imports the
other: optimizers register here, and the runtime looks them up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(eq=False)
class SteppedBackward:
    """One backward in which parameters are stepped.

    Attributes:
        ended: whether all of its gradients are complete; False if it raised.
    """

    ended: bool = False


class Stepper(Protocol):
    """The steps of one optimizer that are begun in backward."""

    def begin(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        wait: Callable[[], None],
        backward: SteppedBackward,
    ) -> int:
        """Begin to step parameters whose gradients do not change any more.

        Args:
            params: of any optimizers; parameters of other optimizers are left alone.
            wait: returns when the gradients are in host memory. A thread calls it.

        Returns:
            How many are being stepped.
        """

    def drop_gradients(self, backward: SteppedBackward) -> list[Tensor]:
        """Let go of gradients that no step reads any more, if the optimizer is to free them.

        Returns:
            Their parameters, each once.
        """

    def is_stepping(self, backward: SteppedBackward) -> bool:
        """Whether ``step()`` has yet to finish steps that were begun in ``backward``."""

    def abandon(self, backward: SteppedBackward) -> list[str]:
        """After a backward that failed: wait for the thread, and forget what it has stepped.

        Returns:
            The names of parameters that were stepped.
        """


# By id: to ask whether there are any is a part of every backward.
registered: dict[int, weakref.ref[Stepper]] = {}
_at_first: list[Callable[[], None]] = []


def call_at_first(function: Callable[[], None]) -> None:
    """Call ``function`` whenever an optimizer registers while there is none."""
    _at_first.append(function)


def register(stepper: Stepper) -> None:
    """Let runtimes find ``stepper`` for as long as it lives."""
    number = id(stepper)
    for function in _at_first if not registered else ():
        function()
    registered[number] = weakref.ref(stepper, lambda _: registered.pop(number, None))


def steppers() -> list[Stepper]:
    """The steppers of all optimizers, oldest first."""
    return [stepper for ref in list(registered.values()) if (stepper := ref()) is not None]


def partly_stepped(names: Sequence[str]) -> RuntimeError:
    """The error after a backward that stepped parameters and then raised."""
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    return RuntimeError(
        f"A backward raised, or was discarded, after it had stepped {len(names)} parameters "
        f"({shown}): they are one step ahead of the others (fsdp2.optim.step_in_backward). Load a "
        "checkpoint; a run that continues anyway starts from these parameters"
    )


def not_stepped(what: str) -> RuntimeError:
    """The error if ``step()`` was not called after a backward that has stepped parameters."""
    return RuntimeError(
        f"{what} between a backward that has stepped parameters (fsdp2.optim.step_in_backward) and "
        "optimizer.step(), which has yet to step the others. Call step() after every backward that "
        "is not marked by set_requires_gradient_sync(False) or set_is_last_backward(False)"
    )
