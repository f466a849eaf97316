"""Public functions on modules that are already sharded."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType

from torch import nn

from ..comm.streams import streams_for
from ..runtime.hooks import UnitHooks, hooks_of
from ..runtime.runtime import runtime_of
from ..runtime.unit import unit_of
from .module import FSDPModule, units_of_all


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method like forward: gather parameters before it and free them after it.

    For methods other than ``forward`` that compute with parameters, such as ``generate``. The
    method may call forward. Has no effect if ``module`` is not sharded, or if that is done already.

    Args:
        module: the module.
        method_name: name of the method.

    Raises:
        ValueError: if there is no such method.

    Example:
        >>> fully_shard(model)
        >>> register_fsdp_forward_method(model, "generate")
        >>> model.generate(tokens)
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    if _is_wrapped(method, module):  # another time, it would be wrapped twice, and so on
        return
    wrapped = hooks_of(unit_of(module)).wrap_method(module, method_name, method)
    setattr(module, method_name, MethodType(wrapped, module))


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Make several roots (such as the pipeline stages of one rank) use the same streams.

    Memory that one of them frees can then be reused by the others at once. Roots whose first
    forwards run on the same stream share streams anyway; this is for those that do not.

    Raises:
        ValueError: if one of them is not an FSDPModule.

    Example:
        >>> share_comm_ctx([stage_0, stage_1])
    """
    units = units_of_all(modules)
    if not units:
        return
    first = units[0]
    streams = first.config.shared_streams
    if streams is None:
        running = first.runtime is not None
        streams = runtime_of(first).streams if running else streams_for(first.device)
    for unit in units:
        unit.config.shared_streams = streams
        if unit.runtime is not None:
            runtime_of(unit).streams = streams


def _is_wrapped(method: object, owner: nn.Module) -> bool:
    """Whether ``method`` of ``owner`` is one of `UnitHooks.wrap_method`."""
    if not isinstance(method, MethodType) or method.__self__ is not owner:
        return False
    # By its code, not by a mark on it: what `functools.wraps` puts around it would copy the mark.
    code = getattr(method.__func__, "__code__", method)
    return code in UnitHooks.wrap_method.__code__.co_consts
