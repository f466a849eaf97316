"""`examples/train_lm.py --elastic`: any number of ranks, the same sequences in each step."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: the example uses its checkpoints", allow_module_level=True)

from benchmarks import faults
from benchmarks.fault_cluster import FAULTS, OPTIONS
from benchmarks.fault_reference import Segment, segments
from benchmarks.hosts import why_not
from example_runs import EXAMPLES, loss_values, losses, run_in_turn


def windows(num_ranks: int, sequences: int, batch: int) -> list[tuple[float, int]]:
    """What all ranks compute in two steps: windows by their first byte, with their weights."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        from common.text_data import Batches
    finally:
        sys.path.remove(str(EXAMPLES))
    text = torch.arange(200, dtype=torch.uint8)
    found = []
    forwards = set()
    for rank in range(num_ranks):
        batches = Batches(text, length=4, batch=batch, rank=rank, num_ranks=num_ranks, seed=1)
        for step in range(2):
            parts = batches.of_step(sequences)
            forwards.add(len(parts))
            assert batches.position == (step + 1) * sequences
            for part in parts:
                assert 1 <= len(part.inputs) <= batch
                each = part.weight / len(part.inputs) / num_ranks  # gradients are averaged
                found += [(each, int(row[0])) for row in part.inputs if each]
    assert len(forwards) == 1  # a forward is collective
    return sorted(found, key=lambda pair: pair[1])


@pytest.mark.parametrize(("sequences", "batch"), [(10, 2), (7, 3), (3, 1)])
def test_a_step_has_the_same_sequences_with_the_same_weights(sequences: int, batch: int) -> None:
    alone = windows(1, sequences, batch)
    assert len({first for _, first in alone}) == 2 * sequences
    for num_ranks in (2, 3, 4, 5):
        found = windows(num_ranks, sequences, batch)
        assert [first for _, first in found] == [first for _, first in alone]
        assert [weight for weight, _ in found] == pytest.approx([1 / sequences] * len(found))


def test_goes_on_with_other_ranks_and_says_what_is_lost(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    options = [*OPTIONS, "--data", str(text), "--steps", "6"]

    def train(num_ranks: int, *runs: tuple[Path, list[str]]) -> None:
        for out, _ in runs:
            out.mkdir(exist_ok=True)
        given = [([*options, "--out", str(o), *more], o / "printed.txt") for o, more in runs]
        run_in_turn(num_ranks, "train_lm.py", given)

    parts = tmp_path / "parts"
    train(2, (tmp_path / "whole", []), (parts, ["--stop-at", "4"]))
    # As a process leaves it that is killed in the middle of a row, two steps after the commit.
    rows = losses(parts)
    lines = [
        json.dumps(row) + "\n" for row in (*rows, rows[-1] | {"step": 5}, rows[-1] | {"step": 6})
    ]
    (parts / "losses.jsonl").write_text("".join(lines) + '{"step": 7, "lo')
    train(3, (parts, []))
    printed = (parts / "printed.txt").read_text()
    assert (
        "continues    after step 4, from disk, on 3 ranks; 2 steps are lost and repeated" in printed
    )
    assert [row["step"] for row in losses(parts)] == [1, 2, 3, 4, 5, 6]
    assert loss_values(parts) == pytest.approx(loss_values(tmp_path / "whole"), rel=1e-4)
    sessions = [json.loads(line) for line in (parts / "sessions.jsonl").read_text().splitlines()]
    found = [(s["resumed_after"], s["lost_steps"], s["world_size"]) for s in sessions]
    assert found == [(0, 0, 2), (4, 2, 3)]


FULL_DISK = """
import errno, runpy, sys, time
sys.path.insert(0, {examples!r})
from common.elastic import Commits
def save(self, step, **state):
    with self._told(step):
        raise OSError(errno.ENOSPC, "No space left on device")
Commits.save = save
from common.elastic import MemorySnapshots
after_step = MemorySnapshots.after_step
def waits_first(self, step, **state):
    for _ in range(600):  # on a busy machine this one would be left out otherwise
        if self.rank or self._look_at_pending():
            break
        time.sleep(0.1)
    after_step(self, step, **state)
MemorySnapshots.after_step = waits_first
runpy.run_path({examples!r} + "/train_lm.py", run_name="__main__")
"""


def test_what_went_on_from_memory_is_committed_if_no_step_follows(tmp_path: Path) -> None:
    """Memory ends with the run: a stop before the first step lost what was in no commit."""
    text, out, full = tmp_path / "text.py", tmp_path / "out", tmp_path / "full.py"
    text.write_bytes(Path(argparse.__file__).read_bytes())
    full.write_text(FULL_DISK.format(examples=str(EXAMPLES)))
    out.mkdir()
    memory = ["--snapshot-dir", str(tmp_path)]
    given = [*OPTIONS, *memory, "--data", str(text), "--steps", "6", "--stop-at", "4"]
    printed = out / "printed.txt"
    run_in_turn(2, str(full), [([*given, "--out", str(out)], printed)])
    assert not list(out.glob("checkpoints/step-*"))
    run_in_turn(2, "train_lm.py", [([*given, "--out", str(out)], printed)])
    assert "continues    after step 4, from memory" in printed.read_text()
    assert [path.name for path in out.glob("checkpoints/step-*")] == ["step-000004"]
    assert not list(tmp_path.glob("fsdp2-snapshots-*"))
    # From there the numbers are those of a run that was not interrupted.
    given[-2:] = []
    whole = tmp_path / "whole"
    whole.mkdir()
    runs = [([*given, "--out", str(each)], each / "printed.txt") for each in (out, whole)]
    run_in_turn(2, "train_lm.py", runs)
    assert loss_values(out) == loss_values(whole)


def test_which_steps_count() -> None:
    rows = [(0, 4), (10, 2), (10, 4), (15, 2), (12, 4)]
    sessions = [{"resumed_after": step, "world_size": size} for step, size in rows]
    assert segments(sessions, 20) == [Segment(1, 20, 4)]
    assert segments(sessions[:4], 15) == [Segment(1, 15, 4)]
    assert segments(sessions[:4], 20) == [Segment(1, 15, 4), Segment(16, 20, 2)]
    assert segments(sessions[:2], 12) == [Segment(1, 10, 4), Segment(11, 12, 2)]


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_needs_no_person_and_changes_no_number(kind: str) -> None:
    """Two hosts with two ranks each; see `benchmarks.faults`."""
    record = faults.run(0, 1, [kind])
    assert (record["person"], record["wrong"]) == ("", [])
    assert len(record["faults"]) == 1


def test_a_start_ends_when_there_is_a_newer_one(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from common.elastic import Start
        from common.lm_report import Rows
    finally:
        sys.path.remove(str(EXAMPLES))
    path = tmp_path / "sessions.jsonl"
    older, newer = (Start(sessions=Rows(path), number=number) for number in (1, 2))
    assert older.sessions is not None
    older.sessions.add(world_size=2)
    older.check_newest()
    assert newer.sessions is not None
    newer.sessions.add(world_size=4)
    newer.check_newest()
    with pytest.raises(SystemExit):
        older.check_newest()
    Start(sessions=older.sessions).check_newest()  # whose own row is not written: it cannot tell


@pytest.fixture
def store_module() -> Iterator[Any]:
    """`examples/clusters/store.py`."""
    sys.path.insert(0, str(EXAMPLES / "clusters"))
    try:
        import store

        yield store
    finally:
        sys.path.remove(str(EXAMPLES / "clusters"))


def test_a_rendezvous_that_was_closed_opens_again(store_module: Any) -> None:
    """As a host closes it on which torchrun fails; with the state that torch itself writes."""
    reopen = store_module.reopen
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{server.port}", "run", 1, 2, is_host="0")
    first, second = (get_rendezvous_handler(parameters) for _ in range(2))
    assert not reopen(server, "torch.rendezvous.run")  # nobody has come
    first.set_closed()
    assert second.is_closed()
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()
    assert reopen(server, "torch.rendezvous.run")
    assert not reopen(server, "torch.rendezvous.run")
    assert not get_rendezvous_handler(parameters).is_closed()  # as torchrun when it starts again


def test_hosts_for_which_there_is_no_room_become_spares(
    store_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host trains, two come at once, and there is room for two: with torch's own rendezvous."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as in elastic.sh
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parameters = RendezvousParameters(
        *("c10d", f"127.0.0.1:{server.port}", "run", 1, 2), is_host="0", last_call_timeout="1"
    )
    first, *others = (get_rendezvous_handler(parameters) for _ in range(3))
    key, spares = "torch.rendezvous.run", store_module.Spares()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        stack.callback(first.set_closed)  # which ends the wait of the spare
        first.next_rendezvous()
        coming = [pool.submit(each.next_rendezvous) for each in others]
        wait_for(lambda: first.num_nodes_waiting() == 2)
        assert spares.look(server, key) == 0  # one of them will be taken in
        coming.append(pool.submit(first.next_rendezvous))
        wait_for(lambda: sum(each.done() for each in coming) == 2)
        wait_for(lambda: first.num_nodes_waiting() == 1)  # for which torchrun starts all again
        wait_for(lambda: spares.look(server, key) == 1)
        wait_for(lambda: first.num_nodes_waiting() == 0)
        assert spares.look(server, key) == 0
        assert sum(each.done() for each in coming) == 2


def test_who_trains_learns_of_a_host_that_comes_after_the_rendezvous_was_closed(
    store_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a link was cut. The host would start alone otherwise: two trainings in one folder."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    parameters = RendezvousParameters(
        *("c10d", f"127.0.0.1:{server.port}", "run", 1, 2), is_host="0", last_call_timeout="1"
    )
    trains, cut_off, comes = (get_rendezvous_handler(parameters) for _ in range(3))
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        stack.callback(trains.set_closed)
        trains.next_rendezvous()
        cut_off.set_closed()
        assert store_module.reopen(server, "torch.rendezvous.run")
        coming = pool.submit(comes.next_rendezvous)
        wait_for(lambda: trains.num_nodes_waiting() == 1)  # for which torchrun starts all again
        again = pool.submit(trains.next_rendezvous)
        assert coming.result(60).world_size == again.result(60).world_size == 2


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_hosts_that_come_at_once_do_not_stop_training() -> None:
    """There is room for one of them; the other replaces the next host that is lost."""
    with ExitStack() as stack:
        cluster = faults.cluster_of(stack, 3, seed=1)
        first, *others = cluster.training
        cluster.start_store()
        cluster.start(first)
        wait_for(lambda: cluster.last_step() > 5)
        for host in others:
            cluster.start(host)
        wait_for(lambda: cluster.sessions()[-1]["world_size"] == 4)
        reached = cluster.last_step()
        wait_for(lambda: cluster.last_step() > reached + 5)
        assert len(cluster.sessions()) == 2
        training = [host for host in cluster.training if len(cluster.workers(host)) == 2]
        assert len(training) == 2
        cluster.kill(training[0])
        wait_for(lambda: len(cluster.sessions()) == 3)
        assert cluster.sessions()[-1]["world_size"] == 4
        reached = cluster.last_step()
        wait_for(lambda: cluster.last_step() > reached + 5)
        assert len(cluster.sessions()) == 3


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
