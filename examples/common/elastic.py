"""`--elastic`: a run that goes on by itself after a fault, on whatever ranks there are.

The launcher (torchrun) starts the processes again when one has died, and when a host joins. Each
start finds the newest state, in the memory of the hosts that are left or on disk, and this file is
what it needs besides: `Commits` (checkpoints; a full disk does not end training), `Snapshots` (in
memory) and `resume` (goes on, and says from where and what is lost). docs/faults.md has what
happens for each kind of fault.
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

# What may differ between the starts of an elastic run, besides FREE_ON_RESUME: a rank's part of the
# batch. The sequences of a step may not.
FREE_IF_ELASTIC = FREE_ON_RESUME | {"batch", "accumulate", "replicate", "hang_after"}


class Commits:
    """Checkpoints of a run. With `elastic`, one that cannot be written does not end training.

    A disk that is full for an hour costs the commits of that hour: there is nothing that a new
    start of the processes could do better.
    """

    def __init__(self, out: str, *, elastic: bool) -> None:
        self.folder, self.elastic = checkpoint_folder(out), elastic
        self.failed = False  # on this rank; all have to know before they make a new Checkpointer
        self.checkpoints = Checkpointer(self.folder, keep=2)

    def save(self, step: int, **state: Any) -> None:
        """Returns once the shards are copied; a thread writes them."""
        with self._told(step):
            self.checkpoints.save(step, **state, blocking=False)

    def has(self, step: int) -> bool:
        """Whether there is a commit of a step."""
        try:
            return peek(self.folder, step).step == step
        except (OSError, CheckpointError):
            return False

    def start_over(self) -> None:
        """After a failure on any rank, on all: forget the save that will never be whole."""
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
            print(f"rank {dist.get_rank()}: {what} failed, training goes on: {error}", flush=True)


class Snapshots:
    """The last steps, in the memory of two hosts each; for an elastic run that asks for them.

    That they cannot be taken, as where there is too little memory, does not end training.

    A run that goes on from the disk has left behind what hosts hold in memory which are away at
    that moment. When these come back, they must not win: so each such start has snapshots of
    another name, numbered by the starts that were not from memory.
    """

    def __init__(self, options: argparse.Namespace, numbers: Numbers) -> None:
        self.options, self.numbers = options, numbers
        self._live: MemorySnapshots | None = None
        self._taken = False
        self._begins: int | None = None

    def load(self, commits: Commits, model: nn.Module, optimizer: Any) -> Restored | None:
        """Load the newest of snapshots and commits; None, on all ranks, if there is nothing."""
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
                    raise  # never begin anew where there is something
        self._begins = None if found and found.origin == "memory" else number + 1
        return found

    def begin(self) -> None:
        """On all ranks, when this start has been noted."""
        if self._begins is not None and self.options.elastic and self.options.snapshot_every:
            if self._live is not None:
                self._live.close()
            self._open(self._begins)
            if self._live is not None:
                self._live.clear()  # what another run in this folder has left, which was removed
        if self._live is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            for folder in Path(self.options.snapshot_dir).glob(f"fsdp2-snapshots-{self._name}-*"):
                if folder.name != f"fsdp2-snapshots-{self._live.run}":
                    shutil.rmtree(folder, ignore_errors=True)

    def after_step(self, step: int, **state: Any) -> None:
        """As of `MemorySnapshots`."""
        if self._live is None:
            return
        try:
            self._live.after_step(step, **state)
        except CheckpointError as error:
            if self._taken:
                raise
            # The first one looks for room, and fails on all ranks. What was restored stays.
            self._say(str(error))
            self._live.close(keep=True)
            self._live = None
        self._taken = True

    def close(self, *, keep: bool) -> None:
        """End, on all ranks; ``keep``, on any of them: the last commit has failed."""
        keep = bool(self.numbers.of_all_ranks(keep).any())
        if self._live is not None:
            self._live.close(keep=keep)

    @property
    def _name(self) -> str:
        return f"train-{zlib.crc32(os.path.abspath(self.options.out).encode()):08x}"

    def _open(self, number: int) -> None:
        self._live = None
        # A rank that was left behind by its launcher ends when it has waited for so long.
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
            print(f"snapshots    none in memory, commits only: {why}", flush=True)


def _from_disk(commits: Commits, model: nn.Module, optimizer: Any) -> Restored | None:
    try:
        loaded = commits.checkpoints.load("latest", model=model, optimizer=optimizer)
    except CheckpointNotFound:
        return None
    return Restored(**vars(loaded), origin="disk")


@dataclass
class Start:
    """From where a start goes on.

    Attributes:
        position: in the data.
        sessions: the log of starts, on rank 0.
        losses: rows of losses.jsonl for which the disk has had no room.
        number: of this start among those of the run, on rank 0; 0 if it is not written.
        committed: whether there is a commit of ``step``: memory may be ahead of the disk.
    """

    step: int = 0
    position: int = 0
    sessions: Rows | None = None
    losses: Sequence[str] = ()
    number: int = 0
    committed: bool = False

    def check_newest(self) -> None:
        """End if there has been another start since: two would write the same checkpoints.

        Hosts that are cut off from each other cannot both reach the store, so this should never
        be; if it is, the steps of the newest start count.
        """
        if self.sessions is not None and self.number:
            starts = len(read_losses(self.sessions.path))
            if starts > self.number:
                fail(
                    f"{self.sessions.path}: another start of this run has begun, {starts} in all, "
                    f"and this is number {self.number}: it ends, and saves nothing"
                )

    def unwritten(self, log: LossLog) -> dict[str, list[str]]:
        """What the disk has had no room for so far, to be saved with the state."""
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
    """Load the newest state there is. Rank 0 says from where, and what is lost."""
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
    """Every start of an elastic run must be given the same options."""
    for name, value in saved.items():
        if name not in FREE_IF_ELASTIC and getattr(options, name) != value:
            fail(f"--elastic: the commit in {options.out} was made with {name} = {value}")


def note_session(out: Path, sessions: Rows, loaded: Restored | None) -> None:
    """Rank 0 adds a line to sessions.jsonl, and prints it if this is not the first start."""
    done = max((row["step"] for row in read_losses(out / "losses.jsonl")), default=0)
    step, origin = (loaded.step, loaded.origin) if loaded is not None else (0, "nothing")
    if loaded is not None and loaded.last_step is not None:
        done = max(done, loaded.last_step)  # the disk was full, say
    lost, size = max(0, done - step), dist.get_world_size()
    sessions.add(
        resumed_after=step, origin=origin, lost_steps=lost, world_size=size, time=time.time()
    )
    if sessions.unwritten and origin != "memory":
        # The next start could not tell that what hosts have in memory is not to be used.
        fail(f"--out: {sessions.path} cannot be written")
    if done or step:
        print(
            f"goes on      after step {step}, from {origin}, on {size} ranks; "
            f"{lost} steps are lost and done again",
            flush=True,
        )


def watched(options: argparse.Namespace, model: nn.Module) -> watch_hangs:
    """Ends a process that waits in vain, so that the launcher starts all of them again.

    A process that dies breaks its connections, which ends the others. One that is stopped, or on
    a host whose link is cut, breaks nothing: without this, the others would wait for the timeout of
    the process group.
    """
    on_hang = "exit" if options.elastic else "warn"
    return watch_hangs(model, after_s=options.hang_after, on_hang=on_hang)
