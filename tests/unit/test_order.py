"""The happens-before checker, on traces written by hand."""

from __future__ import annotations

import pytest

from fsdp2.testing.order import (
    HOST,
    Access,
    Allocate,
    Checker,
    Event,
    Finish,
    Free,
    Held,
    Kind,
    Launch,
    Record,
    Synchronize,
    Wait,
    check,
)


def write(stream: str, block: int = 0, start: int = 0, stop: int = 8) -> Launch:
    return Launch(stream, f"write on {stream}", (Access(block, start, stop, writes=True),))


def read(stream: str, block: int = 0, start: int = 0, stop: int = 8) -> Launch:
    return Launch(stream, f"read on {stream}", (Access(block, start, stop, reads=True),))


def change(stream: str, block: int = 0) -> Launch:
    return Launch(stream, "change", (Access(block, 0, 8, reads=True, writes=True),))


NEW = Allocate(0, 8, "a")
OLD = Allocate(0, 8, "a", filled=True)


def then(first: str, second: str, event: int = 1) -> list[Event]:
    """``second`` waits for ``first``."""
    return [Record(first, event), Wait(second, event)]


def kinds(*events: Event | list[Event]) -> set[Kind]:
    flat = [e for item in events for e in (item if isinstance(item, list) else [item])]
    return {violation.kind for violation in check(flat)}


def test_work_of_one_stream_is_in_order() -> None:
    assert kinds(NEW, write("a"), read("a"), write("a"), Free(0)) == set()


def test_read_waits_for_the_write() -> None:
    assert kinds(NEW, write("a"), then("a", "b"), read("b"), then("b", "a"), Free(0)) == set()
    assert Kind.READ_TOO_EARLY in kinds(OLD, write("a"), read("b"))


def test_an_event_stands_for_what_was_there_when_it_was_recorded() -> None:
    assert kinds(OLD, Record("a", 1), write("a"), Wait("b", 1), read("b")) == {Kind.READ_TOO_EARLY}


def test_a_wait_keeps_its_meaning_when_the_event_is_recorded_again() -> None:
    trace = [OLD, write("a"), *then("a", "b"), write("a", 0, 0, 4), Record("a", 1)]
    assert kinds(trace, read("b", 0, 4, 8)) == set()
    assert kinds(trace, read("b")) == {Kind.READ_TOO_EARLY}


def test_waiting_is_transitive() -> None:
    assert kinds(OLD, write("a"), then("a", "b"), then("b", "c", 2), read("c")) == set()
    assert kinds(OLD, write("a"), then("b", "c", 2), then("a", "b"), read("c")) != set()


def test_a_write_waits_for_reads_and_writes() -> None:
    assert kinds(OLD, read("a"), write("b")) == {Kind.OVERWRITTEN_IN_USE}
    assert kinds(OLD, write("a"), write("b")) == {Kind.OVERWRITTEN_IN_USE}
    assert kinds(OLD, read("a"), read("b")) == set()
    assert kinds(OLD, read("a"), then("a", "b"), write("b")) == set()


def test_ranges_that_do_not_overlap_do_not_matter() -> None:
    assert kinds(OLD, write("a", 0, 0, 4), write("b", 0, 4, 8)) == set()


def test_a_read_hidden_behind_a_later_one_of_its_stream() -> None:
    assert kinds(OLD, read("a"), then("a", "b"), read("a"), write("b")) != set()


def test_memory_has_no_content_before_it_is_written() -> None:
    assert kinds(NEW, read("a")) == {Kind.NEVER_WRITTEN}
    assert kinds(NEW, write("a", 0, 0, 4), read("a", 0, 0, 4)) == set()
    assert kinds(NEW, write("a", 0, 0, 4), read("a")) == {Kind.NEVER_WRITTEN}
    assert kinds(NEW, write("a", 0, 4, 8), write("a", 0, 0, 4), read("a")) == set()
    assert kinds(NEW, change("a")) == {Kind.NEVER_WRITTEN}


def test_padding_may_be_read_if_there_is_anything_else() -> None:
    send = Launch("a", "send", (Access(0, 0, 8, reads=True, padded=True),))
    assert kinds(NEW, write("a", 0, 0, 4), send) == set()
    assert kinds(NEW, send) == {Kind.NEVER_WRITTEN}


def test_memory_of_one_stream_is_used_by_another_only_after_its_allocation() -> None:
    assert kinds(NEW, write("b")) == {Kind.USED_BEFORE_ALLOCATED}
    assert kinds(NEW, then("a", "b"), write("b")) == set()


def test_freed_memory_may_be_given_out_at_once_on_its_own_stream() -> None:
    assert kinds(NEW, write("a"), Free(0)) == set()
    assert kinds(NEW, then("a", "b"), write("b"), Free(0)) == {Kind.FREED_IN_USE}
    assert kinds(NEW, then("a", "b"), write("b"), then("b", "c", 2), Free(0)) != set()
    assert kinds(NEW, then("a", "b"), write("b"), then("b", "a", 2), Free(0)) == set()


def test_use_after_free() -> None:
    assert kinds(NEW, write("a"), Free(0), read("a")) == {Kind.USED_AFTER_FREE}


def test_the_host_waits_only_if_told_to() -> None:
    assert kinds(OLD, write("a"), read(HOST)) == {Kind.READ_TOO_EARLY}
    assert kinds(OLD, write("a"), Synchronize("a"), read(HOST)) == set()
    assert kinds(OLD, write("a"), Record("a", 1), Wait(HOST, 1), read(HOST)) == set()
    assert kinds(OLD, write(HOST), read("a")) == set(), "a launch is after what the host did"


def test_what_is_held_may_be_added_to_and_not_overwritten() -> None:
    held = Held(0, "a gradient", ((0, 4),))
    assert kinds(OLD, held, write("a")) == {Kind.HELD_LOST}
    assert kinds(OLD, held, change("a")) == set()
    assert kinds(OLD, held, write("a", 0, 4, 8)) == set()
    assert kinds(OLD, held, Free(0)) == {Kind.HELD_LOST}
    assert kinds(OLD, held, Held(0, "a gradient", ()), write("a"), Free(0)) == set()


def test_a_message_is_waited_for_once() -> None:
    message = Launch("network", "send", (Access(0, 0, 8, writes=True),), message=1)
    host = Allocate(0, 8, HOST, filled=True)
    assert kinds(host, message, Finish(1), read(HOST)) == set()
    assert kinds(host, message, read(HOST), Finish(1)) == {Kind.READ_TOO_EARLY}
    assert kinds(host, message, Finish(1), Finish(1)) == {Kind.WAITED_TWICE}
    assert kinds(host, message) == {Kind.NEVER_WAITED}


def test_an_event_that_was_never_recorded() -> None:
    assert kinds(Wait("a", 3)) == {Kind.NO_EVENT}


@pytest.mark.parametrize("waits", [True, False])
def test_which_launches_may_overlap(waits: bool) -> None:
    checker = Checker(keep_clocks=True)
    for event in [OLD, write("a"), *(then("a", "b") if waits else []), read("b")]:
        checker.feed(event)
    first, second = checker.launched
    assert checker.happens_before(first, second) is waits
    assert checker.concurrent(first, second) is not waits


def test_a_violation_says_what_and_against_what() -> None:
    (violation,) = check([OLD, write("a"), read("b")])
    assert (violation.index, violation.block) == (2, 0)
    assert str(violation) == (
        "event 2: read on b may read before the write is done (block 0), against write on a on a"
    )
