"""Lets other libraries treat our sharded modules as torch's.

Libraries check ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` and then call methods
that we have too. So torch's class is the last base of a sharded module's class: the check succeeds,
and since `fsdp2.FSDPModule` comes first and has every method, none of torch's code runs.

``torch.distributed.pipelining`` and others also read private state, which `fully_shard.state`
looks up in the module's ``__dict__``. `PipelineState` has the few attributes that describe a unit.
``docs/compatibility.md`` lists clients that read more, and so cannot work.

torch's composable functions (``replicate``, ``checkpoint``) record in a per-module registry that
they were applied, and skip modules that another one has taken. We do the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo

from ..policy import MixedPrecisionPolicy
from ..runtime.runtime import runtime_of
from ..runtime.unit import Unit

__all__ = ["PipelineState", "TorchFSDPModule", "is_replicated", "publish_state", "state_of"]

_KEY: Any = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]


class PipelineState:
    """The state of one unit in the shape that pipeline stages walk at the end of a step.

    It stands for torch's state of the unit, its context and its parameter group.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:
        return self._unit.config.mp_policy

    @property
    def mesh_info(self) -> FSDPMeshInfo | DDPMeshInfo | None:
        """torch's description of the mesh; None for replicas over two dims, which torch lacks."""
        mesh, sharded = self._unit.mesh.mesh, self._unit.mesh.shard_group is not None
        if mesh.ndim == 2:
            return HSDPMeshInfo(mesh, 1, 0) if sharded else None
        return FSDPMeshInfo(mesh, 0) if sharded else DDPMeshInfo(mesh, None, 0)

    @property
    def _state_ctx(self) -> PipelineState:
        return self

    @property
    def _comm_ctx(self) -> Any:
        """Shared by stages whose reductions could not overlap; by default nothing is."""
        return self._unit.runtime or self._unit

    @property
    def all_states(self) -> list[PipelineState]:
        """The states of all units of the tree."""
        if self._unit.runtime is None:
            return [self]
        return [_state_of_unit(unit) for unit in runtime_of(self._unit).units]

    @property
    def _fsdp_param_groups(self) -> list[PipelineState]:
        return [self]

    @property
    def _fsdp_param_group(self) -> PipelineState:
        """The name in torch 2.11."""
        return self

    def post_backward(self) -> None:
        """Reduce what the micro-batches have accumulated."""
        if self._unit.runtime is not None:
            runtime_of(self._unit).reduce(self._unit)

    def _root_post_backward_final_callback(self) -> None:
        """Wait for all reductions and free all units."""
        if self._unit.runtime is not None:
            runtime_of(self._unit).end_backward()


def publish_state(unit: Unit) -> None:
    """Publish the unit's `PipelineState` for `fully_shard.state`, ours and torch's, and mark its
    modules as taken for ``replicate``."""
    # Not where ``_get_module_fsdp_state`` looks: a torch root around it would take it for one of
    # torch's.
    state = PipelineState(unit)
    for module in unit.modules:
        vars(module).setdefault(STATE_KEY, {})[_KEY] = state
        vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


def state_of(module: nn.Module) -> PipelineState | None:
    """The state of the unit that ``module`` belongs to; None if it is not sharded.

    For code that tests whether a module is sharded, or compares states; the contents are private.
    """
    return vars(module).get(STATE_KEY, {}).get(_KEY)


def _state_of_unit(unit: Unit) -> PipelineState:
    state = state_of(unit.modules[0])
    assert state is not None
    return state


def is_replicated(module: nn.Module) -> bool:
    """Whether ``torch.distributed._composable.replicate`` reduces this module's gradients."""
    return "replicate" in vars(module).get(REGISTRY_KEY, {})
