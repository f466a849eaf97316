"""Who is missing, from what ranks wrote."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its own names of places", allow_module_level=True)

from fsdp2.describe.hangs import HangReport, judge, judge_loss
from fsdp2.describe.whereabouts import LOST, START, Whereabouts, look

GATHER = "the all-gather of unit 'b'"
HERE = Whereabouts(3, "forward", 2, "b", GATHER, "train.py:8 in step")
LOADS = Whereabouts(3, "outside", 0, "", "", "train.py:5 in load")


def report(places: dict[int, Whereabouts | None], silent: tuple[int, ...] = ()) -> HangReport:
    return judge(0, 31.4, places, {rank: rank not in silent for rank in places})


def test_who_is_elsewhere_is_named() -> None:
    found = report({0: HERE, 1: HERE, 2: LOADS, 3: replace(HERE, units=1)})
    assert (dict(found.elsewhere), found.silent, found.together) == ({2: LOADS}, {}, (0, 1, 3))
    assert str(found) == (
        "Rank 0 has waited 31 s for the all-gather of unit 'b', in forward of unit 'b', step 4, "
        "at train.py:8 in step.\n"
        "Rank 2: outside of the model, step 4, at train.py:5 in load.\n"
        "Waiting at the same place: ranks 0, 1, 3."
    )


def test_who_is_silent_is_named_with_its_last_place() -> None:
    found = report({0: HERE, 1: LOADS, 2: None, 3: HERE}, silent=(1, 2, 3))
    assert set(found.silent) == {1, 2, 3}
    assert not found.elsewhere
    text = str(found)
    assert "No sign of rank 1: gone, stopped, or cut off; last outside of the model" in text
    assert "No sign of rank 2: gone, stopped, or cut off; never seen." in text
    assert "No sign of rank 3: gone, stopped, or cut off; last in forward of unit" in text


def test_all_at_one_place_are_not_blamed() -> None:
    text = str(report({0: HERE, 1: HERE}))
    assert text.endswith("All ranks wait at this place: the connection or the device hangs.")


def test_another_step_is_another_place() -> None:
    behind = replace(HERE, step=2)
    ahead = replace(HERE, phase="backward", step=4, waits_for="the reduction of unit 'b'")
    found = report({0: HERE, 1: behind, 2: ahead})
    assert set(found.elsewhere) == {1, 2}
    assert behind.order < HERE.order < ahead.order < replace(LOADS, step=4).order


def test_thousands_of_ranks_make_a_short_text() -> None:
    places: dict[int, Whereabouts | None] = dict.fromkeys(range(5000), HERE)
    places |= {rank: replace(LOADS, at=f"train.py:{rank} in load") for rank in range(4000, 4100)}
    text = str(report(places, silent=tuple(range(4200, 4900))))
    assert "ranks 4200, 4201, 4202, 4203, 4204, 4205, 4206, 4207 and 692 more" in text
    assert "And 92 more places." in text
    assert len(text) < 3000


def test_who_lost_others_or_lives_is_not_blamed_for_a_loss() -> None:
    here = Whereabouts(3, "forward", 2, "b", "an all-gather", "train.py:1")
    lost = replace(here, phase="backward", ended=LOST)
    behind = replace(here, units=1, unit="a", waits_for="")
    gone = replace(here, units=1, unit="a", waits_for="")
    alive = {0: True, 1: True, 2: True, 3: False}
    # One is silent: not those that lost it, and not one that is at work elsewhere.
    found = judge_loss(0, "broken", {0: here, 1: lost, 2: behind, 3: gone}, alive)
    assert (found.silent, found.elsewhere) == ({3: gone}, {})
    assert found.together == (0, 1)
    # One has ended by an error of its own, whether it writes any more or not.
    failed = replace(gone, ended="ValueError: no such file")
    found = judge_loss(0, "broken", {0: here, 1: lost, 2: behind, 3: failed}, alive)
    assert (found.silent, found.elsewhere) == ({}, {3: failed})
    # All have only lost others, and one lives elsewhere: it is the one that is missing.
    found = judge_loss(0, "broken", {0: here, 1: lost, 2: behind, 3: lost}, alive)
    assert (found.silent, found.elsewhere) == ({}, {2: behind})
    assert found.together == (0, 1, 3)


def test_a_thread_that_never_begins_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it gets no memory: `Thread.start` then waits without a limit."""
    never = threading.Thread(target=lambda: None)
    starter = threading.Thread(target=never.start, daemon=True)
    name = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
    begun, begin = threading.Event(), getattr(threading, name)

    def refuse(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is starter:
            begun.set()
            return None  # as if it had been started
        return begin(*arguments, **options)

    monkeypatch.setattr(threading, name, refuse)
    assert look([], {}, threading.get_ident()).waits_for == ""
    starter.start()
    begun.wait()
    assert starter.ident is not None
    end = time.monotonic() + 60
    while look([], {}, starter.ident).waits_for != START:
        assert time.monotonic() < end
    never._started.set()  # type: ignore[attr-defined]
    starter.join()
