"""The setup of a sharded model from the user's arguments, and one rank's part of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ...api.arguments import checked_granularity, meant_reshard
from ...api.shard_model import Sharding, find_strategy, offload_beyond, reshard_of
from ...common.checks import check_number
from ...dtensor.boxes import entries_per_part
from ...policy import adopt_offload_policy
from ...transports.compressed.policy import hops_of
from ...transports.host.topology import Topology
from ...wrap import UnitDescription, parameters_of
from ..trace.events import ParamInfo
from ..trace.expert_units import InnerTopology
from ..workload import Workload

Reshard = bool | int | None


@dataclass(frozen=True)
class Setup:
    """How a model is sharded: a `Sharding` applied to a model and a mesh.

    Attributes:
        units: from `units_of`; in a pipeline, the units of a stage.
        sharding: as given, except for the values that are fields here.
        workload: provides the number of micro-batches, the place of optimizer state, and the
            degrees of the model's own parallelisms. The trace marks the parameters of experts; they
            are sharded over the ranks with the same experts, including tensor ranks.
        num_shards, num_replicas: sizes of the mesh dims.
        rank: index among the ranks that share a parameter.
        reshard_after_forward: the setting of each unit; None: `fully_shard`'s default.
        gathered_once: parameters stay gathered between micro-batches.
        ranks_per_node: determines the traffic between nodes.
        granularity: the ``shard_granularity`` of parameters by name, if it is not 1.
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
        """Ranks that share parameters or gradients, and get different inputs."""
        return self.num_shards * self.num_replicas

    @property
    def num_all_ranks(self) -> int:
        """All ranks, including tensor and pipeline ranks."""
        return self.num_ranks * self.workload.tensor_ranks * self.workload.pipeline_ranks

    @property
    def num_batches(self) -> int:
        """Batches in a micro-batch of all ranks; ranks with the same sequences share one."""
        return self.num_ranks // self.workload.context_ranks

    @property
    def num_expert_shards(self) -> int:
        """Ranks that have the same experts."""
        return self.num_ranks * self.workload.tensor_ranks // self.workload.expert_ranks

    @property
    def expert_shard_rank(self) -> int:
        """The rank among these; ``rank`` stands for its first tensor rank."""
        return self.rank * self.workload.tensor_ranks // self.workload.expert_ranks

    @property
    def topology(self) -> Topology:
        """The nodes of its ranks."""
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
    """The largest number of entries of a parameter's sharded dim on a rank."""
    ranks, dim = shard_of(param, setup)
    assert dim is not None
    return entries_per_part(param.shape[dim], ranks, setup.granularity.get(param.name, 1))


def shard_shape(param: ParamInfo, setup: Setup) -> tuple[int, ...]:
    """The shape of a parameter's shard on the rank of ``setup``."""
    shape, (_, dim) = param.shape, shard_of(param, setup)
    if dim is None:
        return shape
    rows = rows_of(param, setup)
    start = min(shard_rank_of(param, setup) * rows, shape[dim])
    return (*shape[:dim], min(rows, shape[dim] - start), *shape[dim + 1 :])


def shard_rank_of(param: ParamInfo, setup: Setup) -> int:
    """The rank of ``setup`` among those that share a parameter."""
    return setup.rank if param.num_experts is None else setup.expert_shard_rank


def make_setup(
    units: Sequence[UnitDescription],
    mesh_shape: int | Sequence[int],
    workload: Workload,
    sharding: Sharding,
    *,
    experts: Collection[tuple[str, ...]] = (),
    granularity: Mapping[str, int] = MappingProxyType({}),
    device_type: str = "cuda",
    ranks_per_node: int = 8,
) -> Setup:
    """The setup that `shard_model` would use.

    Args:
        units: from `units_of`.
        experts: the units (their ``modules``) that `shard_experts` makes.
        granularity: from `granularities`.

    Raises:
        ValueError: if the mesh is not one or two positive numbers or does not fit the strategy,
            for an unknown strategy, and for numbers that are too small.
        TypeError: for a mesh, or a number, of another type.
    """
    sharding = replace(sharding, offload_policy=adopt_offload_policy(sharding.offload_policy))
    offload_beyond(sharding.offload_policy, sharding.max_device_bytes)  # for its checks
    if sharding.max_device_bytes is not None and experts:
        raise ValueError(
            "max_device_bytes is of one `shard_model`, and experts are sharded before: leave one "
            "of max_device_bytes and experts out"
        )
    if sharding.max_gathered_bytes is not None:
        check_number("max_gathered_bytes", sharding.max_gathered_bytes)
    check_number("ranks_per_node", ranks_per_node)
    check_number("prefetch", sharding.prefetch, 0)
    chosen = find_strategy(sharding.strategy)
    shape = checked_mesh(mesh_shape)
    if chosen.hybrid and len(shape) == 1:
        raise ValueError("Strategy 'hybrid' needs a mesh of two dims: (replicas, shards)")
    replicas, shards = (1, *shape)[-2:]
    if not chosen.sharded:
        replicas, shards = replicas * shards, 1
    all_ranks = replicas * shards * workload.tensor_ranks
    if all_ranks % workload.expert_ranks:
        of = "ranks of a stage" if workload.pipeline_ranks > 1 else "ranks"
        raise ValueError(
            f"expert_ranks={workload.expert_ranks} must divide the number of {of}, {all_ranks}: "
            "their mesh is (ranks // expert_ranks, expert_ranks)"
        )

    def reshard(unit: UnitDescription) -> Any:
        if not chosen.sharded:
            return None
        chosen_for = reshard_of(unit, chosen, sharding.reshard_after_forward)
        meant = meant_reshard(chosen_for, shards)
        # Larger shards of experts would be shared by another number of ranks.
        return None if unit.modules in experts and type(meant) is int else meant

    for unit in units:
        _check_reshard(reshard(unit), shards)
    return Setup(
        units=tuple(units),
        sharding=sharding,
        workload=workload,
        num_shards=shards,
        num_replicas=replicas,
        device_type=device_type,
        reshard_after_forward=reshard,
        gathered_once=chosen.gathered_once,
        ranks_per_node=ranks_per_node,
        granularity=granularity,
    )


def granularities(
    model: nn.Module, shard_granularity: Any, experts: Collection[str] = ()
) -> dict[str, int]:
    """The ``shard_granularity`` of parameters by name, where it is not 1.

    Args:
        experts: names of the modules for `shard_experts`, to which it does not apply.

    Raises:
        ValueError: for a number that is less than 1.
        TypeError: for other types than numbers.
    """
    choose = checked_granularity(shard_granularity)
    if shard_granularity is None:
        return {}
    prefixes = tuple(f"{name}." for name in experts)
    rows = {
        name: choose(param, name)
        for name, param, _ in parameters_of(model)
        if not name.startswith(prefixes or ("\0",))
    }
    return {name: each for name, each in rows.items() if each > 1}


def checked_mesh(mesh_shape: Any, name: str = "mesh_shape") -> tuple[int, ...]:
    """``mesh_shape``, an argument called ``name``, as a tuple: (ranks,) or (replicas, shards).

    Raises:
        ValueError: if it is not one or two positive numbers.
        TypeError: if it is something else.
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    if not isinstance(shape, list | tuple) or not all(type(n) is int for n in shape):
        raise TypeError(f"{name} must be a number or a tuple of numbers, got {mesh_shape!r}")
    if not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise ValueError(f"{name} must be ranks or (replicas, shards), got {mesh_shape!r}")
    return tuple(shape)


def _check_reshard(value: Any, num_shards: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 1 or value > num_shards or num_shards % value:
        raise ValueError(
            "reshard_after_forward should be a bool or an int that divides the number of shards, "
            f"{num_shards}, got {value!r}"
        )
