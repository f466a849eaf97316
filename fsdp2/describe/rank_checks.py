"""Checks that ranks do the same work, to debug hangs and replicas that drift apart.

All ranks of a mesh must build the same units, run them in the same order and reduce the same
gradients. If one does not, the others wait in a collective forever. The user calls these checks;
some of them also run automatically before the first forward (`first_forward`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from ..features.partial_gradients import DeferredSums, group_of_sum
from ..guards.rank_agreement.comparison import all_values, by_ranks, describe, last_order, name_of
from ..guards.rank_agreement.store_exchange import (
    MAX_LINES,
    TITLE,
    RanksDisagreeError,
    StoreExchange,
)
from ..observing import observing
from ..runtime.events import TreePart
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit, units_in
from ..sharding.param import ShardedParam


def check_ranks_agree(model: nn.Module, *, values: bool = True, timeout_s: float = 60.0) -> None:
    """Check that all ranks sharded the model in the same way.

    The check compares the units, their parameters (names, shapes, dtypes, placements,
    ``requires_grad``), their settings (mixed precision, resharding, offload, gradient sync) and
    their order in the last forward. It also compares the values of rows that several ranks hold,
    bitwise. Call it on every rank of the model's mesh, between steps. It uses the store of the
    default process group and no collectives. Everything except the values is also compared
    automatically before the first forward, unless ``FSDP2_CHECK_RANKS=0`` is in the environment.

    Args:
        model: sharded, or with sharded modules inside.
        values: whether to compare parameters that several ranks hold (replicas of a 2-D mesh,
            replicated units, 0-dim parameters). Their checksums are compared, so each is read once.
        timeout_s: how long to wait for the slowest rank, in seconds.

    Raises:
        RanksDisagreeError: (a RuntimeError) on every rank. The message names the difference and
            the ranks, or the ranks that did not call it.

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
    """Context manager in which ranks compare their next operation before each gather and reduction.

    If a rank runs another module, reduces other gradients or stops early, an error names it, where
    the job would otherwise hang. Tensor-parallel ranks also compare whether each partial gradient
    is summed now or at the end of backward. In each step, every rank sends messages for every unit
    to the store of the default process group. Use it for debugging, not for regular training.

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
    compared = {
        unit: _Operations(unit, name_of(unit, names), StoreExchange("watch", ranks, timeout_s))
        for ranks, units in by_ranks(units_in(model)).items()
        for unit in units
    }

    class Watch(_Watch):
        operations = compared

    try:
        for unit, operations in compared.items():
            DeferredSums.of(unit).observer = operations.sum_partial
        with observing(Watch):
            yield
    finally:
        for unit in compared:
            DeferredSums.of(unit).observer = None
        compared.clear()  # a class lives until the garbage collector comes


class _Operations:
    """Compares the operations of one unit across ranks before each of them."""

    def __init__(self, unit: Unit, name: str, exchange: StoreExchange) -> None:
        self._unit, self._name, self._exchange = unit, name, exchange

    def gather(self) -> None:
        unit = self._unit
        phase = "backward" if unit.runtime.in_backward else "forward"
        what = f"gather '{self._name}' in {phase}"
        if any(bucket.cache_valid for bucket in unit.buckets):  # which ones may differ by rank
            rest = [
                p.fqn.rsplit(".", 1)[-1]
                for b in unit.buckets
                if not b.cache_valid
                for p in b.params
            ]
            what += f" (only {', '.join(rest) or 'what it has already'})"
        _meet(self._exchange, what)

    def reduce(self, reductions: Sequence[Reduction]) -> None:
        grads = [
            param.fqn.rsplit(".", 1)[-1]
            for reduction in reductions
            for param, grad in zip(reduction.bucket.params, reduction.grads, strict=True)
            if grad is not None
        ]
        _meet(self._exchange, f"reduce '{self._name}' ({', '.join(grads)})")

    def sum_partial(self, param: ShardedParam, grad: torch.Tensor, deferred: bool) -> None:
        over = group_of_sum(param, grad)
        if over is not None:
            ranks = tuple(dist.get_process_group_ranks(over))
            when = "at the end of backward" if deferred else "at once"
            of_sum = StoreExchange("watch", ranks, self._exchange.timeout_s)
            _meet(of_sum, f"sum the gradient of '{param.fqn}' {when}")


class _Watch(TreePart):
    operations: ClassVar[Mapping[Unit, _Operations]]

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(unit in cls.operations for unit in runtime.units) else None

    @override
    def gather_requested(self, unit: Unit) -> None:
        if unit in self.operations:
            self.operations[unit].gather()

    @override
    def reductions_launched(self, unit: Unit, reductions: Sequence[Reduction]) -> None:
        if unit in self.operations:
            self.operations[unit].reduce(reductions)


def _meet(exchange: StoreExchange, what: str) -> None:
    found = exchange.compare({"": {"next": what}}, what)
    if found:
        raise RanksDisagreeError(f"Ranks do different things {found[''][0]}")
