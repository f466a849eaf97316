"""`watch_hangs`: a rank that does not come is named while the others wait for it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import HangReport, HangWarning, fully_shard, watch_hangs
from fsdp2.checkpoint.agreement import told_by_all
from fsdp2.describe.hangs import EXIT_CODE, judge_loss
from fsdp2.describe.whereabouts import LOST, Whereabouts
from harness import cached_mesh, distributed, fork_context, ours_only

pytestmark = ours_only("names its own units")

AFTER_S = 0.5


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def sharded() -> Any:
    model = Blocks()
    mesh = cached_mesh(dist.get_world_size())
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model


def step(model: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()


class Reports:
    """What was reported on this rank."""

    def __init__(self) -> None:
        self.found: list[HangReport] = []
        self.came = threading.Event()

    def __call__(self, report: HangReport) -> None:
        self.found.append(report)
        self.came.set()


def sleep_until_named(keys: list[str]) -> None:
    """On the rank that is late: until all others have reported the hang."""
    dist.distributed_c10d._get_default_store().wait(keys)


def late_rank(moment: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, reports = sharded(), Reports()
    store = dist.distributed_c10d._get_default_store()
    keys = [f"named/{moment}/{other}" for other in range(world_size)]

    def named(report: HangReport) -> None:
        reports(report)
        store.clone().set(keys[rank], "")

    late = world_size - 1
    with watch_hangs(model, after_s=AFTER_S, on_hang=named):
        step(model)
        out = model(torch.ones(2, 8)) if moment == "backward" else None
        if rank == late:
            sleep_until_named(keys[:late])
        if out is None:
            step(model)
        else:
            out.sum().backward()
    if rank == late:
        assert not reports.found
        return
    (report,) = reports.found
    assert (report.rank, list(report.elsewhere), dict(report.silent)) == (rank, [late], {})
    assert report.waited_s >= AFTER_S
    missing = report.elsewhere[late]
    assert report.here.phase == moment
    # In backward, too: the last unit is still gathered, and the next one is waited for.
    assert report.here.waits_for == "the all-gather of unit 'first'"
    assert report.here.order[0] == missing.order[0] == 1
    assert missing.at.startswith("test_watch_hangs.py:")
    assert missing.at.endswith(" in sleep_until_named")
    assert missing.phase == "outside"
    assert "test_watch_hangs.py" in report.here.at
    assert report.together == tuple(range(late))


@distributed(2, 3)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_a_rank_that_is_late(moment: str) -> None:
    late_rank(moment)


@distributed(2)
def test_a_rank_that_was_stopped() -> None:
    """By SIGSTOP, as a debugger or a job scheduler does."""
    rank = dist.get_rank()
    model, reports = sharded(), Reports()
    with watch_hangs(model, after_s=AFTER_S, on_hang=reports):
        step(model)
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 1:
            time.sleep(2 * AFTER_S)  # here it is stopped
        else:
            time.sleep(AFTER_S)  # by now it has written where it is
            stopper = threading.Thread(target=stop_for_a_while, args=(pids[1], reports.came))
            stopper.start()
        step(model)
        dist.barrier()
    if rank == 0:
        stopper.join()
        assert [list(report.silent) for report in reports.found] == [[1]]
        assert "No sign of rank 1: gone, stopped, or cut off; last" in str(reports.found[0])


def stop_for_a_while(pid: int, until: threading.Event) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        until.wait(30)
    finally:
        os.kill(pid, signal.SIGCONT)


@distributed(2)
def test_a_checkpoint_whose_rank_was_stopped_and_one_that_takes_long() -> None:
    """A rank that writes for long is no hang; one that is stopped is."""
    rank = dist.get_rank()
    model, reports = sharded(), Reports()
    with watch_hangs(model, after_s=AFTER_S, on_hang=reports):
        pids: list[Any] = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 1:
            time.sleep(5 * AFTER_S)  # it writes
        told_by_all("test", "written", (0, 1))
        assert not reports.found
        if rank == 1:
            time.sleep(2 * AFTER_S)  # here it is stopped
        else:
            time.sleep(AFTER_S)
            stopper = threading.Thread(target=stop_for_a_while, args=(pids[1], reports.came))
            stopper.start()
        told_by_all("test", "written", (0, 1))
        dist.barrier()
    if rank == 0:
        stopper.join()
        (report,) = reports.found
        assert report.here.waits_for == "all ranks to do their part of a checkpoint"
        assert list(report.silent) == [1]


@distributed(2)
def test_a_step_in_time_is_not_reported() -> None:
    """Nor one rank that computes for long while no other waits."""
    model, reports = sharded(), Reports()
    with watch_hangs(model, after_s=AFTER_S, on_hang=reports):
        for _ in range(3):
            step(model)
        time.sleep(3 * AFTER_S)  # on all ranks
        step(model)
    assert not reports.found
    assert not [t for t in threading.enumerate() if t.name == "fsdp2-hangs" and t.is_alive()]


@distributed(2)
def test_a_warning_names_the_rank_once() -> None:
    rank = dist.get_rank()
    model = sharded()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with watch_hangs(model, after_s=AFTER_S):
            if rank == 1:
                time.sleep(6 * AFTER_S)
            dist.barrier()
            step(model)
    hangs = [str(w.message) for w in found if w.category is HangWarning]
    assert len(hangs) == (rank == 0)
    if rank == 0:
        assert "Rank 0 has waited" in hangs[0]
        assert "for torch.distributed, in barrier()" in hangs[0]
        assert "Rank 1: outside of the model, step 1, at test_watch_hangs.py:" in hangs[0]


def test_who_is_to_blame_for_a_connection_that_broke() -> None:
    """Who has vanished or failed by itself; those that live, if there is none of these."""
    here = Whereabouts(3, "backward", 1, "0", "", "a.py:1 in f", ended=LOST)
    lives = Whereabouts(3, "outside", 0, "", "", "a.py:2 in g")
    failed = Whereabouts(3, "forward", 1, "1", "", "a.py:3 in h", ended="ValueError: no")
    places = {0: here, 1: here, 2: lives}
    alive = dict.fromkeys(places, False) | {2: True}
    report = judge_loss(0, "E: lost", places, alive)
    assert (dict(report.elsewhere), report.silent, report.together) == ({2: lives}, {}, (0, 1))
    alone = judge_loss(0, "E: lost", {0: here, 1: here}, {0: True, 1: False})
    assert "All ranks have lost others: the connection broke" in str(alone)
    report = judge_loss(0, "E: lost", {**places, 3: lives, 4: None}, {**alive, 3: False, 4: False})
    assert (dict(report.elsewhere), dict(report.silent)) == ({}, {3: lives, 4: None})
    report = judge_loss(0, "E: lost", {**places, 3: failed}, {**alive, 3: False})
    assert (dict(report.elsewhere), report.silent) == ({3: failed}, {})
    assert str(report) == (
        "Rank 0 has lost others, at a.py:1 in f: E: lost.\n"
        "Rank 3: in forward of unit '1', step 4, at a.py:3 in h, ended by ValueError: no."
    )


@distributed(1)
def test_wrong_arguments() -> None:
    model = sharded()
    with pytest.raises(ValueError, match="after_s is 0, but has to be more than 0 seconds"):
        watch_hangs(model, after_s=0)
    with pytest.raises(ValueError, match="on_hang is 'raise', but has to be 'warn', 'exit' or"):
        watch_hangs(model, on_hang="raise")


def rank_that_ends(rank: int, port: int, output: str) -> None:
    """A process of its own: rank 1 never comes, and rank 0 ends."""
    with open(output, "w") as file:
        os.dup2(file.fileno(), 2)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model: Any = Blocks()
    fully_shard(model)
    with watch_hangs(model, after_s=AFTER_S, on_hang="exit", flight_records=f"{output}-flight"):
        step(model)
        dist.barrier()  # a collective for the record; gathers may be messages
        Path(f"{output}-trains").touch()
        if rank == 1:
            time.sleep(100)
        step(model)


def test_a_process_that_ends_because_of_a_hang(tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        fork_context().Process(
            target=rank_that_ends, args=(rank, server.port, str(tmp_path / str(rank)))
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        ranks[0].join(60)
        assert ranks[0].exitcode == EXIT_CODE
    finally:
        for process in ranks:
            process.kill()
    said = (tmp_path / "0").read_text()
    assert "Rank 1: outside of the model, step 2, at test_watch_hangs.py:" in said
    assert f"This process ends (exit code {EXIT_CODE})" in said
    assert "wait_unshard" in said  # in the stacks
    record = tmp_path / "0-flight" / "rank_0"
    assert f"Collectives: {record} (torchfrtrace {record.parent} -p rank_)" in said
    entries = pickle.loads(record.read_bytes())["entries"]
    assert "gloo:barrier" in {entry["profiling_name"] for entry in entries}


def store_server(port: Any) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(server.port)
    time.sleep(100)


def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    """As for a host whose link is cut: nothing can be written, and nobody can be asked."""
    mine, its = multiprocessing.Pipe()
    server = fork_context().Process(target=store_server, args=(its,))
    server.start()
    port = mine.recv()
    ranks = [
        fork_context().Process(target=rank_that_ends, args=(rank, port, str(tmp_path / str(rank))))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        assert server.pid is not None
        while not (tmp_path / "0-trains").exists():
            assert ranks[0].is_alive()
            time.sleep(0.01)
        os.kill(server.pid, signal.SIGSTOP)
        ranks[0].join(60)
        assert ranks[0].exitcode == EXIT_CODE
    finally:
        for process in (*ranks, server):
            process.kill()
    said = (tmp_path / "0").read_text()
    assert re.search(r"The store of the process group has not answered for \d+ s \(127", said)
    assert "for the all-gather of unit '(root)', in forward of unit '(root)', step 2" in said
