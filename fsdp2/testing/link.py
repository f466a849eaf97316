"""A simulated link: a thread that waits on the host, a kernel that spins on CUDA."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.profiler import record_function
from typing_extensions import override

Move = Callable[[], None]  # does the copies of a collective


@dataclass(frozen=True)
class Transfer:
    """One collective on a link.

    Attributes:
        name: such as ``simulated::all_gather``.
        wire_bytes: bytes that this rank sent: S times its factor in the formula of
            `SimulatedGroup`.
        seconds: duration by that formula.
        begin, end: when it used the link, in seconds of ``time.perf_counter``. On CUDA, both are
            the time when it was enqueued; the profiler shows when it ran.
    """

    name: str
    wire_bytes: float
    seconds: float
    begin: float
    end: float


class Link:
    """A link shared by the collectives of the same ranks, which use it one after the other.

    The collectives run in the order of the calls, as on one NCCL communicator. Real communicators
    over the same wires would share the bandwidth instead, which takes the same time in total.

    Args:
        bandwidth: bytes per second that a rank sends; may be ``math.inf``. It may be changed while
            nothing is in flight.
        latency: seconds per collective.

    Attributes:
        log: list to which a `Transfer` is appended for each collective; None: no log.

    Raises:
        ValueError: if the bandwidth is not above 0, or the latency is negative or infinite.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        if not bandwidth > 0:
            raise ValueError(f"bandwidth must be above 0 bytes per second, got {bandwidth}")
        if not 0 <= latency < math.inf:
            raise ValueError(f"latency must be 0 or more seconds, and finite, got {latency}")
        self.bandwidth = bandwidth
        self.latency = latency
        self.log: list[Transfer] | None = None
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._free_at = 0.0
        self._stream: Any = None
        self._event: Any = None

    def seconds(self, wire_bytes: float) -> float:
        """Duration of a collective in which every rank sends ``wire_bytes``."""
        return self.latency + wire_bytes / self.bandwidth

    def close(self) -> None:
        """Finish the collectives in flight and end the thread."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    # -- on the host ------------------------------------------------------------------------

    def start(self, name: str, wire_bytes: float, move: Move, result: Any = None) -> dist.Work:
        """Copy and wait on the link's thread; the work is done when the time is over."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="simulated link", daemon=True)
            self._thread.start()
        work = _HostWork(result)
        self._tasks.put((name, wire_bytes, move, work, time.perf_counter()))
        return work

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            name, wire_bytes, move, work, called = task
            error = self._transfer(name, wire_bytes, move, called)
            done = work.end(error)
            # The waiter may free the tensors, so nothing here may still hold them.
            del task, move, work, error
            done.set()

    def _transfer(
        self, name: str, wire_bytes: float, move: Move, called: float
    ) -> BaseException | None:
        begin = max(called, self._free_at)  # the thread may wake up late, but the link is on time
        seconds = self.seconds(wire_bytes)
        try:
            with record_function(name):
                move()
                while (left := begin + seconds - time.perf_counter()) > 0:
                    time.sleep(left)
        except BaseException as error:
            return error
        self._free_at = begin + seconds
        if self.log is not None:
            self.log.append(Transfer(name, wire_bytes, seconds, begin, time.perf_counter()))
        return None

    # -- on CUDA ----------------------------------------------------------------------------

    def enqueue(
        self, name: str, wire_bytes: float, move: Move, result: list[torch.Tensor], own: bool
    ) -> dist.Work:
        """Spin and copy on the current stream, or on one of the link's.

        Args:
            own: use the link's stream; the work's ``wait`` then blocks the stream that is current
                at that time.
        """
        device = result[0].device
        stream = torch.cuda.current_stream(device)
        if own:
            if self._stream is None:
                self._stream = torch.cuda.Stream(device=device)
            self._stream.wait_stream(stream)
            stream = self._stream
        seconds = self.seconds(wire_bytes)
        # A graph cannot wait for work from before its capture.
        capturing = torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(stream), record_function(name):
            if self._event is not None and not capturing:
                stream.wait_event(self._event)
            if seconds > 0:
                torch.cuda._sleep(round(seconds * cycles_per_second(device)))
            move()
            event = torch.cuda.Event()
            event.record(stream)
        self._event = None if capturing else event
        if self.log is not None:
            now = time.perf_counter()
            self.log.append(Transfer(name, wire_bytes, seconds, now, now))
        return _StreamWork(event if own else None, move, result)


class _HostWork(dist.Work):
    """A collective on the thread of a link; ``wait`` blocks until its time is over."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result = result

    def end(self, error: BaseException | None) -> threading.Event:
        """Record how it ended; the caller sets the returned event next."""
        self._error = error
        return self._done

    @override
    def is_completed(self) -> bool:
        return self._done.is_set()

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    @override
    def get_future(self) -> Future:
        self.wait()
        future: Future = Future()
        future.set_result(self._result)
        return future


class _StreamWork(dist.Work):
    """A collective on a stream; ``wait`` makes the current stream wait."""

    def __init__(self, event: Any, move: Move, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._event = event
        self._move: Move | None = move  # keeps the inputs alive
        self._result = result

    @override
    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream(self._result[0].device).wait_event(self._event)
        self._move = None
        return True

    @override
    def get_future(self) -> Future:
        self.wait()
        future: Future = Future(devices=[self._result[0].device])
        future.set_result(self._result)
        return future


def cycles_per_second(device: torch.device, *, measure: bool = False) -> float:
    """The rate at which ``torch.cuda._sleep`` counts: 1 / (seconds per cycle).

    Measured at the first call, as the difference between a long and a short spin after a warm-up.
    This is the clock of the multiprocessors: under heavy load it may fall below the measured rate,
    and spins then take longer.

    Args:
        measure: measure again, for instance after some steps of training.
    """
    rate = _rates.get(device.index)
    if rate is None or measure:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A SimulatedGroup measures the GPU's clock at its first collective, which is not "
                "possible while a CUDA graph is captured: run a step before the capture"
            )
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device=device)):
            _spin_ms(20_000_000)
            long, short = (min(_spin_ms(cycles) for _ in range(3)) for cycles in (4e6, 1e6))
        rate = _rates[device.index] = 3e6 / ((long - short) * 1e-3)
    return rate


_rates: dict[int, float] = {}


def _spin_ms(cycles: float) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(int(cycles))
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
