"""The records of a running profile: bytes in one buffer, which `replay` reads afterwards.

Objects would cost more than the events that they record: each must be allocated, tracked by the
garbage collector and kept in fresh memory. A record is therefore a code (the number of a unit times
`KINDS` plus a kind), followed by numbers. Marks are numbers on both kinds of clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from struct import Struct
from time import perf_counter
from typing import Any

from .clocks import Clock
from .events import ALL_GATHER, ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, REDUCE_SCATTER

# Kinds of records. Compute enters or leaves a unit, with a mark.
ENTER_FORWARD, LEAVE_FORWARD, ENTER_RECOMPUTE, LEAVE_RECOMPUTE = 0, 1, 2, 3
ENTER_BACKWARD, LEAVE_BACKWARD, ENTER_OPTIMIZER, LEAVE_OPTIMIZER = 4, 5, 6, 7
# Of a runtime, which has the number of its first unit: its backward ended; it was reset.
END_BACKWARD, RESET = 8, 9
# Moments, with a mark.
ROOT, STEP = 10, 11
# Memory: a sample (a mark), and what has changed since the last one; `CHANGED` is both.
SAMPLE, PARTS, TOTAL, TAKE, RUNTIME, CHANGED = 12, 13, 14, 15, 16, 19
# An operation and waits; `WAIT_TO_END` has the end of the operation, too.
WAIT, WAIT_TO_END = 17, 18
FIRST_OPERATION = 20  # and five more: three kinds in two phases
KINDS = 32

ENTERS = {ENTER_FORWARD: FORWARD, ENTER_RECOMPUTE: RECOMPUTE, ENTER_OPTIMIZER: OPTIMIZER}
LEAVES = {
    LEAVE_FORWARD: FORWARD,
    LEAVE_RECOMPUTE: RECOMPUTE,
    LEAVE_BACKWARD: BACKWARD,
    LEAVE_OPTIMIZER: OPTIMIZER,
}
# In forward; one more: in backward.
OPERATIONS = {
    kind: FIRST_OPERATION + 2 * i for i, kind in enumerate((ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE))
}
KIND_OF = {record: kind for kind, first in OPERATIONS.items() for record in (first, first + 1)}

CODE = Struct("=i")
MARKED = Struct("=id")
NUMBER = Struct("=iq")
FIVE = Struct("=i5q")
FIVE_MARKED = Struct("=i5qd")
WAITED = Struct("=iqdd")  # which operation (where its record begins), begin and end
# Ranks, bytes of the whole, bytes sent; launched, how long that took (host); begin and end (marks).
OPERATION = Struct("=iiqqdddd")

_FORMS = {
    RESET: CODE,
    PARTS: FIVE,
    CHANGED: FIVE_MARKED,
    TOTAL: NUMBER,
    TAKE: NUMBER,
    RUNTIME: NUMBER,
    WAIT: WAITED,
    WAIT_TO_END: WAITED,
    **dict.fromkeys(range(FIRST_OPERATION, KINDS), OPERATION),
}

UNKNOWN = float("nan")  # the end of an operation that nobody has waited for

# Initial memory: enough for about 500 units' steps. The buffer grows if it is full.
_FIRST_BYTES = 1 << 18

# Reading the memory of the process is a call of the system, which small units would make every
# hundred microseconds: at most this often, and at most for this share of the time.
RESIDENT_INTERVAL_S = 5e-4
RESIDENT_SHARE = 0.005


class Log:
    """The records of a profile, and the state that recording needs.

    Args:
        total: the result of `memory.total_reader`.
        often: read the total for every sample; otherwise at most every `RESIDENT_INTERVAL_S`, in
            the seconds of the clock's marks.

    Attributes:
        write: appends bytes; ``tell``: their number.
        mark, host: of the clock.
        samples: number of samples; ``noted``: the unit whose memory the last one measured.
        often: as given. Without it, samples in which nothing has changed are left out.
        next_total: the mark from which the total must be read again.
    """

    def __init__(self, clock: Clock, total: Callable[[], int | None], *, often: bool) -> None:
        # Not zeros of the system, which it would provide one page at a time while steps run.
        self._buffer = BytesIO(b"\xff" * _FIRST_BYTES)
        self._buffer.write(b"\0")  # the buffer gets separate memory here
        self._buffer.seek(0)
        self.write, self.tell = self._buffer.write, self._buffer.tell
        self.mark, self.host = clock.mark, clock.host
        self.often = often
        self.samples = 0
        self.noted: Any = None
        self.next_total = float("-inf")
        self._total = total
        self._last_total: int | None = None
        self._interval_s = (
            0.0 if often else max(RESIDENT_INTERVAL_S, _cost_s(total) / RESIDENT_SHARE)
        )

    def read_total(self, mark: float) -> None:
        """Read the memory in use, at this mark."""
        if self._interval_s:
            self.next_total = mark + self._interval_s
        total = self._total()
        if total is not None and total != self._last_total:
            self._last_total = total
            self.write(NUMBER.pack(TOTAL, total))

    def end(self) -> bytes:
        """All records. Later ones are lost: a reduction may outlast the profile."""
        with self._buffer.getbuffer() as whole:
            return bytes(whole[: self._buffer.tell()])


def _cost_s(read: Callable[[], Any]) -> float:
    costs = []
    for _ in range(3):
        begin = perf_counter()
        read()
        costs.append(perf_counter() - begin)
    return min(costs)


def records(log: bytes) -> Iterator[tuple[int, int, int, tuple[Any, ...]]]:
    """For each record: its position, its kind, the number of its unit, and its numbers."""
    position = 0
    while position < len(log):
        unit, kind = divmod(CODE.unpack_from(log, position)[0], KINDS)
        form = _FORMS.get(kind, MARKED)
        yield position, kind, unit, form.unpack_from(log, position)[1:]
        position += form.size
