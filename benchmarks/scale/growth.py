"""What single calls of the library cost by the number of ranks or of parameters.

Counted where that can be: requests to the store and their bytes, and instructions of Python's
virtual machine, which are the same on every machine. Each curve is a function of n that returns its
counts, with default points; the slope of a curve on logarithmic axes is the power of n with which
it grows.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from fsdp2.snapshots import meeting
from fsdp2.snapshots.choice import Generation, PartName, choose
from fsdp2.snapshots.memory_snapshots import _parsed

RANKS_PER_HOST = 8
Counts = dict[str, float]


def slope(counts: Mapping[int, float]) -> float:
    """The power of n with which counts grow from the first to the last of them."""
    (n, a), (m, b) = min(counts.items()), max(counts.items())
    return math.log(b / a) / math.log(m / n)


def instructions(call: Callable[[], object]) -> int:
    """How many of Python's instructions it takes, without those of C that they call."""
    num = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return num


def snapshot_choice(n: int) -> Counts:
    """A rank of `MemorySnapshots` begins a session, and finds which parts to fetch from where."""
    # Two snapshots of each rank, with a copy on the host beside its own.
    own = [rank // RANKS_PER_HOST for rank in range(n)]
    told: dict[str, list[tuple[str, str]]] = {}
    for rank, host in enumerate(own):
        for step in (10, 20):
            part = PartName(Generation(1, step, "00000000"), rank, n)
            for at in (host, host ^ 1):
                told.setdefault(f"host {at}", []).append((part.generation.name, part.name))

    def find(session: meeting.Session) -> None:
        choice = choose({folder: _parsed(found) for folder, found in told.items()})
        assert choice is not None
        assert len(session.origins(choice)) == n

    counts: Counts = {}
    with tempfile.TemporaryDirectory() as folder:
        made = []
        counts["instructions to meet"] = instructions(lambda: made.append(_session(folder, own)))
        counts["instructions to choose"] = instructions(lambda: find(made[0]))
        made[0].close()
    return counts


def _session(folder: str, hosts: list[int]) -> meeting.Session:
    """As rank 0 begins it, where all others tell what it tells, but for their host."""

    def told_by_all(about: str, value: str, ranks: tuple[int, ...]) -> list[str]:
        mine = json.loads(json.loads(value)["member"])
        shared = ("host", "machine", "folder")
        members = [
            mine | {"address": "10.0.0.1"} | dict.fromkeys(shared, f"host {host}") for host in hosts
        ]
        return [json.dumps({"error": "", "member": json.dumps(each)}) for each in members]

    with (
        mock.patch.object(meeting, "told_by_all", told_by_all),
        mock.patch.object(meeting, "said_by_first", lambda about, value, ranks: value),
    ):
        ranks = tuple(range(len(hosts)))
        return meeting.Session("growth", Path(folder), None, "127.0.0.1", 60.0, 0, ranks)


CURVES: dict[str, Callable[[int], Counts]] = {"snapshot choice": snapshot_choice}
POINTS: dict[str, tuple[int, ...]] = {"snapshot choice": (64, 256, 1024, 4096)}
