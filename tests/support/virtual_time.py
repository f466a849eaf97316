"""Time that passes only where a test says so: compute takes what it is told, links what they are.

`virtual_host` is the path of the CPU: one clock, which compute moves on and a wait moves to the end
of what it waits for. `virtual_device` is the path of CUDA: every stream has a time of its own,
which work and events move on; the host takes no time. Both use the real runtime, over a
`SimulatedGroup` whose link is virtual, so every number of a profile can be worked out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.comm.streams import simulating
from fsdp2.profiling import clocks
from fsdp2.testing import simulated, simulated_mesh
from fsdp2.testing.link import Link


class Time:
    """What compute moves on: the host's clock, or the current stream."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        """Now."""
        return self.now

    def work(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds


# -- the host ---------------------------------------------------------------------------------


class _Work(dist.Work):
    def __init__(self, time: Time, done: float) -> None:
        super().__init__()
        self._time, self._done = time, done

    def wait(self, timeout: Any = None) -> bool:
        self._time.now = max(self._time.now, self._done)
        return True


class _HostLink(Link):
    """Messages one after the other; who waits is at least as late as they are."""

    time: Time

    def start(self, name: str, wire_bytes: float, move: Any, result: Any = None) -> dist.Work:
        move()
        self._free_at = max(self.time.now, self._free_at) + self.seconds(wire_bytes)
        return _Work(self.time, self._free_at)


@contextmanager
def virtual_host(
    shape: int | Sequence[int], bandwidth: float, latency: float = 0.0
) -> Iterator[tuple[DeviceMesh, Time]]:
    """A mesh whose first rank is this process, and its clock."""
    time = Time()
    link = type("HostLink", (_HostLink,), {"time": time})
    with (
        mock.patch.object(simulated, "Link", link),
        mock.patch.object(clocks, "perf_counter", time.read),
        simulated_mesh(shape, bandwidth, latency) as mesh,
    ):
        yield mesh, time


# -- a device ---------------------------------------------------------------------------------


class _Stream:
    def __init__(self) -> None:
        self.now = 0.0

    def wait_event(self, event: _Event) -> None:
        self.now = max(self.now, event.time)

    def wait_stream(self, other: _Stream) -> None:
        self.now = max(self.now, other.now)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.time = 0.0

    def record(self, stream: _Stream) -> None:
        self.time = stream.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        assert self.timed
        assert other.timed
        return 1e3 * (other.time - self.time)


class VirtualDevice(Time):
    """Stands in for ``torch.cuda``."""

    Event = _Event

    def __init__(self) -> None:
        self._current = _Stream()
        self.num_synchronized = 0

    def Stream(self, device: Any = None, priority: int = 0) -> _Stream:  # noqa: N802
        return _Stream()

    def current_stream(self, device: Any = None) -> _Stream:
        return self._current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def synchronize(self, device: Any = None) -> None:
        self.num_synchronized += 1

    def work(self, seconds: float) -> None:
        self._current.now += seconds


class _DeviceLink(Link):
    """Collectives on the current stream; those of other streams have communicators of their own."""

    time: VirtualDevice

    def start(self, name: str, wire_bytes: float, move: Any, result: Any = None) -> Any:
        move()
        self.time.work(self.seconds(wire_bytes))
        return None


@contextmanager
def virtual_device(
    shape: int | Sequence[int], bandwidth: float, latency: float = 0.0
) -> Iterator[tuple[DeviceMesh, VirtualDevice]]:
    """A mesh whose first rank is this process, and the device with its streams."""
    device = VirtualDevice()
    link = type("DeviceLink", (_DeviceLink,), {"time": device})
    with (
        mock.patch.object(simulated, "Link", link),
        simulating(device),
        simulated_mesh(shape, bandwidth, latency) as mesh,
    ):
        yield mesh, device


# -- compute ----------------------------------------------------------------------------------


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, time: Time, forward_s: float, backward_s: float) -> Tensor:
        ctx.time, ctx.backward_s = time, backward_s
        time.work(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.time.work(ctx.backward_s)
        return grad, None, None, None


class Layer(nn.Module):
    """A square weight without bias, whose products take a given time."""

    def __init__(self, dim: int, time: Time, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dim) / dim)
        self.args = (time, forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        return _Take.apply(x @ self.weight, *self.args)
