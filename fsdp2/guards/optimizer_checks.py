"""Checks for optimizers that do not work with sharded models.

- If an optimizer was built before `fully_shard`, it holds parameters that nothing computes with:
  training runs and learns nothing.
- If it is built while parameters are gathered, it holds plain tensors: gradients go to the sharded
  parameters, and its step would change nothing.
- LBFGS makes one vector of all gradients. DTensors support that if all ranks have the same number
  of rows, with the same result as a single process; otherwise torch fails with an internal error.
- If an optimizer quantizes its state (torchao's), it does so shard by shard. Its first step warns
  if the steps then differ from a single process.
- If it steps while gradients wait to be reduced, it changes nothing, and warns.

Also, `Optimizer.zero_grad` notifies the roots, which then free the gradients that were dropped.

torch calls hooks before the steps of all optimizers of a process, so each check is installed only
once a model or an optimizer class needs it. Ordinary training needs neither the first nor the last
one. An optimizer is checked for gathered parameters when it is built, and not in its steps, unless
patches of torch are turned off (`common/torch_patches.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self
from weakref import WeakSet

from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from ..common.torch_patches import VARIABLE, patches_torch, register, replace, wrap
from ..dtensor.block_shard import is_block_shard
from ..features.early_free.freed_params import FreedParameterProxy
from ..runtime.events import TreePart, UnitPart, registry
from ..runtime.runtime import Runtime
from ..runtime.torch_modes import skip_compile
from ..runtime.unit import ORIGINS, TreeRuntime, Unit
from ..sharding.param import ShardedParam, managed_param, param_gathered_as
from .requested_gradients import sharded_among

_fine: WeakSet[Optimizer] = WeakSet()  # optimizers without original parameters
_trees: WeakSet[TreeRuntime] = WeakSet()  # whose gradients `Optimizer.zero_grad` may have dropped


def watch_originals(units: Sequence[Unit]) -> None:
    """Watch for optimizers that hold original parameters of ``units``.

    Call this before the first forward: an original is freed when it is sharded, unless a user or an
    optimizer holds it. The first step after gradients of the sharded ones raises RuntimeError.
    """
    if any(unit in units for unit, _ in ORIGINS.values()):
        _install(_check_originals)


def follow_optimizers(runtime: TreeRuntime) -> None:
    """From now on optimizers reject gathered parameters, and notify ``runtime`` of `zero_grad`."""
    # All trees are notified, not only those with the optimizer's parameters: finding these would
    # cost per parameter. Units whose gradients are attached, or already free, are skipped.
    _trees.add(runtime)
    _install(_check_unreduced)
    if not patches_torch():
        _install(_check_unpatched)
    wrap("torch.optim.Optimizer.add_param_group", _add_param_group)
    replace("torch.optim.Optimizer.zero_grad", _telling_trees)  # in every step: without `wrap`


def _add_param_group(add: Callable[..., None], optimizer: Optimizer, param_group: Any) -> None:
    add(optimizer, param_group)
    try:
        _check_gathered(optimizer, optimizer.param_groups[-1])  # as torch has checked it
    except ValueError:
        optimizer.param_groups.pop()
        raise


def _check_gathered(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
    for p in param_group["params"]:
        managed = p._param if isinstance(p, FreedParameterProxy) else param_gathered_as(p)
        if managed is not None:
            late = "" if patches_torch() else f". Without {VARIABLE}=0, building it raises"
            raise ValueError(
                f"{type(optimizer).__name__} was given the gathered form of parameter "
                f"'{managed.fqn}', but gradients go to the sharded parameters, so its step would "
                "change nothing. Build it before the first forward, or free what a forward or "
                "unshard() has left gathered: call reshard() on each FSDPModule of the model, "
                f"then model.parameters(){late}"
            )


def _check_unpatched(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # These cases are rejected earlier, or computed, if methods of torch are replaced.
    for group in optimizer.param_groups:
        _check_gathered(optimizer, group)
    computed = sharded_among(p for group in optimizer.param_groups for p in group["params"])
    wait = any(unit.gradients.has_unreduced_from_before() for tree in _trees for unit in tree.units)
    if computed and not wait and all(param.sharded.grad is None for param, _ in computed):
        warnings.warn(  # no error: a step before any backward is legal
            f"No sharded parameter of this {type(optimizer).__name__} has a gradient, from "
            f"'{computed[0][0].fqn}' on: its step would change nothing. {VARIABLE}=0 is set, and "
            "backward(inputs=...) of sharded parameters leaves no gradients then. Call backward() "
            "without inputs, or do not set it",
            stacklevel=2,
        )


def _telling_trees(zero: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(zero)
    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            _tell_trees(False)
        zero(self, set_to_none)
        _tell_trees(True)

    return zero_grad


@skip_compile
def _tell_trees(dropped: bool) -> None:
    for runtime in list(_trees):
        runtime.release_gradients() if dropped else runtime.before_zero_grad()


def watch_flattening(params: Iterable[ShardedParam]) -> None:
    """Make ``LBFGS.step`` raise RuntimeError for parameters that it cannot flatten."""
    if any(_is_uneven(param.sharded) for param in params):
        _install(_check_flattening)


def watch_quantized() -> None:
    """Watch for optimizers that quantize the state of shards differently from whole parameters.

    Call this before the first forward, when the class of the optimizer is usually imported.
    """
    kinds: list[type[Optimizer]] = [Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
    if any(not kind.__module__.startswith(("torch.", "fsdp2.")) for kind in kinds):
        from ..optim.quantized import may_quantize, warn_of_differences

        if any(map(may_quantize, kinds)):
            _install(warn_of_differences, managed_param)


def _install(check: Callable[..., None], *known: object) -> None:
    hook = functools.partial(check, *known)
    register(check, functools.partial(register_optimizer_step_pre_hook, hook))


def _check_unreduced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # In every step: no call per unit.
    for tree in list(_trees):
        for unit in tree.units:
            if unit.gradients.holds_earlier or unit.gradients.holds_partial_sums:
                from ..optim.unreduced import warn_of_unreduced

                warn_of_unreduced(_trees, optimizer)
                return


def _check_originals(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _fine:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    found = [(param, ORIGINS[param][1]) for param in params if param in ORIGINS]
    if not found:
        _fine.add(optimizer)
    elif any(param.grad is not None for param, _ in found):
        # Something computes with the originals: another model that is not sharded.
        return
    lost = [managed.fqn for _, managed in found if managed.sharded.grad is not None]
    # Without a gradient of the sharded ones nothing is lost yet: the optimizer may get them later.
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise RuntimeError(
            f"This {type(optimizer).__name__} was built before fully_shard: it holds the original "
            f"'{lost[0]}'{more}, while the gradients belong to the sharded parameters, so its "
            "step would change nothing. Build it after fully_shard, from model.parameters()"
        )


def _is_uneven(param: Any) -> bool:
    return isinstance(param, DTensor) and any(
        param.shape[placement.dim] % param.device_mesh.size(i)
        if isinstance(placement, Shard)
        else is_block_shard(placement)
        for i, placement in enumerate(param.placements)
    )


def _check_flattening(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, LBFGS):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            # Uneven DTensors that are not ours are left to torch: the advice is about our calls.
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


class _OptimizerChecks(TreePart):
    """Installs the checks for a tree that is about to train; it uses no events of steps."""

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        watch_originals(runtime.units)
        watch_quantized()
        follow_optimizers(runtime)
        return None


class _FlatteningChecks(UnitPart):
    @override
    def sharded(self, unit: Unit) -> None:
        watch_flattening(unit.params)


registry.add(_OptimizerChecks)
registry.add(_FlatteningChecks())
