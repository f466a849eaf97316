"""How a model is sharded, and what one rank has of each parameter: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ...api.shard_model import Sharding
from ...dtensor.boxes import entries_per_part
from ...policy import hops_of
from ...transports.host.topology import Topology
from ...wrap import UnitDescription
from ..trace.events import ParamInfo
from ..trace.expert_units import InnerTopology
from ..workload import Workload

Reshard = bool | int | None


@dataclass(frozen=True)
class Setup:
    """How a model is sharded: what `Sharding` means for a model and a mesh.

    Attributes:
        units: from `units_of`; of a pipeline, those of a stage.
        sharding: as given, but for what is a field here.
        workload: of which are used here: how often a step runs, where state of the optimizer is,
            and over how many ranks the model's own parallelisms go. Experts are those of the
            parameters that the trace says belong to experts; they are sharded over the ranks that
            have the same ones, tensor ranks among them.
        num_shards, num_replicas: sizes of the mesh dims.
        rank: among the ranks that share a parameter.
        reshard_after_forward: the setting of each unit; None: `fully_shard`'s default.
        gathered_once: parameters stay gathered between micro-batches.
        ranks_per_node: which determines what leaves a node.
        granularity: the ``shard_granularity`` of parameters by name, where it is not 1.
    """

    units: tuple[UnitDescription, ...]
    sharding: Sharding
    workload: Workload
    num_shards: int
    num_replicas: int = 1
    rank: int = 0
    device_type: str = "cuda"
    reshard_after_forward: Callable[[UnitDescription], Reshard] | None = None
    gathered_once: bool = False
    ranks_per_node: int = 8
    granularity: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Ranks that share parameters or gradients: those that get inputs of their own."""
        return self.num_shards * self.num_replicas

    @property
    def num_all_ranks(self) -> int:
        """With those that share operators, and have other stages."""
        return self.num_ranks * self.workload.tensor_ranks * self.workload.pipeline_ranks

    @property
    def num_batches(self) -> int:
        """Of a micro-batch of all ranks: those that get the same sequences share one."""
        return self.num_ranks // self.workload.context_ranks

    @property
    def num_expert_shards(self) -> int:
        """Ranks that have the same experts."""
        return self.num_ranks * self.workload.tensor_ranks // self.workload.expert_ranks

    @property
    def expert_shard_rank(self) -> int:
        """The rank among these: of the tensor ranks that are ``rank``, the first."""
        return self.rank * self.workload.tensor_ranks // self.workload.expert_ranks

    @property
    def topology(self) -> Topology:
        """Where its ranks are."""
        policy = self.sharding.comm_policy
        hop = 1 if policy is None else hops_of(policy, self.num_shards)
        return InnerTopology(
            self.num_shards,
            self.num_replicas,
            self.ranks_per_node,
            hop,
            self.workload.expert_ranks,
            self.workload.tensor_ranks,
            self.workload.context_ranks,
            self.workload.pipeline_ranks,
        )


def shard_of(param: ParamInfo, setup: Setup) -> tuple[int, int | None]:
    """The number of ranks that share a parameter, and its sharded dim; None: they hold it whole."""
    if not param.shape:
        return 1, None
    if param.num_experts is not None:  # as `shard_experts` chooses the dim
        ranks = setup.num_expert_shards
        return ranks, 1 if param.shape[0] < ranks and len(param.shape) > 1 else 0
    if setup.num_shards > 1 and param.made_bytes < setup.sharding.replicate_below:
        return 1, None
    return setup.num_shards, 0


def rows_of(param: ParamInfo, setup: Setup) -> int:
    """The most entries along its sharded dim that a rank has of a parameter."""
    ranks, dim = shard_of(param, setup)
    assert dim is not None
    return entries_per_part(param.shape[dim], ranks, setup.granularity.get(param.name, 1))


def shard_shape(param: ParamInfo, setup: Setup) -> tuple[int, ...]:
    """What the rank of ``setup`` has of a parameter."""
    shape, (_, dim) = param.shape, shard_of(param, setup)
    if dim is None:
        return shape
    rows = rows_of(param, setup)
    start = min(shard_rank_of(param, setup) * rows, shape[dim])
    return (*shape[:dim], min(rows, shape[dim] - start), *shape[dim + 1 :])


def shard_rank_of(param: ParamInfo, setup: Setup) -> int:
    """The rank of ``setup`` among those that share a parameter."""
    return setup.rank if param.num_experts is None else setup.expert_shard_rank
