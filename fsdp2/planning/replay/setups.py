"""Turns a user's arguments (a mesh, a strategy by name) into a `Setup`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from ...api.arguments import checked_granularity, meant_reshard
from ...api.shard_model import Sharding, find_strategy, offload_beyond, reshard_of
from ...common.checks import check_number
from ...policy import adopt_offload_policy
from ...wrap import UnitDescription, parameters_of
from ..workload import Workload
from .shards import Setup


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
        # Larger shards of experts would be over another number of ranks.
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
        experts: names of modules that `shard_experts` gets, to which it does not apply.

    Raises:
        ValueError: for a number that is less than 1.
        TypeError: for something else than a number.
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
