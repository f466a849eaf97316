"""Optimizers that were built before `fully_shard` and hold parameters that nothing computes with.

Such a training runs and learns nothing. Original parameters die when they are sharded, unless a
user or an optimizer holds them. Only if one lives at the first forward, a hook looks at the
parameters of each optimizer, until it has seen that there is none among them: a usual training
never has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..sharding.param import ORIGINS
from .unit import Unit

_hook: Any = None
_fine: WeakSet[Optimizer] = WeakSet()


def watch_optimizers(units: Sequence[Unit]) -> None:
    """Before the first forward of ``units``: look out for optimizers of their original parameters.

    In the first step after gradients of the sharded ones: RuntimeError.
    """
    global _hook
    if _hook is None and any(unit in units for unit, _ in ORIGINS.values()):
        _hook = register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _fine:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [(param, ORIGINS[param][1]) for param in params if param in ORIGINS]
    if not found:
        _fine.add(optimizer)
    elif any(param.grad is not None for param, _ in found):
        return  # something computes with the originals: another model that is not sharded
    lost = [managed.fqn for _, managed in found if managed.sharded.grad is not None]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise RuntimeError(
            f"This {type(optimizer).__name__} was built before fully_shard: it holds the original "
            f"'{lost[0]}'{more}, while the gradients are those of the sharded parameters, so its "
            "step would change nothing. Build it after fully_shard, from model.parameters()"
        )
