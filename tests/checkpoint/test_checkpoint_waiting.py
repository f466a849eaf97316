"""Ranks that wait for others list few names: all of them look, again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint_crash import NAME, make_job, run
from fsdp2.checkpoint import CheckpointError
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.format.manifest import FOLDER, marker_name
from fsdp2.checkpoint.saving.attempt import TURN_S, Attempt
from harness import ours_only

pytestmark = ours_only("checkpoints")

NUM_RANKS = 64


class Counting(Disk):
    num_listed = 0

    def names(self, directory: int) -> list[str]:
        found = super().names(directory)
        self.num_listed += len(found)
        return found


def attempts(root: Path) -> list[Attempt]:
    made = []
    for rank in range(NUM_RANKS):
        attempt = make_job(root, rank, NUM_RANKS).attempt
        attempt.begin()
        attempt.disk = Counting()
        made.append(attempt)
    return made


def touch_marker(root: Path, attempt: Attempt, rank: int) -> None:
    (root / attempt.staging / FOLDER / marker_name(rank, NUM_RANKS)).touch()


def test_waiting_ranks_list_few_names(tmp_path: Path) -> None:
    """Ranks mark one after the other, and each looks again at every step."""
    made = attempts(tmp_path)
    for step in range(NUM_RANKS - 1):
        touch_marker(tmp_path, made[step], step)
        for attempt in made[: step + 1]:
            assert not attempt.commit()
    looks = NUM_RANKS * (NUM_RANKS - 1) // 2
    listed = [attempt.disk.num_listed for attempt in made]  # type: ignore[attr-defined]
    assert 0 < sum(listed) < 4 * looks  # all names at each look would be 43,000


def test_one_more_look_lists_nothing(tmp_path: Path) -> None:
    made = attempts(tmp_path)
    for rank in range(NUM_RANKS - 1):
        touch_marker(tmp_path, made[rank], rank)
    for _ in range(40):  # at some time it lists the names, and knows which marker is missing
        assert not made[5].commit()
    before = made[5].disk.num_listed  # type: ignore[attr-defined]
    assert 0 < before <= NUM_RANKS
    for _ in range(100):
        assert not made[5].commit()
    assert made[5].disk.num_listed == before  # type: ignore[attr-defined]


def test_a_rank_that_gave_up_is_seen_at_once(tmp_path: Path) -> None:
    """Also by one that looks for the marker of another rank."""
    made = attempts(tmp_path)
    assert not made[0].commit()
    made[9].give_up("no space")
    with pytest.raises(CheckpointError, match="rank 9 gave up: no space"):
        made[0].commit()


def test_of_ranks_that_wait_one_at_a_time_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that marks last dies when it commits. Thousands would read thousands of manifests."""
    clock = [100.0]
    monkeypatch.setattr("fsdp2.checkpoint.saving.attempt.time.monotonic", lambda: clock[0])
    jobs = [make_job(tmp_path, rank, 4) for rank in range(4)]
    commits: list[int] = []
    for rank, job in enumerate(jobs):
        monkeypatch.setattr(
            job.attempt, "_commit_or_give_up", lambda *_, rank=rank: commits.append(rank)
        )
        run(job)
    assert commits == [3]
    for _ in range(5):
        assert not any(job.attempt.commit() for job in jobs[1:3])
    assert commits == [3]
    for rank in (1, 2):
        clock[0] = 100 + TURN_S * 4 * (rank + 0.1)
        for job in jobs[1 : rank + 1]:
            job.attempt.commit()
        assert commits[-1] == rank
        assert rank not in commits[:-1]


def test_the_first_rank_commits_at_once(tmp_path: Path) -> None:
    """Where the file system shows names late, the one that marks last waits, too; and a program
    may look only once more, at its next save."""
    jobs = [make_job(tmp_path, rank, 2) for rank in range(2)]
    jobs[1].attempt._awaited = 0
    for job in jobs:
        run(job)
    assert not (tmp_path / NAME).exists()
    assert jobs[0].attempt.commit()


def test_a_failure_is_seen_while_another_rank_commits(tmp_path: Path) -> None:
    """As when ranks disagree on what they saved."""
    jobs = [make_job(tmp_path, rank, 3) for rank in range(3)]
    jobs[2].attempt._commit_or_give_up = lambda *_: None  # type: ignore[method-assign]
    for job in jobs:
        run(job)
    assert not jobs[1].attempt.commit()
    with jobs[2].attempt.folder() as staging, jobs[2].disk.directory(FOLDER, staging) as folder:
        jobs[2].attempt._note_failure(2, "ranks disagree", folder)
    with pytest.raises(CheckpointError, match="rank 2 gave up: ranks disagree"):
        jobs[1].attempt.commit()


def test_the_last_to_mark_commits_at_its_first_look(tmp_path: Path) -> None:
    for rank in range(9):
        run(make_job(tmp_path, rank, 9))
    assert (tmp_path / NAME).is_dir()
