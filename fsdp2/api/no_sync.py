"""`FSDPModule.no_sync`: the name that DDP has for backwards that accumulate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..runtime.building import build_runtime
from ..runtime.runtime import runtime_of
from ..runtime.unit import unit_of, units_in
from ..runtime.unit_config import UnitConfig
from .module import FSDPModule


@contextmanager
def no_sync(self: FSDPModule) -> Iterator[None]:
    """Context in which backward accumulates gradients without reducing them.

    For all but the last micro-batch. Sets `set_requires_gradient_sync` to False and restores
    the earlier setting on exit. Only backward must run inside; forward may run outside.
    Parameters are gathered as usual.

    Raises:
        RuntimeError: if this module is not the root: the gradients of the rest of the model
            would be reduced. (`set_requires_gradient_sync` allows that.)

    Warns:
        UserWarning: if no backward ran inside, so that nothing was accumulated.

    Example:
        >>> for micro_batch in batch[:-1]:
        ...     with model.no_sync():
        ...         (loss_of(model, micro_batch) / len(batch)).backward()
        >>> (loss_of(model, batch[-1]) / len(batch)).backward()
    """
    unit = unit_of(self)
    runtime = build_runtime(self) if unit.runtime is None else runtime_of(unit)
    if runtime.root is not unit:
        raise RuntimeError(
            f"no_sync() was called on '{unit.name}', which is part of the sharded "
            f"'{runtime.root.name}': the gradients of the rest would be reduced. Call it on "
            "that module, or use set_requires_gradient_sync(False) if this is intended"
        )
    # Per unit, since a program may have turned sync off for some of them.
    restore = [keep_sync(each.config) for each in units_in(self)]
    backward = runtime.backward
    self.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        for call in restore:
            call()
    # (A root around this one that ran inside has made a runtime of its own.)
    if runtime.backward is backward and unit.runtime is runtime:
        warnings.warn(
            "No backward ran inside no_sync(): gradients of a backward that runs after it are "
            "reduced as always. Put loss.backward() inside",
            stacklevel=3,
        )


def keep_sync(config: UnitConfig) -> Callable[[], None]:
    """A function that restores what `UnitConfig.set_sync` changes."""
    before = (config.sync_grads, config.all_reduce_grads, config.reshard_after_backward)

    def restore() -> None:
        config.sync_grads, config.all_reduce_grads, config.reshard_after_backward = before
        config.reduce_grads = config.sync_grads or config.accumulate_sharded

    return restore
