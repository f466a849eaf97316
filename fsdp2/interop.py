"""What other libraries look for in modules sharded by torch's ``fully_shard``, for ours.

Libraries ask ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and then call the methods
that we have too. So that class is the last base of a sharded module's class: the answer is yes,
and as every method of it is found earlier, in `fsdp2.FSDPModule`, none of its code runs.

``torch.distributed.pipelining`` goes on from there to private state, which `fully_shard.state`
looks up in the module's ``__dict__``. `PipelineState` has the few attributes that it reads.
"""

from __future__ import annotations

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from .unit import Unit

__all__ = ["PipelineState", "TorchFSDPModule", "show_state"]


class PipelineState:
    """The state of one unit in the shape that pipeline stages walk at the end of a step."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    @property
    def all_states(self) -> list[PipelineState]:
        """Of all units of the tree."""
        runtime = self._unit.runtime
        return [self] if runtime is None else [PipelineState(unit) for unit in runtime.units]

    @property
    def _fsdp_param_groups(self) -> list[PipelineState]:
        return [self]

    def post_backward(self) -> None:
        """Reduce what the micro-batches have accumulated."""
        if self._unit.runtime is not None:
            self._unit.runtime.reduce(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Wait for all reductions and free all units."""
        if self._unit.runtime is not None:
            self._unit.runtime.end_backward()


def show_state(module: nn.Module, unit: Unit) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` find a `PipelineState`."""
    states = vars(module).setdefault(STATE_KEY, {})
    states[torch_fully_shard.__wrapped__] = PipelineState(unit)  # type: ignore[attr-defined]
