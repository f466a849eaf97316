"""Who ends an iteration: the end of its last backward, or the caller.

An iteration is one or more backward passes whose gradients go to one optimizer step. By default it
ends with the last backward. Schedules that compute in pieces (pipelines) have no backward that they
could call the last one, so with manual finalization the caller ends it::

    IDLE --a backward begins--> ACTIVE --finalize--> (waiting, if asynchronous) --wait--> IDLE

The mode may not change while an iteration is ACTIVE, and nothing may begin while reductions of a
finalized one are still waited for: either would lose gradients.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Finalization", "GradientReductionHandle"]


class GradientReductionHandle:
    """Waits for gradient reductions that `FSDPModule.finalize_backward` started."""

    def __init__(self, finish: Callable[[GradientReductionHandle], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until ``.grad`` of all sharded parameters is complete. A second call does nothing.

        Raises:
            RuntimeError: if `FSDPModule.reset_iter_state` dropped these gradients.
        """
        if self._finish is not None:
            # Forgotten only after it: the handle of gradients that a reset dropped raises at every
            # call, where returning would say that they are complete.
            self._finish(self)
            self._finish = None


class Finalization:
    """The finalization mode of one tree of units, and where its iteration stands.

    Attributes:
        manual: whether the caller ends the iteration that runs, or the next one if none runs.
        active: whether a backward of an iteration has begun that has not ended yet.
        reducing: whether the caller is ending the iteration now, with its last reductions.
        pending: the handle of an asynchronous finalization that must be waited for.
    """

    def __init__(self, manual: bool) -> None:
        self.manual = manual
        self.active = False
        self.reducing = False
        self.pending: GradientReductionHandle | None = None

    def choose(self, manual: bool, *, in_backward: bool) -> None:
        """Change the mode.

        Raises:
            RuntimeError: while an iteration runs in the other one.
        """
        if manual != self.manual:
            if in_backward:
                raise RuntimeError(
                    "set_manual_backward_finalization cannot change mode during backward"
                )
            if self.active:
                raise RuntimeError(
                    "set_manual_backward_finalization cannot change mode after backward starts: "
                    "call finalize_backward() first, or reset_iter_state() to drop its gradients"
                )
        self.manual = manual

    def check_forward(self) -> None:
        """Raises RuntimeError if reductions of the last iteration are still to be waited for."""
        if self.pending is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() of "
                "the handle that finalize_backward(async_op=True) returned"
            )

    def check_finalize(self, *, in_backward: bool) -> None:
        """Raises RuntimeError if the caller may not end the iteration now."""
        if self.pending is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before finalizing backward "
                "again: call wait() of the handle that finalize_backward(async_op=True) returned"
            )
        if not self.manual:
            raise RuntimeError(
                "FSDP finalize_backward requires manual backward finalization. Call "
                "set_manual_backward_finalization(True) before forward"
            )
        # Autograd calls nothing at the end of a backward that raises, so this is still set after
        # one. What that has left are parts of gradients, not to be reduced.
        if in_backward:
            raise RuntimeError(
                "FSDP finalize_backward must be called after backward completes (after one that "
                "raised, call reset_iter_state())"
            )

    def check_handle(self, handle: GradientReductionHandle) -> None:
        """Raises RuntimeError if ``handle`` is not of the finalization that is pending."""
        if self.pending is not handle:
            raise RuntimeError("This gradient reduction handle was invalidated by a reset")

    def end(self) -> None:
        """The iteration is over, or was dropped."""
        self.active = False
        self.pending = None
