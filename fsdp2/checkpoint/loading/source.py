"""Opens and checks a checkpoint on disk, and locates its tensors.

Reads what this package wrote (with manifests, so that everything can be verified) and any other
safetensors checkpoint: one file, or several with Hugging Face's index. Opening reads headers and
manifests only, and checks all that can be checked without reading data.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...common.suggestions import did_you_mean
from ...dtensor.boxes import Box, overlapping
from ..errors import CheckpointError, CheckpointNotFound, CorruptCheckpoint, some
from ..format.disk import read_exactly
from ..format.header import (
    PICKLED,
    Header,
    TensorInfo,
    frame,
    header_length,
    parse_header,
    parse_json,
)
from ..format.manifest import (
    BLOCK_BYTES,
    FOLDER,
    INDEX,
    Chunk,
    Manifest,
    index_of,
    load,
    marker_name,
    parse_marker_name,
)
from ..format.strict import (
    MAX_INDEX_BYTES,
    MAX_SMALL_BYTES,
    Check,
    is_file_name,
    read_small,
    small_limit,
)
from ..saving.attempt import check_agreement

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class Extent(NamedTuple):
    """A box of a tensor that a file holds row-major and contiguous, from byte ``offset`` on."""

    file: str
    box: Box
    offset: int


@dataclass
class Stored:
    """A tensor of a checkpoint. ``chunks`` have checksums; empty if none were written."""

    info: TensorInfo
    extents: list[Extent] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


@dataclass
class Source:
    """An open checkpoint. Use as a context manager: it holds file descriptors.

    Attributes:
        path: its folder.
        given: what was opened: the folder, an index or a file.
        tensors: the model's tensors, by their names in the checkpoint.
        optimizer: ``optim.<state>.<name>`` tensors.
        aliases: other names of tied tensors.
        manifests: by rank; empty for checkpoints that this package did not write.
        fetch: for data files whose bytes are not in the folder, what brings them: it is given
            memory and the offset in the file, and returns how many bytes it filled in. Called by
            several threads.
    """

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)
    optimizer: dict[str, Stored] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    given: Path = Path()
    bytes_read: int = 0
    fetch: dict[str, Callable[[memoryview, int], int]] = field(default_factory=dict)
    _folder: int = -1
    _fds: dict[str, int] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)

    @property
    def verifiable(self) -> bool:
        """Whether checksums were written with it."""
        return bool(self.manifests)

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each data file."""
        return dict(self._sizes)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in (*self._fds.values(), self._folder):
            if fd >= 0:
                os.close(fd)
        self._fds.clear()
        self._folder = -1

    # -- opening ----------------------------------------------------------------------------

    def open_file(self, name: str) -> int:
        """Open a data file by its name in the checkpoint's folder; remembers it."""
        if name in self._fds:
            return self._fds[name]
        if not is_file_name(name):
            raise CorruptCheckpoint(
                f"{self.path}: file name {name[:300]!r} leads out of the checkpoint's folder, or "
                "is none"
            )
        # O_NONBLOCK: opening a pipe of that name must not block before it is refused below.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        if self.manifests:
            flags |= os.O_NOFOLLOW
        try:
            # Before it is opened: to open a device may set it off.
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=not self.manifests)
            if self.manifests and stat.S_ISLNK(status.st_mode):
                raise CorruptCheckpoint(
                    f"{self.path}: {name} is a symbolic link, which this checkpoint never had"
                )
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpoint(f"{self.path}: {name} is not a file")
            fd = os.open(name, flags, dir_fd=self._folder)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self.path}: file {name} is missing") from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
                raise CorruptCheckpoint(
                    f"{self.path}: file {name[:300]} cannot be there: {error.strerror}"
                ) from error
            if error.errno == errno.EMFILE:
                raise self._no_more_files() from error
            raise
        self._fds[name] = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # it has just taken the place of the other
            raise CorruptCheckpoint(f"{self.path}: {name} is not a file")
        self._sizes[name] = status.st_size
        return fd

    def read_header(self, name: str) -> Header:
        fd = self.open_file(name)
        size, shown = self._sizes[name], f"{self.path}/{name}"
        length = header_length(os.pread(fd, 8, 0), size, shown)
        return parse_header(os.pread(fd, length, 8), size, shown)

    def small_file(self, name: str) -> bytes:
        """Read a file next to the manifests, and compare it with its checksum in them."""
        import hashlib

        path = self.path / FOLDER / name
        try:
            data = read_small(path, small_limit(name))
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{path} is missing") from None
        expected = {n: d for m in self.manifests.values() for n, d in m.small_files.items()}
        if expected.get(name) != hashlib.sha256(data).hexdigest():
            raise CorruptCheckpoint(f"{path}: the checksum is wrong")
        return data

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


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a checkpoint: a folder, an index file, or one safetensors file.

    Raises:
        CheckpointNotFound: if there is none.
        CorruptCheckpoint: if what is there is damaged or incomplete.
        CheckpointError: if it is a pickled file, or cannot be read by this user.
    """
    given = Path(path)
    with _readable(given):
        if not given.exists():
            raise CheckpointNotFound(_not_there(given))
        folder = given if given.is_dir() else given.parent
        source = Source(given, given=given)
        source._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        _open(source, given, folder)
    return source


def _open(source: Source, given: Path, folder: Path) -> None:
    try:
        if given.is_dir() and (given / FOLDER).is_dir():
            _open_own(source)
        elif given.is_dir():
            _open_hub(source, given)
        elif given.name.endswith(".index.json"):
            source.path = folder
            if (folder / FOLDER).is_dir():
                _open_own(source)
            else:
                _open_index(source, given)
        else:
            source.path = folder
            if given.suffix in PICKLE_SUFFIXES:
                raise CheckpointError(f"{given} is {PICKLED}")
            _open_single(source, given.name)
    except BaseException:
        source.__exit__()
        raise


@contextmanager
def _readable(given: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(
            f"{os.path.abspath(given)} cannot be read by this user: {error.strerror}: "
            f"'{error.filename}'"
        ) from error


def _not_there(given: Path) -> str:
    """What to say of a path at which nothing is, with a guess at what was meant."""
    path = Path(os.path.abspath(given))
    around = sorted(os.listdir(path.parent)) if path.parent.is_dir() else []
    meant = did_you_mean(path.name, around)
    # As on the Hub: owner/name. (A folder of that name would make it a path.)
    if not meant and HUB_ID.fullmatch(str(given)) and not path.parent.exists():
        meant = (
            f". If it is a model of the Hugging Face Hub, download it first: hf download {given} "
            "--local-dir FOLDER, and load the folder"
        )
    return f"{path} does not exist{meant}"


# -- checkpoints of this package ----------------------------------------------------------------


def _open_own(source: Source) -> None:
    folder = source.path / FOLDER
    if folder.is_symlink():
        raise CorruptCheckpoint(f"{folder} is a symbolic link, which this checkpoint never had")
    markers = {rank: num for name in os.listdir(folder) if (rank_num := parse_marker_name(name))
               for rank, num in [rank_num]}  # fmt: skip
    if not markers:
        raise CorruptCheckpoint(f"{folder} has no manifest")
    num_ranks = max(markers.values())
    for rank in sorted(markers):
        name = marker_name(rank, num_ranks)
        try:
            data = read_small(folder / name, MAX_SMALL_BYTES)
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{folder}: manifests of different saves are mixed") from None
        manifest = source.manifests[rank] = load(data, f"{folder}/{name}")
        if manifest.rank != rank or rank not in manifest.ranks or len(manifest.ranks) != num_ranks:
            raise CorruptCheckpoint(
                f"{folder}/{name}: not a manifest: of rank {manifest.rank} of "
                f"{len(manifest.ranks)} ranks"
            )
    manifests = list(source.manifests.values())
    missing = sorted(set(manifests[0].ranks) - source.manifests.keys())
    for manifest in manifests[1:]:
        # Nonces count the attempts of one name.
        if (manifest.nonce, manifest.name) != (manifests[0].nonce, manifests[0].name):
            raise CorruptCheckpoint(
                f"{source.path}: the manifests of ranks {manifests[0].rank} and {manifest.rank} "
                "are of different saves"
            )
    _collect(source, missing)
    if missing:
        raise _incomplete(source, missing)
    try:
        check_agreement(manifests)
    except CheckpointError as error:
        raise CorruptCheckpoint(f"{source.path}: {error}") from error
    _check_index(source)


def _check_index(source: Source) -> None:
    """Compare Hugging Face's index with the manifests, though only other libraries read it."""
    expected = index_of(source.manifests.values())
    if expected is None:
        return
    path = source.path / INDEX
    try:
        found = parse_json(read_small(path, MAX_SMALL_BYTES), str(path))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None
    if found != expected:
        raise CorruptCheckpoint(f"{path}: the index is not the one that was written")


def _collect(source: Source, missing: list[int]) -> None:
    """Fill in tensors from the headers of the files and the chunks of the manifests."""
    headers: dict[str, Header] = {}
    owner: dict[str, tuple[int, ...]] = {}
    wholes: dict[tuple[int, ...], Box] = {}
    for manifest in source.manifests.values():
        source.aliases.update(manifest.aliases)
        for files in manifest.sets:
            for file, size in files.sizes.items():
                source.open_file(file)
                actual = source.files[file]
                if actual != size:
                    raise CorruptCheckpoint(
                        f"{source.path}/{file}: expected {size} bytes, the file has {actual}"
                    )
                if file not in headers:
                    headers[file] = source.read_header(file)
                if not missing and file in files.headers:
                    _check_header(source, file, headers[file], files.headers[file])
    for manifest in source.manifests.values():
        # The first set that has a file, as the files of several sets have other names.
        set_of = {file: s.ranks for s in reversed(manifest.sets) for file in s.sizes}
        for chunk in manifest.chunks:
            tensor, file, box, in_own_file, _ = chunk
            name = tensor.name
            table = _table_of(source, file, name)
            stored = table.get(name)
            if stored is None:
                stored = table[name] = Stored(tensor)
            ranks = set_of.get(file)
            if ranks is None:
                raise CorruptCheckpoint(
                    f"{source.path}: '{name}' lies in {file}, which the manifest does not list"
                )
            if owner.setdefault(name, ranks) != ranks:
                continue  # the same tensor again, written by ranks that share no files with these
            _check_chunk(source, chunk, headers[file], stored.info)
            if in_own_file is not None or not stored.extents:
                holds = box
                if in_own_file is None:
                    holds = wholes.get(tensor.shape) or Box.whole(tensor.shape)
                    wholes[tensor.shape] = holds
                stored.extents.append(Extent(file, holds, headers[file].offsets[name]))
            stored.chunks.append(chunk)
    apart: set[tuple[Box, ...]] = set()  # equal layers are cut in the same way
    for stored in (*source.tensors.values(), *source.optimizer.values()):
        boxes = tuple([chunk.box for chunk in stored.chunks])
        if boxes not in apart:
            _check_apart(source, stored.info.name, boxes)
            apart.add(boxes)
    for file, header in headers.items():
        for name, info in header.tensors.items():
            table = _table_of(source, file, name)
            if info.nbytes == 0:  # no rank writes a chunk of zero bytes
                extent = Extent(file, Box.whole(info.shape), header.offsets[name])
                table.setdefault(name, Stored(info, [extent]))
            elif missing:  # the missing rank may have written all of it
                table.setdefault(name, Stored(info))


def _table_of(source: Source, file: str, name: str) -> dict[str, Stored]:
    if not file.startswith("optim"):
        return source.tensors
    if not name.startswith("optim.") or name.count(".") < 2:
        raise CorruptCheckpoint(f"{source.path}/{file}: {name[:300]!r} is no optimizer's state")
    return source.optimizer


def _check_apart(source: Source, name: str, boxes: tuple[Box, ...]) -> None:
    """Check that no element is in two chunks: their sizes add up to the tensor's, so that another
    element would be in none, and keep the value that it has in memory."""
    both = overlapping(boxes)
    if both is not None:
        raise CorruptCheckpoint(
            f"{source.path}: of '{name}' two ranks wrote the same part: "
            f"{both[0].shape} at {both[0].start} and {both[1].shape} at {both[1].start}"
        )


def _check_header(source: Source, file: str, header: Header, expected: str) -> None:
    # The bytes, with metadata and padding. Only where they differ it is looked up how.
    if os.pread(source.open_file(file), header.data_start, 0) == frame(expected):
        return
    what = f"{source.path}/{file}: the header in the manifest"
    table = Check(what).table(parse_json(expected.encode(), what), "it")
    table.pop("__metadata__", None)
    found = {
        name: {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [
                header.offsets[name] - header.data_start,
                header.offsets[name] - header.data_start + info.nbytes,
            ],
        }
        for name, info in header.tensors.items()
    }
    if found != table:
        names = [n for n in table.keys() | found.keys() if table.get(n) != found.get(n)]
        raise CorruptCheckpoint(
            f"{source.path}/{file}: the header is not the one that was written: {some(names)}"
        )
    raise CorruptCheckpoint(f"{source.path}/{file}: the header is not the one that was written")


def _check_chunk(source: Source, chunk: Chunk, header: Header, as_of_others: TensorInfo) -> None:
    tensor = chunk.tensor
    in_file = tensor if chunk.offset is None else tensor._replace(shape=chunk.box.shape)
    blocks = -(-chunk.nbytes // BLOCK_BYTES)
    if (
        header.tensors.get(tensor.name) != in_file
        or tensor != as_of_others
        or len(chunk.checksums) != blocks
    ):
        raise CorruptCheckpoint(
            f"{source.path}/{chunk.file}: tensor '{chunk.tensor.name}' is not what the manifest "
            "says"
        )


def _incomplete(source: Source, missing: list[int]) -> CorruptCheckpoint:
    have = total = 0
    for stored in (*source.tensors.values(), *source.optimizer.values()):
        have += sum(chunk.nbytes for chunk in stored.chunks)
        total += stored.info.nbytes
    ranks = ", ".join(map(str, missing))
    return CorruptCheckpoint(
        f"{source.path}: the manifest of rank {ranks} is missing: the shards that are there cover "
        f"{have} of {total} bytes"
    )


# -- checkpoints of others ----------------------------------------------------------------------


def _open_hub(source: Source, folder: Path) -> None:
    if (folder / INDEX).is_file():
        _open_index(source, folder / INDEX)
        return
    single = sorted(p.name for p in folder.glob("*.safetensors"))
    if "model.safetensors" in single:
        single = ["model.safetensors"]
    if len(single) > 1:
        raise CheckpointNotFound(
            f"{folder} is not a checkpoint: it has several files without {INDEX}: {some(single)}"
        )
    if not single:
        raise CheckpointNotFound(
            f"{folder} is not a checkpoint: it has no safetensors file{_what_it_is(folder)}"
        )
    _open_single(source, single[0])


def _what_it_is(folder: Path) -> str:
    """A guess at what a folder that is not a checkpoint may be; the end of a message."""
    names = sorted(path.name for path in folder.iterdir())
    steps = [n for n in names if n.startswith("step-") and (folder / n / FOLDER).is_dir()]
    if steps:
        return (
            f". It is the folder of a Checkpointer: give one of its steps ({folder / steps[-1]}), "
            "or load it with Checkpointer(...).load"
        )
    if ".metadata" in names:
        return (
            ". It is one of torch.distributed.checkpoint: load it with that, or convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save"
        )
    pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    return f", but {some(pickled)}, which is {PICKLED}" if pickled else ""


def _open_single(source: Source, name: str) -> None:
    header = source.read_header(name)
    source.metadata = header.metadata
    for tensor, info in header.tensors.items():
        extent = Extent(name, Box.whole(info.shape), header.offsets[tensor])
        source.tensors[tensor] = Stored(info, [extent])


def _open_index(source: Source, index: Path) -> None:
    try:
        text = read_small(index, MAX_INDEX_BYTES, links=True)
        items = list(parse_json(text, str(index))["weight_map"].items())
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{index}: not an index of safetensors files: {error!r}") from error
    headers: dict[str, Header] = {}
    for tensor, file in items:
        if not isinstance(file, str):
            raise CorruptCheckpoint(f"{index}: the file of {tensor[:300]!r} is {file!r:.99}")
        if file not in headers:
            headers[file] = source.read_header(file)
        info = headers[file].tensors.get(tensor)
        if info is None:
            raise CorruptCheckpoint(f"{index}: tensor {tensor[:300]!r} is not in {file}")
        extent = Extent(file, Box.whole(info.shape), headers[file].offsets[tensor])
        source.tensors[tensor] = Stored(info, [extent])
