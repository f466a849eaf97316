"""Before the first forward of a root, ranks compare their models, once.

If ranks have different models, settings or weights, training hangs later, or silently trains a
mixture. So before anything is gathered, all ranks exchange checksums through the process group's
key-value store (a few requests each). Later steps do nothing.

``FSDP2_CHECK_RANKS=0`` in the environment of all ranks switches it off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import nn
from typing_extensions import override

from ...comm.transports import backend_name
from ...runtime.events import TreePart, registry
from ...runtime.runtime import Runtime
from ...runtime.states import State
from ...runtime.unit import Unit
from ...sharding.process_groups import timeout_of
from .comparison import by_ranks, describe, initial_values, name_of, sampled_values
from .initial_values import forget_initial
from .store_exchange import MAX_LINES, TITLE, RanksDisagreeError, StoreExchange, can_meet

SWITCH = "FSDP2_CHECK_RANKS"
# A rank may be late because it downloads or compiles. After this time another one names it.
WARN_AFTER_S = 30.0

_REPLICAS = (
    "They are replicas: nothing makes them equal later, because only their gradients are averaged. "
    "Call fsdp2.broadcast_replicas(model) before the first forward (DistributedDataParallel does "
    "this automatically), or give all ranks the same seed or checkpoint"
)
_MIXTURE = (
    "Ranks called fully_shard on models with different values, and each keeps its own rows: the "
    "sharded model is a mixture of them. Call torch.manual_seed(...) with the same seed on all "
    "ranks before building the model (and with different ones for data afterwards), or initialize "
    "the sharded model within fsdp2.init_on_whole_tensors(seed), or load a checkpoint. If you want "
    f"the mixture, set {SWITCH}=0 in the environment of all ranks"
)


class FirstForward(TreePart):
    """The comparison that is due before the first forward of a root."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._root, self._units = runtime.root.modules[0], runtime.units
        self._gathers = any(unit.mesh.num_shards > 1 for unit in self._units)

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        """The comparison for a tree; None if there is nothing to compare, or no store for it."""
        units = runtime.units
        alone = all(unit.mesh.size == 1 for unit in units)
        if alone or os.environ.get(SWITCH, "1") == "0":
            return None
        if not all(can_meet(_backend(unit)) for unit in units):
            return None
        return cls(runtime)

    @override
    def root_forward_begins(self) -> None:
        # Before anything is gathered: ranks with different models would hang in the first gather,
        # without an explanation.
        if self.is_due():
            self.compare()
            self.runtime.remove(self)

    def is_due(self) -> bool:
        """Whether all ranks must take part in the forward that begins.

        Replicas gather nothing: one of them may evaluate alone, until gradients are needed.
        """
        # A capture allows neither the copy of samples to the host nor a wait for other ranks. The
        # comparison stays due: the first forward outside of a capture compares.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return self._gathers or torch.is_grad_enabled()

    def compare(self) -> None:
        """Meet the other ranks.

        Raises:
            RanksDisagreeError: on all ranks, with the first differences; or on the ranks that came,
                with the ranks that did not come.
        """
        names = {module: name for name, module in self._root.named_modules()}
        about = f"run the first forward of '{name_of(self._units[0], names)}'"
        meetings = []
        with torch.no_grad():
            for ranks, units in by_ranks(self._units).items():
                # After this time, the first of the collectives that would hang also gives up.
                timeout_s = min(map(_timeout_s, units))
                meetings.append(StoreExchange("first", ranks, timeout_s, warn_after_s=WARN_AFTER_S))
                # Send to all groups before receiving from any: ranks may reach groups in different
                # orders, and two that each received first would wait for each other.
                meetings[-1].say(_topics(units, names), about)
        try:
            for exchange in meetings:
                _raise_for(exchange.hear())
        except RanksDisagreeError:
            # These units took other numbers of message tags on other ranks. A corrected model
            # in the same processes begins with equal ones.
            for unit in self._units:
                if unit.state is State.SHARDED:
                    unit.param_group.release_tags()
            raise
        # Now all ranks are here and have the same groups.
        for unit in self._units:
            for transports in unit.param_group.transports:
                transports.connect()
        for unit in self._units:
            forget_initial(unit)


def _topics(units: Sequence[Unit], names: Mapping[nn.Module, str]) -> dict[str, dict[str, str]]:
    topics = {"": describe(units, names)}
    for part, values in sampled_values(units, names).items():
        topics[f"values {part}"] = values
    for part, values in initial_values(units, names).items():
        topics[f"initial {part}"] = values
    return topics


def _raise_for(found: Mapping[str, list[str]]) -> None:
    """Raise an error with the differences that the ranks of a meeting found."""
    # The description first: different models always have different values.
    if "" in found:
        raise RanksDisagreeError("\n".join([TITLE, *found[""]]))
    for kind, advice in (("values", _REPLICAS), ("initial", _MIXTURE)):
        lines = [line for topic in found if topic.startswith(kind) for line in found[topic]]
        if lines:
            raise RanksDisagreeError("\n".join([TITLE, *lines[:MAX_LINES], advice]))


def _backend(unit: Unit) -> str:
    group = unit.mesh.shard_group or unit.mesh.replicate_group
    return "" if group is None else backend_name(group, unit.device)


def _timeout_s(unit: Unit) -> float:
    """How long a collective of the unit waits for the slowest rank, in seconds."""
    group = unit.mesh.shard_group or unit.mesh.replicate_group
    assert group is not None
    return timeout_of(group, unit.device).total_seconds()


registry.add(FirstForward)
