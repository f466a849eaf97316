"""The disk is full for one rank: that rank raises, the others learn of it, nothing is left."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch import Tensor

from checkpoint_crash import (
    NAME,
    At,
    Held,
    committed,
    exits,
    fork,
    leftovers,
    make_job,
    memory_folder,
    nonce,
    run,
    save,
    tensors,
)
from fsdp2.checkpoint import CheckpointError
from fsdp2.checkpoint.saving.job import SaveHandle
from harness import ours_only

pytestmark = ours_only("checkpoints")

ROWS = 2000  # 40 KB of weights and as much of optimizer state
PAGE = resource.getpagesize()


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def small_disk(root: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(root)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"not permitted to mount a small disk: {done.stderr.strip()}")
    yield root
    subprocess.run(["umount", str(root)], check=True)


def assert_told(handle: SaveHandle) -> None:
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"will not be committed|was abandoned"):
        handle.wait_committed(30.0)
    assert time.monotonic() - start < 5.0


def written(root: Path, whole: dict[str, Tensor]) -> SaveHandle:
    """Rank 1, which has no trouble."""
    job = make_job(root, 1, whole=whole)
    job.begin()
    handle = SaveHandle(job, None)
    handle._run()
    return handle


def save_with_limit(root: Path, whole: dict[str, Tensor], num_bytes: int) -> Callable[[], None]:
    """Rank 0, in a process that cannot make files longer than so many bytes."""

    def body() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        try:
            run(make_job(root, 0, whole=whole))
        except OSError as error:
            if error.errno == errno.EFBIG:
                os._exit(errno.EFBIG)
            raise

    return body


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("num_bytes", [0, 20, 300, 2000, 6000, 20_000])
def test_a_file_that_may_not_grow(root: Path, num_bytes: int, order: str) -> None:
    """Whether it fails at making room, in the middle of the data, or at its small files."""
    old, new = tensors(1, ROWS), tensors(2, ROWS)
    save(root, name="step-000000", whole=old)
    handle = written(root, old) if order == "last" else None
    code = exits([fork(save_with_limit(root, old, num_bytes))])[0]
    assert code == errno.EFBIG
    assert_told(handle or written(root, old))
    assert os.listdir(root) == ["step-000000"]
    assert committed(root, 1, name="step-000000", whole=old)
    save(root, attempt=2, seed=2, whole=new)
    assert committed(root, 2, whole=new)


def fill(path: Path, but_pages: int) -> None:
    """Write until the disk is full but for so many pages."""
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    path.write_bytes(b"x" * (free - but_pages * PAGE))


def test_a_disk_that_gets_full_anywhere(small_disk: Path) -> None:
    """Once without a free page, once with one, and so on until there is room enough."""
    old, new = tensors(1, ROWS), tensors(2, ROWS)
    save(small_disk, name="step-000000", whole=old)
    for pages in count():
        handle = written(small_disk, old)
        fill(small_disk / "filler", pages)
        full = make_job(small_disk, 0, whole=old)
        full.begin()
        last = SaveHandle(full, None)
        last._run()
        if last._error is None:
            (small_disk / "filler").unlink()
            break
        with pytest.raises(OSError, match="No space left"):
            last.wait()
        assert_told(handle)
        (small_disk / "filler").unlink()
        assert os.listdir(small_disk) == ["step-000000"]
        assert committed(small_disk, 1, name="step-000000", whole=old)
        save(small_disk, attempt=2, seed=2, whole=new)
        assert committed(small_disk, 2, whole=new)
        shutil.rmtree(small_disk / NAME)
    assert pages > 10
    assert handle.wait_committed(30.0)
    assert committed(small_disk, 1, whole=old)


# -- a disk that is too full to clean up --------------------------------------------------------


class FullDisk:
    """A ``before`` of `Disk`: no room for data, nor for the calls named, while it is full."""

    def __init__(self, *calls: str) -> None:
        self.full, self.calls = True, ("pwrite", *calls)

    def __call__(self, call: str, operand: str) -> None:
        # (The rename that gives a file its name comes after its data, and is not reached.)
        if self.full and call in self.calls:
            raise OSError(errno.ENOSPC, "No space left on device")


def fails(root: Path, disk: FullDisk, rank: int, num_ranks: int) -> None:
    with pytest.raises(OSError, match="No space left"):
        run(make_job(root, rank, num_ranks, before=disk))


def test_one_rank_needs_no_room_for_a_note_to_itself(root: Path) -> None:
    fails(root, FullDisk("note"), 0, 1)
    assert os.listdir(root) == []


@pytest.mark.parametrize("calls", [("rename",), ("note",), ("note", "rename")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_next_save_first_removes_what_could_not_be_removed(
    root: Path, num_ranks: int, calls: tuple[str, ...]
) -> None:
    disk = FullDisk(*calls)
    if num_ranks == 2:
        written(root, tensors(1))
    fails(root, disk, 0, num_ranks)
    there = leftovers(root)
    assert bool(there) == ("rename" in calls)  # by which a folder is removed
    disk.full = False
    at = At()
    make_job(root, 0, num_ranks, attempt=2, before=at).begin()
    assert not set(there) & set(leftovers(root))
    removed = [i for i, (call, _) in enumerate(at.calls) if call == "remove"]
    (made,) = (i for i, call in enumerate(at.calls) if call == ("mkdir", f".{NAME}.{nonce(2)}.tmp"))
    assert all(i < made for i in removed)
    save(root, num_ranks, attempt=2, seed=2)
    assert os.listdir(root) == [NAME]
    assert committed(root, 2, num_ranks)


def test_the_next_save_leaves_what_another_rank_still_writes(root: Path) -> None:
    """That rank is to hear why, and then removes it."""
    writes = Held(12, lambda before: run(make_job(root, 1, before=before)))
    fails(root, FullDisk(), 0, 2)
    make_job(root, 0, attempt=2, seed=2).begin()
    assert len(leftovers(root)) == 2
    writes.finish()
    assert "will not be committed: rank 0 gave up: OSError: [Errno 28]" in str(writes.error)
    assert leftovers(root) == [f".{NAME}.{nonce(2)}.tmp"]
    save(root, attempt=2, seed=2)
    assert committed(root, 2)
