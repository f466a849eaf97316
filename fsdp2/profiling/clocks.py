"""Moments on the host and on a device's streams, on one time axis.

A *mark* stands for a moment; it is read after the profile. On the host it is a number, on a stream
an event, so nothing is waited for while a step runs.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, Protocol

import torch

from ..comm.streams import device_module

Mark = Any


class Clock(Protocol):
    """Marks moments. Times are seconds since it was made."""

    stream_ordered: bool

    def host_s(self) -> float:
        """Now, on the host."""
        ...

    def mark(self, stream: Any = None) -> Mark:
        """The moment at which what was put on ``stream`` (default: the current one) is done."""
        ...

    def wait(self) -> None:
        """Until all marks can be read."""
        ...

    def read(self, mark: Mark) -> float:
        """The time of a mark."""
        ...


class HostClock:
    """Where the host orders the work."""

    stream_ordered = False

    def __init__(self) -> None:
        self._start_s = perf_counter()

    def host_s(self) -> float:
        return perf_counter() - self._start_s

    def mark(self, stream: Any = None) -> Mark:
        return perf_counter() - self._start_s

    def wait(self) -> None:
        pass

    def read(self, mark: Mark) -> float:
        return mark


class DeviceClock:
    """Where streams do. Waits for the device once, when it is made.

    Args:
        module: what makes streams and events: ``torch.cuda``, or something like it.
    """

    stream_ordered = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module
        module.synchronize(device)
        self._base = self.mark()
        self._base.synchronize()
        self._start_s = perf_counter()

    def host_s(self) -> float:
        return perf_counter() - self._start_s

    def mark(self, stream: Any = None) -> Mark:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device) if stream is None else stream)
        return event

    def wait(self) -> None:
        self._module.synchronize(self._device)

    def read(self, mark: Mark) -> float:
        return self._base.elapsed_time(mark) * 1e-3


def make_clock(device: torch.device) -> Clock:
    """The clock of what ``device`` runs."""
    module = device_module(device)
    return HostClock() if module is None else DeviceClock(device, module)
