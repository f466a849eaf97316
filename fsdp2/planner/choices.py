"""Checks of what `plan` is given to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ..api.shard_model import find_strategy
from ..common.suggestions import did_you_mean
from ..estimation.checkpointing import MODES
from ..estimation.setups import check_accumulation, check_number, checked_mesh
from .candidates import SEARCHED, Degrees, Fixed, expert_ranks_of
from .hardware import Hardware
from .traces import TracedSteps, check_context_ranks, check_expert_ranks, check_tensor_ranks


def degrees_of(
    tensor_ranks: int | Sequence[int],
    context_ranks: int | Sequence[int],
    traces: TracedSteps,
    num_ranks: int,
) -> list[Degrees]:
    """All combinations of numbers of tensor and context ranks to choose from.

    Raises:
        ValueError: for none, or one that does not divide ``num_ranks``; see `check_tensor_ranks`
            and `check_context_ranks`.
    """
    given = {"tensor_ranks": tensor_ranks, "context_ranks": context_ranks}
    lists = {k: [v] if isinstance(v, int) else list(v) for k, v in given.items()}
    for name, check in (
        ("tensor_ranks", check_tensor_ranks),
        ("context_ranks", check_context_ranks),
    ):
        if not lists[name]:
            raise ValueError(f"{name} is empty: give a number, or several to choose from")
        for each in lists[name]:
            check(each, traces)
            if num_ranks % each:
                raise ValueError(f"{name}={each} must divide num_ranks={num_ranks}")
    made = [
        Degrees(tensor=tensor, context=context)
        for tensor in lists["tensor_ranks"]
        for context in lists["context_ranks"]
    ]
    found = [each for each in made if num_ranks % each.ranks_per_batch == 0]
    if not found:
        raise ValueError(
            f"tensor_ranks={lists['tensor_ranks']} times context_ranks={lists['context_ranks']} "
            f"must divide num_ranks={num_ranks}"
        )
    return found


def within_samples(degrees: Sequence[Degrees], samples: int, most: int) -> list[Degrees]:
    """Those with which a step has at most ``most`` samples.

    Args:
        samples: of a step in which each rank has a batch of its own.

    Raises:
        ValueError: if there are none.
    """
    found = [each for each in degrees if samples // each.ranks_per_batch <= most]
    if not found:
        least = samples // max(each.ranks_per_batch for each in degrees)
        raise ValueError(
            f"A step has {least:,} samples or more, and max_samples={most:,}: give fewer ranks, "
            "more tensor_ranks or context_ranks, fewer micro-batches, or a sample_input with fewer "
            "samples"
        )
    return found


def asked(degrees: Sequence[Degrees], parallelizes: bool) -> list[tuple[int | None, int | None]]:
    """Pairs of tensor and context ranks to choose from; None: nobody asks for them."""
    split = any(each.context > 1 for each in degrees)
    return [
        (each.tensor if parallelizes else None, each.context if split else None) for each in degrees
    ]


def checked_ways(accumulation: Sequence[str], micro_batches: int) -> tuple[str | None, ...]:
    if isinstance(accumulation, str) or not accumulation:
        raise TypeError(f"accumulation must be a sequence of names, got {accumulation!r}")
    for way in accumulation:
        check_accumulation(way)
    return tuple(accumulation) if micro_batches > 1 else (None,)


def checked_modes(modes: Sequence[str], only: str | None) -> tuple[str, ...]:
    chosen = tuple(modes) if only is None else (only,)
    for mode in chosen:
        if mode not in MODES:
            name = "activation_checkpointing" if only is None else "checkpoint"
            hint = did_you_mean(str(mode), MODES)
            raise ValueError(f"{name} must be one of {MODES}, got {mode!r}{hint}")
    return chosen


def checked_expert_ranks(
    ranks: int | Sequence[int] | None, traces: TracedSteps, num_ranks: int, hardware: Hardware
) -> list[int | None]:
    """The numbers of ranks over which experts may be distributed; None: not at all."""
    if ranks is None:
        if not traces.experts:
            return [None]
        return [*expert_ranks_of(num_ranks, hardware.ranks_per_node, traces.num_experts)]
    given = [ranks] if isinstance(ranks, int) else list(ranks)
    for each in given:
        check_expert_ranks(each, traces)
        if num_ranks % each:
            raise ValueError(f"expert_ranks={each} must divide num_ranks={num_ranks}")
    return [*given] if traces.experts else [None]


def checked_fixed(
    strategy: str | None,
    mesh: Any,
    reshard: Any,
    prefetch: int | None,
    num_ranks: int,
    degrees: Sequence[Degrees],
) -> Fixed:
    """What is not searched.

    Raises:
        ValueError: for an unknown strategy, or a mesh of another number of ranks.
        TypeError: for values of other types.
    """
    if strategy is not None:
        find_strategy(strategy)
    if mesh is not None:
        mesh = checked_mesh(mesh)
        shape = " x ".join(map(str, mesh))
        tensor = sorted({each.tensor for each in degrees})
        if all(prod(mesh) * each != num_ranks for each in tensor):
            beside = "" if tensor == [1] else f" beside tensor_ranks={tensor}"
            raise ValueError(
                f"mesh_shape {shape} is not a mesh of num_ranks={num_ranks} ranks{beside}"
            )
        if all(mesh[-1] % each.context for each in degrees):
            context = sorted({each.context for each in degrees})
            raise ValueError(
                f"context_ranks={context} must divide the last dim of mesh_shape {shape}: "
                "parameters are sharded over data and context ranks together"
            )
    if prefetch is not None:
        check_number("prefetch", prefetch)
    if not (reshard is SEARCHED or reshard is None or isinstance(reshard, bool | int)):
        raise TypeError(
            "reshard_after_forward must be a bool, a number of ranks or None (the default), got "
            f"{reshard!r}: leave it out to have it searched"
        )
    return Fixed(strategy, mesh, reshard, prefetch)
