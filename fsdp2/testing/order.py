"""Proves the order of work on several streams: happens-before over a list of events.

A trace lists the host's actions in order: it launches work on streams, records events, makes
streams wait for them, and allocates and frees memory. From a trace, vector clocks determine which
work always happens before which, however fast or slow each stream runs:

- work on a stream happens after earlier work on the stream, after everything that it waited for,
  and after everything that the host had done or waited for;
- an event represents the work on its stream up to its last `Record` before the `Wait`;
- the host is ordered after work only if it waited for it (`Synchronize`, `Finish`).

The rules, over byte ranges of blocks of memory:

- a read happens after every write to the range, and every byte of it was written since the block
  was allocated (if it may contain padding, at least one byte);
- a write happens after every read and every write of the range;
- an access happens after the point on the owner's stream at which the block was allocated;
- a block is freed only when all accesses happen before the next work of the *owner's stream*: a
  caching allocator may reuse it on that stream at once, and on no other;
- nothing is accessed after it was freed;
- a range that is *held* (a gradient that is still needed) is neither overwritten nor freed;
- every message is waited for exactly once, and no stream waits for an event that was never
  recorded.

This module does not use torch; `fsdp2.testing.trace` records traces of real runs.

Example:
    >>> from fsdp2.testing.order import Access, Allocate, Launch, check
    >>> trace = [
    ...     Allocate(block=0, nbytes=8, stream="gather"),
    ...     Launch("gather", "all-gather", (Access(0, 0, 8, writes=True),)),
    ...     Launch("compute", "linear", (Access(0, 0, 8, reads=True),)),
    ... ]
    >>> [violation.kind.name for violation in check(trace)]
    ['USED_BEFORE_ALLOCATED', 'READ_TOO_EARLY']
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from typing_extensions import override

HOST = "host"

Clock = dict[str, int]


# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Access:
    """An access to bytes ``start`` to ``stop`` of a block; in place if ``reads`` and ``writes``.

    With ``padded``, some of the bytes may be padding that was never written.
    """

    block: int
    start: int
    stop: int
    reads: bool = False
    writes: bool = False
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """Work that is launched on a stream; on ``HOST``, it is done at once.

    With ``message``, it is the work of a host-ordered collective: ``stream`` represents the
    network, and `Finish` makes the host wait.
    """

    stream: str
    name: str
    accesses: tuple[Access, ...]
    message: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """``event`` represents the work on ``stream`` so far."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Later work of ``stream`` (or the host) happens after ``event``."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits for all work on ``stream``."""

    stream: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The host waits for a message."""

    message: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """A block of memory for ``stream``; with ``filled``, it was written before the trace began."""

    block: int
    nbytes: int
    stream: str
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """The host returns the block to the allocator now."""

    block: int


@dataclass(frozen=True, slots=True)
class Held:
    """From now on, exactly ``ranges`` of the block are held for this ``reason``."""

    block: int
    reason: str
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on the host without effect on the order; used to analyse overlap."""

    name: str
    subject: str


Event = (
    Launch | Record | Wait | Synchronize | Finish | Allocate | Free | Held | Mark
)  # everything that a trace holds


# -- results -----------------------------------------------------------------------------------


class Kind(Enum):
    """The kind of a violation."""

    NEVER_WRITTEN = "reads memory that was never written"
    READ_TOO_EARLY = "may read before the write is done"
    OVERWRITTEN_IN_USE = "may overwrite data that is still being read or written"
    USED_BEFORE_ALLOCATED = "may use memory while its stream still uses it for something else"
    FREED_IN_USE = "is freed while in use"
    USED_AFTER_FREE = "uses memory that was freed"
    HELD_LOST = "overwrites or frees data that is still needed"
    WAITED_TWICE = "is waited for twice"
    NEVER_WAITED = "is never waited for"
    NO_EVENT = "waits for an event that was never recorded"


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule broken by the event at ``index`` of the trace, against ``earlier`` work."""

    kind: Kind
    index: int
    what: str
    block: int | None = None
    earlier: str = ""

    @override
    def __str__(self) -> str:
        against = f", against {self.earlier}" if self.earlier else ""
        where = "" if self.block is None else f" (block {self.block})"
        return f"event {self.index}: {self.what} {self.kind.value}{where}{against}"


@dataclass(slots=True)
class _Past:
    """An access that later ones must be ordered against."""

    start: int
    stop: int
    stream: str
    time: int
    writes: bool
    name: str


@dataclass(slots=True)
class _Block:
    nbytes: int
    owner: str
    allocated: tuple[str, int] | None
    past: list[_Past] = field(default_factory=list)
    filled: list[tuple[int, int]] = field(default_factory=list)
    held: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    live: bool = True


class Checker:
    """Checks events one by one and collects `violations`.

    Attributes:
        violations: the violations so far.
        launched: with ``keep_clocks``, the stream, the time on it and the clock of every `Launch`,
            by index; see `happens_before`.
    """

    def __init__(self, *, keep_clocks: bool = False) -> None:
        self.violations: list[Violation] = []
        self.launched: dict[int, tuple[str, int, Clock]] = {}
        self._keep_clocks = keep_clocks
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _Block] = {}
        self._open: dict[int, tuple[str, str]] = {}  # messages: stream and name
        self._names: dict[int, str] = {}  # names of messages that were waited for
        self._index = -1
        self._steps = {
            Launch: self._launch,
            Record: self._record,
            Wait: self._wait,
            Synchronize: self._synchronize,
            Finish: self._finish,
            Allocate: self._allocate,
            Free: self._free,
            Held: self._hold,
        }

    def feed(self, event: Event) -> None:
        """Check the next event."""
        self._index += 1
        step = self._steps.get(type(event))
        if step is not None:
            step(event)  # type: ignore[operator]

    def end(self) -> None:
        """End the trace: report messages that were never waited for."""
        for _, name in self._open.values():
            self._report(Kind.NEVER_WAITED, name)
        self._open.clear()

    def happens_before(self, first: int, second: int) -> bool:
        """Whether the launch at index ``first`` always happens before the one at ``second``."""
        stream, time, _ = self.launched[first]
        return first < second and self.launched[second][2].get(stream, 0) >= time

    def concurrent(self, first: int, second: int) -> bool:
        """Whether two launches may run at the same time: neither waits for the other."""
        return not self.happens_before(first, second) and not self.happens_before(second, first)

    # -- clocks ---------------------------------------------------------------------------------

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _tick(self, stream: str) -> Clock:
        """The clock of ``stream`` at a new point, which happens after the host so far."""
        clock = self._clock(stream)
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _record(self, event: Record) -> None:
        clock = self._clock(event.stream)
        _join(clock, self._clocks[HOST])
        self._events[event.event] = dict(clock)

    def _wait(self, event: Wait) -> None:
        if event.event not in self._events:
            self._report(Kind.NO_EVENT, event.stream)
            return
        _join(self._clock(event.stream), self._events[event.event])

    def _synchronize(self, event: Synchronize) -> None:
        _join(self._clocks[HOST], self._clock(event.stream))

    def _finish(self, event: Finish) -> None:
        if event.message not in self._open:
            self._report(Kind.WAITED_TWICE, self._names.get(event.message, "a message"))
            return
        stream, name = self._open.pop(event.message)
        self._names[event.message] = name
        _join(self._clocks[HOST], self._clock(stream))

    # -- memory ---------------------------------------------------------------------------------

    def _allocate(self, event: Allocate) -> None:
        block = _Block(event.nbytes, event.stream, None)
        self._blocks[event.block] = block
        if event.filled:
            block.filled.append((0, event.nbytes))
        else:
            block.allocated = (event.stream, self._tick(event.stream)[event.stream])

    def _free(self, event: Free) -> None:
        block = self._blocks[event.block]
        block.live = False
        clock = dict(self._clock(block.owner))
        _join(clock, self._clocks[HOST])
        for past in block.past:
            if clock.get(past.stream, 0) < past.time:
                self._report(Kind.FREED_IN_USE, "memory", event.block, past)
        for reason in block.held:
            self._report(Kind.HELD_LOST, "memory", event.block, earlier=reason)
        block.past.clear()

    def _hold(self, event: Held) -> None:
        block = self._blocks[event.block]
        if event.ranges:
            block.held[event.reason] = event.ranges
        else:
            block.held.pop(event.reason, None)

    def _launch(self, event: Launch) -> None:
        if event.message is not None:
            self._open[event.message] = (event.stream, event.name)
        clock = self._tick(event.stream)
        if self._keep_clocks:
            self.launched[self._index] = (event.stream, clock[event.stream], dict(clock))
        for access in event.accesses:  # reads first: they see the contents before the writes
            if access.reads:
                self._check(event, access, clock, write=False)
        for access in event.accesses:
            if access.writes:
                self._check(event, access, clock, write=True)
        for access in event.accesses:
            self._note(event, access, clock[event.stream])

    def _check(self, event: Launch, access: Access, clock: Clock, *, write: bool) -> None:
        block = self._blocks.get(access.block)
        if block is None or not block.live or access.stop > block.nbytes:
            self._report(Kind.USED_AFTER_FREE, event.name, access.block)
            return
        if block.allocated is not None and clock.get(block.allocated[0], 0) < block.allocated[1]:
            self._report(Kind.USED_BEFORE_ALLOCATED, event.name, access.block)
        if not write:
            ask = _touches if access.padded else _covers
            if not ask(block.filled, access.start, access.stop):
                self._report(Kind.NEVER_WRITTEN, event.name, access.block)
        kind = Kind.OVERWRITTEN_IN_USE if write else Kind.READ_TOO_EARLY
        for past in block.past:
            overlaps = past.start < access.stop and access.start < past.stop
            ordered = clock.get(past.stream, 0) >= past.time
            if (write or past.writes) and overlaps and not ordered:
                self._report(kind, event.name, access.block, past)
        if write and not access.reads:
            for reason, ranges in block.held.items():
                if any(start < access.stop and access.start < stop for start, stop in ranges):
                    self._report(Kind.HELD_LOST, event.name, access.block, earlier=reason)

    def _note(self, event: Launch, access: Access, time: int) -> None:
        block = self._blocks.get(access.block)
        if block is None or not block.live:
            return
        start, stop, stream = access.start, access.stop, event.stream
        # Accesses inside this one and ordered before it need not be checked again: a write comes
        # after everything there, a read after earlier reads of the same stream.
        block.past = [
            past
            for past in block.past
            if not (start <= past.start and past.stop <= stop)
            or not (access.writes or (past.stream == stream and not past.writes))
        ]
        block.past.append(_Past(start, stop, stream, time, access.writes, event.name))
        if access.writes:
            _add(block.filled, start, stop)

    def _report(
        self,
        kind: Kind,
        what: str,
        block: int | None = None,
        past: _Past | None = None,
        earlier: str = "",
    ) -> None:
        if past is not None:
            earlier = f"{past.name} on {past.stream}"
        self.violations.append(Violation(kind, self._index, what, block, earlier))


def check(events: Iterable[Event]) -> list[Violation]:
    """Return all violations of a trace.

    Args:
        events: a trace of `recording`, or a list written by hand.

    Example:
        >>> allocate = Allocate(block=0, nbytes=8, stream="compute")
        >>> read = Launch("compute", "relu", (Access(0, 0, 8, reads=True),))
        >>> [violation.kind.name for violation in check([allocate, read])]
        ['NEVER_WRITTEN']
    """
    checker = Checker()
    for event in events:
        checker.feed(event)
    checker.end()
    return checker.violations


def _join(clock: Clock, other: Mapping[str, int]) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def _covers(ranges: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether ``ranges``, which are disjoint and not adjacent, contain ``start`` to ``stop``."""
    return start >= stop or any(a <= start and stop <= b for a, b in ranges)


def _touches(ranges: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether ``ranges`` contain any part of ``start`` to ``stop``."""
    return start >= stop or any(a < stop and start < b for a, b in ranges)


def _add(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Add a range, merging it with overlapping and adjacent ones."""
    if _covers(ranges, start, stop):
        return
    apart = [(a, b) for a, b in ranges if b < start or stop < a]
    near = [r for r in ranges if not (r[1] < start or stop < r[0])]
    apart.append((min([start, *(a for a, _ in near)]), max([stop, *(b for _, b in near)])))
    ranges[:] = apart
