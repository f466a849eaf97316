"""Public functions on modules that are sharded already."""

from __future__ import annotations

from types import MethodType

from torch import nn

from ..comm.streams import streams_for
from ..runtime.unit import unit_of
from .module import FSDPModule, units_of_all


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of ``module`` be a forward: parameters are gathered before and freed after it.

    For methods that compute with parameters beside ``forward``: ``generate``, ``encode``. Forward
    may be called inside the method. Nothing happens if ``module`` is not sharded.

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
    wrapped = unit_of(module).hooks.wrap_method(module, method_name, method)
    setattr(module, method_name, MethodType(wrapped, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the stages of a pipeline on one rank) use the same streams.

    Memory that one of them frees on a stream can then be used by the others at once. Roots whose
    first forwards run on the same stream do so anyway; this is for those that do not.

    Raises:
        ValueError: if one of them is no FSDPModule.

    Example:
        >>> share_comm_ctx([stage_0, stage_1])
    """
    units = units_of_all(modules)
    if not units:
        return
    first = units[0]
    streams = first.config.shared_streams or (first.runtime and first.runtime.streams)
    streams = streams or streams_for(first.device)
    for unit in units:
        unit.config.shared_streams = streams
        if unit.runtime is not None:
            unit.runtime.streams = streams
