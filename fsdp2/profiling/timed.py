"""A communication while it is being recorded, and the transport that records it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..comm.transports import Finish, Transport, done
from ..runtime.unit import Unit
from .clocks import Clock, Mark
from .events import Communication


@dataclass
class Operation:
    """A `Communication` whose times are still marks; one without an end is still running."""

    unit: str
    kind: str
    phase: str
    num_ranks: int
    nbytes: int
    sent_bytes: int
    launched_s: float
    begin: Mark
    launch_s: float = 0.0
    end: Mark = None

    def read(self, read: Callable[[Mark], float]) -> Communication:
        """Convert the marks to times."""
        return Communication(
            self.unit,
            self.kind,
            self.phase,
            self.num_ranks,
            self.nbytes,
            self.sent_bytes,
            self.launched_s,
            self.launch_s,
            read(self.begin),
            read(self.end),
        )


class Watcher(Protocol):
    """The interface of a recorder that `TimedTransport` reports to."""

    clock: Clock

    def operation(
        self, unit: Unit, kind: str, num_ranks: int, sizes: tuple[int, int]
    ) -> Operation: ...

    def launched(self, operation: Operation, *, end: Mark = None) -> None: ...

    def waited(self, operation: Operation, begin: Mark, end: Mark) -> None: ...


class TimedTransport:
    """Wraps the transport of one reduction and records its calls.

    Args:
        sizes: bytes of the whole, and bytes sent.
        operations: list to which launched operations are appended.
    """

    def __init__(
        self,
        transport: Transport,
        recorder: Watcher,
        unit: Unit,
        kind: str,
        sizes: tuple[int, int],
        operations: list[Operation],
    ) -> None:
        self._transport = transport
        self._recorder = recorder
        self._unit = unit
        self._kind = kind
        self._sizes = sizes
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def reduce_scatter(self, *args: Any) -> Finish:
        return self._timed(self._transport.reduce_scatter, *args)

    def all_reduce(self, *args: Any) -> Finish:
        return self._timed(self._transport.all_reduce, *args)

    def _timed(self, launch: Callable[..., Finish], *args: Any) -> Finish:
        recorder = self._recorder
        num_ranks = self._transport.group.size()
        operation = recorder.operation(self._unit, self._kind, num_ranks, self._sizes)
        self._operations.append(operation)
        finish = launch(*args)
        if finish is done:  # on a stream
            recorder.launched(operation, end=recorder.clock.mark())
            return done
        recorder.launched(operation)

        def timed_finish() -> None:
            begin = recorder.clock.mark()
            finish()
            operation.end = recorder.clock.mark()
            recorder.waited(operation, begin, operation.end)

        return timed_finish
