"""Reports hangs while they last: which rank the others wait for, and where it is.

On each rank, a thread periodically writes to the process group's store where the rank is. A rank
that has waited for others too long reads the entries of all ranks. Training steps run unchanged:
they record and send nothing, and no hook is installed.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from ..common.failures import lost_what
from ..common.stores import read_present
from ..common.threads import tell, work_in_turns
from ..guards.rank_agreement.comparison import name_of
from ..guards.rank_agreement.store_exchange import can_meet, name_ranks
from ..runtime.unit import units_in
from . import flight_records
from .flight_records import PREFIX
from .whereabouts import CHECKPOINT, LOST, Whereabouts, line_of_error, look

EXIT_CODE = 76  # of a process that ends because of a hang; free in sysexits.h
_INTERVALS = 5  # how often a rank writes where it is, in the time after which a wait is a hang
_LONGEST_S, _SHORTEST_S = 5.0, 0.05  # limits of the time between two writes
_UNSEEN = "a line that could not be seen"
_AT_STORE = "fsdp2/hangs/at-store"  # the ranks on the store's host: "rank@host," of each


class HangWarning(RuntimeWarning):
    """Ranks have waited long for others; the message names the late ranks."""


@dataclass(frozen=True)
class HangReport:
    """Which rank waits, and for which ranks.

    Attributes:
        rank: the rank that reports.
        waited_s: how long it has waited, in seconds.
        here: where it is.
        elsewhere: the ranks that others wait for, and where each of them is.
        silent: the ranks that have stopped writing (because their processes are gone or stopped, or
            cannot reach the store), and where each was last; None if it never wrote.
        together: ranks that wait at the same place.
        store_silent_s: seconds since the store's last answer, if the store's silence is the reason
            that other ranks' places are unknown.
        store: the store's address, if it did not answer.
        store_host: the name of its host; "" if no rank runs there.
        at_store: the ranks that run on its host, and are lost with it, and where each was last.
        flight_record: the file with torch's record of this rank's collectives, if written.
        error: the error that ended the wait; "" while it lasts.
    """

    rank: int
    waited_s: float
    here: Whereabouts
    elsewhere: Mapping[int, Whereabouts]
    silent: Mapping[int, Whereabouts | None]
    together: tuple[int, ...]
    store_silent_s: float | None = None
    flight_record: Path | None = None
    error: str = ""
    store: str = ""
    store_host: str = ""
    at_store: Mapping[int, Whereabouts] = field(default_factory=dict)

    @override
    def __str__(self) -> str:
        what = self.here.waits_for or "the device"
        lines = [
            f"Rank {self.rank} has waited {self.waited_s:.0f} s for {what}, {self.here.place}."
        ]
        if self.error:
            what = self.here.waits_for or "others"
            at = self.here.at or "a line that is unknown"
            lines = [f"Rank {self.rank} has lost {what}, at {at}: {self.error}."]
        if self.store_silent_s is not None:
            lines += self._lines_of_store()
        silent: dict[str, list[int]] = {}
        for rank, last in self.silent.items():
            silent.setdefault("never seen" if last is None else f"last {last}", []).append(rank)
        for text, ranks in silent.items():
            lines.append(f"No sign of {name_ranks(ranks)}: gone, stopped, or cut off; {text}.")
        apart: dict[str, list[int]] = {}
        for rank, place in self.elsewhere.items():
            apart.setdefault(str(place), []).append(rank)
        for text, ranks in list(apart.items())[:8]:
            lines.append(f"{name_ranks(ranks).capitalize()}: {text}.")
        if len(apart) > 8:
            lines.append(f"And {len(apart) - 8} more places.")
        if not self.silent and not self.elsewhere and self.store_silent_s is None:
            lines.append(
                "All ranks have lost others: the connection broke."
                if self.error
                else "All ranks wait at this place: the connection or the device hangs."
            )
        elif len(self.together) > 1 and not self.error:
            lines.append(f"Waiting at the same place: {name_ranks(self.together)}.")
        if self.flight_record is not None:
            folder = self.flight_record.parent
            lines.append(f"Collectives: {self.flight_record} (torchfrtrace {folder} -p {PREFIX})")
        return "\n".join(lines)

    def _lines_of_store(self) -> list[str]:
        at = self.store
        if self.at_store:
            at += f" on host {self.store_host}, with {name_ranks(self.at_store)}"
        at = f" ({at})" if at else ""
        gone = "its host is gone, or this one is cut off"
        if self.rank in self.at_store:
            gone = "its process is gone or stopped, on the host of this rank"
        more = "more " if self.at_store else ""
        lines = [
            f"The store of the process group has not answered for {self.store_silent_s:.0f} s"
            f"{at}: {gone}. So nothing {more}is known about other ranks."
        ]
        by_place: dict[str, list[int]] = {}
        for rank, place in self.at_store.items():
            if rank != self.rank:
                by_place.setdefault(str(place), []).append(rank)
        for text, ranks in by_place.items():
            lines.append(f"Before that, {name_ranks(ranks)} on the store's host: {text}.")
        return lines


def judge(
    rank: int,
    waited_s: float,
    places: Mapping[int, Whereabouts | None],
    alive: Mapping[int, bool],
) -> HangReport:
    """Find the ranks that are missing where ``rank`` waits. Pure.

    Args:
        places: each rank's last entry; None if it never wrote.
        alive: whether each rank is still writing.
    """
    here = places[rank]
    assert here is not None
    silent = {
        r: place for r, place in places.items()
        if r != rank and not alive[r] and not _has_ended(place)
    }  # fmt: skip
    others = {r: p for r, p in places.items() if r not in silent and p is not None}
    # A rank that waits for the same operation is in the right place, however many units it has
    # begun: a forward counts a unit before its gather, a backward after its reduction.
    together = [r for r, p in others.items() if r == rank or _same(p, here)]
    elsewhere = {r: p for r, p in others.items() if r not in together}
    return HangReport(rank, waited_s, here, elsewhere, silent, tuple(sorted(together)))


def judge_loss(
    rank: int,
    error: str,
    places: Mapping[int, Whereabouts | None],
    alive: Mapping[int, bool],
) -> HangReport:
    """Find the ranks that ``rank`` has lost, according to ``error``. Pure; see `judge`."""
    report = judge(rank, 0.0, places, alive)
    # A connection breaks on all ranks that need it, so ranks that lost others are not to blame.
    # Nor are live ranks, if another one is silent or has raised an unrelated error.
    lost = [r for r, place in report.elsewhere.items() if place.ended == LOST]
    failed = {r: p for r, p in report.elsewhere.items() if p.ended and p.ended != LOST}
    live = {r: p for r, p in report.elsewhere.items() if not p.ended}
    elsewhere = failed if failed or report.silent else live
    together = tuple(sorted({*report.together, *lost}))
    return replace(report, error=error, elsewhere=elsewhere, together=together)


def _same(a: Whereabouts, b: Whereabouts) -> bool:
    return a.order[:2] == b.order[:2] and a.waits_for == b.waits_for and not b.ended


class watch_hangs:  # noqa: N801 (used like a function)
    """Context manager that reports hangs and names the ranks that others wait for.

    On each rank, a thread writes to the store of the default process group where the rank is: step,
    phase, unit, line of the program. A rank that has waited longer than ``after_s`` reads the
    entries of all ranks. It reports which ranks are somewhere else, and which have stopped writing.
    Training steps do no additional work. Every rank must enter the context; a rank that does not is
    reported as never seen.

    Args:
        model: sharded, or with sharded modules inside.
        after_s: seconds after which a wait is reported; the same on all ranks, because it also
            determines how often each rank writes. Choose more than the longest task of a single
            rank (writing a file, loading data). Choose less than the timeout of the process group,
            whose error does not name the late ranks.
        on_hang: "warn": issue a `HangWarning`; training continues if the late rank arrives. "exit":
            print the same text and the stacks of all threads on stderr, and end the process with
            exit code 76, so that a launcher can restart the job. Or a function, called with a
            `HangReport` from another thread. Each wait is reported once.
        flight_records: a folder, the same for all ranks. Each rank that reports writes its last
            collectives there, from torch's flight recorder; ``torchfrtrace FOLDER -p rank_``
            compares them. None: none are written.

    If the process of another rank dies, connections break, and the wait ends with an error. When
    such an error leaves the context, the rank looks for silent ranks and for ranks that raised an
    error, for at most two fifths of ``after_s``. It reports them in the same way, and the error
    propagates. In this case, "exit" does not end the process, and a function is called in the
    thread that leaves the context.

    If the store does not answer for ``after_s`` while this rank waits, that is reported too: its
    host is gone, or this host is cut off. The store often runs on the host of rank 0. Each rank
    therefore remembers the last entries of the ranks on the store's host, and includes them.

    Raises:
        ValueError: if ``after_s`` is not positive, or ``on_hang`` is none of these.
        RuntimeError: on entering, if the processes of the group share no store (MPI).

    Example:
        >>> with watch_hangs(model, after_s=120):
        ...     model(batch).sum().backward()
        HangWarning: Rank 0 has waited 120 s for the all-gather of unit 'layers.2', in forward of
        unit 'layers.2', step 12, at train.py:90 in step.
        Rank 3: outside of the model, step 12, at train.py:88 in next_batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        after_s: float = 60.0,
        on_hang: str | Callable[[HangReport], object] = "warn",
        flight_records: str | os.PathLike[str] | None = None,
    ) -> None:
        if not after_s > 0:
            raise ValueError(f"after_s is {after_s}, but has to be more than 0 seconds")
        if not callable(on_hang) and on_hang not in ("warn", "exit"):
            raise ValueError(f"on_hang is {on_hang!r}, but has to be 'warn', 'exit' or a function")
        self._after_s, self._on_hang = after_s, on_hang
        self._flight_records = flight_records
        self._interval_s = min(_LONGEST_S, max(_SHORTEST_S, after_s / _INTERVALS))
        names = {module: name for name, module in model.named_modules()}
        self._units = units_in(model)
        self._names = {unit: name_of(unit, names) for unit in self._units}
        self._on_devices = any(unit.device.type != "cpu" for unit in self._units)
        self._beat = 0
        self._ended = ""  # how this rank leaves, if by an error
        self._left: Whereabouts | None = None
        self._loss: Whereabouts | None = None
        self._place = Whereabouts(0, "outside", 0, "", "", "")  # at the last look
        self._store_host = ""
        self._at_store: dict[int, Whereabouts] = {}
        self._found: HangReport | None = None
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> watch_hangs:
        # No ranks to wait for: a single process, even if it simulates a rank of many.
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return self
        if dist.get_backend() in ("fake", "threaded"):
            return self
        if not can_meet(dist.get_backend()):
            raise RuntimeError(
                "watch_hangs needs a process group whose ranks share a TCPStore or a FileStore, "
                f"which the ranks of backend '{dist.get_backend()}' here do not"
            )
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # A separate client: the training thread may wait in the other for minutes.
        self._store: Any = dist.distributed_c10d._get_default_store().clone()
        self._trains = threading.get_ident()
        self._answered = time.monotonic()
        self._store_host, self._at_store = "", {}
        self._told = not _is_here(self._store)
        self._reported = self._reported_store = False  # before it is done: it may raise
        self._stay, self._stay_without = _Stay(), _Stay()
        # Two, because a request to a store that is cut off may take as long as TCP tries again.
        turns = (self._watch, self._watch_store)
        self._threads = [work_in_turns("fsdp2-hangs", turn) for turn in turns]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._threads:
            self._note(error)
        self._done.set()
        # A thread may be in a request to a store that is gone.
        longest_s = 2 * self._interval_s + 1.0 if self._loss is not None else 1.0
        end = time.monotonic() + longest_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, end - time.monotonic()))
        if self._loss is not None:
            silent = time.monotonic() - self._answered
            unknown = HangReport(self._rank, 0.0, self._loss, {}, {}, (), silent, error=self._ended)
            self._act(self._found or unknown)

    def _note(self, error: BaseException) -> None:
        """Keep the error for the other ranks, and whether it means that ranks were lost."""
        what = lost_what(error)
        first = (str(error).splitlines() or [""])[0][:200]
        self._ended = f"{type(error).__name__}: {first}"
        self._left = replace(
            self._look(),
            waits_for=what or "",
            at=line_of_error(error),
            ended=self._ended if what is None else LOST,
        )
        if what is not None:
            self._loss = self._left

    # -- in the threads -----------------------------------------------------------------------

    def _watch(self) -> bool:
        if not self._done.wait(self._interval_s):
            with suppress(RuntimeError):  # the store is gone, which `_watch_store` reports
                self._watch_step()
            return True
        left, self._left = self._left, None
        if left is not None:
            with suppress(RuntimeError):
                self._write(left)
                if self._loss is not None:
                    self._found = self._find_lost()
        return False

    def _watch_step(self) -> None:
        place = self._write()
        if not self._told:
            self._tell_at_store()
            self._told = True
        self._remember()
        waited_s = self._stay.in_s(place)
        if not waited_s:
            self._reported = False
        # With devices, the host does not wait visibly; it only stops moving.
        waits = place.waits_for or self._on_devices
        if waits and waited_s >= self._after_s and not self._reported:
            self._report(place, waited_s)

    def _watch_store(self) -> bool:
        if self._done.wait(self._interval_s) or self._reported_store:
            return False
        silent_s = time.monotonic() - self._answered
        if silent_s < 2 * self._interval_s:
            self._stay_without = _Stay()
            return True
        place = self._look()
        # Counted from here on: the whole process may have been stopped for a while.
        waited_s = self._stay_without.in_s(place)
        if waited_s < self._after_s or not (place.waits_for or self._on_devices):
            return True
        # The program may be waiting for the store itself, so no rank is to blame.
        self._reported_store = True
        self._act(HangReport(self._rank, waited_s, place, {}, {}, (), silent_s))
        return False

    def _look(self) -> Whereabouts:
        """Where this rank is; if that cannot be determined, where it was."""
        # The program continues during the look and may do anything, so the look can fail. But a
        # rank that writes nothing counts as gone.
        try:
            self._place = look(self._units, self._names, self._trains)
        except Exception as error:
            if not self._place.at.startswith(_UNSEEN):
                tell(error, "Only this look at where the rank is has failed.")
            at = f"{_UNSEEN} ({type(error).__name__}: {error})"
            self._place = replace(self._place, waits_for="", at=at)
        return self._place

    def _write(self, place: Whereabouts | None = None) -> Whereabouts:
        if place is None:
            place = self._look()
        self._beat += 1
        key = self._key(self._rank)
        self._store.set(key, json.dumps([self._beat, asdict(place)]))
        self._store.check([key])  # `set` does not wait for an answer
        self._answered = time.monotonic()
        return place

    def _tell_at_store(self) -> None:
        """Write that this rank runs on the store's host; after its first `_write`, which others
        read."""
        mine = f"{self._rank}@"
        if self._store.check([_AT_STORE]):
            said = self._store.get(_AT_STORE).decode().split(",")
            if any(each.startswith(mine) for each in said):
                return  # in an earlier context
        self._store.append(_AT_STORE, f"{mine}{socket.gethostname()},")

    def _remember(self) -> None:
        """Keep the entries of the ranks on the store's host, for when it is gone.

        Not of all ranks: the traffic of the store would grow with the square of their number.
        """
        if not _server(self._store) or not self._store.check([_AT_STORE]):
            return
        said = self._store.get(_AT_STORE).decode().rstrip(",").split(",")
        ranks = sorted({int(each.partition("@")[0]) for each in said})
        found = self._store.multi_get([self._key(rank) for rank in ranks])
        self._store_host = said[0].partition("@")[2]
        self._at_store = {
            rank: Whereabouts(**json.loads(text)[1])
            for rank, text in zip(ranks, found, strict=True)
        }

    def _key(self, rank: int) -> str:
        return f"fsdp2/hangs/{rank}"

    def _report(self, place: Whereabouts, waited_s: float) -> None:
        """Read the entries of all ranks twice, and report if they show a hang."""
        since = time.monotonic() - waited_s
        first = self._read()
        # Live ranks write in between. So does this one, since others may read at this time.
        for _ in range(3):
            if self._done.wait(self._interval_s) or not _stands(place, self._write()):
                return
        second = self._read()
        places = {rank: where for rank, (_, where) in second.items()}
        alive = {rank: second[rank][0] != first[rank][0] for rank in second}
        report = judge(self._rank, time.monotonic() - since, places, alive)
        late = any(where.order < place.order for where in report.elsewhere.values())
        waits = place.waits_for and place.waits_for != CHECKPOINT
        failed = any(where.ended for where in report.elsewhere.values())
        # Otherwise it computes, or it is the rank that others wait for, or it waits for ranks that
        # read or write large files, which is no hang as long as they are alive.
        if waits or late or failed or report.silent:
            self._reported = True
            self._act(report)

    def _find_lost(self) -> HangReport:
        """Wait, for at most two intervals, until each rank has written or counts as silent."""
        first = self._read()
        end = time.monotonic() + 2 * self._interval_s
        while True:
            time.sleep(max(_SHORTEST_S, self._interval_s / 10))  # each reads what all wrote
            second = self._read()
            places = {rank: where for rank, (_, where) in second.items()}
            alive = {rank: second[rank][0] != first[rank][0] for rank in second}
            known = [
                rank == self._rank or alive[rank] or _has_ended(places[rank]) for rank in places
            ]
            if all(known) or time.monotonic() > end:
                return judge_loss(self._rank, self._ended, places, alive)

    def _act(self, report: HangReport) -> None:
        if report.store_silent_s is not None:
            report = replace(
                report,
                store=_address(self._store),
                store_host=self._store_host,
                at_store=dict(self._at_store),
            )
        if self._flight_records is not None:
            with suppress(OSError):  # a full disk must not hide the report
                file = flight_records.dump(self._flight_records, self._rank)
                report = replace(report, flight_record=file)
        if callable(self._on_hang):
            self._on_hang(report)
        elif self._on_hang == "warn":
            warnings.warn(str(report), HangWarning, stacklevel=2)
        elif report.error:
            print(report, file=sys.stderr, flush=True)
        else:
            if report.store_silent_s is None:
                with suppress(RuntimeError):  # its end is not the cause of what others lose then
                    self._write(replace(report.here, ended=LOST))
            try:
                print(f"{report}\nThis process ends (exit code {EXIT_CODE}).", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                sys.stderr.flush()
            finally:  # also where there is no memory for a text
                os._exit(EXIT_CODE)

    def _read(self) -> dict[int, tuple[int, Whereabouts | None]]:
        """Each rank's last entry: how many it has written, and where it was."""
        keys = [self._key(rank) for rank in range(self._size)]
        said = read_present(self._store, keys)
        found = [json.loads(said[key]) if key in said else (0, None) for key in keys]
        return {
            rank: (beat, place and Whereabouts(**place)) for rank, (beat, place) in enumerate(found)
        }


def _server(store: Any) -> tuple[str, int] | None:
    """The address and the port of the store; None if it is a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _address(store: Any) -> str:
    """The address of the store's host, and its port; "" if the store is a file."""
    server = _server(store)
    return f"{server[0]}:{server[1]}" if server else ""


def _is_here(store: Any) -> bool:
    """Whether the store runs on this host: a socket binds to local addresses only."""
    server = _server(store)
    if server is None:
        return False
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(server[0], 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as mine:
                mine.bind(address)
                return True
    return False


def _has_ended(place: Whereabouts | None) -> bool:
    return place is not None and bool(place.ended)


class _Stay:
    """How long a rank has been at one place."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._before: Whereabouts | None = None

    def in_s(self, place: Whereabouts) -> float:
        """Seconds at ``place`` up to now; 0 if the rank has just arrived."""
        if self._before is None or not _stands(self._before, place):
            self._since, self._before = time.monotonic(), place
            return 0.0
        self._before = place
        return time.monotonic() - self._since


def _stands(before: Whereabouts, now: Whereabouts) -> bool:
    """Whether a rank has not moved. (A polling loop changes lines without making progress.)"""
    return (before.order, before.waits_for) == (now.order, now.waits_for)
