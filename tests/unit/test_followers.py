"""Threads that do what follows once messages have come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its exchanges", allow_module_level=True)

from fsdp2.transports.host.followers import follow


class Owner:
    pass


def test_a_thread_ends_with_its_owner_and_serves_one_purpose() -> None:
    owner = Owner()
    found: list[threading.Thread] = []

    def job() -> None:
        found.append(threading.current_thread())

    for purpose in ("sum", "sum", "relay"):
        follow(owner, purpose, job).wait()
    first, again, other = found
    assert first is again
    assert other is not first
    assert first.is_alive()
    del owner
    for thread in (first, other):
        thread.join(harness.JOB_TIMEOUT_S)
        assert not thread.is_alive()


def test_what_a_step_has_begun_is_finished_once_and_errors_are_raised_by_who_waits() -> None:
    owner = Owner()
    calls: list[int] = []

    def job() -> Callable[[], None]:
        return lambda: calls.append(1)

    def broken() -> None:
        raise ValueError("did not come")

    step = follow(owner, "sum", job)
    step.wait()
    step.wait()
    assert calls == [1]
    step = follow(owner, "sum", broken)
    for _ in range(2):
        with pytest.raises(ValueError, match="did not come"):
            step.wait()
    follow(owner, "sum", job).wait()
    assert calls == [1, 1]
