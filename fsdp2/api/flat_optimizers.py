"""A clear error for LBFGS on unevenly sharded parameters, which DTensors cannot flatten.

LBFGS concatenates all gradients into one vector. That works for DTensors whose ranks all have the
same number of rows and gives the single-process result; otherwise torch fails with an internal
error. The optimizer hook is installed only if a model has unevenly sharded parameters.
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
    """Make ``LBFGS.step`` raise RuntimeError for parameters that it cannot flatten."""
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
                    "vector of all gradients, which DTensors support only if all ranks have "
                    f"equally many rows; '{managed.fqn}' of shape {tuple(param.shape)} is sharded "
                    f"over {param.device_mesh.size()} ranks. Do not shard the model: "
                    'shard_model(model, strategy="none"), or leave such parameters replicated: '
                    "shard_placement_fn=lambda param: Replicate()"
                )
