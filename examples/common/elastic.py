"""`--elastic`: a run that continues automatically after a fault, on any number of ranks.

The launcher (torchrun) restarts the processes when one has died, and when a host joins. Each start
finds the newest state, in the memory of the remaining hosts or on disk. This file has the parts:

- `Commits`: checkpoints (here called commits); a full disk does not end training;
- `Snapshots`: the last steps in memory;
- `resume`: loads the newest state, and reports where it came from and which steps are lost.

docs/faults.md describes what happens for each kind of fault.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from common.lm_report import LossLog, Numbers, Rows, read_losses
from common.options import FREE_ON_RESUME, checkpoint_folder, fail
from fsdp2 import watch_hangs
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointNotFound,
    MemorySnapshots,
    Restored,
    peek,
)

# Options that may differ between the starts of an elastic run, in addition to FREE_ON_RESUME: a
# rank's part of the batch may change, but not the sequences of a step.
FREE_IF_ELASTIC = FREE_ON_RESUME | {"batch", "accumulate", "replicate", "hang_after"}


class Commits:
    """Checkpoints of a run. With `elastic`, training continues if one cannot be written.

    If the disk is full for an hour, the checkpoints of that hour are lost. Restarting the processes
    would not help.
    """

    def __init__(self, out: str, *, elastic: bool) -> None:
        self.folder, self.elastic = checkpoint_folder(out), elastic
        self.failed = False  # on this rank; all must know before they make a new Checkpointer
        self.checkpoints = Checkpointer(self.folder, keep=2)

    def save(self, step: int, **state: Any) -> None:
        """Save a step; returns when the shards are copied, and a thread writes them."""
        with self._told(step):
            self.checkpoints.save(step, **state, blocking=False)

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of a step."""
        try:
            return peek(self.folder, step).step == step
        except (OSError, CheckpointError):
            return False

    def start_over(self) -> None:
        """After a failure on any rank: forget the incomplete save. Call it on all ranks."""
        self.failed = False
        with self._told(None):
            self.checkpoints = Checkpointer(self.folder, keep=2)

    def close(self) -> None:
        with self._told(None):
            self.checkpoints.close()

    @contextmanager
    def _told(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except (OSError, CheckpointError) as error:
            if not self.elastic:
                raise
            self.failed = True
            what = "a checkpoint" if step is None else f"the checkpoint before step {step}"
            print(f"rank {dist.get_rank()}: {what} failed, training continues: {error}", flush=True)


class Snapshots:
    """Snapshots of the last steps, each in the memory of two hosts; for elastic runs.

    If they cannot be taken, for example because there is too little memory, training continues.

    When a run resumes from disk, hosts that are away may still hold newer snapshots in memory. When
    they return, these must not be used. Each start that does not resume from memory therefore gives
    its snapshots a new name, numbered by such starts.
    """

    def __init__(self, options: argparse.Namespace, numbers: Numbers) -> None:
        self.options, self.numbers = options, numbers
        self._live: MemorySnapshots | None = None
        self._taken = False
        self._begins: int | None = None

    def load(self, commits: Commits, model: nn.Module, optimizer: Any) -> Restored | None:
        """Load the newest snapshot or checkpoint; None, on all ranks, if there is none."""
        if not (self.options.elastic and self.options.snapshot_every):
            return _from_disk(commits, model, optimizer)
        starts = [s.get("origin") for s in read_losses(Path(self.options.out) / "sessions.jsonl")]
        number = sum(origin != "memory" for origin in starts)
        number = int(self.numbers.of_all_ranks(number)[0, 0])
        found = None
        if number:
            self._open(number)
        if self._live is None:
            found = _from_disk(commits, model, optimizer)
        else:
            try:
                found = self._live.restore(
                    model=model, optimizer=optimizer, checkpoints=commits.checkpoints
                )
            except (OSError, CheckpointError) as error:  # on all ranks
                self._say(f"cannot be loaded: {error}")
                found = _from_disk(commits, model, optimizer)
                if found is None:
                    raise  # never start over if there is a snapshot
        self._begins = None if found and found.origin == "memory" else number + 1
        return found

    def begin(self) -> None:
        """Call it on all ranks, after this start was added to sessions.jsonl."""
        if self._begins is not None and self.options.elastic and self.options.snapshot_every:
            if self._live is not None:
                self._live.close()
            self._open(self._begins)
            if self._live is not None:
                self._live.clear()  # left by an earlier run in this folder, which was removed
        if self._live is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            for folder in Path(self.options.snapshot_dir).glob(f"fsdp2-snapshots-{self._name}-*"):
                if folder.name != f"fsdp2-snapshots-{self._live.run}":
                    shutil.rmtree(folder, ignore_errors=True)

    def after_step(self, step: int, **state: Any) -> None:
        """As in `MemorySnapshots`."""
        if self._live is None:
            return
        try:
            self._live.after_step(step, **state)
        except CheckpointError as error:
            if self._taken:
                raise
            # The first one looks for room, and fails on all ranks. The restored snapshot stays.
            self._say(str(error))
            self._live.close(keep=True)
            self._live = None
        self._taken = True

    def close(self, *, keep: bool) -> None:
        """End; call it on all ranks. ``keep``: the last checkpoint has failed on this rank."""
        keep = bool(self.numbers.of_all_ranks(keep).any())
        if self._live is not None:
            self._live.close(keep=keep)

    @property
    def _name(self) -> str:
        return f"train-{zlib.crc32(os.path.abspath(self.options.out).encode()):08x}"

    def _open(self, number: int) -> None:
        self._live = None
        # A rank that its launcher left behind ends after waiting for this time.
        for _ in range(1 + math.ceil(2 * self.options.hang_after / 10)):
            try:
                self._live = MemorySnapshots(
                    f"{self._name}-{number}",
                    every=self.options.snapshot_every,
                    directory=self.options.snapshot_dir,
                    host=self.options.snapshot_host,
                )
                return
            except CheckpointError as error:  # on all ranks
                why = str(error)
        self._say(why)

    def _say(self, why: str) -> None:
        if dist.get_rank() == 0:
            print(f"snapshots    none in memory, checkpoints only: {why}", flush=True)


def _from_disk(commits: Commits, model: nn.Module, optimizer: Any) -> Restored | None:
    try:
        loaded = commits.checkpoints.load("latest", model=model, optimizer=optimizer)
    except CheckpointNotFound:
        return None
    return Restored(**vars(loaded), origin="disk")


@dataclass
class Start:
    """The state from which a start continues.

    Attributes:
        position: position in the data.
        sessions: the log of starts, on rank 0.
        losses: rows of losses.jsonl that could not be written because the disk was full.
        number: number of this start in the run, on rank 0; 0 if it could not be written.
        committed: whether there is a checkpoint of ``step``; memory may be ahead of the disk.
    """

    step: int = 0
    position: int = 0
    sessions: Rows | None = None
    losses: Sequence[str] = ()
    number: int = 0
    committed: bool = False

    def check_newest(self) -> None:
        """End if a newer start exists: two starts would write the same checkpoints.

        Hosts that are cut off from each other cannot both reach the store, so this should never
        happen. If it does, the steps of the newest start count.
        """
        if self.sessions is not None and self.number:
            starts = len(read_losses(self.sessions.path))
            if starts > self.number:
                fail(
                    f"{self.sessions.path}: a newer start of this run exists (number {starts}; "
                    f"this is number {self.number}), so this one ends and saves nothing"
                )

    def unwritten(self, log: LossLog) -> dict[str, list[str]]:
        """Rows that could not be written because the disk was full, to be saved with the state."""
        if self.sessions is not None and self.sessions.unwritten:
            self.sessions.flush()
        return {
            "losses": log.unwritten,
            "sessions": list(self.sessions.unwritten) if self.sessions is not None else [],
        }


def resume(
    options: argparse.Namespace,
    commits: Commits,
    snapshots: Snapshots,
    model: nn.Module,
    optimizer: Any,
) -> Start:
    """Load the newest state. Rank 0 reports where it came from, and which steps are lost."""
    loaded = snapshots.load(commits, model, optimizer)
    start = Start()
    unwritten: dict[str, list[str]] = {}
    if loaded is not None:
        check_same_run(options, loaded.extra["options"])
        first = min(loaded.extra_of_ranks)
        unwritten = loaded.extra_of_ranks[first].get("unwritten", {})
        start = Start(loaded.step, loaded.extra["position"], losses=unwritten.get("losses", []))
        on_disk = loaded.origin == "disk" or commits.has(loaded.step)
        start.committed = bool(snapshots.numbers.of_all_ranks(on_disk)[0, 0])
    if dist.get_rank() == 0:
        rows = Rows(Path(options.out) / "sessions.jsonl", unwritten=unwritten.get("sessions", []))
        start.sessions = rows
        note_session(Path(options.out), rows, loaded)
        start.number = 0 if rows.unwritten else len(read_losses(rows.path))
    snapshots.begin()
    return start


def check_same_run(options: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Check that this start has the same options as earlier starts of the elastic run."""
    for name, value in saved.items():
        if name not in FREE_IF_ELASTIC and getattr(options, name) != value:
            fail(f"--elastic: the checkpoint in {options.out} was made with {name} = {value}")


def note_session(out: Path, sessions: Rows, loaded: Restored | None) -> None:
    """Rank 0 adds a line to sessions.jsonl, and prints it if this is not the first start."""
    done = max((row["step"] for row in read_losses(out / "losses.jsonl")), default=0)
    step, origin = (loaded.step, loaded.origin) if loaded is not None else (0, "nothing")
    if loaded is not None and loaded.last_step is not None:
        done = max(done, loaded.last_step)  # for example, if the disk was full
    lost, size = max(0, done - step), dist.get_world_size()
    sessions.add(
        resumed_after=step, origin=origin, lost_steps=lost, world_size=size, time=time.time()
    )
    if sessions.unwritten and origin != "memory":
        # The next start could not know that the snapshots in hosts' memory must not be used.
        fail(f"--out: {sessions.path} cannot be written")
    if done or step:
        print(
            f"continues    after step {step}, from {origin}, on {size} ranks; "
            f"{lost} steps are lost and repeated",
            flush=True,
        )


def watched(options: argparse.Namespace, model: nn.Module) -> watch_hangs:
    """Watch for hangs; in an elastic run, a hanging process ends, and the launcher restarts all.

    A process that dies breaks its connections, which ends the others. A process that is stopped, or
    whose host is cut off, breaks no connection. Without this, the others would wait for the timeout
    of the process group.
    """
    on_hang = "exit" if options.elastic else "warn"
    return watch_hangs(model, after_s=options.hang_after, on_hang=on_hang)
