"""A device that only records the work on its streams, and its dependencies.

`LaunchDevice` implements what `DeviceStreams` uses of ``torch.cuda``. The result is a graph of
`StreamLaunch` objects, to which the planner assigns times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...transports.host.topology import Topology
from ..trace.account import Account
from ..trace.events import Compute, CopyEnd, ExchangeEnd, HostCopy, Operation

# The streams of the model's own collectives, by group.
_BESIDE = {"tensor": "tensor parallel", "context": "context parallel"}


@dataclass(frozen=True)
class Collective:
    """One call of a collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or, with a `CommPolicy`, "all_to_all".
            "send": everything to the next rank of a ring.
        group: "shard", "secondary" (within the groups of ``reshard_after_forward=int``),
            "replicate", "within" and "across" (the two hops of a reduction), "tensor" or "context".
            With experts also "expert shard" (ranks with the same experts) and "experts" (ranks over
            which experts are distributed).
        nbytes: bytes of the whole data that is gathered, scattered or reduced, with padding.
        sent: bytes that this rank sends.
        messages: number of collectives in the call.
        unit: name of the unit.
        copied: bytes that copies to and from buffers of the call read and write.
        between: the part of ``sent`` that goes to other nodes; None: as in a ring or, for an
            all-to-all, the same number of bytes to each rank.
        params: number of parameters, or of their gradients.
    """

    kind: str
    group: str
    nbytes: int
    sent: int
    messages: int
    unit: str
    copied: int = 0
    between: int | None = None
    params: int = 1


@dataclass(frozen=True, eq=False)
class Copy:
    """Bytes copied between host and device: offloaded shards, gradients, activations."""

    kind: str
    nbytes: int
    unit: str


@dataclass(frozen=True, eq=False)
class StreamLaunch:
    """Work on a stream.

    Attributes:
        number: position in host order.
        after: numbers of the launches that it waits for, except the previous one on its stream.
        unit: name of the unit that it is for, if any.
    """

    number: int
    stream: str
    work: Compute | Collective | Copy
    after: tuple[int, ...]
    unit: str = ""
    phase: str = ""

    @property
    def lane(self) -> str:
        """Its stream; if all work is on one stream in host order, the stream it has on a GPU."""
        if self.stream != "compute" or not isinstance(self.work, Collective):
            return self.stream
        if self.work.kind == "all_to_all":  # a compressed reduction
            return "reduce-scatter"
        return self.work.kind.replace("_", "-")


class LaunchStream:
    """Like ``torch.cuda.Stream``."""

    def __init__(self, device: LaunchDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.last: int | None = None
        self.waits: set[int] = set()

    def frontier(self) -> frozenset[int]:
        """The launches whose completion implies that everything on this stream is complete."""
        own = () if self.last is None else (self.last,)
        return frozenset((*own, *self.waits))

    def wait_event(self, event: LaunchEvent) -> None:
        self.waits |= event.after - {self.last}

    def wait_stream(self, other: LaunchStream) -> None:
        if other is not self:
            self.waits |= other.frontier() - {self.last}

    def record_event(self, event: LaunchEvent | None = None) -> LaunchEvent:
        event = event or LaunchEvent(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        # The host waits, so all later launches come after.
        for stream in self.device.streams:
            stream.wait_stream(self)


class LaunchEvent:
    """Like ``torch.cuda.Event``."""

    def __init__(self, device: LaunchDevice) -> None:
        self._device = device
        self.after: frozenset[int] = frozenset()

    def record(self, stream: LaunchStream | None = None) -> None:
        self.after = (stream or self._device.current_stream()).frontier()

    def synchronize(self) -> None:
        for stream in self._device.streams:
            stream.wait_event(self)


class LaunchDevice:
    """Stands in for ``torch.cuda``.

    Attributes:
        launches: the launches so far.
        phase: phase that is recorded with each launch.
    """

    def __init__(self) -> None:
        self.launches: list[StreamLaunch] = []
        self.phase = ""
        self._names = iter(("all-gather", "reduce-scatter", "all-reduce"))
        self._beside: dict[str, LaunchStream] = {}
        self.compute = LaunchStream(self, "compute")
        self.streams = [self.compute]
        self._current = self.compute

    def launch(self, work: Compute | Collective | Copy, unit: str = "") -> None:
        """Put work on the current stream."""
        stream = self._current
        number = len(self.launches)
        after = tuple(sorted(stream.waits))
        self.launches.append(StreamLaunch(number, stream.name, work, after, unit, self.phase))
        stream.last = number
        stream.waits = set()

    def exchange(self, work: Collective, unit: str = "") -> LaunchEvent:
        """Put a collective on another stream, after compute so far; returns its end."""
        stream = self.beside_compute(_BESIDE.get(work.group, "all-to-all"))
        with self.stream(stream):
            self.launch(work, unit)
        return stream.record_event()

    def beside_compute(self, name: str) -> LaunchStream:
        """The stream of this name, which waits for compute so far."""
        stream = self._beside.get(name)
        if stream is None:
            stream = self._beside[name] = LaunchStream(self, name)
            self.streams.append(stream)
        stream.wait_stream(self.compute)
        return stream

    def Stream(self, device: Any = None, priority: int = 0) -> LaunchStream:  # noqa: N802
        stream = LaunchStream(self, next(self._names))
        self.streams.append(stream)
        return stream

    def Event(self) -> LaunchEvent:  # noqa: N802
        return LaunchEvent(self)

    def current_stream(self, device: Any = None) -> LaunchStream:
        return self._current

    @contextmanager
    def stream(self, stream: LaunchStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


class ReplayState:
    """State shared by all units of one replay.

    Attributes:
        transfers: every collective so far.
        device: the device of the streams; None if the host orders everything.
        topology: the nodes of the ranks.
        inside: name of the unit that is computing; empty outside all units.
    """

    def __init__(self, account: Account, device: LaunchDevice | None, topology: Topology) -> None:
        self.account = account
        self.device = device
        self.topology = topology
        self.transfers: list[Collective] = []
        self.inside = ""
        self._copies: dict[int, LaunchEvent] = {}  # of activations: their ends
        self._exchanges: dict[int, LaunchEvent] = {}  # the same for the model's own collectives

    def transfer(self, transfer: Collective) -> None:
        self.transfers.append(transfer)
        if self.device is not None:
            self.device.launch(transfer, transfer.unit)
            self.account.clock = len(self.device.launches)

    def exchange(self, transfer: Collective, number: int | None = None) -> None:
        """Record a collective that compute waits for at once, or at the end of this ``number``."""
        self.transfers.append(transfer)
        if self.device is None:
            return
        end = self.device.exchange(transfer, transfer.unit)
        self.account.clock = len(self.device.launches)
        if number is None:
            self.device.compute.wait_event(end)
        else:
            self._exchanges[number] = end

    def end_exchange(self, event: ExchangeEnd) -> None:
        """Let compute wait for an exchange."""
        if self.device is not None:
            self.device.compute.wait_event(self._exchanges.pop(event.number))

    def kernel(self, nbytes: int, dtype: torch.dtype, unit: str = "") -> None:
        """Record a kernel on the current stream that reads and writes ``nbytes`` in total.

        Args:
            unit: the unit that it is for; by default, the unit that is computing.
        """
        if self.device is not None and nbytes:
            operation = Operation(0, nbytes, dtype)
            self.device.launch(Compute((operation,), 0, 0), unit or self.inside)

    def wait_on_host(self) -> None:
        """Let the host wait for the current stream."""
        if self.device is not None:
            self.device.current_stream().synchronize()

    def host_copy(self, event: HostCopy | CopyEnd) -> None:
        """Record a copy of an offloaded activation, or that compute waits for one."""
        if self.device is None:
            return
        if isinstance(event, CopyEnd):
            self.device.compute.wait_event(self._copies.pop(event.number))
            return
        stream = self.device.beside_compute("copies")
        with self.device.stream(stream):
            self.device.launch(Copy(event.kind, event.nbytes, self.inside), self.inside)
            self.account.clock = len(self.device.launches)
        self._copies[event.number] = stream.record_event()

    def copy(self, kind: str, nbytes: int, unit: str) -> None:
        """Record a copy between host and device."""
        if self.device is not None and nbytes:
            self.device.launch(Copy(kind, nbytes, unit), unit)
