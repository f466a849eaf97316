"""`FSDPModule`: what a sharded module offers beside being the module that it was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .runtime import Runtime, build_runtime, units_in
from .unit import Unit


class FSDPModule:
    """A module after `fully_shard`: its class is a subclass of this and of what it was.

    Outside of forward and backward its parameters are DTensors, sharded over the mesh.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class, as slicing a sharded ``nn.Sequential`` does."""
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    # -- parameters by hand -----------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters; not those of sharded submodules.

        The gather follows the mixed-precision policy.

        Args:
            async_op: return a handle at once instead of waiting; forward waits by itself.

        Returns:
            A handle if ``async_op``, else None.

        Raises:
            RuntimeError: if parameters are on the meta device.

        Example:
            >>> handle = model.layers[0].unshard(async_op=True)
            >>> ...  # something else to compute
            >>> handle.wait()
        """
        unit, runtime = self._unit_and_runtime()
        runtime.unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's gathered parameters and register the sharded ones."""
        unit = _unit_of(self)
        if unit.runtime is not None:
            unit.runtime.reshard(unit)

    # -- choices ----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; without, they accumulate unsharded.

        Args:
            requires_gradient_sync: False for all but the last micro-batch, to accumulate
                gradients without communication.
            recurse: whether to set it for sharded submodules too.
        """
        for unit in self._units(recurse):
            unit.reduce_grads = unit.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces gradients over replicas (2-D mesh).

        With False, gradients are reduce-scattered only and wait for a backward with True.
        """
        for unit in self._units(recurse):
            unit.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward waits for gradient reductions in flight.

        With False, ``.grad`` of the last units reduced may not be there after backward.
        """
        self._unit_and_runtime()[1].is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the ``reshard_after_forward`` argument of `fully_shard`.

        Raises:
            ValueError: if ``reshard_after_forward`` is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for unit in self._units(recurse):
            unit.reshard_policy = unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether to free parameters after backward.

        With False they stay gathered for the next micro-batch; set it back to True for the last
        one before the optimizer step, which changes the shards only.
        """
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` when the forward of this one begins.

        Replaces the automatic choice (the one that ran next in the last forward); more than one
        overlaps more and holds more memory.

        Raises:
            ValueError: if one of them is no FSDPModule.
        """
        _unit_of(self).forward_prefetch = [_unit_of(m) for m in _checked(modules)]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather ``modules`` when the backward of this one begins.

        Replaces the automatic choice (the one that ran before it in forward).

        Raises:
            ValueError: if one of them is no FSDPModule.
        """
        _unit_of(self).backward_prefetch = [_unit_of(m) for m in _checked(modules)]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by ``factor``, not by their number.

        Not recursive. Works on every backend.
        """
        _unit_of(self).divide_factor = factor

    def reset_iter_state(self) -> None:
        """Forget an iteration that raised.

        Not needed: the next forward of the root does so by itself. Frees all gathered
        parameters; gradients of a failed backward are dropped.
        """
        self._unit_and_runtime()[1].reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, those of the sharded parameters too while others are registered."""
        for unit in self._units(recurse=True):
            for param in unit.params:
                grad = param.sharded.grad
                if grad is not None and set_to_none:
                    param.sharded.grad = None
                elif grad is not None:
                    grad.requires_grad_(False).zero_()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    # -- inside -----------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts (``.to``, ``.double``, ``to_empty``) act on the sharded parameters."""
        unit = _unit_of(self)
        if unit.runtime is not None:
            unit.runtime.reshard(unit)
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        unit.adopt_replaced()
        unit.dirty = True
        return result

    def __deepcopy__(self, memo: dict) -> Any:
        raise NotImplementedError(
            f"copy.deepcopy of a sharded {type(self).__mro__[2].__name__} is not supported: build "
            "a second model, shard it and load this one's state_dict()"
        )

    def _units(self, recurse: bool) -> list[Unit]:
        assert isinstance(self, nn.Module)
        return units_in(self) if recurse else [_unit_of(self)]

    def _unit_and_runtime(self) -> tuple[Unit, Runtime]:
        assert isinstance(self, nn.Module)
        unit = _unit_of(self)
        if unit.runtime is None:
            build_runtime(self)
        return unit, unit.runtime


class UnshardHandle:
    """Waits for a gather that `FSDPModule.unshard` started."""

    def __init__(self, unit: Unit | None = None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Make the current stream wait; then the unsharded parameters are registered."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.runtime.wait_unshard(unit)


def _unit_of(module: Any) -> Unit:
    return vars(module)["_fsdp2_unit"]


def _checked(modules: Iterable[Any]) -> Iterable[Any]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return modules


_sharded_classes: dict[type, type] = {}


def make_sharded_class(module: nn.Module) -> None:
    """Make the class of ``module`` a subclass of `FSDPModule`, first in its bases."""
    cls = type(module)
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(
            f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__}
        )
    module.__class__ = _sharded_classes[cls]


def move_to_device(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move buffers (and parameters left unsharded) in place; meta tensors stay."""
    for tensor in tensors:
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)
