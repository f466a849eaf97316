"""What callers do to a tree of units between the points at which hooks run.

Gathers that a user or a pipeline asks for, and the end of an iteration that the caller ends.
`root` has what hooks do, and the order of a step that both follow.
"""

from __future__ import annotations

from functools import partial

from ..features.finalization import GradientReductionHandle
from .runtime import Runtime, runtime_of
from .states import RESHARDED, State
from .torch_modes import autograd_is_running
from .unit import Unit


def unshard(unit: Unit) -> None:
    """Start a gather that the user called for."""
    runtime = runtime_of(unit)
    runtime.streams.before_gathers(runtime.optimizer_event)
    if unit.state in RESHARDED:
        runtime.free_written(unit)
        unit.start_unshard(runtime.streams)
    unit.hooks.notice_accumulation()  # parameters may be used without a forward of the unit


def gather_for_backward(unit: Unit) -> None:
    """Register the unsharded parameters between forward and backward, and start the gather.

    Backward waits for it. But where weight gradients are computed separately no hook is called,
    so there this call waits.
    """
    runtime = runtime_of(unit)
    if runtime.ends_iteration or runtime.in_backward:
        return
    deferred = any(other.weight_grads_deferred for other in runtime.units)
    if not deferred and not runtime.forwards.outstanding:
        return
    if deferred:
        unit.unshard(runtime.streams)
        return
    if unit.state is State.PARTLY_FREED:
        unit.reshard(runtime.streams)
    if unit.state in RESHARDED:
        unit.start_unshard(runtime.streams)
    unit.register_unsharded()


def choose_finalization(runtime: Runtime, *, manual: bool) -> None:
    """Set whether the caller ends iterations."""
    runtime.finalization.choose(manual, in_backward=autograd_is_running())


def finalize_backward(runtime: Runtime, *, wait: bool) -> GradientReductionHandle | None:
    """End an iteration whose backwards are all over: reduce what they left, free all units.

    Args:
        wait: whether to wait for the reductions, instead of returning a handle that does.

    Raises:
        RuntimeError: if the caller may not end it now; see `Finalization`.
    """
    finalization = runtime.finalization
    finalization.check_finalize(in_backward=runtime.in_backward)
    finalization.reducing = True
    with runtime.streams.ending(runtime.computed_on):
        try:
            runtime.reduce_left()
        finally:
            finalization.reducing = False
        if wait:
            runtime.complete_iteration()
        # Units are freed at once: a reduction holds what it reads. Only ``.grad`` waits for the
        # handle.
        runtime.free_units()
    if not wait:
        finalization.pending = GradientReductionHandle(partial(finish_finalization, runtime))
    return finalization.pending


def finish_finalization(runtime: Runtime, handle: GradientReductionHandle) -> None:
    """Wait for the reductions of a finalization that did not."""
    runtime.finalization.check_handle(handle)
    with runtime.streams.ending(runtime.computed_on):
        runtime.complete_iteration()
        runtime.synchronize()
