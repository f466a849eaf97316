"""`Checkpointer`: the checkpoints of a training run, one folder per step."""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..common.checks import check_bytes
from ..common.suggestions import did_you_mean
from ..dtensor.placement import all_ranks, this_rank
from .agreement import Together, check_shared, run_nonce
from .errors import CheckpointError, CheckpointNotFound
from .format.disk import Disk, make_folder
from .format.manifest import FOLDER
from .loading.opening import open_source
from .loading.restore import NameMap, values_of_rank
from .loading.training import Extras, Loaded, load_training
from .saving.capture import RankLocal
from .saving.job import SaveHandle, SaveJob, SaveOptions
from .saving.repeated import Repeated
from .saving.roll_call import RollCall
from .saving.staging import Staging
from .saving.training import Optimizers, capture_training

PATIENCE_S = 30.0  # how far apart ranks may call load before there is a warning
STEP = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,17})")


class Checkpointer:
    """Saves and loads the state of a training run, on any number of ranks.

    A run resumed on the same number of ranks is exact: random state and per-rank buffers are
    restored too. On another number of ranks neither is restored (see `Loaded.same_ranks`).

    All ranks create a Checkpointer and call its methods in the same order. They communicate only a
    few bytes, at creation and in loads.

    Args:
        root: the folder of the checkpoints; created if it does not exist.
        keep: how many committed steps to keep; None: all.
        layout, max_file_bytes, files_per_host, ranks, rank_local: as for `save_model`.
        grace_s: a later save removes an unfinished attempt after this many seconds without a write,
            or after a minute at most if a rank gave the attempt up.
        max_device_bytes: device memory in bytes that a save with ``blocking=False`` may use on this
            rank, so that training waits less for copies to the host. Up to this much of the state
            is first copied on the device. (With Adam in fp32, the state has 12 bytes for each
            parameter of a shard.) The memory is freed once the copies have reached the host.

    Raises:
        CheckpointError: if the folder cannot be created, or not all ranks see the same one.
        ValueError, TypeError: if an argument has a wrong value or type.

    Example::

        checkpoints = Checkpointer("run/checkpoints", keep=3)
        for step in range(start, steps):
            train_step()
            if step % 100 == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, blocking=False)
        checkpoints.close()
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        layout: str = "auto",
        max_file_bytes: int = 5_000_000_000,
        files_per_host: int | None = None,
        ranks: Sequence[int] | None = None,
        rank_local: RankLocal | None = None,
        grace_s: float = 3600.0,
        max_device_bytes: int = 0,
    ) -> None:
        check_bytes("max_device_bytes", max_device_bytes)
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.root = Path(os.path.abspath(root))
        self.keep = keep
        self.rank = this_rank()
        self._world = all_ranks()
        self.ranks = tuple(sorted(ranks)) if ranks is not None else all_ranks()
        if self.rank not in self.ranks:
            raise ValueError(f"Rank {self.rank} is not in ranks={self.ranks}")
        self._options = SaveOptions(layout, max_file_bytes, grace_s, files_per_host=files_per_host)
        self._rank_local = rank_local
        self._disk = Disk()
        self._staging = Staging(max_device_bytes)
        self._repeated = Repeated()
        self._last: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        make_folder(self.root)
        run_nonce()
        check_shared(self.root, self.ranks)

    # -- saving -----------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        extra: Any = None,
        blocking: bool = True,
        timeout: float | None = 600.0,
    ) -> SaveHandle:
        """Save everything that training needs to resume after ``step``.

        This rank's buffers and the state of random number generators are always saved too.

        Args:
            step: the step number, at least 0; names the checkpoint.
            model: the module being trained.
            optimizer: an optimizer, or several; their parameters must be the model's.
            scheduler: anything with ``state_dict`` and ``load_state_dict``, or several.
            extra: other state that this rank needs, such as the position in the data: numbers,
                strings, tensors, and lists and dicts of them. May differ between ranks.
            blocking: False returns once copies of this rank's tensors to buffers are enqueued; a
                thread writes the files. The current stream waits for the copies, but the host does
                not. So the checkpoint has the values at the time of the call, whatever you do next.
                Any other stream that writes to the tensors must first wait for the current one. If
                an earlier save is still being written, this call first waits for it and raises its
                error.
            timeout: how many seconds a blocking save waits for the other ranks.

        Returns:
            A handle; with ``blocking`` the checkpoint is committed.

        Raises:
            CheckpointExists: if the step has already been saved.
            CheckpointError: if the state cannot be saved, or ranks disagree. Also if other ranks
                never called the previous save, which can then never be committed.
            TimeoutError: after ``timeout`` seconds, if ``blocking``; names the ranks that have not
                called this or have not finished.
            TypeError: if ``extra`` or a state holds other than plain values; names the place.
            OSError: if the disk is full or broken; earlier checkpoints stay intact.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, got {_shown(step)}")
        self._check_group()
        target = self.root / f"step-{step:06d}"
        call = RollCall(target, self.rank, self.ranks)
        with call.called():
            self._finish_last()
            captured = capture_training(
                model, optimizer, scheduler, extra, self.ranks, self.rank, self._rank_local,
                self._repeated,
            )  # fmt: skip
            job = SaveJob(
                self.root,
                target.name,
                call.nonce,
                self.rank,
                self.ranks,
                captured,
                self._options,
                self._disk,
            )
            job.begin()
        handle = SaveHandle(job, step, call)
        self._last = handle
        if blocking:
            handle._run(after=self._prune)
            try:
                handle.wait_committed(timeout)
            except TimeoutError:
                raise
            except BaseException:
                self._last = None  # its error has been raised; the next save must not repeat it
                raise
            self._prune(handle)
            return handle
        try:
            staged = self._staging.fill(captured)
            thread = threading.Thread(
                target=handle._run,
                args=(staged, self._prune),
                name="fsdp2-checkpoint",
                daemon=False,
            )
            thread.start()
        except BaseException as error:
            job.attempt.give_up(f"{type(error).__name__}: {error}")
            self._last = None  # nobody will write it
            raise
        self._thread = thread
        return handle

    def _finish_last(self) -> None:
        """Wait until the earlier save is written, and try once more to commit it.

        Raises:
            CheckpointError: if some ranks never called that save; every later call raises it too.
        """
        thread, self._thread = self._thread, None
        last, self._last = self._last, None
        if thread is not None:
            thread.join()
        if last is not None:
            last.wait()
            if not last.committed():
                self._last = last
                last._check_all_called()
                self._last = None

    def _check_group(self) -> None:
        """Check that the ranks are the same as when this object was created.

        Raises:
            CheckpointError: if the process group was created or destroyed since.
        """
        if all_ranks() != self._world:
            raise CheckpointError(
                f"This Checkpointer of {self.root} was made when there were {len(self._world)} "
                f"ranks, but now there are {len(all_ranks())}: make it after "
                "init_process_group(), and use it before destroy_process_group()"
            )

    def wait(self, timeout: float | None = 600.0) -> None:
        """Wait until the last save is committed.

        Raises:
            TimeoutError: after ``timeout`` seconds.
            CheckpointError: or any other error that the save raised.
        """
        last = self._last
        if last is not None:
            last.wait_committed(timeout)
            self._prune(last)

    def close(self, timeout: float | None = 600.0) -> None:
        """Wait for the last save to finish."""
        try:
            self.wait(timeout)
        finally:
            if self._thread is not None:
                self._thread.join()
            self._thread = self._last = None
            self._staging.clear()
            self._repeated.forget()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prune(self, handle: SaveHandle) -> None:
        """Remove committed steps beyond the newest ``keep``; the first rank does it."""
        if self.keep is None or self.rank != self.ranks[0] or not handle._job.attempt.committed:
            return
        with self._disk.directory(self.root) as root:
            for step in self.steps()[: -self.keep]:
                name = _find(self.root, step).name
                # Rename first, so that a checkpoint is either complete or absent. The name is that
                # of a staging folder: if this process dies here, a later save removes it.
                trash = f".{name}.{handle._job.attempt.nonce}.tmp"
                self._disk.rename(name, trash, root)
                self._disk.remove_tree(trash, root)

    # -- listing --------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return steps_in(self.root)

    # -- loading ----------------------------------------------------------------------------

    def load(
        self,
        step: int | str = "latest",
        *,
        model: nn.Module | None = None,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        strict: bool = True,
        cast: bool = False,
        verify_checksums: bool = True,
        keep_on_error: bool = True,
        random_state: bool = True,
        names: NameMap = None,
        device: torch.device | str | None = None,
    ) -> Loaded:
        """Load a step, saved by any number of ranks on any mesh.

        All ranks check everything before any rank changes anything (see ``keep_on_error``). An
        error on one rank is raised on all of them, and errors of this module keep their class. So a
        program can catch an error and load an earlier step.

        Args:
            step: its number, or "latest": the latest step that the first rank sees. All ranks load
                the same step.
            model, optimizer, scheduler: the objects to load into, of the same structure as those
                saved; None: skip. The optimizer needs no state yet.
            strict, cast, verify_checksums, device: as for `load_model`.
            names: as for `load_model`; also applies to the state of the optimizer and of modules.
            keep_on_error: as for `load_model`; also protects the optimizer's existing state. State
                that the optimizer does not have yet is always read once.
            random_state: restore random number generators, if the number of ranks is the same as
                when saving.

        Raises:
            CheckpointNotFound: if there is no such step. With "latest" the first rank's listing
                decides, so all ranks raise it or none does.
            CheckpointError: if a rank does not see the latest step of the first rank, or never
                calls this method.
            CorruptCheckpoint, CheckpointMismatch: as for `load_model`.

        Example::

            from fsdp2.checkpoint import Checkpointer, CheckpointNotFound

            checkpoints = Checkpointer("run/checkpoints")
            try:
                first = checkpoints.load("latest", model=model, optimizer=optimizer).step + 1
            except CheckpointNotFound:  # on all ranks or on none
                first = 1
        """
        self._check_group()
        with Together(f"load from {self.root}", self.ranks) as together:
            try:
                self._finish_last()
            except CheckpointError as error:  # of a save, which has nothing to do with this load
                warnings.warn(f"{error}. What is committed is loaded", stacklevel=2)
            number = self._resolve(step, together)
            with open_source(_find(self.root, number)) as source:
                if not source.ranks:
                    raise CheckpointNotFound(f"{source.path} was not saved by a Checkpointer")
                return load_training(
                    source, number, self.rank, self.ranks, model, optimizer, scheduler,
                    strict=strict, cast=cast, verify_checksums=verify_checksums,
                    keep_on_error=keep_on_error, random_state=random_state, names=names,
                    device=device, before_change=together.tell,
                )  # fmt: skip

    def _resolve(self, step: int | str, together: Together) -> int:
        steps = self.steps()
        mine = "latest" if step == "latest" else str(_number(step, self.root))
        told = together.tell(
            json.dumps([mine, steps[-1] if steps else None]), warn_after_s=PATIENCE_S
        )
        wanted, latest = zip(*map(cache(json.loads), told), strict=True)
        for rank, its in zip(self.ranks, wanted, strict=True):
            if its != wanted[0]:
                raise CheckpointError(
                    f"Rank {rank} loads step {its}, and rank {self.ranks[0]} step {wanted[0]}: "
                    "all ranks have to load the same"
                )
        if step != "latest":
            return int(mine)
        if latest[0] is None:
            raise _nothing_in(self.root)
        number = latest[0]
        if number not in steps and number not in self.steps():
            # Not CheckpointNotFound: that is the same on all ranks, so that a program may catch
            # it and begin anew.
            raise CheckpointError(
                f"Rank {self.rank} does not see step {number} in {self.root}, which rank "
                f"{self.ranks[0]} lists there: the file system shows it late on this node, or "
                "does not share the folder. Start all ranks again"
            )
        return number


def peek(root: str | os.PathLike[str], step: int | str = "latest") -> Loaded:
    """Read the values other than tensors that a `Checkpointer` saved, in a single process.

    For programs that need their options before they start processes and build a model.

    Args:
        root: the folder of the checkpoints.
        step: its number, or "latest".

    Returns:
        A report with the step, ``extra`` of the first rank, and ``extra_of_ranks``.

    Raises:
        CheckpointNotFound: if there is no such step.
        CorruptCheckpoint: if the checkpoint is damaged.

    Example::

        saved = peek("run/checkpoints")
        print(saved.step, saved.extra["options"])
    """
    folder = Path(os.path.abspath(root))
    steps = steps_in(folder)
    if step == "latest" and not steps:
        raise _nothing_in(folder)
    number = steps[-1] if step == "latest" else _number(step, folder)
    with open_source(_find(folder, number)) as source:
        first = source.ranks[0]
        extras = Extras(source, {first: values_of_rank(source, first)})
    return Loaded(step=number, extra=extras[first], extra_of_ranks=extras)


def steps_in(root: Path) -> list[int]:
    """The committed steps in a `Checkpointer`'s folder, oldest first."""
    if not root.is_dir():
        return []
    return sorted(
        int(match[1])
        for name in os.listdir(root)
        if (match := STEP.fullmatch(name)) and (root / name / FOLDER).is_dir()
    )


def _find(root: Path, step: int) -> Path:
    path = root / f"step-{step:06d}"
    if not path.is_dir():
        known = ", ".join(map(str, steps_in(root)[-8:])) or "none"
        raise CheckpointNotFound(f"{root} has no committed step {step}; the last ones: {known}")
    return path


def _number(step: int | str, root: Path) -> int:
    """Convert a step given as a number or a string of digits.

    Raises:
        ValueError: for anything else; lists the existing steps.
    """
    is_whole = isinstance(step, int) and not isinstance(step, bool)
    if is_whole or (isinstance(step, str) and step.isdecimal()):
        return int(step)
    if not isinstance(step, str | int | float):
        raise TypeError(
            f"step must be a number or 'latest', got {_shown(step)}; other arguments are "
            "keywords: load(model=model)"
        )
    known = ", ".join(map(str, steps_in(root)[-8:])) or "none"
    folder = STEP.fullmatch(step) if isinstance(step, str) else None
    meant = did_you_mean(str(step), ["latest"])
    if folder is not None:
        meant = f": did you mean {int(folder[1])}?"
    raise ValueError(
        f"step must be a whole number or 'latest', got {step!r}; the last steps in {root}: {known}"
        f"{meant}"
    )


def _shown(value: Any) -> str:
    """A short form for messages, where modules and optimizers would be too long."""
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def _nothing_in(root: Path) -> CheckpointNotFound:
    """The error for a folder without steps, with a guess at what it is."""
    advice = ""
    if not root.is_dir():
        advice = f": there is no such folder{_neighbour_of(root)}"
    elif not os.listdir(root):
        advice = _neighbour_of(root)
    elif (root / FOLDER).is_dir():
        advice = (
            ": it is itself a checkpoint. Pass the folder that holds the steps to Checkpointer, or "
            "read its weights with load_model"
        )
    elif (root / ".metadata").exists():
        advice = ": it is a checkpoint of torch.distributed.checkpoint; load it with that"
    return CheckpointNotFound(f"{root} has no committed checkpoint{advice}")


def _neighbour_of(root: Path) -> str:
    """The end of a message: a Checkpointer's folder next to ``root`` that may be meant."""
    others = []
    with suppress(OSError):
        others = [path.name for path in sorted(root.parent.iterdir()) if steps_in(path)]
    return did_you_mean(root.name, others)
