"""Turns a user's arguments (a mesh, a strategy by name) into a `Setup`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...api.arguments import checked_granularity, meant_reshard
from ...api.shard_model import find_strategy, offload_beyond, reshard_of
from ...common.suggestions import did_you_mean
from ...policy import OffloadPolicy
from ...wrap import UnitDescription, parameters_of
from ..trace.paged_state import StateOffload
from .shards import ACCUMULATIONS, Setup

# Of the fields of `Setup` that are numbers.
_LEAST = {
    "micro_batches": 1,
    "max_gathered_bytes": 1,
    "ranks_per_node": 1,
    "prefetch": 0,
    "expert_ranks": 1,
}


def check_number(name: str, value: object, least: int = 1) -> None:
    """Check an argument that counts something.

    Raises:
        TypeError: if it is not an int.
        ValueError: if it is less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_accumulation(value: object) -> None:
    """Check how gradients of micro-batches are to be summed.

    Raises:
        ValueError: if it is none of `ACCUMULATIONS`.
    """
    if value not in ACCUMULATIONS:
        hint = did_you_mean(str(value), ACCUMULATIONS)
        raise ValueError(f"accumulation must be one of {ACCUMULATIONS}, got {value!r}{hint}")


def make_setup(
    units: Sequence[UnitDescription],
    mesh_shape: int | Sequence[int],
    *,
    strategy: str = "full",
    reshard_after_forward: Any = None,
    experts: Collection[tuple[str, ...]] = (),
    **options: Any,
) -> Setup:
    """The setup that `shard_model` would use.

    Args:
        units: from `units_of`.
        experts: the units (their ``modules``) that `shard_experts` makes.
        options: further fields of `Setup`.

    Raises:
        ValueError: if the mesh is not one or two positive numbers or does not fit the strategy,
            for an unknown strategy or kind of accumulation, and for numbers that are too small.
        TypeError: for a mesh, or a number, of another type.
    """
    expert_ranks = options.get("expert_ranks", 1)
    _check_offload(options, experts)
    for name, least in _LEAST.items():
        if options.get(name) is not None:
            check_number(name, options[name], least)
    check_accumulation(options.get("accumulation", "unsharded"))
    chosen = find_strategy(strategy)
    replicas, shards = _replicas_and_shards(mesh_shape)
    if chosen.hybrid and isinstance(mesh_shape, int):
        raise ValueError("Strategy 'hybrid' needs a mesh of two dims: (replicas, shards)")
    if not chosen.sharded:
        replicas, shards = replicas * shards, 1
    all_ranks = replicas * shards * options.get("tensor_ranks", 1)
    if all_ranks % expert_ranks:
        of = "ranks of a stage" if options.get("pipeline_ranks", 1) > 1 else "ranks"
        raise ValueError(
            f"expert_ranks={expert_ranks} must divide the number of {of}, {all_ranks}: "
            "their mesh is (ranks // expert_ranks, expert_ranks)"
        )

    def reshard(unit: UnitDescription) -> Any:
        if not chosen.sharded:
            return None
        chosen_for = meant_reshard(reshard_of(unit, chosen, reshard_after_forward), shards)
        # Larger shards of experts would be over another number of ranks.
        return None if unit.modules in experts and type(chosen_for) is int else chosen_for

    setup = Setup(
        units=tuple(units),
        num_shards=shards,
        num_replicas=replicas,
        reshard_after_forward=reshard,
        gathered_once=chosen.gathered_once,
        **options,
    )
    for unit in units:
        _check_reshard(reshard(unit), shards)
    return setup


def _check_offload(options: dict[str, Any], experts: Collection[tuple[str, ...]]) -> None:
    limit, offload = options.get("max_device_bytes"), options.get("offload_optimizer")
    offload_beyond(options.get("offload_policy", OffloadPolicy()), limit)
    if limit is not None and experts:
        raise ValueError(
            "max_device_bytes is of one `shard_model`, and experts are sharded before: leave one "
            "of max_device_bytes and experts out"
        )
    if not (offload is None or isinstance(offload, StateOffload)):
        raise TypeError(f"offload_optimizer must be a StateOffload or None, got {offload!r}")


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


def resized(setup: Setup, replicas: int, shards: int) -> Setup:
    """The same setup on another mesh."""
    return replace(setup, num_shards=shards, num_replicas=replicas)


def checked_mesh(mesh_shape: Any) -> tuple[int, ...]:
    """``mesh_shape`` as a tuple: (ranks,) or (replicas, shards).

    Raises:
        ValueError: if it is not one or two positive numbers.
        TypeError: if it is something else.
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    if not isinstance(shape, list | tuple) or not all(type(n) is int for n in shape):
        raise TypeError(f"mesh_shape must be a number or a tuple of numbers, got {mesh_shape!r}")
    if not 1 <= len(shape) <= 2 or min(shape) < 1:
        raise ValueError(f"mesh_shape must be ranks or (replicas, shards), got {mesh_shape!r}")
    return tuple(shape)


def _replicas_and_shards(mesh_shape: Any) -> tuple[int, int]:
    shape = checked_mesh(mesh_shape)
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])


def _check_reshard(value: Any, num_shards: int) -> None:
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, int) or value < 1 or value > num_shards or num_shards % value:
        raise ValueError(
            "reshard_after_forward should be a bool or an int that divides the number of shards, "
            f"{num_shards}, got {value!r}"
        )
