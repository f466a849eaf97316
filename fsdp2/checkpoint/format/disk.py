"""The operating system's calls that a checkpoint is made of, in one place.

Everything that changes a disk goes through a `Disk`, so that tests can record the order of calls,
stop before the n-th, or make one fail. Paths are relative to directory descriptors: a directory
may be renamed (committed) by another rank while this one still works in it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError

WRITE_BYTES = 4 << 20


def make_folder(path: Path) -> None:
    """Make a folder and its parents, unless it exists: all ranks of a save call this.

    Raises:
        CheckpointError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if path.is_file():
            raise CheckpointError(f"{path} is a file, not a folder") from error
        raise CheckpointError(f"{path} cannot be made: {error.strerror}") from error


def temporary_name(name: str, unique: str) -> str:
    """Under which `Disk.write_file` writes."""
    return f".{name}.{unique}.tmp"


class Disk:
    """Thin wrappers; each method is one system call unless noted.

    Args:
        before: called before each call that changes something, with its name and its operands.
    """

    def __init__(self, before: Callable[[str, str], None] | None = None) -> None:
        self._before = before

    def _note(self, call: str, operand: object) -> None:
        if self._before is not None:
            self._before(call, str(operand))

    # -- directories ------------------------------------------------------------------------

    @contextmanager
    def directory(self, path: str | os.PathLike[str], within: int | None = None) -> Iterator[int]:
        """A descriptor of a directory; closed on exit."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=within)
        try:
            yield fd
        finally:
            os.close(fd)

    def make_directory(self, name: str, within: int) -> None:
        """Make a directory unless it exists: all ranks of a save call this."""
        self._note("mkdir", name)
        try:
            os.mkdir(name, dir_fd=within)
        except FileExistsError:
            if not self.is_directory(name, within):
                raise

    def is_directory(self, name: str, within: int) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def exists(self, name: str, within: int) -> bool:
        try:
            os.stat(name, dir_fd=within, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def names(self, directory: int) -> list[str]:
        return sorted(os.listdir(directory))

    def rename(self, old: str, new: str, within: int) -> None:
        self._note("rename", f"{old} -> {new}")
        os.rename(old, new, src_dir_fd=within, dst_dir_fd=within)

    def remove_tree(self, name: str, within: int) -> None:
        """Remove a directory and its contents (several calls).

        Other processes may remove the same files, which is no error. If they add files meanwhile,
        the directory stays.
        """
        self._note("remove", name)
        try:
            with self.directory(name, within) as fd:
                for child in os.listdir(fd):
                    if self.is_directory(child, fd):
                        self.remove_tree(child, fd)
                    else:
                        self.unlink(child, fd)
            os.rmdir(name, dir_fd=within)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def unlink(self, name: str, within: int) -> None:
        self._note("unlink", name)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=within)

    # -- files ------------------------------------------------------------------------------

    def create(self, name: str, size: int, within: int) -> int:
        """Open for writing and set the final size; other ranks may do the same at the same time.

        Never truncates what other ranks have written, and never reserves blocks: some file systems
        emulate ``posix_fallocate`` by writing, which would race with other ranks.
        """
        self._note("open", name)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=within)
        try:
            self._note("ftruncate", name)
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write_at(
        self, fd: int, data: memoryview | bytes | bytearray, offset: int, name: str
    ) -> None:
        """Write all of ``data``, in as many calls as it takes."""
        view = memoryview(data).cast("B")
        while view:
            self._note("pwrite", name)
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int, name: str) -> None:
        self._note("fsync", name)
        os.fsync(fd)

    def start_sync(self, fd: int, name: str) -> None:
        """Start writing to disk early, from another thread; only `sync` counts as durable."""
        self._note("fdatasync", name)
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write_file(
        self, name: str, data: bytes | Iterable[bytes], within: int, *, unique: str
    ) -> None:
        """Write a file atomically: readers see all of it or none (several calls).

        Args:
            data: its bytes, or pieces of them.
            unique: distinguishes the temporary name from any other rank's.
        """
        temporary = temporary_name(name, unique)
        fd = self.create(temporary, 0, within)
        try:
            at, pending = 0, bytearray()
            for part in [data] if isinstance(data, bytes) else data:
                pending += part
                if len(pending) >= WRITE_BYTES:
                    self.write_at(fd, pending, at, name)
                    at, pending = at + len(pending), bytearray()
            self.write_at(fd, pending, at, name)
            # Before the rename: after a power failure the name could stand for an empty file.
            self.sync(fd, name)
        finally:
            self.close(fd)
        self.rename(temporary, name, within)

    def note(self, name: str, text: str, within: int) -> None:
        """Leave a short message for other ranks. On a full disk the file exists but is empty."""
        self._note("note", name)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=within)
        with suppress(OSError):
            os.pwrite(fd, text.encode(), 0)
        os.close(fd)

    def read_note(self, name: str, within: int) -> str:
        """What `note` wrote."""
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=within)
        try:
            return os.read(fd, 4096).decode(errors="replace")
        finally:
            os.close(fd)

    def touch(self, name: str, within: int) -> float:
        """Create or update an empty file; returns its time by the file system's own clock."""
        self._note("touch", name)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=within)
        try:
            os.utime(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)


def read_exactly(fd: int, out: memoryview, offset: int) -> int:
    """Fill ``out`` from ``offset`` on; returns the number of bytes read, fewer at end of file."""
    done = os.preadv(fd, [out], offset)  # almost always all of it
    while 0 < done < len(out):
        num = os.preadv(fd, [out[done:]], offset + done)
        if num == 0:
            break
        done += num
    return done
