"""Public functions on modules that are already sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..comm.streams import streams_for
from ..runtime.runtime import runtime_of
from .module import units_of_all


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """Make several roots (such as the pipeline stages of one rank) use the same streams.

    The others can then reuse memory at once that one of them frees. Roots whose first forwards run
    on the same stream share streams anyway; this function is for other roots.

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
