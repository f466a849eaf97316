"""One save of this rank, from captured tensors to a committed checkpoint."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from ...common.pinned import power_of_two
from ...common.versions import __version__
from ...dtensor.placement import ranks_of_host
from ..errors import CheckpointError
from ..format.disk import Disk
from ..format.manifest import FOLDER, Manifest, own_name, state_name
from ..format.ranges import Ranges
from ..format.small_state import SmallFile, digest_of_names
from ..format.strict import small_limit
from ..format.tensors import LocalBytes
from .attempt import Attempt, remove_left, sweep
from .capture import Captured
from .roll_call import RollCall, left_open, settled
from .staging import Staged
from .writing import MAX_FILE_BYTES, Progress, SavePlan, Writer, Writers, plan_save

LAYOUTS = ("auto", "shared", "per-rank")
MANY_FILES = 512  # of a kind in a folder; with more, several ranks write one


@dataclass(frozen=True)
class SaveOptions:
    """Settings for writing checkpoints.

    Attributes:
        layout: "shared", "per-rank" or "auto".
        max_file_bytes: of one file of whole tensors.
        grace_s: leftovers of an attempt are removed after this many seconds without a write, or
            after a minute at most if the attempt was given up.
        num_threads: threads per rank that write.
        files_per_host: how many files of boxes the ranks of a host write together; None: see
            `writers`.
    """

    layout: str = "auto"
    max_file_bytes: int = MAX_FILE_BYTES
    grace_s: float = 3600.0
    num_threads: int = 2
    files_per_host: int | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {self.layout!r}")
        if self.files_per_host is None:
            return
        if self.layout == "shared":
            raise ValueError(
                "files_per_host is for the layouts 'per-rank' and 'auto': with layout 'shared', "
                "all ranks write the files of the whole model"
            )
        num = ranks_of_host()
        if type(self.files_per_host) is not int or self.files_per_host < 1:
            raise ValueError(
                f"files_per_host must be a number of files, got {self.files_per_host!r}"
            )
        if num % self.files_per_host:
            raise ValueError(
                f"files_per_host must divide the {num} ranks of a host, got {self.files_per_host}"
            )

    def writers(self, num_ranks: int) -> Writers:
        """Which ranks write the same file of boxes.

        With layout "per-rank" each its own: not every storage takes a file from several writers.
        """
        if self.files_per_host is not None:
            return Writers(ranks_of_host() // self.files_per_host, of_host=True)
        if self.layout == "per-rank":
            return Writers()
        return Writers(power_of_two(-(-num_ranks // MANY_FILES)))


class SaveJob:
    """Writes one rank's part.

    Args:
        root, name: the checkpoint will be ``root/name``.
        nonce: of this attempt.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        nonce: str,
        rank: int,
        ranks: tuple[int, ...],
        captured: Captured,
        options: SaveOptions,
        disk: Disk | None = None,
    ) -> None:
        self.captured = captured
        self.options = options
        self.rank = rank
        self.ranks = ranks
        self.disk = disk or Disk()
        self.attempt = Attempt(self.disk, root, name, nonce, rank, ranks)
        self.progress = Progress(sum(t.nbytes for t in captured.locals.values()))

    @cached_property
    def plan(self) -> SavePlan:
        """What goes where. Made by the thread that writes: training does not wait for it."""
        return plan_of(
            self.captured,
            self.rank,
            self.ranks,
            layout=self.options.layout,
            max_file_bytes=self.options.max_file_bytes,
            writers=self.options.writers(len(self.ranks)),
        )

    def begin(self) -> None:
        """Make the staging folder, and reject early what cannot work."""
        root = self.attempt.root
        remove_left(self.disk, root)
        if self.rank == self.ranks[0]:
            with _named(root):
                sweep(self.disk, root, grace_s=self.options.grace_s, nonce=self.attempt.nonce)
        self.attempt.begin()

    def write(self, staged: Staged | None = None) -> None:
        """Write, make durable, mark, and commit if this rank is the last.

        Args:
            staged: as `Staging.fill` returns it; None reads straight from the tensors.
        """
        try:
            read = staged() if staged is not None else LocalBytes(self.captured.locals)
            writer = Writer(
                self.disk, self.plan, read, self.progress, num_threads=self.options.num_threads
            )
            with self.attempt.folder() as staging:
                checksums = writer.write(staging)
                with self.disk.directory(FOLDER, staging) as folder:
                    small, values = write_small_files(self.disk, self.captured, self.rank, folder)
            # Last, when all of this rank's data is on disk: from the moment the last marker is
            # there, any rank may commit.
            self.attempt.mark(
                Manifest(
                    nonce=self.attempt.nonce,
                    name=self.attempt.name,
                    rank=self.rank,
                    ranks=Ranges.of(self.ranks),
                    sets=self.plan.recorded(checksums),
                    aliases=self.captured.aliases,
                    small_files=small,
                    writer=describe_writer(),
                    optimizer_names=digest_of_names(self.captured.values),
                ),
                values,
            )
        except BaseException as error:
            if isinstance(error, OSError) and error.errno:
                self._explain(error)
            self.attempt.give_up(f"{type(error).__name__}: {error}")
            if isinstance(error, FileNotFoundError) and self.attempt.is_gone():
                raise self.attempt.abandoned() from error
            raise
        self.attempt.commit()

    def _explain(self, error: OSError) -> None:
        """Add the path, the bytes to save and the free space to the error's message."""
        error.filename = error.filename or str(self.attempt.root / self.attempt.name)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                status = os.statvfs(self.attempt.root)
                error.strerror = (
                    f"{error.strerror} (this rank saves {self.progress.total_bytes:,} bytes; "
                    f"{status.f_bavail * status.f_frsize:,} are free)"
                )


def plan_of(captured: Captured, rank: int, ranks: tuple[int, ...], **options: Any) -> SavePlan:
    """`plan_save`, once for all captures of the same parts."""
    key = (rank, ranks, *sorted(options.items()))
    plan = captured.plans.get(key)
    if plan is None:
        plan = captured.plans[key] = plan_save(captured.parts, rank, ranks, **options)
    return plan


def write_small_files(
    disk: Disk, captured: Captured, rank: int, folder: int
) -> tuple[dict[str, SmallFile], bytes]:
    """Write what a rank saves in addition to its shards.

    Returns:
        The manifest's entries for it, and the values that are not tensors, for the manifest's end.

    Raises:
        CheckpointError: if it is more than can be loaded.
    """
    values = json.dumps(captured.values).encode()
    files = {state_name(rank): values}
    if captured.own:
        own = {name: t.cpu().contiguous() for name, t in captured.own.items()}
        files[own_name(rank)] = safetensors_bytes(own)
    listed = {}
    for name, data in files.items():
        if len(data) > small_limit(name):
            raise CheckpointError(
                f"{name} would have {len(data)} bytes: more than {small_limit(name)}, the limit of "
                "what is not sharded. Keep large tensors as parameters or buffers, and out of extra"
            )
        if data is not values:
            disk.write_file(name, data, folder, unique="small")
        num_bytes = len(data) if data is values else None
        listed[name] = SmallFile(hashlib.sha256(data).hexdigest(), num_bytes)
    return listed, values


def describe_writer() -> dict[str, Any]:
    """The writer's name and versions, for people who find the checkpoint later."""
    return {
        "fsdp2": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class _named:  # noqa: N801
    """Turns the errors of a missing or read-only root into clear messages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(f"{self.root} is no folder any more") from error
        if isinstance(error, PermissionError):
            raise CheckpointError(f"{self.root} cannot be written to") from error


class SaveHandle:
    """A save that is in progress or done.

    ``wait()`` returns when this rank's part is durable; it does not wait for other ranks. The
    checkpoint is *committed* when every rank's part is durable and the folder has its final name:
    see `wait_committed`.

    Attributes:
        step: the step being saved; None for weights alone.
        path: the checkpoint's final path.
    """

    def __init__(self, job: SaveJob, step: int | None, call: RollCall | None = None) -> None:
        self._job = job
        self._call = call
        self.step = step
        self.path = job.attempt.root / job.attempt.name
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._started = time.monotonic()
        self._finished: float | None = None

    def _run(self, staged: Staged | None = None, after: Any = None) -> None:
        try:
            self._job.write(staged)
            if after is not None:
                after(self)
        except BaseException as error:
            self._error = error
            # Where there was no room for its note, the others learn of it from the store.
            with suppress(OSError):
                if self._call is not None and self._job.rank in self._job.attempt.unfinished():
                    self._call.refuse(error)
        finally:
            if self._call is not None and not self._job.attempt.committed:
                left_open(self._call, self._job.attempt, self._error)
            self._finished = time.monotonic()
            self._done.set()

    @property
    def total_bytes(self) -> int:
        """The number of bytes that this rank writes."""
        return self._job.progress.total_bytes

    @property
    def written_bytes(self) -> int:
        """The number of bytes that this rank has written so far."""
        return self._job.progress.written_bytes

    @property
    def bytes_per_s(self) -> float:
        """The mean rate at which this rank writes, up to now or to the end."""
        seconds = (self._finished or time.monotonic()) - self._started
        return self.written_bytes / max(seconds, 1e-9)

    @property
    def done(self) -> bool:
        """Whether this rank has finished, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> SaveHandle:
        """Wait until this rank's part is durable.

        Raises:
            TimeoutError: after ``timeout`` seconds.
            OSError, CheckpointError: if writing failed; such a save is never committed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.path} is not written yet after {timeout} s")
        if self._error is not None:
            settled(self._job.attempt)
            raise self._error
        return self

    def committed(self) -> bool:
        """Whether the checkpoint is committed.

        If all ranks' parts are durable and no rank has committed the checkpoint yet, this call
        does, unless it is another rank's turn.
        """
        return self.done and self._error is None and self._commit()

    def _commit(self) -> bool:
        attempt, call = self._job.attempt, self._call
        try:
            committed = attempt.commit()
            if call is not None and not committed:
                call.check_refused(attempt)
        except (OSError, CheckpointError):
            settled(attempt)
            raise
        if committed:
            settled(attempt)
            if call is not None:
                call.forget()
        return committed

    def _check_all_called(self) -> None:
        """Check that this written save is committed, or waits only for ranks that called save.

        Raises:
            CheckpointError: naming ranks that never called it.
        """
        if self._call is not None and self._finished is not None and not self.committed():
            self._call.check_all_called(self._job.attempt, self._finished)

    def wait_committed(self, timeout: float | None = 600.0) -> SaveHandle:
        """Wait until every rank's part is durable and the checkpoint has its final name.

        Raises:
            TimeoutError: after ``timeout`` seconds, because a rank is slow or has died.
            CheckpointError: if it will never be committed.

        Warns:
            UserWarning: after waiting half a minute for other ranks only; names the ranks that have
                not called save or have not finished writing.
        """
        began = time.monotonic()
        self.wait(timeout)
        alone = time.monotonic()
        pause = 0.001
        while not self._commit():
            waited_s = time.monotonic() - began
            why = "not all ranks have finished"
            if timeout is not None and waited_s > timeout:
                if self._call is not None:
                    why = self._call.why(self._job.attempt)
                settled(self._job.attempt)
                raise TimeoutError(f"{self.path} is not committed after {timeout} s: {why}")
            if self._call is not None:
                self._call.warn_once(time.monotonic() - alone, self._job.attempt)
            time.sleep(pause)
            pause = min(2 * pause, 0.25)
        return self
