"""What other libraries look for in modules sharded by torch's ``fully_shard``, for ours.

Libraries ask ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and then call the methods
that we have too. So that class is the last base of a sharded module's class: the answer is yes,
and as every method of it is found earlier, in `fsdp2.FSDPModule`, none of its code runs.

``torch.distributed.pipelining`` goes on from there to private state, which `fully_shard.state`
looks up in the module's ``__dict__``. `PipelineState` has the few attributes that it reads.

What torch calls composable functions (``replicate``, ``checkpoint``) note in a registry of each
module that they were applied, and leave alone what another one has: so do we.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from ..runtime.unit import Unit

__all__ = ["PipelineState", "TorchFSDPModule", "is_replicated", "publish_state", "state_of"]

_KEY: Any = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]


class PipelineState:
    """The state of one unit in the shape that pipeline stages walk at the end of a step."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    @property
    def _comm_ctx(self) -> Any:
        """What stages share whose reductions could not overlap: by default nothing."""
        return self._unit.runtime or self._unit

    @property
    def all_states(self) -> list[PipelineState]:
        """Of all units of the tree."""
        runtime = self._unit.runtime
        return [self] if runtime is None else [_state_of_unit(unit) for unit in runtime.units]

    @property
    def _fsdp_param_groups(self) -> list[PipelineState]:
        return [self]

    @property
    def _fsdp_param_group(self) -> PipelineState:
        """As torch 2.11 has it."""
        return self

    def post_backward(self) -> None:
        """Reduce what the micro-batches have accumulated."""
        if self._unit.runtime is not None:
            self._unit.runtime.reduce(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Wait for all reductions and free all units."""
        if self._unit.runtime is not None:
            self._unit.runtime.end_backward()


def publish_state(unit: Unit) -> None:
    """Let `fully_shard.state`, ours and torch's, find one `PipelineState` for the whole unit, and
    let ``replicate`` see that the modules are taken."""
    state = PipelineState(unit)
    for module in unit.modules:
        vars(module).setdefault(STATE_KEY, {})[_KEY] = state
        vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def state_of(module: nn.Module) -> PipelineState | None:
    """The state of the unit that ``module`` was sharded as; None if it was not.

    Exists for code that asks whether, or compares; what it has inside is private.
    """
    return vars(module).get(STATE_KEY, {}).get(_KEY)


def _state_of_unit(unit: Unit) -> PipelineState:
    state = state_of(unit.modules[0])
    assert state is not None
    return state


def is_replicated(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` reduces this module's gradients."""
    return "replicate" in vars(module).get(REGISTRY_KEY, {})
