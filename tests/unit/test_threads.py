"""Threads that nobody waits for survive errors and tell them; all others have somebody."""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its own threads", allow_module_level=True)

from fsdp2.cli import together
from fsdp2.common.threads import tell, work_in_turns
from fsdp2.transports.host.followers import follow

ROOT = Path(__file__).parents[2]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    errors: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    return errors


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(3), MemoryError()])
def test_an_error_ends_a_turn_and_not_the_thread(
    told: list[BaseException], error: BaseException
) -> None:
    turns: list[int] = []

    def turn() -> bool:
        turns.append(threading.get_ident())
        if len(turns) in (2, 3):
            raise error
        return len(turns) < 5

    thread = work_in_turns("test", turn)
    thread.join(30)
    assert turns == [thread.ident] * 5
    (seen,) = told
    if isinstance(error, SystemExit):  # which Python passes over in silence
        assert "SystemExit(3) in a thread does not end the process" in str(seen)
    else:
        assert seen is error
    assert seen.__notes__ == ["The thread continues; its further errors are not shown."]


def test_an_error_of_who_is_told_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(args: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(threading, "excepthook", hook)
    tell(ValueError("odd"), "note")


def test_who_waits_for_a_follower_gets_any_error_of_it() -> None:
    """SystemExit is no Exception, and was taken for the end of the step."""

    class Owner:
        pass

    def leave() -> None:
        raise SystemExit(3)

    owner = Owner()
    with pytest.raises(SystemExit):
        follow(owner, "test", leave).wait()
    follow(owner, "test", lambda: None).wait()


class Told:
    """A store in which another rank has told why it failed."""

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return b"rank 1 on node7: no space"

    def add(self, key: str, num: int) -> int:
        return num


def test_a_rank_ends_with_the_others_though_nobody_reads_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its main thread may wait in a collective without end."""

    def cannot_be_said(cause: str) -> int:
        raise BrokenPipeError(cause)

    class Ended(Exception):
        pass

    monkeypatch.setattr(together, "fail", cannot_be_said)
    monkeypatch.setattr(together.os, "_exit", Mock(side_effect=Ended))
    with pytest.raises(Ended):
        together._watch(Told(), threading.Event(), 1, 2)
    together.os._exit.assert_called_once_with(2)  # type: ignore[attr-defined]


STARTS = ("Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "work_in_turns")


def starts_threads(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if type(node) is ast.Call]
    names = {getattr(func, "attr", getattr(func, "id", "")) for func in calls}
    return not names.isdisjoint(STARTS)


def test_the_page_says_of_every_thread_what_an_error_in_it_does() -> None:
    package = ROOT / "fsdp2"
    files = {str(p.relative_to(package)) for p in package.rglob("*.py") if starts_threads(p)}
    page = (ROOT / "docs" / "developers" / "streams.md").read_text()
    section = page.split("\n## Threads\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)) == sorted(
        files - {"common/threads.py"}
    )
