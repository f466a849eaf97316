"""Times on the host and on a device's streams, on one time axis.

A *mark* is a number that stands for a moment and is read after the profile. On the host it is the
time, on a stream the number of an event, so a step never waits for its marks.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

from ..comm.streams import device_module

Mark = float


class Clock(Protocol):
    """Marks moments. Times are seconds since the clock was created."""

    stream_ordered: bool

    @property
    def host(self) -> Callable[[], float]:
        """Call it for the time on the host, which `host_s` converts."""
        ...

    @property
    def mark(self) -> Callable[[], Mark]:
        """Call it to mark when the work so far on the current stream is done."""
        ...

    def wait(self) -> None:
        """Wait until all marks can be read."""
        ...

    def read(self, mark: Mark) -> float:
        """The time of a mark."""
        ...

    def host_s(self, host: float) -> float:
        """Convert a result of ``host`` to a time."""
        ...


class HostClock:
    """The clock for devices on which the host orders the work."""

    stream_ordered = False

    def __init__(self) -> None:
        # Marks come straight from the system, without a Python function: thirty per unit and step.
        self.mark: Callable[[], Mark] = perf_counter
        self.host: Callable[[], float] = perf_counter
        self._start_s = perf_counter()

    def wait(self) -> None:
        pass

    def read(self, mark: Mark) -> float:
        return mark - self._start_s

    def host_s(self, host: float) -> float:
        return host - self._start_s


class DeviceClock:
    """The clock for devices with streams. Waits for the device once, when it is created.

    Args:
        module: provides streams and events: ``torch.cuda``, or a module like it.
    """

    stream_ordered = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        self._events: list[Any] = []
        module.synchronize(device)
        self.mark()
        self._events[0].synchronize()
        self.host: Callable[[], float] = perf_counter
        self._start_s = perf_counter()

    def mark(self) -> Mark:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        self._events.append(event)
        return len(self._events) - 1

    def wait(self) -> None:
        self._module.synchronize(self._device)

    def read(self, mark: Mark) -> float:
        return self._events[0].elapsed_time(self._events[int(mark)]) * 1e-3

    def host_s(self, host: float) -> float:
        return host - self._start_s


def make_clock(device: torch.device) -> Clock:
    """The clock for work on ``device``."""
    module = device_module(device)
    return HostClock() if module is None else DeviceClock(device, module)
