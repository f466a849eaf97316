"""`FSDPModule.no_sync`: backwards that accumulate, under the name that DDP uses."""

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

    Use it for all but the last micro-batch. It calls ``set_requires_gradient_sync(False)`` and
    restores the earlier setting on exit. Backward must run inside; forward may run outside.
    Parameters are gathered as usual.

    Raises:
        RuntimeError: if this module is not the root, as the rest of the model would still reduce
            its gradients. (`set_requires_gradient_sync` allows that.)

    Warns:
        UserWarning: if no backward ran inside, so nothing was accumulated.

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
    # (A root around this one that ran inside has made its own runtime.)
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
