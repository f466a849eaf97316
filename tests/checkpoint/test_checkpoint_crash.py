"""A rank may die before any system call of a save: it leaves no checkpoint or a complete one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from checkpoint_crash import (
    LAYOUTS,
    NAME,
    TOGETHER,
    At,
    Crash,
    committed,
    exits,
    fork,
    leftovers,
    make_job,
    memory_folder,
    nonce,
    run,
    save,
)
from fsdp2.checkpoint import CheckpointError, CheckpointExists
from fsdp2.checkpoint.format.header import Header, header_length, parse_header
from fsdp2.checkpoint.format.manifest import FOLDER, INDEX, marker_name, own_name
from fsdp2.checkpoint.loading.opening import open_source
from fsdp2.checkpoint.saving import attempt
from fsdp2.checkpoint.saving.job import SaveJob
from harness import ours_only

pytestmark = ours_only("checkpoints")

LONG = pytest.mark.long


@pytest.fixture(autouse=True)
def all_may_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have waited do not take turns (`test_checkpoint_waiting` sees to these)."""
    monkeypatch.setattr(attempt, "TURN_S", 0.0)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def run_other(job: SaveJob) -> None:
    """A rank that is well: it may learn that the save failed, and nothing else."""
    try:
        run(job)
    except CheckpointExists:
        raise
    except CheckpointError:
        pass


def try_commit(job: SaveJob) -> bool:
    try:
        return job.attempt.commit()
    except CheckpointExists:
        raise
    except CheckpointError:
        return False


def crash_at(
    root: Path, number: int, victim: int, num_ranks: int, when: str, *, dead: bool, layout: str
) -> At:
    """One save, of which ``victim`` ends before call ``number``; others run before or after."""
    others = [make_job(root, r, num_ranks, layout=layout) for r in range(num_ranks) if r != victim]

    def at_call() -> None:
        if when == "meanwhile":
            for job in others:
                run_other(job)
        if not dead:
            raise Crash

    at = At(number, at_call, dead=dead)
    job = make_job(root, victim, num_ranks, before=at, layout=layout)
    if when == "before":
        for other in others:
            run_other(other)
    try:
        run(job)
        assert not at.reached
    except Crash:
        pass
    if when == "after" or (when == "meanwhile" and not at.reached):
        for other in others:
            run_other(other)
    survivors = [try_commit(other) for other in others]
    assert all(survivors) or not any(survivors)
    return at


def retry(root: Path, num_ranks: int, layout: str = "shared") -> None:
    """The same name with other bytes, by ranks that know nothing of the first attempt."""
    if committed(root, 1, num_ranks):
        for rank in range(num_ranks):
            with pytest.raises(CheckpointExists):
                make_job(root, rank, num_ranks, attempt=2, seed=2).begin()
        assert committed(root, 1, num_ranks)
        return
    save(root, num_ranks, attempt=2, seed=2, layout=layout)
    assert committed(root, 2, num_ranks)


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
@pytest.mark.parametrize(
    ("num_ranks", "victim", "layout"),
    [
        (2, 0, "shared"),
        (2, 1, "per-rank"),
        (3, 1, TOGETHER),
        pytest.param(2, 1, "shared", marks=LONG),
        pytest.param(2, 0, "per-rank", marks=LONG),
        pytest.param(3, 0, "shared", marks=LONG),
        pytest.param(3, 1, "shared", marks=LONG),
        pytest.param(3, 2, "per-rank", marks=LONG),
        pytest.param(2, 0, TOGETHER, marks=LONG),
        pytest.param(3, 2, TOGETHER, marks=LONG),
    ],
)
def test_a_rank_that_is_gone_before_any_call(
    root: Path, num_ranks: int, victim: int, layout: str, when: str
) -> None:
    """Committed exactly if its marker was there; what it left does no harm to a retry."""
    for number in count():
        folder = root / str(number)
        folder.mkdir()
        at = crash_at(folder, number, victim, num_ranks, when, dead=True, layout=layout)
        if not at.reached:
            assert committed(folder, 1, num_ranks)
            break
        assert committed(folder, 1, num_ranks) == at.marked(victim, num_ranks), at.calls[-1]
        retry(folder, num_ranks, layout)
    assert number > 25


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
@pytest.mark.parametrize(
    ("num_ranks", "victim"),
    [(2, 0), pytest.param(2, 1, marks=LONG), pytest.param(3, 1, marks=LONG)],
)
def test_a_rank_that_raises_before_any_call(
    root: Path, num_ranks: int, victim: int, when: str
) -> None:
    """It says that it failed: others learn of it, and the last one leaves nothing behind."""
    for number in count():
        folder = root / str(number)
        folder.mkdir()
        at = crash_at(folder, number, victim, num_ranks, when, dead=False, layout="shared")
        if not at.reached:
            break
        began = any(c == "open" and "clock" not in o for c, o in at.calls[: number + 1])
        if not at.marked(victim, num_ranks):
            assert not committed(folder, 1, num_ranks), at.calls[-1]
            assert not (began and leftovers(folder)), at.calls[-1]
        elif committed(folder, 1, num_ranks):
            assert leftovers(folder) == []
        retry(folder, num_ranks)
    assert number > 25


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_process_that_exits_before_any_call(root: Path, first: int, step: int) -> None:
    """The real end of a process: no handler, no clean-up."""
    for number in count(first, step):
        folder = root / str(number)
        folder.mkdir()
        if first:
            run(make_job(folder, 1))
        job = make_job(folder, 0, before=At(number, lambda: os._exit(99)))
        code = exits([fork(lambda job=job: run(job))])[0]
        assert code in (0, 99)
        other = make_job(folder, 1)
        if not first:
            run(other)
        ready = any(folder.glob(f".*/{FOLDER}/{marker_name(0, 2)}")) or (folder / NAME).exists()
        assert other.attempt.commit() == ready
        assert committed(folder, 1) == ready
        retry(folder, 2)
        if code == 0:
            break
    assert number > 25


@pytest.mark.parametrize("layout", LAYOUTS)
def test_others_may_finish_before_any_call(root: Path, layout: str) -> None:
    """Whichever rank overtakes which, and wherever: one checkpoint."""
    for number in count():
        folder = root / str(number)
        folder.mkdir()
        other = make_job(folder, 1, layout=layout)
        at = At(number, lambda other=other: run(other))
        job = make_job(folder, 0, before=at, layout=layout)
        run(job)
        if not at.reached:
            break
        assert job.attempt.commit()
        assert other.attempt.commit()
        assert committed(folder, 1)
        assert os.listdir(folder) == [NAME]
    assert number > 25


# -- the order of calls -------------------------------------------------------------------------


def num_writers(file: str) -> int:
    """How many ranks write the header; that of a file of whole tensors the one that commits."""
    found = re.search(r"-ranks-(\d+)-(\d+)", file)
    return int(found[2]) - int(found[1]) + 1 if found else 1


def header_of(head: bytes, file: Path) -> Header:
    size = file.stat().st_size
    return parse_header(head[8 : 8 + header_length(head[:8], size, file.name)], size, file.name)


class Log:
    """The calls of all ranks in one list, and what the staged files look like at each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[int, str, str]] = []
        self.staged_files = 0

    def of(self, rank: int):
        def before(call: str, operand: str) -> None:
            self.check_not_readable()
            self.calls.append((rank, call, operand))

        return before

    def check_not_readable(self) -> None:
        """Nobody can take a staged file without a header, or the folder, for a checkpoint."""
        for file in self.root.glob(".*.tmp/*.safetensors"):
            pieces = len(self.places("pwrite", f"header of {file.name}"))
            if pieces >= num_writers(file.name):
                continue
            head = file.read_bytes()[:4096]
            self.staged_files += 1
            assert pieces or head == bytes(len(head))
            with pytest.raises(SafetensorError):
                safe_open(file, "pt").__enter__()
            with pytest.raises(CheckpointError):
                header_of(head, file)
            with pytest.raises(CheckpointError):
                open_source(file.parent)
        assert self.places("rename", NAME) or not (self.root / NAME).exists()

    def places(self, call: str, operand: str, rank: int | None = None) -> list[int]:
        """Where in the list a call is; the operand of a rename is what it makes."""
        return [
            i
            for i, (r, c, o) in enumerate(self.calls)
            if c == call and rank in (None, r) and o.split(" -> ")[-1] == operand
        ]

    def assert_written_whole(self, name: str, rank: int) -> int:
        """A small file: written, made durable, and named only then; returns its naming."""
        (write,), (sync,) = self.places("pwrite", name, rank), self.places("fsync", name, rank)
        (rename,) = self.places("rename", name, rank)
        assert write < sync < rename
        return rename


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 0, 1)])
def test_nothing_is_named_before_it_is_durable(
    root: Path, order: tuple[int, ...], layout: str
) -> None:
    log, num_ranks = Log(root), len(order)
    staging = f".{NAME}.{nonce(1)}.tmp"
    jobs = {r: make_job(root, r, num_ranks, before=log.of(r), layout=layout) for r in order}
    for rank in order:
        jobs[rank].begin()
    for rank in order:
        jobs[rank].write()
    assert committed(root, 1, num_ranks)
    assert log.staged_files > (100 if layout == "shared" else 10)
    last = order[-1]
    (published,) = log.places("rename", NAME)
    shared = {f for job in jobs.values() for s in job.plan.sets if s.whole for f in s.files}
    headers = [i for file in shared for i in log.places("pwrite", f"header of {file}")]
    markers = []
    for rank in order:
        marker = log.assert_written_whole(marker_name(rank, num_ranks), rank)
        opened = log.places("open", f".{marker_name(rank, num_ranks)}.marker.tmp", rank)[0]
        for file, chunks in files_of(jobs[rank]).items():
            writes = [i for i in log.places("pwrite", file, rank) if i < marker]
            syncs = [i for i in log.places("fsync", file, rank) if i < opened]
            assert len(writes) >= chunks
            assert syncs
            assert all(i < syncs[-1] for i in writes)
            if file in shared:
                continue
            # A header stands for data that is durable, so it comes behind an fsync of its own.
            (header,) = log.places("pwrite", f"header of {file}", rank)
            assert max(writes) < syncs[-2] < header < syncs[-1]
        assert log.assert_written_whole(own_name(rank), rank) < opened
        assert any(i > marker for i in log.places("fsync", FOLDER, rank))
        markers.append(marker)
    assert len(headers) >= len(shared)
    assert bool(shared) == (layout == "shared")
    assert all(i > max(markers) for i in headers)
    for file in shared:
        (header,) = log.places("pwrite", f"header of {file}", last)
        assert any(header < i < published for i in log.places("fsync", file, last))
    named = max(headers, default=max(markers))
    if (root / NAME / INDEX).exists():
        named = log.assert_written_whole(INDEX, last)
        assert all(named > header for header in headers)
    for folder in (FOLDER, staging):
        assert any(named < i < published for i in log.places("fsync", folder, last))
    assert log.places("fsync", str(root), last)[-1] > published


def files_of(job: SaveJob) -> dict[str, int]:
    """The data files of a rank, and how many chunks it writes into each."""
    files = {file: 0 for s in job.plan.sets for file in s.files}
    for chunk in job.plan.chunks:
        files[chunk.file] += 1
    return files


def test_a_rank_that_finds_it_committed_makes_that_durable(root: Path) -> None:
    """The one that renamed may have ended before it synced the folder."""
    run(make_job(root, 1))
    at = At()
    run(make_job(root, 0, before=at))
    rename = [i for i, (call, _) in enumerate(at.calls) if call == "rename"][-1]
    other_root = root / "other"
    other_root.mkdir()
    other_at = At()
    other = make_job(other_root, 1, before=other_at)
    run(other)
    with pytest.raises(Crash):
        run(make_job(other_root, 0, before=At(rename + 1, dead=True)))
    assert (other_root / NAME).exists()
    other_at.calls.clear()
    assert other.attempt.commit()
    assert ("fsync", str(other_root)) in other_at.calls
