"""What the doctor finds wrong, from facts that are made up."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its command line", allow_module_level=True)

from fsdp2.doctor.checks import ERROR, WARNING, FolderFacts, check
from fsdp2.doctor.examine import Examination, _findings_of
from fsdp2.doctor.facts import Facts, facts_of
from fsdp2.doctor.links import MeasuredLink, rounds
from fsdp2.doctor.meeting import PhaseError
from fsdp2.doctor.report import report
from pages import ROOT, blocks

GB = 1 << 30


def fact(rank: int, **changes: Any) -> Facts:
    """Rank ``rank`` of four, two on a host, all in order."""
    good = Facts(
        rank=rank,
        local_rank=rank % 2,
        world_size=4,
        host="ab"[rank // 2],
        boot="1",
        pid=100 + rank,
        address=f"10.0.0.{rank // 2}",
        fsdp2="1",
        torch="2.15.0",
        python="3.11.7",
        nccl="2.28",
        device="H100",
        device_id=f"{rank // 2}{rank % 2}",
        num_devices=2,
        device_used=GB // 2,
        device_bytes=80 * GB,
        cores=64,
        threads=1,
        memory_free=200 * GB,
        memory_bytes=256 * GB,
        open_files=65536,
        locked_bytes=-1,
        shm_bytes=8 * GB,
        settings={"NCCL_ALGO": "ring"},
    )
    return replace(good, **changes)


def facts(**changes: Any) -> list[Facts]:
    """Four ranks; the changes are those of rank 3, or by rank: ``{rank: value}``."""
    by_rank = {name: v if isinstance(v, dict) else {3: v} for name, v in changes.items()}
    return [
        fact(rank, **{name: of[rank] for name, of in by_rank.items() if rank in of})
        for rank in range(4)
    ]


def test_nothing_is_wrong_where_nothing_is() -> None:
    links = [MeasuredLink(0, 2, 1e-4, 1e9, 0.0)]
    folders = {rank: FolderFacts("", (0, 1, 2, 3), 10 * GB, 1e8) for rank in range(4)}
    assert check(facts(), links, folders, GB) == []


WRONG = {
    "torch": (
        {"torch": "2.13.0"},
        ERROR,
        "versions",
        "torch 2.15.0 on ranks 0, 1, 2, 2.13.0 on rank 3",
    ),
    "fsdp2": ({"fsdp2": "0"}, ERROR, "versions", "fsdp2 1 on ranks 0, 1, 2, 0 on rank 3"),
    "nccl": ({"nccl": "2.20"}, ERROR, "versions", "2.20 on rank 3"),
    "python": (
        {"python": "3.12.1"},
        WARNING,
        "versions",
        "Python 3.11 on ranks 0, 1, 2, 3.12 on rank 3",
    ),
    "setting": (
        {"settings": {3: {}}},
        WARNING,
        "environment",
        "NCCL_ALGO: ring on ranks 0, 1, 2, none on rank 3",
    ),
    "world size": (
        {"world_size": 8},
        ERROR,
        "launch",
        "WORLD_SIZE 4 on ranks 0, 1, 2, 8 on rank 3",
    ),
    "too few devices": (
        {"num_devices": 1, "device": "", "device_id": ""},
        ERROR,
        "devices",
        "rank 3 have no device",
    ),
    "no driver": (
        {"num_devices": 0, "device": "", "device_id": ""},
        ERROR,
        "devices",
        "the CPU on rank 3",
    ),
    "other device": (
        {"device": "A100"},
        WARNING,
        "devices",
        "H100 on ranks 0, 1, 2, A100 on rank 3",
    ),
    "one device": ({"device_id": "10"}, ERROR, "devices", "ranks 2, 3 share a device"),
    "device in use": (
        {"device_used": 40 * GB},
        WARNING,
        "devices",
        "rank 3 on b has 40.0 GiB of 80.0 GiB in use",
    ),
    "no address": ({"address": ""}, ERROR, "address", "rank 3 cannot be resolved"),
    "loopback": (
        {"address": "127.0.1.1"},
        ERROR,
        "address",
        "rank 3 would give other hosts the address 127.0.1.1",
    ),
    "uneven hosts": ({"host": "c"}, WARNING, "hosts", "a: 2, b: 1, c: 1"),
    "threads": (
        {"threads": {0: 128, 1: 128}},
        WARNING,
        "threads",
        "2 ranks on a use 128 threads each, of 64",
    ),
    "memory": ({"memory_free": {0: GB, 1: GB}}, WARNING, "memory", "a has 1.00 GiB of 256 GiB"),
    "shm": ({"shm_bytes": {0: 1 << 20}}, WARNING, "shared memory", "/dev/shm on a has 1.00 MiB"),
    "files": ({"open_files": {2: 256}}, ERROR, "limits", "b may open 256 files"),
    "locked": ({"locked_bytes": {0: 65536}}, WARNING, "limits", "a may lock 64.0 KiB"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_differs_is_named(case: str) -> None:
    changes, level, about, words = WRONG[case]
    (found,) = check(facts(**changes))
    assert (found.level, found.about) == (level, about)
    assert words in found.text
    assert found.advice


def test_addresses_of_one_host_may_be_of_the_loop() -> None:
    alone = [replace(each, host="a", address="127.0.0.1", device="", device_id="", nccl="",
                     num_devices=0) for each in facts()]  # fmt: skip
    assert check(alone) == []


def test_slow_links_and_clocks_are_named() -> None:
    links = [MeasuredLink(a, b, 1e-4, 1e9, 0.0) for a, b in combinations(range(4), 2)]
    links[0] = replace(links[0], bytes_per_s=1e8)
    links[-1] = replace(links[-1], latency_s=0.1)
    links[1] = replace(links[1], clock_s=-7.0)
    clock, slow, late = check(facts(), links)
    assert "clocks of a (rank 0) and b (rank 2) are 7.00 s apart" in clock.text
    assert "between a (rank 0) and a (rank 1) carries 95.4 MiB/s" in slow.text
    assert "between b (rank 2) and b (rank 3) takes 100.0 ms" in late.text
    alike = [replace(link, bytes_per_s=1e8, clock_s=0.0, latency_s=1e-4) for link in links]
    assert check(facts(), alike) == []


def test_folders() -> None:
    good = {rank: FolderFacts("", (0, 1, 2, 3), 10 * GB, 1e8) for rank in range(4)}
    (alone,) = check(facts(), (), good | {3: replace(good[3], seen=(3,))})
    assert "rank 3 do not see the files of all other ranks" in alone.text
    (full,) = check(facts(), (), good | {2: replace(good[2], free_bytes=GB)}, 2 * GB)
    assert "1.00 GiB are free there, but 2.00 GiB are needed" in full.text
    (closed,) = check(facts(), (), good | {1: FolderFacts("Permission denied", (), 0, 0.0)})
    assert "rank 1 cannot write there: Permission denied" in closed.text


@pytest.mark.parametrize("size", range(1, 10))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(size: int) -> None:
    members = [10 * i for i in range(size)]
    found = rounds(members)
    assert len(found) <= size
    for pairs in found:
        busy = [member for pair in pairs for member in pair]
        assert len(busy) == len(set(busy))
    met = [frozenset(pair) for pairs in found for pair in pairs]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in combinations(members, 2)}


def test_facts_survive_other_versions_of_them() -> None:
    mine = facts_of(0, 1, 0)
    assert Facts.from_dict(mine.to_dict()) == mine
    told = mine.to_dict() | {"new": 1}
    del told["open_files"], told["settings"], told["host"]
    assert Facts.from_dict(told) == replace(mine, open_files=0, settings={}, host="")


def test_the_report_of_many_hosts_is_short() -> None:
    many = [replace(fact(0), rank=rank, host=f"host-{rank}") for rank in range(500)]
    links = [MeasuredLink(0, rank, 1e-4, 1e9 + rank, 0.0) for rank in range(1, 500)]
    text = report(Examination(500, many, [], links))
    assert "500 of 500 ranks answered, on 500 hosts" in text
    assert "and 436 more" in text
    assert "The slowest 10 of 499 links" in text
    assert len(text.splitlines()) < 90


def test_the_page_shows_what_is_printed() -> None:
    (shown,) = [b.code for b in blocks(ROOT / "docs/guides/clusters.md") if b.language == "text"]
    ranks = [replace(fact(0), rank=rank, world_size=9) for rank in range(5)]
    ranks[4] = replace(ranks[4], torch="2.13.0")
    nodes = [replace(fact(0), rank=8 * node, host=f"node{node}") for node in range(4)]
    speeds = [MeasuredLink(8 * a, 8 * b, 1e-4, 2.8e9, 0.0) for a, b in combinations(range(4), 2)]
    speeds[4] = replace(speeds[4], bytes_per_s=1.2e8)
    findings = [
        *_findings_of(PhaseError("arrival", {}, [9]), []),
        *[each for each in check(ranks) if each.about == "versions"],
        *[each for each in check(nodes, speeds) if each.about == "link"],
    ]
    printed = report(Examination(10, findings=findings)).splitlines()
    assert shown.splitlines() == printed[-7:-1]
