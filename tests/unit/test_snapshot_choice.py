"""Where copies of snapshots are, and which snapshot is restored: pure."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from fsdp2.snapshots import transfer
from fsdp2.snapshots.choice import Generation, PartName, choose
from fsdp2.snapshots.neighbours import SnapshotPlace, neighbours
from harness import ours_only

pytestmark = ours_only("snapshots in memory")


def places(*ranks: int) -> list[SnapshotPlace]:
    """So many ranks on each host."""
    return [SnapshotPlace(f"h{i}", f"f{i}") for i, num in enumerate(ranks) for _ in range(num)]


def generation(session: int, step: int, nonce: str = "00000000") -> Generation:
    return Generation(session, step, nonce)


def parts(of: Generation, *ranks: int, num: int = 4) -> list[PartName]:
    return [PartName(of, rank, num) for rank in ranks]


@pytest.mark.parametrize("num_hosts", range(2, 9))
def test_copies_are_on_another_host_in_pairs(num_hosts: int) -> None:
    where = places(*[1 + i % 3 for i in range(num_hosts)])
    found = neighbours(where)
    copies = {(where[r].host, where[n].host) for r, n in enumerate(found) if n is not None}
    assert len({here for here, _ in copies}) == num_hosts
    assert all(here != there for here, there in copies)
    fatal = [
        pair for pair in combinations([f"h{i}" for i in range(num_hosts)], 2)
        if set(pair) in [set(copy) for copy in copies]
    ]  # fmt: skip
    assert len(fatal) == num_hosts // 2 + (2 if num_hosts % 2 else 0)


def test_one_host_with_two_folders_and_with_one() -> None:
    assert neighbours([SnapshotPlace("h", "a"), SnapshotPlace("h", "b")]) == [1, 0]
    assert neighbours([SnapshotPlace("h", "a"), SnapshotPlace("h", "a")]) == [None, None]


def test_names() -> None:
    for each in (generation(1, 20), generation(1234567, 10**10, "0f3a9c11")):
        assert Generation.parse(each.name) == each
        part = PartName(each, 3, 8)
        assert PartName.parse(each.name, part.name) == part
    for name in ("", ".incoming-000001-000000020-00000000", "000001-20-00000000", "lock-00003"):
        assert Generation.parse(name) is None
    assert PartName.parse(generation(1, 20).name, "rank-00008-of-00008") is None


def test_the_newest_whole_one_is_chosen() -> None:
    old, new = generation(1, 10), generation(1, 20)
    inventories = {"a": [*parts(old, 0, 1, 2), *parts(new, 0, 1, 2)], "b": parts(old, 2, 3)}
    choice = choose(inventories)
    assert choice is not None
    assert choice.generation == old
    assert choice.holders[PartName(old, 2, 4)] == ("a", "b")
    inventories["b"] += parts(new, 3)
    choice = choose(inventories)
    assert choice is not None
    assert choice.generation == new


def test_a_later_session_wins_over_a_higher_step() -> None:
    """A host that was away comes back with what the others have gone on from without it."""
    stale, now = generation(1, 900), generation(2, 890)
    choice = choose({"back": parts(stale, 0, 1, 2, 3), "went on": parts(now, 0, 1, num=2)})
    assert choice is not None
    assert choice.generation == now


def test_parts_of_two_sessions_of_one_number_are_not_mixed() -> None:
    a, b = generation(2, 10, "aaaaaaaa"), generation(2, 10, "bbbbbbbb")
    assert choose({"x": parts(a, 0, 1), "y": parts(b, 2, 3)}) is None
    assert choose({"x": parts(a, 0, 1), "y": parts(a, 0, 1, num=3)}) is None


def test_damaged_parts_do_not_count() -> None:
    old, new = generation(1, 10), generation(1, 20)
    inventories = {"a": parts(old, 0, 1, 2, 3) + parts(new, 0, 1, 2, 3), "b": parts(new, 3)}
    damaged = PartName(new, 3, 4)
    choice = choose(inventories, {("a", damaged)})
    assert choice is not None
    assert choice.generation == new
    assert choice.holders[damaged] == ("b",)
    choice = choose(inventories, {("a", damaged), ("b", damaged)})
    assert choice is not None
    assert choice.generation == old


def test_random_losses_against_a_plain_search() -> None:
    source = random.Random(0)
    for _ in range(300):
        inventories: dict[str, list[PartName]] = {
            folder: [
                PartName(generation(s, step), rank, 3)
                for s in (1, 2) for step in (1, 2) for rank in range(3) if source.random() < 0.6
            ]
            for folder in "abc"
        }  # fmt: skip
        there = {part for found in inventories.values() for part in found}
        whole = [
            (s, step) for s in (1, 2) for step in (1, 2)
            if all(PartName(generation(s, step), rank, 3) in there for rank in range(3))
        ]  # fmt: skip
        choice = choose(inventories)
        found = None if choice is None else (choice.generation.session, choice.generation.step)
        assert found == (max(whole) if whole else None)


def test_a_reader_of_many_servers_keeps_few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a descriptor here, and a thread of the server."""
    connected: set[object] = set()

    class Peer:
        def __init__(self, *address: object) -> None:
            connected.add(self)

        def close(self) -> None:
            connected.discard(self)

    monkeypatch.setattr(transfer, "Peer", Peer)
    peers = transfer.Peers("")
    for port in range(1000):
        assert peers.to(("host", port)) is peers.to(("host", port))
        assert len(connected) <= transfer.MAX_PEERS
    peers.close()
    assert not connected
