"""Saves that not every rank calls: errors name the ranks, and nothing is committed or loaded."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from checkpoint_cases import build
from fsdp2.checkpoint import Checkpointer, CheckpointError, CheckpointNotFound, peek, save_model
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.saving import roll_call
from fsdp2.checkpoint.saving.job import SaveJob
from harness import distributed, ours_only, shared_folder

pytestmark = ours_only("checkpoints")

ADVICE = "rank 1 never called save for it. All 2 ranks must call save .* `if rank == 0`"


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roll_call, "PATIENCE_S", seconds)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    roll_call._open_ends.clear()


@distributed(2)
def test_the_next_save_names_ranks_that_never_called_the_one_before() -> None:
    model = build("1d")
    with shared_folder() as root:
        if dist.get_rank() == 0:
            checkpoints = Checkpointer(root)
            checkpoints.save(1, model=model, blocking=False)
            for step in (2, 3):  # again and again: nothing can make it come out
                with patience(0.05), pytest.raises(CheckpointError, match=ADVICE) as error:
                    checkpoints.save(step, model=model, blocking=False)
                assert "step-000001 was never committed" in str(error.value)
            assert checkpoints.steps() == []
            with pytest.raises(CheckpointNotFound, match="no committed checkpoint"):
                peek(root)
            with pytest.raises(TimeoutError, match=ADVICE):
                checkpoints.close(timeout=0.1)
        roll_call._open_ends.clear()


@distributed(2)
def test_a_load_warns_of_the_save_that_others_never_called_and_takes_an_earlier_one() -> None:
    model = build("1d")
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        checkpoints.save(1, model=model)
        with patience(0.05), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if dist.get_rank() == 0:
                checkpoints.save(2, model=model, blocking=False)
            assert checkpoints.load(model=model).step == 1
            assert peek(root).step == 1
        found = [str(w.message) for w in said if "never committed" in str(w.message)]
        assert len(found) == (dist.get_rank() == 0), found
        assert all("step-000002 was never committed: rank 1 never called" in t for t in found)
        roll_call._open_ends.clear()


@distributed(2)
@pytest.mark.parametrize("weights", [False, True])
def test_a_blocking_save_says_whom_it_waits_for(weights: bool) -> None:
    model = build("1d")
    with shared_folder() as root:
        if dist.get_rank() == 0:
            save: Any = lambda **options: Checkpointer(root).save(1, **options)  # noqa: E731
            if weights:
                save = partial(save_model, path=f"{root}/weights")
            with patience(0.05), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                with pytest.raises(TimeoutError, match=ADVICE):
                    save(model=model, timeout=0.3)
            assert re.search(ADVICE, str(said[0].message))
            assert len(said) == 1
        roll_call._open_ends.clear()


@distributed(2)
def test_a_rank_that_is_late_or_slow_is_no_mistake() -> None:
    model = build("1d")
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        if dist.get_rank() == 1:
            time.sleep(0.5)  # behind by several calls
        for step in range(4):
            checkpoints.save(step, model=model, blocking=False)
        checkpoints.close()
        assert checkpoints.steps() == [0, 1, 2, 3]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            roll_call._warn_at_exit()


@distributed(2)
def test_a_rank_that_fails_before_it_writes_tells_those_that_wait() -> None:
    model = build("1d")
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        rank = dist.get_rank()
        extra: Any = object() if rank == 1 else 1
        with pytest.raises(TypeError if rank == 1 else CheckpointError) as error:
            checkpoints.save(1, model=model, extra=extra)
        if rank == 0:
            assert "will not be committed: rank 1 failed: TypeError: extra" in str(error.value)
        # The same step again, as ranks count their attempts alike.
        checkpoints.save(1, model=model, extra=1)
        assert checkpoints.steps() == [1]


class NoRoom:
    """A ``before`` of `Disk`: neither for data nor for a note."""

    def __init__(self) -> None:
        self.full = True

    def __call__(self, call: str, operand: str) -> None:
        if self.full and call in ("pwrite", "note"):
            raise OSError(errno.ENOSPC, "No space left on device")


@distributed(2)
def test_a_rank_without_room_for_a_note_tells_those_that_wait() -> None:
    """They would wait for ten minutes, and its bytes would stay for an hour."""
    rank, model = dist.get_rank(), build("1d")
    store = dist.distributed_c10d._get_default_store()
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        disk = NoRoom()
        if rank == 0:
            checkpoints._disk = Disk(disk)
            with pytest.raises(OSError, match="No space left"):
                checkpoints.save(1, model=model)
            store.set("failed", "")
        else:

            def later(call: str, operand: str) -> None:
                """The first rank cannot remove what this one is to write to."""
                if call == "open":
                    store.wait(["failed"])

            checkpoints._disk = Disk(later)
            with pytest.raises(CheckpointError, match=r"rank 0 failed: OSError: .* No space left"):
                checkpoints.save(1, model=model, timeout=20)
        dist.barrier()
        disk.full = False
        checkpoints.save(2, model=model)
        dist.barrier()
        assert [name for name in os.listdir(root) if "step" in name] == ["step-000002"]


@distributed(3)
def test_what_others_had_written_is_removed_if_a_rank_fails_before_it_writes() -> None:
    model, fails = build("1d"), dist.get_rank() == 0
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        with pytest.raises(TypeError if fails else CheckpointError):
            checkpoints.save(1, model=model, extra=object() if fails else 1, timeout=20)
        dist.barrier()
        assert [name for name in os.listdir(root) if "step" in name] == []


@distributed(2)
def test_ranks_agree_whether_there_is_a_latest_step() -> None:
    """Though the file system shows a new folder late to one of them."""
    model = build("1d")
    is_dir = Path.is_dir
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        checkpoints.save(1, model=model)
        for late in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == late:
                    patch.setattr(Path, "is_dir", lambda p: "step-" not in str(p) and is_dir(p))
                if late == 0:  # all begin anew
                    with pytest.raises(CheckpointNotFound):
                        checkpoints.load("latest", model=model)
                else:  # no reason to begin anew
                    with pytest.raises(CheckpointError, match="does not see step 1") as error:
                        checkpoints.load("latest", model=model)
                    assert not isinstance(error.value, CheckpointNotFound)


@distributed(2)
def test_a_partial_sum_is_not_saved() -> None:
    model = build("1d")
    mesh = init_device_mesh("cpu", (2,))
    model.register_buffer("total", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    with (
        shared_folder() as folder,
        pytest.raises(CheckpointError, match=r"'total' has placement .*redistribute it first"),
    ):
        save_model(model, folder)


@distributed(2)
def test_a_checkpointer_made_for_other_ranks_is_refused() -> None:
    with shared_folder() as root:
        checkpoints = Checkpointer(root)
        checkpoints._world = (0,)  # as before init_process_group
        with pytest.raises(CheckpointError, match=r"made when there were 1 ranks, but now .* 2"):
            checkpoints.save(1, model=nn.Linear(2, 2))
        with pytest.raises(CheckpointError, match="make it after init_process_group"):
            checkpoints.load(model=nn.Linear(2, 2))


ALONE = """
import sys, torch, torch.distributed as dist
from fsdp2.checkpoint import Checkpointer
from fsdp2.checkpoint.saving import roll_call
from fsdp2.checkpoint.saving.job import SaveJob
from torch.testing._internal.distributed import fake_pg  # registers the backend
def write_at(*args):
    raise OSError(28, "No space left on device")
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
roll_call.EXIT_WAIT_S = 0.1
for step, ranks in (1, None), (2, [0]), (3, [0]):
    checkpoints = Checkpointer(sys.argv[1], ranks=ranks)
    if step == 2:
        checkpoints._disk.write_at = write_at
    checkpoints.save(step, model=torch.nn.Linear(2, 2), blocking=False)
"""


def test_a_process_that_ends_during_a_save_finishes_it_or_says_what_is_missing(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stderr.splitlines() if "UserWarning" in line)
    assert len(said) == 2, done.stderr
    assert "step-000001 is not committed as rank 0 ends: rank 1 never called save" in said[0]
    assert "step-000002 is not committed as rank 0 ends: OSError: [Errno 28] No space" in said[1]
    assert peek(tmp_path).step == 3


@distributed(2)
def test_a_wait_for_a_rank_that_does_not_finish_writing_names_it() -> None:
    """It called, so it may have died since, and nothing else would tell for ten minutes."""
    model = build("1d")
    store = dist.distributed_c10d._get_default_store()
    said: list[str] = []
    with shared_folder() as root, patience(0.05), pytest.MonkeyPatch.context() as patch:
        write = SaveJob.write

        def late(self: SaveJob, read: Any = None) -> None:
            store.wait([f"warned/{root}"])
            write(self, read)

        def warn(text: str, **options: Any) -> None:
            said.append(text)
            store.set(f"warned/{root}", "")

        if dist.get_rank() == 1:
            patch.setattr(SaveJob, "write", late)
        else:
            patch.setattr(roll_call.warnings, "warn", warn)
        with Checkpointer(root) as checkpoints:
            checkpoints.save(1, model=model, blocking=False)
        assert peek(root).step == 1
    assert len(said) == (dist.get_rank() == 0)
    assert all("rank 1 called save and did not finish writing" in text for text in said)
