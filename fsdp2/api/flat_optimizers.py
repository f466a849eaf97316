"""LBFGS over parameters whose shards are of unequal size, which DTensors cannot flatten.

It makes one vector of all gradients. DTensors do that where all ranks have equally many rows, and
give what one process gives; else the error comes from inside of torch. Only where a model has such
parameters, a hook looks at the class of each optimizer that steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..sharding.param import ShardedParam, managed_param

_hook: Any = None


def watch_flattening(params: Iterable[ShardedParam]) -> None:
    """Let the step of an LBFGS of ``params`` raise RuntimeError where it cannot work."""
    global _hook
    if _hook is None and any(_is_uneven(param.sharded) for param in params):
        _hook = register_optimizer_step_pre_hook(_check)


def _is_uneven(param: Any) -> bool:
    return isinstance(param, DTensor) and any(
        isinstance(placement, Shard) and param.shape[placement.dim] % param.device_mesh.size(i)
        for i, placement in enumerate(param.placements)
    )


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, LBFGS):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            managed = managed_param(param) if _is_uneven(param) else None
            if managed is not None:
                raise RuntimeError(
                    f"Cannot flatten unevenly sharded tensor: {type(optimizer).__name__} makes one "
                    "vector of all gradients, which DTensors can do only where all ranks have "
                    f"equally many rows; '{managed.fqn}' of shape {tuple(param.shape)} is sharded "
                    f"over {param.device_mesh.size()} ranks. Shard nothing for it: "
                    'shard_model(model, strategy="none"), or leave such parameters replicated: '
                    "shard_placement_fn=lambda param: Replicate()"
                )
