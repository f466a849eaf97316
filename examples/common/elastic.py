"""`--elastic`: a run that goes on by itself after a fault, on whatever ranks there are.

The launcher (torchrun) starts the processes again when one has died, and when a host joins. Each
start finds the newest commit, and this file is what it needs besides: `Commits` (checkpoints that a
full disk does not end), `resume` (goes on, and says what is lost) and `Session` (a line for each
start). docs/faults.md has what happens for each kind of fault.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from common.lm_report import read_losses
from common.options import FREE_ON_RESUME, checkpoint_folder, fail
from fsdp2 import watch_hangs
from fsdp2.checkpoint import Checkpointer, CheckpointError, CheckpointNotFound, Loaded

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


def resume(
    options: argparse.Namespace, commits: Commits, model: nn.Module, optimizer: Any
) -> Loaded | None:
    """Load the newest commit; None if there is none. Rank 0 says what is lost."""
    try:
        loaded = commits.checkpoints.load("latest", model=model, optimizer=optimizer)
    except CheckpointNotFound:
        loaded = None
    if loaded is not None:
        check_same_run(options, loaded.extra["options"])
    if dist.get_rank() == 0:
        note_session(Path(options.out), loaded.step if loaded else 0)
    return loaded


def check_same_run(options: argparse.Namespace, saved: dict[str, Any]) -> None:
    """Every start of an elastic run must be given the same options."""
    for name, value in saved.items():
        if name not in FREE_IF_ELASTIC and getattr(options, name) != value:
            fail(f"--elastic: the commit in {options.out} was made with {name} = {value}")


def note_session(out: Path, step: int) -> None:
    """Rank 0 adds a line to sessions.jsonl, and prints it if this is not the first start."""
    done = max((row["step"] for row in read_losses(out / "losses.jsonl")), default=0)
    session = {
        "resumed_after": step,
        "lost_steps": max(0, done - step),
        "world_size": dist.get_world_size(),
        "time": time.time(),
    }
    try:
        with (out / "sessions.jsonl").open("a") as file:
            file.write(json.dumps(session) + "\n")
    except OSError as error:
        print(f"sessions.jsonl: {error}", flush=True)
    if done or step:
        print(
            f"goes on      after step {step} on {session['world_size']} ranks; "
            f"{session['lost_steps']} steps are lost and done again",
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
