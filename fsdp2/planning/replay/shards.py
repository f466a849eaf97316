"""How a model is sharded, and what one rank has of each parameter: pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...dtensor.boxes import entries_per_part
from ...policy import CommPolicy, MixedPrecisionPolicy, OffloadPolicy, hops_of
from ...transports.host.topology import Topology
from ...wrap import UnitDescription
from ..trace.events import ParamInfo
from ..trace.expert_units import InnerTopology
from ..trace.paged_state import StateOffload

Reshard = bool | int | None
# How gradients of micro-batches are summed: whole, and reduced in the last; reduce-scattered in
# each, and all-reduced over replicas in the last (`FSDPModule.set_accumulate_sharded`); or fully
# reduced in each, as where nobody calls `FSDPModule.set_requires_gradient_sync`.
ACCUMULATIONS = ("unsharded", "sharded", "every")


@dataclass(frozen=True)
class Setup:
    """How a model is sharded.

    Attributes:
        units: from `units_of`.
        num_shards, num_replicas: sizes of the mesh dims.
        rank: among the ranks that share a parameter.
        reshard_after_forward: the setting of each unit; None: `fully_shard`'s default.
        prefetch: number of units gathered ahead.
        replicate_below: parameters of fewer bytes are replicated on every rank.
        gathered_once: parameters stay gathered between micro-batches.
        max_gathered_bytes: limit on gathered parameters; None: no limit.
        micro_batches: forwards and backwards per step.
        accumulation: how their gradients are summed, one of `ACCUMULATIONS`.
        comm_policy: of all units.
        ranks_per_node: which determines what leaves a node.
        expert_ranks: over which experts are distributed, of the parameters that the trace says
            belong to experts; these are sharded over the ranks that have the same ones, with
            ``tensor_ranks`` among them.
        tensor_ranks: that share the operators of a tensor-parallel model, beside ``num_ranks``.
        context_ranks: of ``num_ranks``, those that have parts of the same sequences.
        max_device_bytes: what `CPUOffloadPolicy` leaves on the device; None: nothing.
        offload_optimizer: where state of the optimizer is; None: where its parameters are.
        granularity: the ``shard_granularity`` of parameters by name, where it is not 1.
        pipeline_ranks: of a pipeline, of which ``units`` are a stage; each has ``num_ranks`` and
            their ``tensor_ranks``.
    """

    units: tuple[UnitDescription, ...]
    num_shards: int
    num_replicas: int = 1
    rank: int = 0
    device_type: str = "cuda"
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    reshard_after_forward: Callable[[UnitDescription], Reshard] | None = None
    prefetch: int = 1
    direct_min_bytes: int | None = None
    replicate_below: int = 0
    gathered_once: bool = False
    micro_batches: int = 1
    accumulation: str = "unsharded"
    comm_policy: CommPolicy | None = None
    max_gathered_bytes: int | None = None
    ranks_per_node: int = 8
    expert_ranks: int = 1
    tensor_ranks: int = 1
    context_ranks: int = 1
    max_device_bytes: int | None = None
    offload_optimizer: StateOffload | None = None
    granularity: Mapping[str, int] = field(default_factory=dict)
    pipeline_ranks: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks that share parameters or gradients: those that get inputs of their own."""
        return self.num_shards * self.num_replicas

    @property
    def num_batches(self) -> int:
        """Of a micro-batch of all ranks: those that get the same sequences share one."""
        return self.num_ranks // self.context_ranks

    @property
    def num_expert_shards(self) -> int:
        """Ranks that have the same experts."""
        return self.num_ranks * self.tensor_ranks // self.expert_ranks

    @property
    def expert_shard_rank(self) -> int:
        """The rank among these: of the tensor ranks that are ``rank``, the first."""
        return self.rank * self.tensor_ranks // self.expert_ranks

    @property
    def topology(self) -> Topology:
        """Where its ranks are."""
        hop = 1 if self.comm_policy is None else hops_of(self.comm_policy, self.num_shards)
        return InnerTopology(
            self.num_shards,
            self.num_replicas,
            self.ranks_per_node,
            hop,
            self.expert_ranks,
            self.tensor_ranks,
            self.context_ranks,
            self.pipeline_ranks,
        )


def shard_of(param: ParamInfo, setup: Setup) -> tuple[int, int | None]:
    """The number of ranks that share a parameter, and its sharded dim; None: they hold it whole."""
    if not param.shape:
        return 1, None
    if param.num_experts is not None:  # as `shard_experts` chooses the dim
        ranks = setup.num_expert_shards
        return ranks, 1 if param.shape[0] < ranks and len(param.shape) > 1 else 0
    if setup.num_shards > 1 and param.made_bytes < setup.replicate_below:
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


def with_rank(setup: Setup, rank: int) -> Setup:
    """The same setup for another rank."""
    return replace(setup, rank=rank)
