"""`MemorySnapshots`: the state of training in the memory of two hosts, for a quick restart."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.agreement import Together, added, forget, said_by_first, told_by_all
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.errors import CheckpointError
from ..checkpoint.loading.training import Loaded, load_training
from ..checkpoint.saving.capture import Captured, RankLocal
from ..checkpoint.saving.repeated import Repeated
from ..checkpoint.saving.staging import Staged, Staging
from ..checkpoint.saving.training import Optimizers, capture_training
from ..common.checks import check_bytes
from ..common.host import memory_bytes
from ..dtensor.placement import all_ranks, this_rank
from .assembly import assembled
from .choice import Choice, Generation, PartName, choose
from .folder import RUN
from .meeting import Session, raise_first
from .part import write_part
from .transfer import Peer, older_parts

CLOSE_S = 600.0


@dataclass
class Restored(Loaded):
    """What `MemorySnapshots.restore` found: everything in `Loaded`, and the origin.

    Attributes:
        origin: "memory" or "disk".
        last_step: the last step known to have been finished before the restart; None if unknown.
    """

    origin: str = "memory"
    last_step: int | None = None

    @property
    def lost_steps(self) -> int | None:
        """The number of finished steps that must be repeated; None if unknown."""
        return None if self.last_step is None else max(0, self.last_step - self.step)


class MemorySnapshots:
    """Keeps the state of training in host memory, on its own host and on another one.

    Every few steps, each rank copies its checkpoint state to host memory. Training continues while
    a thread writes the state to files in memory (``/dev/shm``) and sends a copy to the rank's
    neighbour, a rank on another host. After a restart, `restore` loads the newest snapshot whose
    parts can all be found on the remaining hosts. A restarted process finds its own files; a new
    host gets the parts of the host that it replaces from the neighbour. No disk is involved. Any
    number of ranks can resume (on another number without random state, as with `Checkpointer`).

    A snapshot is removed only when a later one is complete on all ranks, with its copies. So a kill
    at any moment leaves one that can be restored. Every byte is compared with its checksum before
    it is used. A damaged part counts as lost, and its other copy is used. If both copies of a part
    are lost, only the disk remains: also save with a `Checkpointer` now and then.

    *Memory*: ``directory`` holds two snapshots of this rank's state, and two of the state of the
    rank whose copies it keeps. With AdamW in fp32, each has 12 bytes per parameter of a shard, so
    they take 48 in all. The process holds one more snapshot in (pinned) memory. The first
    `after_step` raises an error if there is too little memory. *Time*: only the current stream
    waits for the copy to host memory. While a snapshot is unfinished on any rank, all ranks skip
    later ones, with a warning the first time.

    All ranks create one after ``init_process_group``, again after each restart, and call the same
    methods for the same steps. Training's process groups are not used: a few bytes go through the
    store, the rest through separate TCP connections.

    Gemini (Wang et al., SOSP 2023) showed that copies in another host's memory allow frequent
    snapshots and quick restarts. As in Gemini, hosts hold copies for each other in pairs.

    Args:
        run: the name of the run. Use the same name after a restart to restore its snapshots.
            Simultaneous runs need different names.
        every: take a snapshot after each step that this divides. The first step after each start
            also takes one, since copies may be missing by then.
        directory: a folder in memory, separate on each host. A folder on a local disk works too, as
            it outlives the processes.
        host: a name for the machines that fail together; by default each machine on its own. Pass
            the name of the rack, for example, to keep copies in other racks.
        max_mb_per_s: limit for sending to the neighbour, in million bytes per second, which leaves
            the rest of the link to training. None: no limit.
        address: the address by which the other hosts reach this one. By default the address of
            ``GLOO_SOCKET_IFNAME``, or the one from which ``MASTER_ADDR`` is reached.
        rank_local: as for `save_model`.
        stale_s: remove snapshots of other runs in ``directory`` that no process holds after this
            many seconds without a write.
        max_device_bytes: as for `Checkpointer`.

    Attributes:
        run, every: as given.
        complete: the step of the last snapshot known to be complete on all ranks, with all copies;
            None before that.
        skipped: how many snapshots were skipped.
        neighbour: the rank that holds copies of this rank's parts; None if there is one host.

    Raises:
        ValueError: if ``run`` is not a valid file name, or ``every`` is below 1.
        CheckpointError: on all ranks, if one cannot take part: the folder cannot be created,
            another job uses it, hosts share it, or the address is wrong.

    Example::

        checkpoints = Checkpointer("run/checkpoints")
        with MemorySnapshots("my-run", every=10) as snapshots:
            found = snapshots.restore(model=model, optimizer=optimizer, checkpoints=checkpoints)
            for step in range(found.step + 1 if found else 1, steps + 1):
                train_step()
                snapshots.after_step(step, model=model, optimizer=optimizer)
    """

    def __init__(
        self,
        run: str,
        *,
        every: int,
        directory: str | os.PathLike[str] = "/dev/shm",
        host: str | None = None,
        max_mb_per_s: float | None = None,
        address: str | None = None,
        rank_local: RankLocal | None = None,
        stale_s: float = 86400.0,
        max_device_bytes: int = 0,
    ) -> None:
        check_bytes("max_device_bytes", max_device_bytes)
        if not RUN.fullmatch(run):
            raise ValueError(
                f"run must be letters, digits, '.', '_' and '-' (at most 100), got {run!r}"
            )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
        if max_mb_per_s is not None and max_mb_per_s <= 0:
            raise ValueError(f"max_mb_per_s must be above 0, got {max_mb_per_s}")
        self.run, self.every = run, every
        self.rank, self.ranks = this_rank(), all_ranks()
        self._bytes_per_s = None if max_mb_per_s is None else max_mb_per_s * 1e6
        self._rank_local = rank_local
        path = Path(os.path.abspath(directory))
        self._session = Session(run, path, host, address, stale_s, self.rank, self.ranks)
        assert self._session.folder is not None
        self._folder = self._session.folder
        self.neighbour = self._session.neighbours[self.rank]
        if self.neighbour is None and self.rank == self.ranks[0]:
            warnings.warn(
                f"MemorySnapshots('{run}') has one host only: snapshots survive the end of "
                "processes, and are lost with the host",
                stacklevel=2,
            )
        self.complete: int | None = None
        self.skipped = 0
        self._base: Generation | None = None  # which was restored
        self._kept: Generation | None = None  # of this session
        self._pending: Generation | None = None
        self._staging = Staging(max_device_bytes)
        self._repeated = Repeated()
        self._thread: threading.Thread | None = None
        self._count = 0  # of snapshots that were begun
        self._failure = ""
        self._closed = False

    # -- taking -----------------------------------------------------------------------------

    def after_step(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        extra: Any = None,
    ) -> bool:
        """Report that a step is finished, and begin a snapshot if one is due.

        Args:
            step: the step number, at least 0 and increasing. Call this after every step, so that
                `Restored.lost_steps` is known after a fault.
            model, optimizer, scheduler, extra: as for `Checkpointer.save`.

        Returns:
            Whether a snapshot was begun; the same on all ranks.

        Raises:
            CheckpointError: if ranks are at different steps; at the first snapshot, on all ranks,
                if a host has too little memory.
            ValueError: if ``step`` is not above the last snapshot's step.
            TypeError: if ``extra`` or a state holds other than plain values.
        """
        self._check_open()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer of at least 0, got {step!r}")
        if self._pending is not None and step <= self._pending.step:
            raise ValueError(
                f"after_step({step}) after a snapshot of step {self._pending.step}: steps increase."
                " Call clear() before training goes back to an earlier one"
            )
        self._folder.note_progress(self._session.number, step)
        if self._pending is not None and step % self.every:
            return False
        self._warn_of_failure()
        if not self._agree_to_start(step):
            return False
        first, generation = self._pending is None, self._session.generation(step)
        self._pending = generation
        self._count += 1
        # All ranks have begun the last one, since it is over, and look at none before it.
        self._forget(self._count - 2)
        try:
            captured, error = None, None
            try:
                captured = capture_training(
                    model, optimizer, scheduler, extra, self.ranks, self.rank, self._rank_local,
                    self._repeated,
                )  # fmt: skip
            except Exception as caught:
                error = caught
            if first:
                self._make_room(captured, error)
            if error is not None:
                raise error
            assert captured is not None
            copying = (generation, captured, self._staging.fill(captured))
            thread = threading.Thread(
                target=self._copy, args=copying, name="fsdp2-snapshot", daemon=True
            )
            thread.start()
        except BaseException:
            added(f"{self._key}/ended", 1)  # the others continue
            raise
        self._thread = thread
        return True

    def _agree_to_start(self, step: int) -> bool:
        """Whether to take a snapshot of ``step``: the first rank decides for all of them.

        Ranks that decided on their own would begin different ones, and none would ever be whole.
        """
        decision = ""
        if self.rank == self.ranks[0]:
            start = self._look_at_pending()
            decision = json.dumps([step, start, self._name(self._kept), self.complete])
        about = f"whether to take the next snapshot of '{self._folder.path.name}'"
        said, start, kept, complete = json.loads(said_by_first(about, decision, self.ranks))
        if said != step:
            raise CheckpointError(
                f"Rank {self.rank} is at step {step}, and rank {self.ranks[0]} at step {said}: "
                "call after_step on all ranks, for the same steps"
            )
        self._kept, self.complete = Generation.parse(kept), complete
        if not start:
            self.skipped += 1
            if self.skipped == 1 and self.rank == self.ranks[0]:
                warnings.warn(
                    f"The snapshot of step {step} is left out: the snapshot of step "
                    f"{self._pending.step if self._pending else '?'} is still being copied. Take "
                    "them less often, or raise max_mb_per_s. (Further ones are only counted, in "
                    "`skipped`)",
                    stacklevel=3,
                )
        return bool(start)

    @property
    def _key(self) -> str:
        """The prefix of the store's counts of how far all ranks are with the last snapshot."""
        return self._key_of(self._count)

    def _key_of(self, count: int) -> str:
        return f"snapshots/{self._session.nonce}/{count}"

    def _forget(self, count: int) -> None:
        """Remove what the store knows of a snapshot, on the first rank."""
        if count > 0 and self.rank == self.ranks[0]:
            for name in ("written", "copied", "ended"):
                forget(f"{self._key_of(count)}/{name}")

    @staticmethod
    def _name(generation: Generation | None) -> str:
        return generation.name if generation is not None else ""

    def _look_at_pending(self) -> bool:
        """Note how far all ranks have come with the last snapshot; whether all are done with it."""
        pending, num = self._pending, len(self.ranks)
        if pending is None:
            return True
        key = self._key
        if added(f"{key}/ended", 0) < num:
            return False
        if added(f"{key}/copied", 0) == num:
            self._kept, self.complete = pending, pending.step
        elif self.complete is None and added(f"{key}/written", 0) == num:
            # Without copies, as the neighbour cannot be reached; better than none.
            self._kept = pending
        return True

    def _copy(self, generation: Generation, captured: Captured, staged: Staged) -> None:
        """Write and send this rank's part; in a thread."""
        part = PartName(generation, self.rank, len(self.ranks))
        key = self._key
        keep = {self._kept} if self._kept is not None else set()
        try:
            self._folder.remove(keep, older_parts(self._folder, part))
            if self._kept is not None and self._session.cleans:
                self._folder.remove(keep, self._of_other_sessions())
            write_part(self._folder, part, captured, staged)
            added(f"{key}/written", 1)
            if self.neighbour is not None:
                address = self._session.address_of(self.neighbour)
                with Peer(*address, self._session.secret) as peer:
                    peer.put(self._folder, part, sorted(keep), self._bytes_per_s)
            added(f"{key}/copied", 1)
        except BaseException as error:
            self._failure = (
                f"A snapshot of rank {self.rank} is not complete; training continues with the "
                f"earlier ones: {type(error).__name__}: {error}"
            )
        finally:
            with suppress(RuntimeError, ValueError):  # the store is gone as the program ends
                added(f"{key}/ended", 1)

    def _of_other_sessions(self) -> list[PartName]:
        return [p for p in self._folder.parts() if not self._session.is_own(p.generation)]

    def _make_room(self, captured: Captured | None, error: Exception | None) -> None:
        """Before the first snapshot: remove what cannot be needed, and check the space.

        Raises:
            CheckpointError: on all ranks, if a host has too little, or a rank has an error.
        """
        base = {self._base} if self._base is not None else set()
        if self._session.cleans:
            self._folder.remove(base, self._of_other_sessions())
        num_bytes = 0
        if captured is not None:
            tensors = (*captured.locals.values(), *captured.own.values())
            num_bytes = sum(t.nbytes for t in tensors) + len(json.dumps(captured.values))
        shown = "" if error is None else f"{type(error).__name__}: {error}"
        told = json.dumps([num_bytes, _free_bytes(self._folder.path), shown])
        said = told_by_all("make room for snapshots", told, self.ranks)
        answers = [json.loads(each) for each in said]
        raise_first(self.ranks, [each[2] for each in answers])
        needed: dict[str, int] = {}
        free: dict[str, int] = {}
        members = self._session.members
        copies = self._session.neighbours
        for member, to, (nbytes, available, _) in zip(members, copies, answers, strict=True):
            places = [member.folder] if to is None else [member.folder, members[to].folder]
            for place in places:
                needed[place] = needed.get(place, 0) + 2 * nbytes
            free[member.folder] = min(available, free.get(member.folder, available))
        for rank, member in zip(self.ranks, members, strict=True):
            if needed[member.folder] > free[member.folder]:
                raise CheckpointError(
                    f"Two snapshots need {needed[member.folder]:,} bytes on the host of rank "
                    f"{rank}, in {self._folder.directory}, and {free[member.folder]:,} are free: "
                    "make the file system larger (mount -o remount,size=...; docker --shm-size; "
                    "a medium: Memory volume in Kubernetes), pass another directory, or take "
                    "more hosts"
                )

    # -- restoring --------------------------------------------------------------------------

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizers = None,
        scheduler: Any = None,
        checkpoints: Checkpointer | None = None,
        device: torch.device | str | None = None,
    ) -> Restored | None:
        """Load the newest state: from memory or, if the disk has a newer one, from disk.

        Args:
            model, optimizer, scheduler, device: as for `Checkpointer.load`.
            checkpoints: the checkpoints of the same run on disk; pass them on all ranks or on none.

        Returns:
            A report; None, on all ranks, if there is nothing to load.

        Raises:
            CheckpointError: on all ranks, if a rank cannot load its part.
        """
        self._check_open()
        if self._pending is not None:
            raise CheckpointError("restore() comes before the first after_step()")
        on_disk = max(checkpoints.steps(), default=-1) if checkpoints is not None else -1
        mine = self._folder.parts() if self._session.cleans else []
        told = json.dumps([on_disk, [[p.generation.name, p.name] for p in mine]])
        answers = [json.loads(each) for each in told_by_all("find snapshots", told, self.ranks)]
        step_on_disk = answers[0][0]
        choice = self._choose({
            member.folder: _parsed(found)
            for member, (_, found) in zip(self._session.members, answers, strict=True)
            if found
        }, step_on_disk)  # fmt: skip
        last_step = self._session.last_step
        if choice is not None:
            loaded = self._load(choice, model, optimizer, scheduler, device)
            self._base = choice.generation
        elif checkpoints is None or step_on_disk < 0:
            return None
        else:
            loaded = checkpoints.load(
                step_on_disk, model=model, optimizer=optimizer, scheduler=scheduler, device=device
            )
        # A start that ends before its first step has lost nothing more than the one before.
        self._folder.note_progress(self._session.number, loaded.step)
        origin = "disk" if choice is None else "memory"
        return Restored(**vars(loaded), origin=origin, last_step=last_step)

    def _choose(self, inventories: dict[str, list[PartName]], on_disk: int) -> Choice | None:
        """The newest intact snapshot, if it is not older than the checkpoint."""
        here, ranks_here = self._session.here, self._session.at(self._session.here)
        bad: set[tuple[str, PartName]] = set()
        while True:
            choice = choose(inventories, bad)
            if choice is None or choice.generation.step < on_disk:
                return None
            parts = [part for part, folders in choice.holders.items() if here in folders]
            damaged = []
            for part in parts[ranks_here.index(self.rank) :: len(ranks_here)]:
                try:
                    self._folder.verify(part)
                except CheckpointError as error:
                    damaged.append(part)
                    warnings.warn(f"A part of a snapshot is not used: {error}", stacklevel=3)
            told = json.dumps([[p.generation.name, p.name] for p in damaged])
            answers = told_by_all("choose a snapshot", told, self.ranks)
            found = {
                (member.folder, part)
                for member, answer in zip(self._session.members, answers, strict=True)
                for part in _parsed(json.loads(answer))
            }
            if not found:
                return choice
            bad |= found

    def _load(
        self,
        choice: Choice,
        model: nn.Module | None,
        optimizer: Optimizers,
        scheduler: Any,
        device: torch.device | str | None,
    ) -> Loaded:
        origins = self._session.origins(choice)
        # Its end is also a barrier: nobody removes what another rank still reads.
        with (
            Together("restore a snapshot", self.ranks) as together,
            assembled(self._folder, choice, origins, self._session.secret) as source,
        ):
            # Everything has been verified; reading twice would double what is sent.
            return load_training(
                source, choice.generation.step, self.rank, self.ranks, model, optimizer,
                scheduler, keep_on_error=False, device=device, before_change=together.tell,
            )  # fmt: skip

    # -- ending -----------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until this rank has written and sent its part of the last snapshot.

        Returns:
            Whether it has, within ``timeout`` seconds.
        """
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                return False
        self._warn_of_failure()
        self._look_at_pending()
        return True

    def _warn_of_failure(self) -> None:
        failure, self._failure = self._failure, ""
        if failure:
            warnings.warn(failure, stacklevel=3)

    def clear(self) -> None:
        """Remove all snapshots of this run, to start over under its name; call it on all ranks."""
        self._check_open()
        self.wait()
        self._told("clear")
        if self._session.cleans:
            self._folder.remove(set(), self._folder.parts())
        self._told("continue after clear() of")
        self._base = self._kept = self._pending = self.complete = None

    def close(self, *, keep: bool = False, timeout: float = CLOSE_S) -> None:
        """Wait for the last snapshot, then remove all of this run's; call it on all ranks.

        Args:
            keep: keep them, so that a later job of this name can resume from them.
            timeout: seconds to wait for this rank's part of the last snapshot.
        """
        if self._closed:
            return
        try:
            self.wait(timeout)
            self._told("close")
            if not keep and self._session.cleans:
                self._folder.remove_all()
            # Until then the locks keep out a new job of this name. The first rank may end as soon
            # as it has heard of all others, and with it the store, before these hear of it.
            with suppress(RuntimeError):
                self._told("end")
                for count in (self._count - 1, self._count):
                    self._forget(count)
        finally:
            self._end()

    def _told(self, what: str) -> None:
        told_by_all(f"{what} snapshots", "", self.ranks)

    def _end(self) -> None:
        self._closed = True
        self._session.close()
        if self._thread is None or not self._thread.is_alive():
            self._staging.clear()
            self._repeated.forget()

    def __enter__(self) -> MemorySnapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end()  # what is there is needed now

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("These MemorySnapshots are closed")


def _parsed(names: Iterable[tuple[str, str]]) -> list[PartName]:
    """Parts, as ranks tell them."""
    parts = [PartName.parse(generation, name) for generation, name in names]
    return [part for part in parts if part is not None]


def _free_bytes(path: Path) -> int:
    """What can be written to ``path`` without running out of space, or of memory."""
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    _, memory = memory_bytes()
    return min(free, memory) if memory and _in_memory(path) else free


def _in_memory(path: Path) -> bool:
    device = os.stat(path).st_dev
    mounts: Iterable[str] = Path("/proc/self/mountinfo").read_text().splitlines()
    numbers = f"{os.major(device)}:{os.minor(device)}"
    return any(
        line.split()[2] == numbers and line.partition(" - ")[2].startswith(("tmpfs", "ramfs"))
        for line in mounts
    )
