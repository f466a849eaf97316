"""`train_lm.py --elastic` and snapshots in memory: which state a start takes, and what is lost."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from checkpoint_cases import adamw, build, train
from harness import cpu_only, distributed, ours_only, shared_folder

pytestmark = [ours_only("snapshots in memory"), cpu_only("files and sockets")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(module: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return getattr(__import__(f"common.{module}"), module)
    finally:
        sys.path.remove(str(EXAMPLES))


def life(
    root: Path, last: int, commit: int = 0, every: int = 1, directory: str = ""
) -> tuple[str, int, int]:
    """A start that trains to step ``last`` and is killed; its origin, first step and lost steps.

    Every rank is a host.
    """
    elastic, report = example("elastic"), example("lm_report")
    rank, out = dist.get_rank(), root / "out"
    memory = root / f"host{rank}"
    memory.mkdir(exist_ok=True)
    out.mkdir(exist_ok=True)
    options = argparse.Namespace(
        elastic=True, out=str(out), snapshot_every=every, snapshot_host=f"host{rank}",
        snapshot_dir=directory or str(memory), hang_after=5.0,
    )  # fmt: skip
    model = build("1d", seed=last)
    optimizer = adamw(model)
    commits = elastic.Commits(str(out), elastic=True)
    snapshots = elastic.Snapshots(options, report.Numbers())
    start = elastic.resume(options, commits, snapshots, model, optimizer)
    log = report.LossLog(out, first_step=start.step, unwritten=start.losses)
    for step in range(start.step + 1, last + 1):
        train(model, optimizer, range(step, step + 1))
        log.write(step, loss=0.5 * step)
        extra = {"options": {}, "position": step, "unwritten": start.unwritten(log)}
        if step == commit:
            commits.save(step, model=model, optimizer=optimizer, extra=extra)
            commits.checkpoints.wait()
        snapshots.after_step(step, model=model, optimizer=optimizer, extra=extra)
        if snapshots._live is not None:
            assert snapshots._live.wait(60)
        dist.barrier()  # nobody ends before what is sent to it has arrived
    assert start.position == start.step
    if snapshots._live is not None:
        snapshots._live._end()
    log.close()
    dist.barrier()
    row = json.loads((out / "sessions.jsonl").read_text().splitlines()[-1])
    steps = [json.loads(line)["step"] for line in (out / "losses.jsonl").read_text().splitlines()]
    assert steps == list(range(1, max(last, start.step) + 1))
    dist.barrier()
    return row["origin"], row["resumed_after"], row["lost_steps"]


def on_first(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


@distributed(2)
@pytest.mark.filterwarnings("ignore")
def test_from_memory_while_a_copy_is_left_then_from_disk() -> None:
    with shared_folder() as folder:
        root = Path(folder)
        assert life(root, 5, commit=2) == ("nothing", 0, 0)
        on_first(lambda: shutil.rmtree(root / "host1"))
        assert life(root, 7) == ("memory", 5, 0)
        # Of every third step only, from the first on: 8 and 9 are there, 10 and 11 are not.
        assert life(root, 11, every=3) == ("memory", 7, 0)
        assert life(root, 9) == ("memory", 9, 2)
        assert life(root, 9) == ("memory", 9, 0)  # not counted twice
        on_first(lambda: shutil.move(root / "host1", root / "away"))
        on_first(lambda: shutil.rmtree(root / "host0"))
        assert life(root, 4) == ("disk", 2, 7)
        # The host comes back with what others have gone back behind: that is not to be used.
        on_first(lambda: shutil.rmtree(root / "host1"))
        on_first(lambda: shutil.move(root / "away", root / "host1"))
        assert life(root, 6, commit=6) == ("memory", 4, 0)
        assert len(list((root / "host1").glob("fsdp2-snapshots-*"))) == 1
        # A run that was removed and begun anew does not find the old one.
        on_first(lambda: shutil.rmtree(root / "out"))
        assert life(root, 3) == ("nothing", 0, 0)
        assert life(root, 3) == ("memory", 3, 0)


@distributed(2)
@pytest.mark.filterwarnings("ignore")
def test_without_memory_there_are_commits() -> None:
    """No such folder; too little room from the first snapshot on."""
    import fsdp2.snapshots.memory_snapshots as module

    with shared_folder() as folder:
        root = Path(folder)
        assert life(root, 3, commit=2) == ("nothing", 0, 0)
        example("elastic").math = argparse.Namespace(ceil=lambda value: 0)  # tries once
        assert life(root, 3, directory=str(root / "none")) == ("disk", 2, 1)
        assert life(root, 4) == ("disk", 2, 1)  # 3 was left behind by the start without memory
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_free_bytes", lambda path: 10)
            assert life(root, 6) == ("memory", 4, 0)
        assert life(root, 5) == ("memory", 4, 2)


class SmallDisk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


def test_rows_that_have_no_room_are_written_later_and_carried_over(tmp_path: Path) -> None:
    rows_of, path = example("lm_report").Rows, tmp_path / "rows"
    rows = rows_of(path)
    rows.add(step=1)
    rows._file = SmallDisk(path, room=5)
    rows.add(step=2)
    rows.add(step=3)
    assert path.read_text() == '{"step": 1}\n{"ste'
    carried = list(rows.unwritten)
    # Another start, which the state is given to; and this one, when there is room again.
    again = tmp_path / "again"
    shutil.copy(path, again)
    other = rows_of(again, keep=lambda row: row["step"] <= 3, unwritten=carried)
    other.add(step=4)
    rows._file.room = 100
    rows.add(step=4)
    whole = "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4))
    assert again.read_text() == path.read_text() == whole
    # What was written after all is not written twice; what is behind the kept ones is cut off.
    assert not rows_of(path, keep=lambda row: row["step"] <= 3, unwritten=carried).unwritten
    assert path.read_text() == whole.replace('{"step": 4}\n', "")
