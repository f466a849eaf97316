"""Where a rank is can be told at every line: a watcher survives whatever it looks at."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_watch_hangs import AFTER_S, Blocks, sharded, step

import fsdp2
from fsdp2 import HangReport, clip_grad_norm_, watch_hangs
from fsdp2.checkpoint import Checkpointer
from fsdp2.describe import hangs
from fsdp2.describe.whereabouts import Whereabouts, look
from fsdp2.runtime.unit import units_in
from harness import distributed, ours_only, shared_folder

pytestmark = ours_only("names its own units")

OURS = os.path.dirname(fsdp2.__file__) + os.sep
TIMES = 3  # that a line is looked at: the state around it is another one at first


@contextmanager
def at_every_line(sample: Callable[[FrameType], None]) -> Iterator[Counter[tuple[CodeType, int]]]:
    """Call ``sample`` at the lines of the package, in constructors and comprehensions too."""
    seen: Counter[tuple[CodeType, int]] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        place = frame.f_code, frame.f_lineno if event == "line" else -len(event)
        seen[place] += 1
        if seen[place] <= TIMES:
            sample(frame)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


@distributed(2)
def test_every_line_of_a_first_forward_a_step_a_save_and_a_load() -> None:
    model = sharded()
    units = units_in(model)
    names = {unit: unit.name for unit in units}
    optimizer = torch.optim.AdamW(model.parameters())
    me = threading.get_ident()
    found: Counter[str] = Counter()
    errors: list[str] = []

    def sample(frame: FrameType) -> None:
        try:
            found[look(units, names, me).waits_for] += 1
        except Exception as error:
            errors.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}: {error!r}")

    with shared_folder() as root, at_every_line(sample) as seen:
        for _ in range(2):
            step(model)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        checkpoints = Checkpointer(root)
        checkpoints.save(1, model=model, optimizer=optimizer)
        checkpoints.load(1, model=model, optimizer=optimizer)
    assert errors == []
    assert len(seen) > 3000
    texts = "\n".join(found)
    for what in (
        "all ranks to run the first forward",
        "the all-gather of unit",
        "the reduction of unit",
        "all ranks to do their part of a checkpoint",
    ):
        assert what in texts, found


@distributed(1)
def test_what_a_program_deletes_is_freed_though_it_was_looked_at() -> None:
    """Its frames must not keep what their variables referred to."""
    freed: list[int] = []
    has_loss, was_seen, has_none, may_end = (threading.Event() for _ in range(4))

    def program() -> None:
        loss = Blocks()
        weakref.finalize(loss, freed.append, 1)
        has_loss.set()
        assert was_seen.wait(30)
        del loss
        gc.collect()
        has_none.set()
        assert may_end.wait(30)

    thread = threading.Thread(target=program)
    thread.start()
    assert has_loss.wait(30)
    assert thread.ident is not None
    look([], {}, thread.ident)
    was_seen.set()
    assert has_none.wait(30)
    freed_at_once = list(freed)
    may_end.set()
    thread.join()
    assert freed_at_once == [1]


class Watched:
    """What threads told, and how often this rank has written where it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: self.told.append(str(args[1])))

    def wait_for_beats(self, watching: watch_hangs, num: int) -> None:
        until, end = watching._beat + num, time.monotonic() + 30
        while watching._beat < until:
            assert time.monotonic() < end, "the watcher has ended"
            time.sleep(0.01)


@distributed(2)
def test_a_watcher_goes_on_whatever_it_sees() -> None:
    """Another rank must not hear that this one is gone."""
    model = sharded()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(monkeypatch)
        with watch_hangs(model, after_s=AFTER_S) as watching:
            watched.wait_for_beats(watching, 2)

            def fails(*args: Any) -> Whereabouts:
                raise RuntimeError("dictionary changed size during iteration")

            monkeypatch.setattr(hangs, "look", fails)
            watched.wait_for_beats(watching, 8)
            place = watching._read()[dist.get_rank()][1]
            assert place is not None
            assert "could not be seen (RuntimeError: dictionary changed size" in place.at
            monkeypatch.setattr(hangs, "look", look)
            watched.wait_for_beats(watching, 2)
            place = watching._read()[dist.get_rank()][1]
            assert place is not None
            assert place.at.startswith("test_whereabouts.py:")
            dist.barrier()
    assert watched.told == ["dictionary changed size during iteration"]


class OftenDown:
    """A store of which every third request fails."""

    def __init__(self, store: Any) -> None:
        self._store, self._num = store, 0

    def __getattr__(self, name: str) -> Any:
        self._num += 1
        if self._num % 3 == 0:
            raise dist.DistStoreError("wait timeout after 300000ms")
        return getattr(self._store, name)


@distributed(2)
def test_a_watcher_outlives_errors_of_the_store() -> None:
    model = sharded()
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(monkeypatch)
        with watch_hangs(model, after_s=AFTER_S) as watching:
            watching._store = OftenDown(watching._store)
            watched.wait_for_beats(watching, 12)
            dist.barrier()
    assert watched.told == []


@distributed(2)
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_function_of_the_user_that_raises_ends_no_watcher(error: type[BaseException]) -> None:
    model, calls = sharded(), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        watched = Watched(monkeypatch)

        def on_hang(report: HangReport) -> None:
            calls.append(report)
            raise error("no pager")

        with watch_hangs(model, after_s=AFTER_S, on_hang=on_hang) as watching:
            for _ in range(2):
                if dist.get_rank() == 1:
                    time.sleep(4 * AFTER_S)
                dist.barrier()
                step(model)
            watched.wait_for_beats(watching, 2)
            dist.barrier()
    if dist.get_rank() == 0:
        assert len(calls) == 2  # once for each wait
        assert len(watched.told) == 1
        assert "no pager" in watched.told[0]
