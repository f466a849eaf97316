"""Ranks, jobs and clean-ups that overtake each other at a checkpoint's name."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from checkpoint_crash import (
    NAME,
    At,
    Before,
    Held,
    committed,
    leftovers,
    make_job,
    mark,
    memory_folder,
    nonce,
    run,
    save,
    tensors,
)
from fsdp2.checkpoint import CheckpointError, CheckpointExists
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.format.manifest import FOLDER, marker_name
from fsdp2.checkpoint.format.marker import read_marker
from fsdp2.checkpoint.saving import attempt
from fsdp2.checkpoint.saving.attempt import Attempt, _left, sweep
from fsdp2.checkpoint.saving.job import SaveJob
from harness import ours_only

pytestmark = ours_only("checkpoints")

LONG = pytest.mark.long
STAGING = f".{NAME}.{nonce(1)}.tmp"


@pytest.fixture(autouse=True)
def all_may_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have waited do not take turns (`test_checkpoint_waiting` sees to these)."""
    monkeypatch.setattr(attempt, "TURN_S", 0.0)


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def marked() -> Iterator[Path]:
    """A folder with an attempt of which all is there but the commit."""
    with memory_folder() as folder:
        mark(folder)
        yield folder


# -- several that commit ------------------------------------------------------------------------


def commit(root: Path, rank: int) -> Callable[[Before], object]:
    return lambda before: make_job(root, rank, before=before).attempt.commit()


def give_up(root: Path, rank: int) -> Callable[[Before], object]:
    return lambda before: make_job(root, rank, before=before).attempt.give_up("full")


def sweep_all(root: Path, rank: int) -> Callable[[Before], object]:
    return lambda before: sweep(Disk(before), root, grace_s=-60.0)


def num_calls(marked: Path, body: Callable[[Path, int], Callable[[Before], object]]) -> int:
    at = At()
    shutil.copytree(marked, marked / "count")
    body(marked / "count", 0)(at)
    shutil.rmtree(marked / "count")
    return len(at.calls)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize("other", [commit, give_up, sweep_all])
def test_a_commit_and_another_rank_at_every_pair_of_calls(
    marked: Path, other: Callable[[Path, int], Callable[[Before], object]], step: int
) -> None:
    """One stands still before its i-th call, the other before its j-th; then either goes on."""
    attempt = marked / STAGING
    sizes = num_calls(marked, commit), num_calls(marked, other)
    outcomes = []
    for i in range(sizes[0] + 1):
        for j in range(i % step, sizes[1] + 1, step):
            root = marked / f"{i}-{j}"
            shutil.copytree(attempt, root / STAGING)
            pair = [Held(i, commit(root, 0)), Held(j, other(root, 1))]
            for held in pair if (i + j) % 2 else pair[::-1]:
                held.finish()
            outcomes.append(committed(root, 1) if other is not commit else (root / NAME).exists())
            if other is commit:
                assert [held.error for held in pair] == [None, None], (i, j)
                assert make_job(root, 0).attempt.commit()
            sweep(Disk(), root, grace_s=-60.0)
            assert os.listdir(root) == [NAME] * outcomes[-1], (i, j)
            assert committed(root, 1) == outcomes[-1]
            shutil.rmtree(root)
    assert len(outcomes) > 100 // step
    assert all(outcomes) if other is commit else any(outcomes) and not all(outcomes)


def test_a_commit_between_two_looks_at_the_name(
    marked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not there at the first look and there at the second: it is this attempt's all the same."""
    others = [make_job(marked, 1)]

    def read_then_commit(path: Path) -> bytes:
        try:
            return read_marker(path)
        except FileNotFoundError:
            while others:
                assert others.pop().attempt.commit()
            raise

    monkeypatch.setattr(attempt, "read_marker", read_then_commit)
    assert make_job(marked, 0).attempt.commit()
    assert others == []
    assert committed(marked, 1)


@pytest.mark.parametrize("times", [150, pytest.param(3000, marks=LONG)])
def test_concurrent_commits_make_one_checkpoint(marked: Path, times: int) -> None:
    for i in range(times):
        root = marked / str(i)
        shutil.copytree(marked / STAGING, root / STAGING)
        attempts = [make_job(root, rank).attempt for rank in (0, 1)]
        barrier = threading.Barrier(2)
        results: list[object] = []

        def one(attempt, barrier=barrier, results=results) -> None:
            barrier.wait()
            try:
                results.append(attempt.commit() or attempt.commit())
            except BaseException as error:
                results.append(error)

        threads = [threading.Thread(target=one, args=(attempt,)) for attempt in attempts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True, True]
        assert os.listdir(root) == [NAME]
        if i % 10 == 0:
            assert committed(root, 1)
        shutil.rmtree(root)


def test_a_disagreement_that_all_find_at_once_leaves_nothing(root: Path) -> None:
    """Each rank is held before it says so: none finds the words of another."""
    barrier = threading.Barrier(2, timeout=30)

    def before(call: str, operand: str) -> None:
        if call == "note":
            barrier.wait()

    commits = []
    for rank, whole in enumerate((tensors(1), tensors(1, rows=9))):
        job = make_job(root, rank, whole=whole, before=before)
        commits.append(job.attempt.commit)
        job.attempt.commit = lambda: False  # type: ignore[method-assign]
        run(job)  # marks
    errors: list[BaseException] = []
    threads = [
        threading.Thread(target=lambda commit=commit: errors.append(error_of(commit)))
        for commit in commits
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("disagree on the names, shapes or dtypes" in str(error) for error in errors)
    assert os.listdir(root) == []


def error_of(action: Callable[[], object]) -> BaseException:
    with pytest.raises(CheckpointError) as caught:
        action()
    return caught.value


# -- two jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_two_jobs_of_one_name_are_never_merged(root: Path, num_ranks: int) -> None:
    """The other job comes and goes at every call of this one; the loser is told."""
    lost = []
    for number in count():
        folder = root / str(number)
        folder.mkdir()
        run(make_job(folder, 1))
        refused: list[CheckpointExists] = []

        def other_job(folder: Path = folder, refused: list[CheckpointExists] = refused) -> None:
            try:
                save(folder, num_ranks, attempt=2, seed=2)
            except CheckpointExists as error:
                refused.append(error)

        at = At(number, other_job)
        job = make_job(folder, 0, before=at)
        try:
            run(job)
            lost.append(False)
            assert refused or not at.reached
            assert committed(folder, 1)
        except CheckpointExists:
            lost.append(True)
            assert not refused
            assert committed(folder, 2, num_ranks)
            for rank in (0, 1):
                with pytest.raises(CheckpointExists):
                    make_job(folder, rank).attempt.commit()
        if not at.reached:
            break
    assert len(lost) > 40
    renamed = lost.index(False)
    assert at.calls[renamed - 1] == ("rename", f"{STAGING} -> {NAME}")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_full_folder(path: Path) -> None:
    path.mkdir()
    (path / "other.txt").write_text("other")


def make_file(path: Path) -> None:
    path.write_text("other")


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def untouched(path: Path) -> tuple[int, ...]:
    """What a change of ``path`` would change; to read a link or a folder is none."""
    found = os.lstat(path)
    times = found.st_mtime_ns, found.st_ctime_ns
    return found.st_mode, found.st_ino, found.st_nlink, found.st_size, *times


@pytest.mark.parametrize("make", [make_folder, make_full_folder, make_file, make_dangling_link])
def test_whatever_has_the_name_keeps_it(root: Path, make: Callable[[Path], None]) -> None:
    make(root / NAME)
    before = untouched(root / NAME)
    with pytest.raises(CheckpointExists):
        make_job(root, 0).begin()
    assert os.listdir(root) == [NAME]
    assert untouched(root / NAME) == before


@pytest.mark.parametrize("make", [make_folder, make_full_folder, make_file, make_dangling_link])
def test_whatever_took_the_name_meanwhile_keeps_it(
    marked: Path, make: Callable[[Path], None]
) -> None:
    """An empty folder too, which a rename would replace without a word."""
    make(marked / NAME)
    before = untouched(marked / NAME)
    for rank in (0, 1):
        with pytest.raises(CheckpointExists):
            make_job(marked, rank).attempt.commit()
    assert untouched(marked / NAME) == before


@pytest.mark.parametrize("make", [make_full_folder, make_file])
def test_what_takes_the_name_just_before_the_rename_keeps_it(
    marked: Path, make: Callable[[Path], None]
) -> None:
    def at_rename(call: str, operand: str) -> None:
        if operand.endswith(f"> {NAME}"):
            make(marked / NAME)

    with pytest.raises(CheckpointExists):
        make_job(marked, 0, before=at_rename).attempt.commit()
    assert [p.read_text() for p in (marked / NAME, marked / NAME / "other.txt") if p.is_file()] == [
        "other"
    ]


def test_an_empty_folder_that_appears_during_a_commit_keeps_the_name(marked: Path) -> None:
    at = At(0, lambda: make_folder(marked / NAME))
    with pytest.raises(CheckpointExists):
        make_job(marked, 0, before=at).attempt.commit()
    assert os.listdir(marked / NAME) == []


# -- markers of other attempts ------------------------------------------------------------------


def test_a_marker_of_an_earlier_attempt_is_never_used(root: Path) -> None:
    """A rank that marked the attempt that failed has to mark the next one too."""
    run(make_job(root, 0))
    make_job(root, 1, before=At()).begin()
    retried = make_job(root, 1, attempt=2, seed=2)
    run(retried)
    assert not retried.attempt.commit()
    assert not committed(root, 2)
    run(make_job(root, 0, attempt=2, seed=2))
    assert committed(root, 2)
    with pytest.raises(CheckpointExists):
        run(make_job(root, 1))
    assert committed(root, 2)


def test_a_marker_that_was_copied_from_an_earlier_attempt_is_refused(root: Path) -> None:
    run(make_job(root, 0))
    retried = make_job(root, 1, attempt=2, seed=2)
    run(retried)
    name = f"{FOLDER}/{marker_name(0, 2)}"
    shutil.copy(root / STAGING / name, root / retried.attempt.staging / name)
    with pytest.raises(CheckpointError, match="another attempt"):
        retried.attempt.commit()
    assert not (root / NAME).exists()


# -- what is left over --------------------------------------------------------------------------


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    for each in (path, *path.rglob("*")):
        os.utime(each, (then, then))


def abandoned(root: Path, name: str, seconds: float) -> str:
    job = make_job(root, 0, name=name)
    run(job)
    age(root / job.attempt.staging, seconds)
    return job.attempt.staging


def test_leftovers_are_removed_after_the_grace_time(root: Path) -> None:
    old, young = abandoned(root, "old", 101.0), abandoned(root, "young", 50.0)
    save(root)
    age(root / NAME, 1000.0)
    (root / "notes").mkdir()
    age(root / "notes", 1000.0)
    assert sweep(Disk(), root, grace_s=100.0) == [old]
    assert sorted(os.listdir(root)) == sorted([young, NAME, "notes"])
    assert committed(root, 1)


@pytest.mark.parametrize("place", ["", FOLDER, "data"])
def test_one_fresh_file_keeps_an_attempt_alive(root: Path, place: str) -> None:
    """Ranks write into files for long without making any."""
    staging = root / abandoned(root, "slow", 1000.0)
    data = next(staging.glob("*.safetensors"))
    os.utime(data if place == "data" else staging / place)
    assert sweep(Disk(), root, grace_s=100.0) == []
    age(staging, 1000.0)
    assert sweep(Disk(), root, grace_s=100.0) == [staging.name]
    assert os.listdir(root) == []


def test_ages_are_told_by_the_clock_of_the_file_system(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(root, "young", 50.0)

    class Server(Disk):
        """Its clock is ahead of this machine's."""

        def touch(self, name: str, within: int) -> float:
            return super().touch(name, within) + 1000.0

    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert sweep(Disk(), root, grace_s=100.0) == []
    assert len(sweep(Server(), root, grace_s=100.0)) == 1
    assert os.listdir(root) == []


def test_only_folders_are_removed(root: Path) -> None:
    """A file or a link of such a name is not what this package leaves."""
    outside = root / "outside"
    make_full_folder(outside)
    (root / f".a.{nonce(1)}.tmp").write_text("a file")
    (root / f".b.{nonce(1)}.tmp").symlink_to(outside)
    old = abandoned(root, "c", 1000.0)
    assert sweep(Disk(), root, grace_s=-60.0) == [old]
    assert (outside / "other.txt").read_text() == "other"
    assert len(leftovers(root)) == 2


def test_a_new_save_cleans_up_and_leaves_live_attempts(root: Path) -> None:
    abandoned(root, "dead", 4000.0)
    live = abandoned(root, "live", 0.0)
    save(root)
    assert sorted(os.listdir(root)) == sorted([live, NAME])


def test_a_clean_up_may_end_anywhere(root: Path) -> None:
    """The next one goes on where it ended; another at the same time is no error."""
    for number in count():
        folder = root / str(number)
        folder.mkdir()
        abandoned(folder, NAME, 1000.0)
        at = At(number, lambda folder=folder: sweep(Disk(), folder, grace_s=-60.0))
        sweep(Disk(at), folder, grace_s=-60.0)
        assert os.listdir(folder) == []
        if not at.reached:
            break
    assert number > 8


def given_up(root: Path, run_name: str, start: int, seconds: float, *, failed: bool = True) -> str:
    """Rank 0 gave up, if it ``failed``, and rank 1 was killed before it had finished."""
    job = attempt_of(root, run_name, start)
    job.attempt.begin()
    (root / job.attempt.staging / "model.safetensors").write_bytes(bytes(10))
    if failed:
        job.attempt.give_up("OSError: No space left on device")
    _left.clear()  # another process
    age(root / job.attempt.staging, seconds)
    return job.attempt.staging


def attempt_of(root: Path, run_name: str, start: int) -> SaveJob:
    job = make_job(root, 0)
    name = f"step-{start:06d}"
    its = f"{run_name * 8}{start:04x}{'00' * 8}-1"  # as `next_nonce` makes it
    job.attempt = Attempt(job.disk, root, name, its, 0, (0, 1))
    return job


def test_what_was_given_up_goes_at_once_after_a_restart_and_soon_in_other_runs(root: Path) -> None:
    """And never what a rank may still be writing, or commit."""
    before = given_up(root, "5a", 0, 1.0)
    not_failed = given_up(root, "5a", 1, 1.0, failed=False)
    same_start = given_up(root, "5a", 2, 1.0)
    later = given_up(root, "5a", 3, 1.0)
    other_old, other_young = given_up(root, "6b", 0, 61.0), given_up(root, "6b", 1, 30.0)
    assert leftovers(root) == sorted(
        [before, not_failed, same_start, later, other_old, other_young]
    )
    attempt_of(root, "5a", 2).begin()
    assert leftovers(root) == sorted([not_failed, same_start, later, other_young])


def test_who_writes_to_an_attempt_that_was_removed_hears_that(root: Path) -> None:
    """And not of a file that is missing, which is a puzzle."""
    for number in range(3, 40, 4):
        writes = Held(number, lambda before: run(make_job(root, 1, before=before)))
        sweep(Disk(), root, grace_s=-60.0)
        writes.finish()
        assert writes.error is None or "abandoned and removed" in str(writes.error), number
        assert isinstance(writes.error, CheckpointError | None), number
        sweep(Disk(), root, grace_s=-60.0)
    assert os.listdir(root) == []
