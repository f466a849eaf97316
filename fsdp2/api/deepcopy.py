"""`copy.deepcopy` of sharded modules: shards are copied, nothing is gathered.

The copy is an independent sharded model on the same mesh with the same settings: it has its own
storages, units and hooks and, from its first forward on, its own runtime. `copy.deepcopy` walks
the modules as usual; this file only puts the copies of units and sharded parameters into its memo
beforehand and connects units and modules afterwards.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ..common.classes import original_class
from ..dtensor.subclasses import copy_of
from ..runtime.hooks import UnitHooks, hooks_of
from ..runtime.runtime import runtime_of
from ..runtime.unit import ORIGINS, Unit, units_in
from ..sharding.param import ShardedParam
from .torch_compat import publish_state


class ToBeCopied:
    """Represents a sharded module in the result of its ``__reduce_ex__``.

    `copy.deepcopy` copies it, which copies the module; every other use of it raises.
    """

    def __init__(self, module: nn.Module, copied: nn.Module | None = None) -> None:
        self._module = module
        self._copied = copied

    def __deepcopy__(self, memo: dict[int, Any]) -> ToBeCopied:
        return ToBeCopied(self._module, deepcopy_module(self._module, memo))

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        self.result()
        raise NotImplementedError

    def result(self) -> nn.Module:
        if self._copied is not None:
            return self._copied
        original = original_class(type(self._module)).__name__
        raise pickle.PicklingError(
            f"A sharded {original} cannot be pickled (torch.save of a model, copy.copy): save "
            "model.state_dict(), full_state_dict(model) or a checkpoint of fsdp2.checkpoint, and "
            "load that into a model made by the same code. copy.deepcopy works"
        )


def refuse_own_deepcopy(cls: type) -> dict[str, Any]:
    """Attributes for the class of sharded modules of class ``cls``."""

    def refuse(self: nn.Module, memo: dict[int, Any]) -> None:
        raise NotImplementedError(
            f"{cls.__name__} has its own __deepcopy__, which does not handle sharding: "
            "build a second model, shard it and load this one's state_dict()"
        )

    return {"__deepcopy__": refuse} if hasattr(cls, "__deepcopy__") else {}


def deepcopy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a sharded module.

    Works at any time, also between forward and backward or with parameters gathered: only the
    shards are copied, and the copy is in the state of a model between steps. As with plain
    modules, gradients are not copied.
    """
    units = [unit for unit in _units_reached(module) if id(unit) not in memo]
    if not units:  # inside a tree that is being copied
        return _copy_object(module, memo)
    with ExitStack() as stack:
        for unit in units:
            if unit.runtime is not None:
                runtime_of(unit).on.before_shards_read(unit, "copied")
            stack.enter_context(unit.registration.showing_sharded())
        with torch.inference_mode(False), torch.no_grad():
            for unit in units:
                _copy_unit(unit, memo)
        result = _copy_object(module, memo)
        for unit in units:
            _wire(unit, memo[id(unit)], memo)
    return result


def _units_reached(module: nn.Module) -> list[Unit]:
    """The units under ``module``, and under the other modules of units that have several."""
    found: dict[Unit, None] = {}
    waiting = [module]
    while waiting:
        for unit in units_in(waiting.pop()):
            if unit not in found:
                found[unit] = None
                waiting += unit.modules
    return list(found)


def _copy_object(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy ``module`` the way `copy.deepcopy` copies a module of the original class."""
    new: Any = object.__new__(type(module))
    memo[id(module)] = new
    state = copy.deepcopy(module.__getstate__(), memo)
    if isinstance(state, tuple):  # classes with __slots__
        state, slots = state
        for name, value in slots.items():
            object.__setattr__(new, name, value)
    new.__setstate__(state or {})
    return new


def _copy_unit(unit: Unit, memo: dict[int, Any]) -> None:
    """Copy a unit's storages and parameters; the copy still refers to the modules of ``unit``."""
    unit.param_group.freezing.adopt()  # done to what is gathered
    config = replace(unit.config)
    if config.shared_streams is None and unit.runtime is not None:
        # Shared streams: each can reuse at once what the other frees.
        config.shared_streams = runtime_of(unit).streams
    new = type(unit)(unit.modules, unit.mesh, unit.device, config)
    new.name = unit.name
    memo[id(unit)] = new
    memo[id(unit.registration)] = new.registration
    param_group = new.param_group
    param_group.params = [_copy_param(param, memo) for param in unit.params]
    locals_ = {id(q): p.local for p, q in zip(unit.params, param_group.params, strict=True)}
    param_group.make_buckets()
    for bucket in param_group.buckets:
        # An extension keeps the tensor it is given; the others copy it into their storage.
        sources = [
            copy_of(locals_[id(q)]) if q.extension else locals_[id(q)] for q in bucket.params
        ]
        bucket.shard_from(sources, whole=False)
    for param, copied in zip(unit.params, param_group.params, strict=True):
        memo[id(param.sharded)] = copied.sharded
    for original, (owner, param) in list(ORIGINS.items()):
        if owner is unit:  # a tie to another unit that is not resolved yet stays a tie in the copy
            ORIGINS[copy.deepcopy(original, memo)] = (new, memo[id(param)])


def _copy_param(param: ShardedParam, memo: dict[int, Any]) -> ShardedParam:
    """Copy a parameter's description; `attach` creates its Parameter."""
    new = copy.copy(param)
    new.adopt_grad_dtype(param.sharded)
    # Without its hooks, as copies of plain parameters.
    new.sharded = nn.Parameter(param.sharded.detach(), requires_grad=param.sharded.requires_grad)
    new.is_sharded = False
    new.unsharded = new.secondary = None
    new.dtype = param.local.dtype
    new.attributes = copy.deepcopy(vars(param.sharded), memo)
    memo[id(param)] = new
    return new


def _wire(unit: Unit, new: Unit, memo: dict[int, Any]) -> None:
    """Connect the copied unit with its modules, and these with their hooks."""
    new.modules = tuple(copy.deepcopy(module, memo) for module in unit.modules)
    new.registration.unit_modules = new.modules
    for param, copied in zip(unit.params, new.params, strict=True):
        # A submodule may be copied without all the modules that its parameters are tied to.
        copied.owners = [(memo[id(m)], name) for m, name in param.owners if id(m) in memo]
    new.param_group.plan_registration()
    hooks = UnitHooks.made_for(new)
    for module in new.modules:
        hooks.take_over(hooks_of(unit), module)
    for module, name, method, wrap in hooks_of(unit).methods:
        wrapped = wrap(hooks, memo[id(module)], name, copy.deepcopy(method, memo))
        setattr(memo[id(module)], name, MethodType(wrapped, memo[id(module)]))
    for chosen, earlier in (
        (new.forward_prefetch, unit.forward_prefetch),
        (new.backward_prefetch, unit.backward_prefetch),
    ):
        chosen += [memo[id(other)] for other in earlier if id(other) in memo]
    publish_state(new)
