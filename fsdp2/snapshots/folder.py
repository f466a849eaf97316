"""The folder of a run's snapshots on one host: written, checked and cleaned up.

::

    /dev/shm/fsdp2-snapshots-<run>/
      lock-00003                        held by the process of rank 3
      progress-00003                    session and step that it has come to
      000002-000000120-9f3ac01b/        a generation: session, step, nonce of the session
        rank-00003-of-00008/            a part: its own, or a copy of another host's
          model-rank-00003.safetensors  a checkpoint with layout="per-rank", as far as one rank
          optim-rank-00003.safetensors  writes it
          rank-00003-of-00008.json      its manifest, with checksums of everything, and its values
      .incoming-...                     a part that is being written; .restore-...: for a load

A part appears by one rename, when everything in it is written, and goes by one rename. So a process
that is killed at any moment leaves parts that are whole or that nothing looks at. Whether the bytes
are still what was written is checked before they are used.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path

from ..checkpoint.errors import CheckpointError, CorruptCheckpoint, some
from ..checkpoint.format.checksum import crc32
from ..checkpoint.format.disk import Disk, read_exactly
from ..checkpoint.format.header import FileInfo, info_of
from ..checkpoint.format.manifest import BLOCK_BYTES, Group, Manifest, marker_name
from ..checkpoint.format.marker import load, read_marker
from ..checkpoint.format.small_state import read_small_file
from .choice import Generation, PartName

PREFIX = "fsdp2-snapshots-"
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOCK_PATIENCE_S = 10.0
_PROGRESS = struct.Struct("=QQ")
_locked: set[Path] = set()  # by this process: the system's locks do not keep it from itself


class Folder:
    """The snapshots of a run on this host.

    Args:
        directory: which holds the folders of all runs.
        run: the name of the run.

    Raises:
        CheckpointError: if it cannot be made, or belongs to another user.
    """

    def __init__(self, directory: Path, run: str, disk: Disk | None = None) -> None:
        self.directory = directory
        self.path = directory / f"{PREFIX}{run}"
        self.disk = disk or Disk()
        try:
            # Others must not read the weights, nor put theirs here: /dev/shm is everybody's.
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = os.lstat(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be made: {error.strerror}") from error
        if status.st_uid != os.geteuid() or not self.path.is_dir() or self.path.is_symlink():
            raise CheckpointError(
                f"{self.path} belongs to another user (or is no folder): choose another run name, "
                "or another directory"
            )
        self._lock = -1
        self._lock_path = self.path
        self._progress = -1

    @property
    def identity(self) -> str:
        """The same for all processes that see this very folder, on one machine."""
        status = os.stat(self.path)
        return f"{status.st_dev}:{status.st_ino}"

    # -- who writes here --------------------------------------------------------------------

    def lock(self, rank: int, patience_s: float = LOCK_PATIENCE_S) -> None:
        """Keep other jobs out. The system gives the lock back however this process ends.

        A lock of the process, not of the open file: that would live on in the workers of a data
        loader, which outlive a killed parent by some seconds.

        Raises:
            CheckpointError: if another process has it.
        """
        path = self.path / f"lock-{rank:05d}"
        if path in _locked:
            raise CheckpointError(
                f"This process has snapshots in {self.path} already: close() them first"
            )
        deadline = time.monotonic() + patience_s
        while (fd := _try_lock(path)) < 0:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Another process is rank {rank} of a run that keeps its snapshots in "
                    f"{self.path}. Give each run its own name; if it is a process that was left "
                    "behind, end it"
                )
            time.sleep(0.05)
        progress = self.path / f"progress-{rank:05d}"
        try:
            self._progress = os.open(progress, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except BaseException:  # no space: this process may try again once there is some
            os.close(fd)
            raise
        self._lock, self._lock_path = fd, path
        _locked.add(path)

    def unlock(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            os.close(self._progress)
            _locked.discard(self._lock_path)
            self._lock = self._progress = -1

    def note_progress(self, session: int, step: int) -> None:
        """Note the step that this rank has come to; one write of 16 bytes.

        Without room for even these, it stays unknown how many steps are lost; training continues.
        """
        with suppress(OSError):
            os.pwrite(self._progress, _PROGRESS.pack(session, step), 0)

    def progress(self) -> tuple[int, int]:
        """The latest session and step that any rank has noted here; (0, 0): none."""
        found = [(0, 0)]
        for path in self.path.glob("progress-*"):
            with suppress(OSError, struct.error):
                found.append(_PROGRESS.unpack(path.read_bytes()))
        return max(found)

    # -- what is here -----------------------------------------------------------------------

    def parts(self) -> list[PartName]:
        """Everything that is written, oldest first."""
        found = []
        for generation in _names(self.path):
            if Generation.parse(generation) is not None:
                for name in _names(self.path / generation):
                    part = PartName.parse(generation, name)
                    if part is not None:
                        found.append(part)
        return sorted(found)

    def path_of(self, part: PartName) -> Path:
        return self.path / part.generation.name / part.name

    @contextmanager
    def incoming(self, part: PartName) -> Iterator[Path]:
        """A folder to write a part into, which takes its place if no error is raised inside."""
        name = f".incoming-{part.generation.name}-{part.name}-{secrets.token_hex(4)}"
        path = self.path / name
        with self.disk.directory(self.path) as root:
            self.disk.make_directory(name, root)
            try:
                yield path
                self.disk.make_directory(part.generation.name, root)
                # Onto a part that is there already this fails, and that one stays.
                self.disk.rename(name, f"{part.generation.name}/{part.name}", root)
            except BaseException:
                self.disk.remove_tree(name, root)
                raise

    def remove(self, keep: Set[Generation], among: Iterable[PartName]) -> None:
        """Remove those parts whose generation is not to be kept."""
        with self.disk.directory(self.path) as root:
            for part in among:
                if part.generation in keep:
                    continue
                gone = f".removed-{secrets.token_hex(8)}"
                # First out of sight in one step: half a part must never be found.
                with suppress(FileNotFoundError):
                    self.disk.rename(f"{part.generation.name}/{part.name}", gone, root)
                    self.disk.remove_tree(gone, root)
                with suppress(OSError):  # others are in it
                    os.rmdir(part.generation.name, dir_fd=root)

    def remove_unfinished(self) -> None:
        """Remove what killed processes left; before anything of this session is written."""
        with self.disk.directory(self.path) as root:
            for name in self.disk.names(root):
                if name.startswith((".incoming-", ".removed-", ".restore-")):
                    self.disk.remove_tree(name, root)

    def remove_all(self) -> None:
        """Remove the folder; nothing of this run may be at work any more."""
        with self.disk.directory(self.directory) as directory:
            self.disk.remove_tree(self.path.name, directory)

    # -- whether it is what was written -----------------------------------------------------

    def manifest(self, part: PartName) -> Manifest:
        """The manifest of a part.

        Raises:
            CorruptCheckpoint: if it is damaged, or not of this part.
        """
        path = self.path_of(part) / marker_name(part.rank, part.num_ranks)
        try:
            manifest = load(read_marker(path), str(path))
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{path} is missing") from error
        return checked(manifest, part, str(path))

    def verify(self, part: PartName, path: Path | None = None) -> None:
        """Compare every byte of a part with its checksums.

        Args:
            path: where it is, if not in its place yet.

        Raises:
            CorruptCheckpoint: naming the file.
        """
        path = path or self.path_of(part)
        marker = path / marker_name(part.rank, part.num_ranks)
        try:
            manifest = load(read_marker(marker), str(marker))
            checked(manifest, part, str(marker))
            for name, small in manifest.small_files.items():
                read_small_file(path, marker.name, name, small)
            for files in manifest.sets:
                for name, info in files.files.items():
                    groups = [group for group in files.groups if group.file == name]
                    _verify_file(path / name, info, groups)
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCheckpoint(f"{path} is damaged: {error!r}") from error


def _try_lock(path: Path) -> int:
    """A descriptor that holds the lock; -1 if another process has it."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run of this name that has just ended may have removed the file in between: what is
        # locked then is one that no other process will find.
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return -1


def checked(manifest: Manifest, part: PartName, shown: str) -> Manifest:
    """``manifest``, if it belongs to ``part``.

    Raises:
        CorruptCheckpoint: if not.
    """
    generation = part.generation.name
    told = manifest.nonce, manifest.rank, len(manifest.ranks)
    if told != (generation, part.rank, part.num_ranks):
        raise CorruptCheckpoint(f"{shown} is of {told}, not of {part}")
    whole = [file for files in manifest.sets if files.whole for file in files.files]
    if whole:
        raise CorruptCheckpoint(
            f"{shown} is not of a snapshot: {some(whole)} would hold whole tensors"
        )
    return manifest


def _verify_file(path: Path, info: FileInfo, groups: Sequence[Group]) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        if info_of(size, os.pread(fd, info.header_bytes, 0)) != info:
            raise CorruptCheckpoint(f"{path}: its size or header is not what was written")
        buffer = memoryview(bytearray(BLOCK_BYTES))
        boxes = ((group.box_bytes, *box) for group in groups for box in group.boxes())
        for nbytes, _, offset, checksums in boxes:
            assert offset is not None  # a file of one rank: boxes one after the other
            for i, expected in enumerate(checksums):
                first = i * BLOCK_BYTES
                block = buffer[: min(BLOCK_BYTES, nbytes - first)]
                num = read_exactly(fd, block, offset + first)
                if num != len(block) or crc32(block) != expected:
                    raise CorruptCheckpoint(f"{path}: it is damaged near byte {offset + first}")
    finally:
        os.close(fd)


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_stale(directory: Path, own: Path, stale_s: float, disk: Disk | None = None) -> list[str]:
    """Remove folders of runs that ended long ago without removing them, by the clock of the file
    system; returns their names.

    Only those that no process holds, in which nothing was written for ``stale_s`` seconds.
    """
    disk = disk or Disk()
    removed = []
    with disk.directory(directory) as root:
        clock = f".fsdp2-snapshots-clock-{secrets.token_hex(4)}"
        try:
            now = disk.touch(clock, root)
        finally:
            disk.unlink(clock, root)
        for path in sorted(directory.glob(f"{PREFIX}*")):
            with suppress(OSError):
                if path == own or path.is_symlink() or path.stat().st_uid != os.geteuid():
                    continue
                ages = [now - p.lstat().st_mtime for p in (path, *path.rglob("*"))]
                if min(ages) > stale_s and not any(map(_held, path.glob("lock-*"))):
                    disk.remove_tree(path.name, root)
                    removed.append(path.name)
    return removed


def _held(lock: Path) -> bool:
    fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
