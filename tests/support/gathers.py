"""Counts what a sharded model gathers, where transports send it, and how much is in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from fsdp2.comm.transports import GroupTransport
from fsdp2.transports.host.exchange import Exchange


class Gathers:
    """What was gathered of a model since `clear`.

    Attributes:
        forward, backward: how often, by names of parameters.
        peak_units: the most units that had gathered storage when a gather began.
    """

    def __init__(self, model: Any) -> None:
        self.units = model._units(True)
        self.clear()

    def clear(self) -> None:
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.peak_units = 0

    def note(self, plan: Any) -> None:
        for unit in self.units:
            for bucket in unit.buckets:
                gathered = bucket.gathered
                if gathered is None:
                    continue
                plans = [gathered.plan, gathered.secondary and gathered.secondary.plan]
                together = getattr(plan, "plans", [plan])
                if any(given is each for given in together for each in plans):
                    names = [param.fqn for param in bucket.params]
                    (self.backward if unit.runtime.in_backward else self.forward).update(names)
        self.peak_units = max(self.peak_units, sum(gathered_bytes(u) > 0 for u in self.units))

    @property
    def most_often(self) -> int:
        """How often the parameter was gathered in backward that was gathered most often."""
        return max(self.backward.values(), default=0)


@contextmanager
def counting(model: nn.Module) -> Iterator[Gathers]:
    """Count the gathers of a sharded model inside."""
    gathers = Gathers(model)
    patches = []
    for transport in (Exchange, GroupTransport):
        real = transport.all_gather

        def all_gather(self: Any, plan: Any, tag: int, real: Any = real) -> Any:
            gathers.note(plan)
            return real(self, plan, tag)

        patches.append(mock.patch.object(transport, "all_gather", all_gather))
    with patches[0], patches[1]:
        yield gathers


def gathered_bytes(unit: Any) -> int:
    """Bytes of gathered storage that have memory now."""
    segments = [bucket.gathered for bucket in unit.buckets if bucket.gathered is not None]
    return sum(storage.size() for each in segments for storage in each.storages)


def bytes_held(model: Any) -> int:
    """The same for all units of a model."""
    return sum(map(gathered_bytes, model._units(True)))
