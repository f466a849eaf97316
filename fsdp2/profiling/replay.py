"""Converts the records of a profile to data, after the steps, so that recording stays cheap."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, sub
from typing import Any

from . import events
from . import log as kinds
from .clocks import Clock
from .events import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from .log import FIRST_OPERATION, KIND_OF, OPERATIONS, records
from .memory import NOTHING, PARTS


class LogReader:
    """Reads the records one by one.

    Args:
        units: names, by number; one more number is the optimizer's.
        depths: number of units that enclose each.
    """

    def __init__(self, clock: Clock, units: Sequence[str], depths: Sequence[int]) -> None:
        self._clock, self._units, self._depths = clock, units, depths
        self.borders: list[events.UnitBorder] = []
        self.waits: list[events.WaitInterval] = []
        self.samples: list[events.Sample] = []
        self.moments: list[events.Moment] = []
        self._operations: dict[int, list[Any]] = {}  # by where their records begin
        # The state.
        self._open: list[tuple[int, str]] = []
        self._last_s = 0.0
        self._runtimes = [-1] * len(units)
        self._parts: list[tuple[int, ...]] = [NOTHING] * len(units)
        self._sums: tuple[int, ...] = NOTHING
        self._named = dict(zip(PARTS, NOTHING, strict=True))
        self._total: int | None = None

    def read(self, log: bytes) -> None:
        """Read all records."""
        for position, kind, unit, numbers in records(log):
            if kind in (kinds.SAMPLE, kinds.CHANGED):
                *parts, mark = numbers
                if parts:
                    self._read_memory(kinds.PARTS, unit, tuple(parts))
                time_s = self._clock.read(mark)
                self.samples.append(events.Sample(time_s, self._named, self._total))
            elif kind in (kinds.PARTS, kinds.TAKE, kinds.TOTAL):
                self._read_memory(kind, unit, numbers)
            elif kind >= FIRST_OPERATION:
                self._operations[position] = [unit, kind, *numbers]
            elif kind in (kinds.WAIT, kinds.WAIT_TO_END):
                self._read_wait(kind, *numbers)
            elif kind == kinds.RUNTIME:
                self._runtimes[unit] = numbers[0]
            elif kind == kinds.RESET:
                # The time of the failure is unknown: end it with the last known event.
                self._leave_all(unit, (FORWARD, BACKWARD, RECOMPUTE), self._last_s)
            else:
                self._read_border(kind, unit, self._clock.read(*numbers))

    def end(self) -> None:
        """Leave what is still entered, with the last known event."""
        for unit, phase in reversed(self._open):
            self._border(False, unit, phase, self._last_s)
        self._open.clear()

    @property
    def communications(self) -> tuple[events.Communication, ...]:
        """Operations whose end is known, in the order of their launches."""
        return tuple(
            self._communication(*operation)
            for operation in self._operations.values()
            if operation[-1] == operation[-1]  # not NaN: nobody has waited for it
        )

    def _communication(self, unit: int, kind: int, *numbers: Any) -> events.Communication:
        num_ranks, nbytes, sent_bytes, launched, launch_s, begin, end = numbers
        return events.Communication(
            self._units[unit],
            KIND_OF[kind],
            FORWARD if kind in OPERATIONS.values() else BACKWARD,
            num_ranks,
            nbytes,
            sent_bytes,
            self._clock.host_s(launched),
            launch_s,
            self._clock.read(begin),
            self._clock.read(end),
        )

    def _read_wait(self, kind: int, position: int, begin: float, end: float) -> None:
        operation, read = self._operations[position], self._clock.read
        unit, kind_of_it = self._units[operation[0]], KIND_OF[operation[1]]
        wait = events.WaitInterval(unit, kind_of_it, read(begin), read(end))
        self.waits.append(wait)
        if kind == kinds.WAIT_TO_END:
            operation[-1] = end

    def _read_memory(self, kind: int, unit: int, numbers: tuple[int, ...]) -> None:
        if kind == kinds.TOTAL:
            self._total = numbers[0]
            return
        if kind == kinds.TAKE:
            self._sums = (*self._sums[:-1], self._sums[-1] + numbers[0])
        else:
            before, self._parts[unit] = self._parts[unit], numbers
            self._sums = tuple(map(sub, map(add, self._sums, numbers), before))
        self._named = dict(zip(PARTS, self._sums, strict=True))  # samples share it

    def _read_border(self, kind: int, unit: int, time_s: float) -> None:
        if kind in (kinds.ROOT, kinds.STEP):
            self.moments.append(events.Moment("root" if kind == kinds.ROOT else "step", time_s))
        elif kind == kinds.END_BACKWARD:
            self._leave_all(unit, (BACKWARD, RECOMPUTE), time_s)
        elif kind == kinds.ENTER_BACKWARD:
            # Recomputation may have stopped early: then its forward did not end.
            self._leave(unit, RECOMPUTE, time_s)
            if (unit, BACKWARD) not in self._open:
                self._enter(unit, BACKWARD, time_s)
        elif kind in kinds.ENTERS:
            self._enter(unit, kinds.ENTERS[kind], time_s)
        else:
            self._leave(unit, kinds.LEAVES[kind], time_s)
            if kind == kinds.LEAVE_OPTIMIZER:
                self.moments.append(events.Moment("optimizer", self._last_s))

    def _enter(self, unit: int, phase: str, time_s: float) -> None:
        self._open.append((unit, phase))
        self._border(True, unit, phase, time_s)
        self._last_s = time_s

    def _leave(self, unit: int, phase: str, time_s: float) -> None:
        if (unit, phase) in self._open:
            self._open.remove((unit, phase))
            self._border(False, unit, phase, time_s)
            self._last_s = time_s

    def _leave_all(self, runtime: int, phases: tuple[str, ...], time_s: float) -> None:
        for unit, phase in reversed(self._open):
            of_unit = phase != OPTIMIZER and self._runtimes[unit] == runtime
            if of_unit and phase in phases:
                self._leave(unit, phase, time_s)

    def _border(self, enters: bool, unit: int, phase: str, time_s: float) -> None:
        if phase == OPTIMIZER:  # inside all units
            border = events.UnitBorder(enters, "", phase, len(self._units), time_s)
        else:
            border = events.UnitBorder(enters, self._units[unit], phase, self._depths[unit], time_s)
        self.borders.append(border)


def replay(
    log: bytes, clock: Clock, units: Sequence[str], depths: Sequence[int], **others: Any
) -> events.Recording:
    """The recording; ``others``: its remaining attributes."""
    found = LogReader(clock, units, depths)
    found.read(log)
    found.end()
    return events.Recording(
        stream_ordered=clock.stream_ordered,
        units=tuple(units),
        compute=events.exclusive(found.borders, found.waits),
        communications=found.communications,
        waits=tuple(found.waits),
        memory=tuple(found.samples),
        moments=tuple(found.moments),
        **others,
    )
