"""An open checkpoint on disk: its files, and where its tensors lie in them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ...dtensor.boxes import Box
from ..errors import CheckpointError, CorruptCheckpoint
from ..format.disk import read_exactly
from ..format.header import FileInfo, Header, TensorInfo, header_length, parse_header
from ..format.index import Index
from ..format.manifest import FOLDER, Chunk, Manifest, marker_name, tables_of
from ..format.ranges import Ranges
from ..format.small_state import SmallFile, read_small_file
from ..format.strict import is_file_name


class Extent(NamedTuple):
    """A box of a tensor that a file holds row-major and contiguous, from byte ``offset`` on."""

    file: str
    box: Box
    offset: int


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for what the system does not let this user read."""
    return CheckpointError(
        f"{os.path.abspath(path)} cannot be read by this user: {error.strerror}: '{error.filename}'"
    )


@lru_cache(1 << 14)  # layers are cut in the same way
def _overlap(box: Box, other: Box) -> bool:
    return box.intersect(other) is not None


@dataclass
class Stored:
    """A tensor of a checkpoint. ``chunks`` have checksums; empty if none were written."""

    info: TensorInfo
    extents: list[Extent] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def near(self, box: Box) -> list[tuple[Chunk, Extent]]:
        """The chunks that overlap ``box``, and what holds each of them."""
        return [(c, self._extent_of(c)) for c in self.chunks if _overlap(box, c.box)]

    def extents_near(self, box: Box) -> list[Extent]:
        """What holds ``box``; it may be more."""
        return self.extents

    def _extent_of(self, chunk: Chunk) -> Extent:
        for extent in self.extents:
            if _holds(extent, chunk):
                return extent
        raise AssertionError(f"no file holds '{chunk.tensor.name}'")  # `own` has seen to it


def _holds(extent: Extent, chunk: Chunk) -> bool:
    if extent.file != chunk.file:
        return False
    # Of whole tensors there is one extent, in files of boxes one for each chunk: boxes are
    # compared for those that are neither.
    if extent.box is chunk.box or extent.box.shape == chunk.tensor.shape:
        return True
    return extent.box.intersect(chunk.box) == chunk.box


@dataclass
class Source:
    """An open checkpoint. Use as a context manager: it holds file descriptors.

    Attributes:
        path: its folder.
        given: what was opened: the folder, an index or a file.
        tensors: the model's tensors, by their names in the checkpoint.
        optimizer: ``optim.<state>.<name>`` tensors.
        aliases: other names of tied tensors.
        ranks: those that saved; none if another library wrote it, without checksums.
        speakers: of ranks whose optimizers have the same parameters, the first.
        small_files: what a rank saved in addition to its shards.
        index: what it was opened by, unless by manifests.
        manifests: by rank, if it was opened by them.
        fetch: for data files whose bytes are not in the folder, what brings them: it is given
            memory and the offset in the file, and returns how many bytes it filled in. Called by
            several threads.
        folder: a descriptor of ``path``.
    """

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    optimizer: dict[str, Stored] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ranks: Ranges = field(default_factory=lambda: Ranges(()))
    speakers: tuple[int, ...] = ()
    small_files: Callable[[int], dict[str, SmallFile]] = field(default=lambda rank: {})
    index: Index | None = None
    manifests: dict[int, Manifest] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    given: Path = Path()
    bytes_read: int = 0
    fetch: dict[str, Callable[[memoryview, int], int]] = field(default_factory=dict)
    folder: int = -1
    _fds: dict[str, int] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    @property
    def verifiable(self) -> bool:
        """Whether checksums were written with it."""
        return bool(self.ranks)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each data file."""
        return dict(self._sizes)

    def chunks(self) -> Iterator[tuple[Ranges, Chunk]]:
        """Each box that a rank wrote, as the manifests list it, with the ranks of its set."""
        tables = tables_of(self.manifests.values())
        for manifest in self.manifests.values():
            for files in manifest.sets:
                try:
                    yield from ((files.ranks, chunk) for chunk in files.chunks(tables))
                except CorruptCheckpoint as error:
                    raise CorruptCheckpoint(f"{self.path}: {error}") from error

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (*self._fds.values(), self.folder):
            if fd >= 0:
                os.close(fd)
        if self.index is not None:
            self.index.close()
        self._fds.clear()
        self.folder, self.index = -1, None

    # -- opening ----------------------------------------------------------------------------

    def open_file(self, name: str, expected: FileInfo | None = None) -> int:
        """Open a data file by its name in the checkpoint's folder; remembers it.

        Args:
            expected: what it was when it was written.
        """
        if name in self._fds:
            return self._fds[name]
        if not is_file_name(name):
            raise CorruptCheckpoint(
                f"{self.path}: file name {name[:300]!r} leads out of the checkpoint's folder, or "
                "is none"
            )
        # O_NONBLOCK: opening a pipe of that name must not block before it is refused below.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if self.verifiable:
            flags |= os.O_NOFOLLOW
        try:
            # Before it is opened: to open a device may set it off.
            status = os.stat(name, dir_fd=self.folder, follow_symlinks=not self.verifiable)
            if self.verifiable and stat.S_ISLNK(status.st_mode):
                raise CorruptCheckpoint(
                    f"{self.path}: {name} is a symbolic link, which this checkpoint never had"
                )
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpoint(f"{self.path}: {name} is not a file")
            fd = os.open(name, flags, dir_fd=self.folder)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.path}: file {name} is missing") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                raise CorruptCheckpoint(
                    f"{self.path}: file {name[:300]} cannot be there: {error.strerror}"
                ) from error
            if error.errno == errno.EMFILE:
                raise self._no_more_files() from error
            if isinstance(error, PermissionError):
                raise unreadable(self.path, error) from error
            raise
        self._fds[name] = fd
        try:
            self._check_file(name, os.fstat(fd), expected)
        except BaseException:
            os.close(self._fds.pop(name))
            self._sizes.pop(name, None)
            raise
        return fd

    def _check_file(self, name: str, status: os.stat_result, expected: FileInfo | None) -> None:
        if not stat.S_ISREG(status.st_mode):  # it has just taken the place of the other
            raise CorruptCheckpoint(f"{self.path}: {name} is not a file")
        self._sizes[name] = status.st_size
        if expected is None:
            return
        if status.st_size != expected.size:
            raise CorruptCheckpoint(
                f"{self.path}/{name}: expected {expected.size} bytes, the file has {status.st_size}"
            )
        header = os.pread(self._fds[name], expected.header_bytes, 0)
        if hashlib.sha256(header).hexdigest() != expected.header_sha256:
            self.read_header(name)  # raises what is wrong with a header that cannot be
            raise CorruptCheckpoint(
                f"{self.path}/{name}: the header is not the one that was written"
            )

    def read_header(self, name: str) -> Header:
        fd = self.open_file(name)
        size, shown = self._sizes[name], f"{self.path}/{name}"
        length = header_length(os.pread(fd, 8, 0), size, shown)
        return parse_header(os.pread(fd, length, 8), size, shown)

    def small_file(self, rank: int, name: str) -> bytes:
        """Read what a rank saved in addition to its shards, and compare its checksum."""
        small = self.small_files(rank).get(name)
        if small is None:
            raise CorruptCheckpoint(f"{self.path}: rank {rank} saved no {name}")
        marker = marker_name(rank, len(self.ranks))
        return read_small_file(self.path / FOLDER, marker, name, small)

    # -- reading ----------------------------------------------------------------------------

    def reopen(self, name: str) -> int:
        """Another descriptor of an open data file, for the caller to close."""
        fd = self._fds[name]
        try:
            # The very file that was checked, even if its name now belongs to another.
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise self._no_more_files() from error
            return os.dup(fd)  # no /proc here

    def is_cached(self, file: str, offset: int) -> bool:
        """Whether a byte of a data file is in the page cache; False if the system cannot tell."""
        flag = getattr(os, "RWF_NOWAIT", None)  # of Linux
        if flag is None or file in self.fetch:
            return False
        try:
            return os.preadv(self._fds[file], [bytearray(1)], offset, flag) == 1
        except OSError:  # it is not there, or the file system has no such flag
            return False

    def _no_more_files(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: this process may open no more files: {len(self._fds)} of the "
            "checkpoint are open, and each thread that reads opens one more: raise the limit "
            "(ulimit -n)"
        )

    def read(self, file: str, out: memoryview, offset: int, fd: int | None = None) -> None:
        """Fill ``out`` from byte ``offset`` of ``file``, by another descriptor of it if given."""
        if (fetch := self.fetch.get(file)) is not None:
            num = fetch(out, offset)
        else:
            num = read_exactly(self._fds[file] if fd is None else fd, out, offset)
        self.bytes_read += num
        if num < len(out):
            raise CorruptCheckpoint(
                f"{self.path}/{file}: ended at byte {offset + num}, expected {offset + len(out)}: "
                "it was cut while it was read"
            )
