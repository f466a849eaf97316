"""One attempt to save a checkpoint: staged, marked by every rank, committed by one rename.

::

    begin()    makes .<name>.<nonce>.tmp/             nothing is visible under <name>
      ... every rank writes and fsyncs its ranges; the first bytes of each file stay zero ...
    mark()     makes this rank's manifest durable     the data it lists was durable before
    commit()   once all manifests exist: headers, index, rename to <name>
    give_up()  this attempt will never be committed

No rank waits for another. Any rank that finds all manifests may commit: the one that marks last
and the first one do, and if they die, the others take turns. Several may commit at the same time:
they write the same bytes, and only one rename succeeds. Readers see nothing before the rename and
everything after it.

Headers of files that several ranks write are written at commit, not before. A file of its final
size whose ranges were never written reads as valid zeros; with zeros in place of the header, no
safetensors reader accepts it.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from ...common.threads import submit
from ..errors import CheckpointError, CheckpointExists
from ..format.disk import Disk, temporary_name
from ..format.header import FileInfo, frame
from ..format.index import NAME
from ..format.manifest import (
    ANY_FAILED,
    FAILED,
    FOLDER,
    INDEX,
    Manifest,
    SetOfFiles,
    Table,
    failed_name,
    hf_index_bytes,
    kind_of,
    marker_name,
)
from ..format.marker import dump, load, manifest_in, read_marker
from ..format.ranges import Ranges
from .indexing import TooLarge, index_parts

STAGING = re.compile(r"\.(?P<name>.+)\.(?P<nonce>[0-9a-f]{16,}-\d+)\.tmp")
CLOCK = ".fsdp2-clock"
NUM_PROBES = 4  # markers looked for before all names are listed
NUM_READERS = 16  # of manifests: on a file system of a network, each takes a while
NUM_READ = 4  # by each of them at a time
TURN_S = 0.005  # times the number of ranks: longer than a commit takes
GIVEN_UP_S = 60.0  # without a write, after which an attempt that was given up is removed
# Errors of a rename whose source is gone or whose target is taken: another rank was faster.
_TAKEN = (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Attempt:
    """This rank's view of one attempt.

    Args:
        root: the folder that holds the checkpoints.
        name: of the checkpoint in it.
        nonce: the same on all ranks, and used for no other attempt.
        rank, ranks: this rank and all that take part.
    """

    def __init__(
        self, disk: Disk, root: Path, name: str, nonce: str, rank: int, ranks: tuple[int, ...]
    ) -> None:
        self.disk = disk
        self.root = root
        self.name = name
        self.nonce = nonce
        self.rank = rank
        self.ranks = ranks
        self.staging = f".{name}.{nonce}.tmp"
        self.committed = False
        self._reason: str | None = None  # why this rank gave up
        self._awaited: int | None = None  # a rank that had not marked
        self._complete_s: float | None = None  # when all had, if this rank has waited for one
        self._random = random.Random(f"{nonce} {rank}")

    def begin(self) -> None:
        """Make the staging folder.

        Raises:
            CheckpointExists: if the final name is taken.
            CheckpointError: if the root is missing or cannot be written to.
        """
        with _explained(self.root), self.disk.directory(self.root) as root:
            if self.disk.exists(self.name, root):
                raise CheckpointExists(
                    f"{self.root / self.name} exists already: choose another step or name, or "
                    "remove it first"
                )
            self.disk.make_directory(self.staging, root)
            with self.disk.directory(self.staging, root) as staging:
                self.disk.make_directory(FOLDER, staging)

    @contextmanager
    def folder(self):
        """A descriptor of the staging folder."""
        with self.disk.directory(self.root / self.staging) as fd:
            yield fd

    def mark(self, manifest: Manifest, values: bytes) -> None:
        """Write this rank's manifest; everything that it lists must be durable by now.

        Args:
            values: the rank's values that are not tensors; they stand at the manifest's end.
        """
        name, data = marker_name(self.rank, len(self.ranks)), dump(manifest, values)
        with self.folder() as staging, self.disk.directory(FOLDER, staging) as folder:
            self.disk.write_file(name, data, folder, unique="marker")
            self.disk.sync(folder, FOLDER)

    def give_up(self, reason: str, rank: int | None = None) -> None:
        """Note that a rank failed, and why; remove the attempt if all ranks are done with it.

        Args:
            rank: the one that failed, and has not marked; None: this one.
        """
        if rank is None:
            rank, self._reason = self.rank, reason
        # The disk may be broken or full: what fails here is tried again by the next save.
        notes = self.root / self.staging / FOLDER
        with suppress(OSError), self.disk.directory(notes) as folder:
            self._note_failure(rank, reason, folder)
        self._remove_if_settled()

    def _note_failure(self, rank: int, reason: str, folder: int) -> None:
        try:
            self.disk.note(ANY_FAILED, "", folder)
        finally:
            self.disk.note(failed_name(rank), reason, folder)

    # -- committing -------------------------------------------------------------------------

    def commit(self) -> bool:
        """Commit if every rank has marked; returns whether the checkpoint is committed now.

        Raises:
            CheckpointExists: if another checkpoint took the name meanwhile.
            CheckpointError: if this attempt can never be committed: a rank gave up, or ranks
                disagree on what they saved.
            OSError: if the disk is full or broken; this attempt is given up then.
        """
        if self.committed or self._find_committed():
            return True
        try:
            with self.folder() as staging, self.disk.directory(FOLDER, staging) as folder:
                if self._must_wait(folder):
                    return False
                names = set(self.disk.names(folder))
                failed = [r for r in self.ranks if failed_name(r) in names]
                reason = self.disk.read_note(failed_name(failed[0]), folder) if failed else ""
                missing = [r for r in self.ranks if marker_name(r, len(self.ranks)) not in names]
                if missing:
                    self._awaited = self._random.choice(missing)
                elif not failed and self._is_turn():
                    self._commit_or_give_up(staging, folder)
        except FileNotFoundError:
            # Another rank renamed the folder meanwhile, or the folder was removed.
            if self._find_committed():
                return True
            raise self.abandoned() from None
        if failed:
            self._remove_if_settled()
            raise CheckpointError(
                f"{self.root / self.name} will not be committed: rank {failed[0]} gave up: "
                f"{reason or 'its error is raised there'}"
            )
        return self.committed

    def _must_wait(self, folder: int) -> bool:
        """Whether there is nothing to commit yet, or another rank commits, and none has given up.

        Every rank looks, again and again, at a folder with more than one name for each rank. So it
        looks first for a marker that was missing, or for a few at random.
        """
        if self.disk.exists(ANY_FAILED, folder):
            return False
        if self._complete_s is not None:
            return not self._is_turn()
        probed = self._random.sample(self.ranks, min(NUM_PROBES, len(self.ranks)))
        for rank in probed if self._awaited is None else (self._awaited, *probed):
            if not self.disk.exists(marker_name(rank, len(self.ranks)), folder):
                self._awaited = rank
                return True
        return False

    def _is_turn(self) -> bool:
        """Whether this rank may commit, now that all have marked.

        The rank that marks last does: it finds all markers at its first look. (Where the file
        system shows names late, no rank may: so the first rank does, too.) The others would follow
        a moment later, and read each manifest once for every rank: they take turns, in each of them
        twice as many as in the one before.
        """
        if self._awaited is None:
            return True
        now = time.monotonic()
        self._complete_s = now if self._complete_s is None else self._complete_s
        turn_s = TURN_S * len(self.ranks) * self.ranks.index(self.rank).bit_length()
        return now >= self._complete_s + turn_s

    def is_gone(self) -> bool:
        """Whether the staging folder was removed, or renamed."""
        return self.root.is_dir() and not os.path.lexists(self.root / self.staging)

    def abandoned(self) -> CheckpointError:
        """The error of a rank that finds it gone."""
        return CheckpointError(
            f"{self.root / self.name}: this attempt to save was abandoned and removed"
        )

    def unfinished(self) -> list[int]:
        """Ranks whose parts are not durable yet; [] if the staging folder is gone."""
        try:
            with self.folder() as staging, self.disk.directory(FOLDER, staging) as folder:
                names = set(self.disk.names(folder))
        except FileNotFoundError:
            return []
        return [r for r in self.ranks if marker_name(r, len(self.ranks)) not in names]

    def _find_committed(self) -> bool:
        """Whether the final name exists and belongs to this attempt.

        Raises:
            CheckpointExists: if it belongs to another attempt.
        """
        if not self._has_name():
            if not os.path.lexists(self.root / self.name):
                return False
            # Another rank may have committed between the two checks, so check again.
            if not self._has_name():
                raise CheckpointExists(
                    f"{self.root / self.name} was created by another job in the meantime; this "
                    "attempt is not merged into it"
                )
        with self.disk.directory(self.root) as root:
            # The rank that renamed it may have died before it made the rename durable.
            self.disk.sync(root, str(self.root))
        self.committed = True
        return True

    def _has_name(self) -> bool:
        """Whether what is under the final name is this attempt."""
        path = self.root / self.name / FOLDER / marker_name(self.rank, len(self.ranks))
        try:
            return load(read_marker(path), str(path)).nonce == self.nonce
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _commit_or_give_up(self, staging: int, folder: int) -> None:
        try:
            self._commit(staging, folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            # Ranks that wait must learn of a full disk. But another rank may have committed all
            # the same, and an error must mean that nothing was committed.
            self.give_up(f"{type(error).__name__}: {error}")
            if not self._find_committed():
                raise

    def _commit(self, staging: int, folder: int) -> None:
        # With a shared temporary name, one rank would rename the file that another is writing.
        unique = str(self.rank)
        shared: list[SetOfFiles] = []
        hf_index: list[bytes | None] = []

        def last() -> bytes | None:
            hf_index.append(hf_index_bytes(shared))
            return hf_index[0]

        parts = index_parts(agreeing(self._manifests(folder, shared)), last)
        try:
            self.disk.write_file(NAME, parts, folder, unique=unique)
        except TooLarge:
            self.disk.unlink(temporary_name(NAME, unique), folder)  # loads read the manifests
        except CheckpointError as error:
            self._note_failure(self.rank, str(error), folder)
            # A rank that finds another rank's note cleans up. If all ranks found the disagreement
            # at the same time, each left a note before it could read one: the last cleans up.
            names = self.disk.names(folder)
            if all(failed_name(rank) in names for rank in self.ranks):
                self._remove_if_settled()
            raise
        # Another rank may rename the folder while this one writes. All paths are relative to
        # descriptors, so the writes still arrive, and put the same bytes there once more.
        for files in shared:
            self._write_headers(staging, files)
        if hf_index[0] is not None:
            self.disk.write_file(INDEX, hf_index[0], staging, unique=unique)
        # The folders before the rename: after a power failure, the final name must not stand for a
        # folder whose entries never reached the disk.
        self.disk.sync(folder, FOLDER)
        self.disk.sync(staging, self.staging)
        self._publish()

    def _manifests(self, folder: int, shared: list[SetOfFiles]) -> Iterator[Manifest]:
        """All manifests, one by one.

        Args:
            shared: where the sets of files go whose headers are to be written at the end.
        """
        names = [marker_name(rank, len(self.ranks)) for rank in self.ranks]
        for name, data in _contents(folder, names):
            manifest = load(data, name)
            if manifest.nonce != self.nonce:
                raise CheckpointError(f"{name} in {self.staging} is of another attempt")
            shared += [files for files in manifest.sets if files.headers]
            yield manifest

    def _write_headers(self, staging: int, files: SetOfFiles) -> None:
        for file, header in files.headers.items():
            fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC, dir_fd=staging)
            try:
                self.disk.write_at(fd, frame(header), 0, f"header of {file}")
                self.disk.sync(fd, file)
            finally:
                self.disk.close(fd)

    def _publish(self) -> None:
        with self.disk.directory(self.root) as root:
            # Check first: renaming onto an empty folder would succeed silently.
            if self.disk.exists(self.name, root):
                self._find_committed()
                return
            try:
                self.disk.rename(self.staging, self.name, root)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                self._find_committed()
                return
            self.disk.sync(root, str(self.root))
        self.committed = True

    # -- leftovers --------------------------------------------------------------------------

    def _remove_if_settled(self) -> None:
        """Remove the staging folder once every rank has marked or given up.

        What is not settled yet, or cannot be removed now, is looked at again by the next save.
        """
        left = _left.setdefault(self.root, {})
        left[self.staging] = self
        with suppress(OSError):
            if self._is_removed():
                left.pop(self.staging, None)

    def _is_removed(self) -> bool:
        with self.disk.directory(self.root) as root:
            try:
                with self.disk.directory(f"{self.staging}/{FOLDER}", root) as folder:
                    names = set(self.disk.names(folder))
            except FileNotFoundError:
                return True
            failed = {r for r in self.ranks if failed_name(r) in names}
            if self._reason is not None:  # there may have been no room for its note
                failed.add(self.rank)
            others = [r for r in self.ranks if r not in failed]
            if not failed or any(marker_name(r, len(self.ranks)) not in names for r in others):
                return False
            _remove(self.disk, self.staging, root)
            return True


def _contents(folder: int, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Names and contents of files: a few are read at a time, by several threads."""

    def read(names: Sequence[str]) -> list[tuple[str, bytes]]:
        return [(name, _content(folder, name)) for name in names]

    with ThreadPoolExecutor(NUM_READERS) as pool:
        for first in range(0, len(names), NUM_READERS * NUM_READ):
            at_once = names[first : first + NUM_READERS * NUM_READ]
            shares = [at_once[at : at + NUM_READ] for at in range(0, len(at_once), NUM_READ)]
            for found in [submit(pool, read, share) for share in shares]:
                yield from found.result()


def _content(folder: int, name: str) -> bytes:
    with open(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
        return manifest_in(file)


def remove_left(disk: Disk, root: Path) -> None:
    """Remove attempts that this process gave up, or saw given up, and that are still there."""
    for attempt in list(_left.get(root, {}).values()):
        attempt.disk = disk
        if attempt._reason is not None:
            attempt.give_up(attempt._reason)
        else:
            attempt._remove_if_settled()


# By root and name of the staging folder.
_left: dict[Path, dict[str, Attempt]] = {}


_EQUAL_SETTINGS = ". layout=, files_per_host= and LOCAL_WORLD_SIZE have to be equal on all ranks"


def check_agreement(manifests: Iterable[Manifest]) -> None:
    """Check that the parts fit together.

    Raises:
        CheckpointError: if ranks that share files laid them out differently, or the chunks are
            not exactly the tensors.
    """
    for _ in agreeing(manifests):
        pass


def agreeing(manifests: Iterable[Manifest]) -> Iterator[Manifest]:
    """The same manifests, one by one. Raises as `check_agreement`, at the end at the latest."""
    digests: dict[Ranges, tuple[int, str]] = {}
    tables: dict[tuple[Ranges, int], Table] = {}  # by the set, and the rank that describes it
    written: Counter[tuple[Ranges, int, Ranges]] = Counter()  # bytes of each of these tensors
    boxes: dict[str, tuple[int, FileInfo]] = {}  # files that several ranks may write, and the first
    for manifest in manifests:
        for files in manifest.sets:
            first, digest = digests.setdefault(files.ranks, (manifest.rank, files.digest))
            if digest != files.digest:
                raise CheckpointError(
                    f"Ranks {first} and {manifest.rank} disagree on the names, shapes or dtypes of "
                    f"what ranks {list(files.ranks)} save together. If parts of the model exist "
                    "on some ranks only, name them with rank_local="
                    + ("" if files.whole else _EQUAL_SETTINGS)
                )
            for file, info in () if files.whole else files.files.items():
                first, as_of_first = boxes.setdefault(file, (manifest.rank, info))
                if info != as_of_first:
                    raise CheckpointError(
                        f"Ranks {first} and {manifest.rank} disagree on the sizes of what each "
                        f"rank writes into {file}: are their meshes the same?"
                    )
            describes = manifest.rank if files.tensors else files.ranks[0]
            if files.tensors:
                tables[files.ranks, describes] = files.tensors
            for group in files.groups:
                written[files.ranks, describes, group.tensors] += group.box_bytes
        yield manifest
    _check_all_written(tables, written)


def _check_all_written(
    tables: dict[tuple[Ranges, int], Table], written: dict[tuple[Ranges, int, Ranges], int]
) -> None:
    """Compare with the sizes of tensors. (Each set of ranks writes all of its tensors: separate
    sets may hold the same tensor, in different files.)"""
    left = {
        (ranks, kind_of(where), info.name): info.nbytes
        for (ranks, _), table in tables.items()
        for where, info in table
    }
    whole = dict(left)
    for (ranks, describes, positions), nbytes in written.items():
        table = tables.get((ranks, describes), ())
        for position in positions:
            if position >= len(table):
                raise CheckpointError(
                    f"The manifest of rank {describes} does not describe what ranks {list(ranks)} "
                    "save together"
                )
            where, info = table[position]
            left[ranks, kind_of(where), info.name] -= nbytes
    for key, nbytes in left.items():
        if nbytes:
            total = whole[key]
            raise CheckpointError(f"'{key[2]}': the ranks wrote {total - nbytes} of {total} bytes")


def sweep(disk: Disk, root: Path, *, grace_s: float, nonce: str = "") -> list[str]:
    """Remove staging folders in which nothing was written for ``grace_s`` seconds.

    Folders of attempts that were given up, which nobody can commit, go sooner. Those left by an
    earlier start of this run go at once, as torchrun ends all ranks before it starts them again.
    Others go after `GIVEN_UP_S`: their ranks may still be writing, and must get the reason as their
    error.

    Ages are measured against a file that was just touched in the same folder: the clocks of other
    nodes and of the file system may differ from this node's.

    Args:
        nonce: of the attempt that begins.
    """
    removed = []
    with disk.directory(root) as folder:
        leftovers = [
            name
            for name in disk.names(folder)
            if STAGING.fullmatch(name) and disk.is_directory(name, folder)
        ]
        if not leftovers:
            return []
        now = disk.touch(CLOCK, folder)
        disk.unlink(CLOCK, folder)
        for name in leftovers:
            limit_s = grace_s
            if any((root / name / FOLDER).glob(FAILED)):
                limit_s = -inf if _is_of_earlier_start(name, nonce) else min(grace_s, GIVEN_UP_S)
            if now - _newest(root / name) > limit_s:
                _remove(disk, name, folder)
                removed.append(name)
    return removed


def _is_of_earlier_start(name: str, nonce: str) -> bool:
    """Whether a staging folder is of the same run as ``nonce``, before torchrun restarted it."""
    found = STAGING.fullmatch(name)
    assert found is not None
    run, start = slice(0, 16), slice(16, 20)  # as `next_nonce` makes them
    its = found["nonce"]
    return its[run] == nonce[run] and its[start] < nonce[start]


def _remove(disk: Disk, staging: str, root: int) -> None:
    """Remove a staging folder. A rank may be about to commit it, so it is renamed first.

    Either this rename succeeds or that rank's does; a folder with its final name is never touched.
    """
    removed = f".removed{staging}"
    disk.remove_tree(removed, root)  # left by an earlier removal that was interrupted
    with suppress(FileNotFoundError):
        disk.rename(staging, removed, root)
        disk.remove_tree(removed, root)


def _newest(path: Path) -> float:
    """The latest change of a folder or anything in it; infinity if it disappears meanwhile."""
    try:
        return max(p.lstat().st_mtime for p in (path, *path.rglob("*")))
    except FileNotFoundError:
        return float("inf")


@contextmanager
def _explained(root: Path):
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{root} is no folder any more") from error
    except PermissionError as error:
        raise CheckpointError(f"{root} cannot be written to: {error.strerror}") from error
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise CheckpointError(f"{root} is on a read-only file system") from error
