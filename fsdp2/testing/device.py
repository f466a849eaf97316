"""A device with streams and events, but no memory or speed, that records the calls to it.

`SimulatedDevice` implements what `DeviceStreams` uses of ``torch.cuda``: `Stream`, `Event`,
`current_stream` and the context manager `stream`. Nothing is delayed or reordered: the checker
determines from the recording what may run out of order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from .order import HOST, Event, Record, Synchronize, Wait


class SimulatedStream:
    """Like ``torch.cuda.Stream``."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.name = name
        self._device = device

    def wait_event(self, event: SimulatedEvent) -> None:
        """Make later work on this stream wait for ``event``."""
        self._device.emit(Wait(self.name, event.number))

    def wait_stream(self, other: SimulatedStream) -> None:
        """Make later work on this stream wait for the work on ``other`` so far."""
        self.wait_event(other.record_event())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        """An event that represents the work on this stream so far."""
        event = event or SimulatedEvent(self._device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for this stream."""
        self._device.emit(Synchronize(self.name))

    @override
    def __repr__(self) -> str:
        return f"SimulatedStream({self.name!r})"


class SimulatedEvent:
    """Like ``torch.cuda.Event``."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.number = device.next_event()
        self._device = device

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Represent the work on ``stream`` (default: the current one) so far."""
        stream = stream or self._device.current_stream()
        self._device.emit(Record(stream.name, self.number))

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """Make ``stream`` (default: the current one) wait."""
        (stream or self._device.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait."""
        self._device.emit(Wait(HOST, self.number))


class SimulatedDevice:
    """Takes the place of ``torch.cuda`` as the module of a device.

    Args:
        emit: called with every event of the trace.
        names: names of the streams, in the order of their creation.

    Attributes:
        compute: the initial current stream.
        capturing: whether it reports that a graph is being captured.
    """

    def __init__(
        self, emit: Callable[[Event], None], names: tuple[str, ...] = ("gather", "reduce", "all")
    ) -> None:
        self.emit = emit
        self._names = names
        self._num_streams = 0
        self._num_events = 0
        self.compute = SimulatedStream(self, "compute")
        self._current = self.compute
        self.capturing = False

    def Stream(self, device: Any = None, priority: int = 0) -> SimulatedStream:  # noqa: N802
        """A new stream. Every runtime creates its own, in the same order.

        If ``device`` is a string, a test's own stream with that name.
        """
        if isinstance(device, str):
            return SimulatedStream(self, device)
        number, self._num_streams = self._num_streams, self._num_streams + 1
        runtime, index = divmod(number, len(self._names))
        return SimulatedStream(self, self._names[index] + (f"#{runtime}" if runtime else ""))

    def Event(self) -> SimulatedEvent:  # noqa: N802
        """A new event."""
        return SimulatedEvent(self)

    def next_event(self) -> int:
        """A number for an event."""
        self._num_events += 1
        return self._num_events

    def current_stream(self, device: Any = None) -> SimulatedStream:
        """The current stream."""
        return self._current

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Put work on ``stream`` inside the context."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before
