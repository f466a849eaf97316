"""Converts a recording into trace events for Perfetto and chrome://tracing.

The format: "Trace Event Format", Google, 2016. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .events import KINDS, Recording

HOST_ROW, COMPUTE_ROW, FIRST_ROW = 0, 1, 2  # thread ids; rows of one kind follow each other
ROWS_PER_KIND = 100

Spanning = TypeVar("Spanning")


def rows_of(spans: Sequence[Spanning]) -> list[list[Spanning]]:
    """Distribute spans (with ``begin_s`` and ``end_s``) over as few rows as avoid overlaps."""
    rows: list[list[Any]] = []
    for span in sorted(spans, key=lambda s: s.begin_s):  # type: ignore[attr-defined]
        free = next((row for row in rows if row[-1].end_s <= span.begin_s), None)  # type: ignore[attr-defined]
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def trace_events(recording: Recording) -> list[dict[str, Any]]:
    """Complete events, counters and names, as the format requires."""
    pid = recording.rank
    events = [_name("process_name", pid, None, f"rank {pid} ({recording.device})")]
    compute = "compute stream" if recording.stream_ordered else "compute thread"
    rows = {COMPUTE_ROW: compute, HOST_ROW: "host: launches"}
    for stretch in recording.compute:
        title = f"{stretch.unit} {stretch.phase}".strip()
        events.append(
            _complete(title, "compute", COMPUTE_ROW, pid, stretch, {"phase": stretch.phase})
        )
    for wait in recording.waits:
        if wait.end_s > wait.begin_s:
            title = f"wait: {wait.kind} of {wait.unit}"
            events.append(_complete(title, "wait", COMPUTE_ROW, pid, wait, {}))
    for number, kind in enumerate(KINDS):
        own = [each for each in recording.communications if each.kind == kind]
        for index, row in enumerate(rows_of(own)):
            tid = FIRST_ROW + number * ROWS_PER_KIND + index
            rows[tid] = kind if index == 0 else f"{kind} ({index + 1})"
            for each in row:
                seconds = each.end_s - each.begin_s
                details = {
                    "phase": each.phase,
                    "ranks": each.num_ranks,
                    "bytes": each.nbytes,
                    "sent bytes": each.sent_bytes,
                    "sent GB/s": each.sent_bytes / seconds / 1e9 if seconds > 0 else None,
                    "launched at (us)": each.launched_s * 1e6,
                }
                events.append(_complete(each.unit, kind, tid, pid, each, details))
    for each in recording.communications:
        launch = {"ts": each.launched_s * 1e6, "dur": each.launch_s * 1e6}
        title = f"launch {each.kind} of {each.unit}"
        base = {"name": title, "cat": "launch", "ph": "X", "pid": pid, "tid": HOST_ROW}
        events.append({**base, **launch, "args": {}})
    for sample in recording.memory:
        at = {"ph": "C", "pid": pid, "tid": 0, "ts": sample.time_s * 1e6}
        events.append({"name": "memory of units (bytes)", **at, "args": dict(sample.parts)})
        if sample.total is not None:
            events.append({"name": "memory in all (bytes)", **at, "args": {"total": sample.total}})
    for tid, name in rows.items():
        events.append(_name("thread_name", pid, tid, name))
        events.append({**_name("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}})
    return events


def _complete(
    name: str, category: str, tid: int, pid: int, span: Any, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": span.begin_s * 1e6,
        "dur": max(0.0, span.end_s - span.begin_s) * 1e6,
        "args": args,
    }


def _name(what: str, pid: int, tid: int | None, name: str) -> dict[str, Any]:
    event: dict[str, Any] = {"name": what, "ph": "M", "pid": pid, "args": {"name": name}}
    return event if tid is None else {**event, "tid": tid}
