"""Who ends an iteration: the end of its last backward, or the caller.

An iteration is one or more backward passes whose gradients go to one optimizer step. By default it
ends with the last backward. Schedules that compute in pieces (pipelines) cannot tell which backward
is the last one, so with manual finalization the caller ends the iteration::

    IDLE --a backward begins--> ACTIVE --finalize--> (waiting, if asynchronous) --wait--> IDLE

The mode may not change while an iteration is ACTIVE, and nothing may begin while reductions of a
finalized one are still waited for: either would lose gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from torch import nn
from typing_extensions import override

from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.runtime import Runtime, runtime_of
from ..runtime.torch_modes import autograd_is_running
from ..runtime.unit import Unit, unit_of

__all__ = ["Finalization", "GradientReductionHandle", "finalize_backward"]


class GradientReductionHandle:
    """Waits for gradient reductions that `FSDPModule.finalize_backward` started."""

    def __init__(self, finish: Callable[[GradientReductionHandle], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait until ``.grad`` of all sharded parameters is complete. Later calls return at once.

        Raises:
            RuntimeError: if a reduction failed, or `FSDPModule.reset_iter_state` dropped these
                gradients. They are lost, and every further call raises too.
        """
        if self._finish is not None:
            # Forgotten only afterwards: after a reset that dropped the gradients, every call must
            # raise. Returning would mean that they are complete.
            self._finish(self)
            self._finish = None


class Finalization(TreePart):
    """The end of iterations in one tree of units whose caller ends them.

    Attributes:
        pending: the handle of an asynchronous finalization that must be waited for.
    """

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.pending: GradientReductionHandle | None = None
        runtime.held_open = True

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if runtime.root.config.manual_finalization else None

    def finalize(self, *, wait: bool) -> GradientReductionHandle | None:
        """End an iteration whose backwards are over: reduce remaining gradients, free all units.

        Args:
            wait: whether to wait for the reductions, instead of returning a handle that does.

        Raises:
            RuntimeError: if the caller may not end it now.
        """
        self._check_finalize()
        runtime = self.runtime
        last = runtime.is_last_backward
        with runtime.streams.ending(runtime.backward.stream):
            try:
                # These are the last reductions, whatever was set for the backwards.
                runtime.held_open, runtime.is_last_backward = False, True
                try:
                    runtime.reduce_left()
                finally:
                    runtime.held_open, runtime.is_last_backward = True, last
                if wait:
                    runtime.complete_iteration()
                # Units are freed at once: a reduction holds its inputs. Only ``.grad`` waits for
                # the handle.
                runtime.free_units()
            except Exception:
                runtime.give_up()
                raise
        if not wait:
            self.pending = GradientReductionHandle(self._finish)
        return self.pending

    def _finish(self, handle: GradientReductionHandle) -> None:
        """Wait for the reductions of an asynchronous finalization."""
        if self.pending is not handle:
            raise RuntimeError(
                "This gradient reduction handle was invalidated by a reset, or since an earlier "
                "wait() of it raised"
            )
        with self.runtime.streams.ending(self.runtime.backward.stream):
            try:
                self.runtime.complete_iteration()
            except Exception:
                self.pending = None
                self.runtime.give_up()
                raise
            self.pending = None
            self.runtime.synchronize()

    def _check_finalize(self) -> None:
        if self.pending is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before finalizing backward "
                "again: call wait() of the handle that finalize_backward(async_op=True) returned"
            )
        # Autograd calls nothing at the end of a backward that raises, so this is still set after
        # one. Its gradients are incomplete and must not be reduced.
        if self.runtime.in_backward:
            raise RuntimeError(
                "FSDP finalize_backward must be called after backward completes (after one that "
                "raised, call reset_iter_state())"
            )

    # -- events of the tree -----------------------------------------------------------------

    @override
    def before_root_forward(self) -> None:
        if self.pending is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() of "
                "the handle that finalize_backward(async_op=True) returned"
            )

    @override
    def tree_reset(self) -> None:
        self.pending = None


class _OnlyRoots(UnitPart):
    @override
    def before_tree(self, root_module: nn.Module, root: Unit, units: Sequence[Unit]) -> None:
        """
        Raises:
            RuntimeError: if a unit other than ``root`` has manual finalization, or a handle of an
                asynchronous finalization was not waited for.
        """
        for unit in units:
            if unit.runtime is not None and (before := runtime_of(unit).part(Finalization)):
                before.before_root_forward()
            if unit is not root and unit.config.manual_finalization:
                raise RuntimeError(
                    "set_manual_backward_finalization must be called on the root FSDP module "
                    f"'{root.name}', not on '{unit.name}'"
                )


def set_manual_backward_finalization(self: nn.Module, enabled: bool) -> None:
    """Set whether the caller ends each iteration with `finalize_backward`.

    Use it for schedules such as pipelines, which run several backwards, or parts of them, and
    cannot tell which one is the last. `set_is_last_backward` is then ignored. The settings for
    gradient sync and resharding still apply to each backward.

    Args:
        enabled: whether the caller ends iterations. Call this on the root, before backward.

    Raises:
        RuntimeError: if this is not the root, or if a backward has begun and neither
            `finalize_backward` nor `reset_iter_state` has ended the iteration.

    Example:
        >>> model.set_manual_backward_finalization(True)
        >>> model.set_requires_gradient_sync(False)
        >>> for micro_batch in batch:
        ...     (loss_of(model, micro_batch) / len(batch)).backward()
        >>> model.set_requires_gradient_sync(True)
        >>> model.finalize_backward()
        >>> optimizer.step()
    """
    registry.require(Finalization, "set_manual_backward_finalization")
    unit = unit_of(self)
    # Before the first forward it is not known which module is the root. The runtime looks at
    # the settings of all units when it is made.
    if unit.runtime is not None:
        runtime = runtime_of(unit)
        runtime.check_root(unit, "set_manual_backward_finalization")
        _change_mode(runtime, manual=enabled)
    unit.config.manual_finalization = enabled


def _change_mode(runtime: Runtime, *, manual: bool) -> None:
    part = runtime.part(Finalization)
    if manual is (part is not None):
        return
    if autograd_is_running():
        raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
    if runtime.backward.in_iteration:
        raise RuntimeError(
            "set_manual_backward_finalization cannot change mode after backward starts: call "
            "finalize_backward() first, or reset_iter_state() to drop its gradients"
        )
    if part is None:
        runtime.add(Finalization(runtime))
    else:
        runtime.remove(part)
        runtime.held_open = False


def finalize_backward(self: nn.Module, *, async_op: bool = False) -> GradientReductionHandle | None:
    """End an iteration: reduce the remaining gradients and free parameters.

    This uses the current settings, so turn gradient sync and resharding back on first. Before the
    first forward, it does nothing.

    Args:
        async_op: return while reductions are still in flight. Wait for the handle before
            using gradients and before the next forward.

    Returns:
        A handle if ``async_op``, else None.

    Raises:
        RuntimeError: without `set_manual_backward_finalization`; inside backward; if the handle of
            an earlier call has not been waited for; if this is not the root; or if a reduction
            failed. After a failed reduction, the next forward starts fresh.
    """
    registry.require(Finalization, "finalize_backward")
    unit = unit_of(self)
    if unit.runtime is None:
        return GradientReductionHandle() if async_op else None
    runtime = runtime_of(unit)
    runtime.check_root(unit, "finalize_backward")
    part = runtime.part(Finalization)
    if part is None:
        raise RuntimeError(
            "FSDP finalize_backward requires manual backward finalization. Call "
            "set_manual_backward_finalization(True) before forward"
        )
    return part.finalize(wait=not async_op)


registry.add(Finalization)
registry.add(_OnlyRoots())
