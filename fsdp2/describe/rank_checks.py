"""Checks that ranks do the same things, to debug hangs and replicas that drift apart.

All ranks of a mesh must build the same units, run them in the same order and reduce the same
gradients; if one does not, the others wait in a collective forever. The user calls these checks;
some of them also run automatically before the first forward (`first_forward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..features.partial_gradients import deferred_in
from ..guards.rank_agreement.comparison import all_values, by_ranks, describe, last_order, name_of
from ..guards.rank_agreement.store_exchange import (
    MAX_LINES,
    TITLE,
    RanksDisagreeError,
    StoreExchange,
)
from ..runtime.unit import Unit, units_in
from ..sharding.param import ShardedParam


def check_ranks_agree(model: nn.Module, *, values: bool = True, timeout_s: float = 60.0) -> None:
    """Check that all ranks sharded the model in the same way.

    Compares the units, their parameters (names, shapes, dtypes, placements, ``requires_grad``),
    their settings (mixed precision, resharding, offload, gradient sync), the order in which the
    last forward ran them, and, for rows that several ranks hold, their values bitwise. Every rank
    of the model's mesh must call it, between steps. It uses the store of the default process group
    and no collectives. Everything except the values is also compared automatically before the
    first forward, unless ``FSDP2_CHECK_RANKS=0`` is in the environment.

    Args:
        model: sharded, or with sharded modules inside.
        values: whether to compare parameters that several ranks hold (replicas of a 2-D mesh,
            replicated units, 0-dim parameters) by checksums, for which they are read once.
        timeout_s: how long to wait for the slowest rank, in seconds.

    Raises:
        RanksDisagreeError: (a RuntimeError) on every rank; says what differs and between which
            ranks, or which ranks did not call it.

    Example:
        >>> check_ranks_agree(model)
        RanksDisagreeError: Ranks disagree about the model:
        requires_grad of 'layers.3.bias': True (ranks 0, 1, 3), False (rank 2)
    """
    names = {module: name for name, module in model.named_modules()}
    for ranks, units in by_ranks(units_in(model)).items():
        topics = {"": describe(units, names) | last_order(units, names)}
        if values:
            for part, held in all_values(units, names).items():
                topics[f"values {part}"] = held
        found = StoreExchange("agree", ranks, timeout_s).compare(topics, "check that ranks agree")
        lines = found.get("") or [line for of_part in found.values() for line in of_part]
        if lines:
            raise RanksDisagreeError("\n".join([TITLE, *lines[:MAX_LINES]]))


@contextmanager
def watch_ranks(model: nn.Module, *, timeout_s: float = 60.0) -> Iterator[None]:
    """Context in which ranks compare the next operation before each gather and reduction.

    If a rank runs another module, reduces other gradients or stops early, an error names it instead
    of a hang. Tensor-parallel ranks also compare before each sum of a partial gradient whether it
    happens now or at the end of backward. Each step costs a message per unit and rank to the store
    of the default process group, so use it for debugging, not for regular training.

    Args:
        model: sharded, or with sharded modules inside.
        timeout_s: how long to wait for the slowest rank, in seconds.

    Raises:
        RanksDisagreeError: (a RuntimeError) in forward or backward, on every rank that arrived.

    Example:
        >>> with watch_ranks(model):
        ...     model(batch).sum().backward()
        RanksDisagreeError: Ranks do different things next: gather 'layers.1' in forward
        (ranks 0, 1), gather 'layers.2' in forward (rank 2)
    """
    names = {module: name for name, module in model.named_modules()}
    all_units = units_in(model)
    try:
        for ranks, units in by_ranks(all_units).items():
            for unit in units:
                _watch(unit, name_of(unit, names), StoreExchange("watch", ranks, timeout_s))
        yield
    finally:
        for unit in all_units:
            vars(unit).pop("start_unshard", None)
            vars(unit.gradients).pop("make_reductions", None)
            vars(deferred_in(unit)).pop("choose_group", None)


def _watch(unit: Unit, name: str, exchange: StoreExchange) -> None:
    """Shadow the class's methods on this object, so that unwatched units pay nothing."""
    start_unshard, make_reductions = unit.start_unshard, unit.gradients.make_reductions

    def gather(streams: Any) -> None:
        phase = "backward" if unit.runtime.in_backward else "forward"
        what = f"gather '{name}' in {phase}"
        if any(bucket.cache_valid for bucket in unit.buckets):  # which ones may differ by rank
            rest = [
                p.fqn.rsplit(".", 1)[-1]
                for b in unit.buckets
                if not b.cache_valid
                for p in b.params
            ]
            what += f" (only {', '.join(rest) or 'what it has already'})"
        _meet(exchange, what)
        start_unshard(streams)

    def reduce(taken: Any, **options: Any) -> Any:
        reductions = make_reductions(taken, **options)
        if reductions:
            grads = [
                param.fqn.rsplit(".", 1)[-1]
                for reduction in reductions
                for param, grad in zip(reduction.bucket.params, reduction.grads, strict=True)
                if grad is not None
            ]
            _meet(exchange, f"reduce '{name}' ({', '.join(grads)})")
        return reductions

    deferred = deferred_in(unit)
    choose_group = deferred.choose_group

    def choose(param: ShardedParam, grad: torch.Tensor, *, may_wait: bool) -> Any:
        group = choose_group(param, grad, may_wait=may_wait)
        over = param.summed_over(grad)
        if over is not None:
            ranks = tuple(dist.get_process_group_ranks(over))
            when = "at once" if group is None else "at the end of backward"
            of_sum = StoreExchange("watch", ranks, exchange.timeout_s)
            _meet(of_sum, f"sum the gradient of '{param.fqn}' {when}")
        return group

    vars(unit)["start_unshard"] = gather
    vars(deferred)["choose_group"] = choose
    vars(unit.gradients)["make_reductions"] = reduce


def _meet(exchange: StoreExchange, what: str) -> None:
    found = exchange.compare({"": {"next": what}}, what)
    if found:
        raise RanksDisagreeError(f"Ranks do different things {found[''][0]}")
