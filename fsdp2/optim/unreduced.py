"""Steps of optimizers while gradients wait to be reduced: they change nothing, which is said once.

After a backward without gradient sync, gradients are on the gathered parameters. A program that
never turns sync on again trains nothing, and its losses alone would tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

_warned: WeakSet[Optimizer] = WeakSet()


def warn_of_unreduced(trees: Iterable[Any], optimizer: Optimizer) -> None:
    """Warn, once for each optimizer, if its step leaves parameters out whose gradients wait.

    Args:
        trees: of units.
        optimizer: which steps now.
    """
    if optimizer in _warned:
        return
    units = [unit for tree in list(trees) for unit in tree.units]
    waiting = [
        param
        for unit in units
        if unit.gradients.has_unreduced_from_before()
        for param in _waiting_in(unit)
        if param.sharded.grad is None
    ]
    if not waiting:
        return
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    names = [param.fqn for param in waiting if id(param.sharded) in stepped]
    if names:
        _warned.add(optimizer)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"This step of {type(optimizer).__name__} does not change '{names[0]}'{more}: "
            "gradients of the last backward are not reduced yet, and so in no .grad of a sharded "
            "parameter. Call model.set_requires_gradient_sync(True) (or set_requires_all_reduce) "
            "before the last backward of a step",
            stacklevel=5,
        )


def _waiting_in(unit: Any) -> Iterable[Any]:
    for param in unit.params:
        if param.unsharded is not None and param.unsharded.grad is not None:
            yield param
    for bucket in unit.buckets:
        for param, _ in bucket.partial.rows():
            yield param
