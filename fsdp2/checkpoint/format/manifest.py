"""What each rank records about its part of a checkpoint.

A manifest is also the rank's marker: once it exists under its name, everything it lists is durable.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...dtensor.boxes import Box
from ..errors import CorruptCheckpoint
from .header import FileInfo, Header, TensorInfo, bytes_of
from .ranges import Ranges
from .small_state import SmallFile

FOLDER = ".fsdp2"
FAILED = "failed-*"  # every `failed_name`
ANY_FAILED = "failed"  # is there if any of them is
BLOCK_BYTES = 1 << 20  # of data per checksum
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of a tensor, and whether it is the one that writes it.

    Attributes:
        kind: "model" or "optim": which files it belongs to.
        box: this rank's part. ``typical``: the first rank's, from which the layout of the files
            is chosen, so that all ranks choose the same.
        ranks: all ranks that hold a part.
        writes: whether this rank writes it; a replica does not.
        written_by: how many elements each of ``ranks`` writes. Only asked where several of them
            write their boxes into one file.
    """

    kind: str
    tensor: TensorInfo
    box: Box
    typical: Box
    ranks: tuple[int, ...]
    writes: bool
    written_by: Callable[[int], int] | None = field(default=None, compare=False)


class Chunk(NamedTuple):
    """A box of one tensor that one rank wrote.

    Attributes:
        tensor: the whole tensor.
        file: its name in the checkpoint's folder.
        box: which part of the tensor.
        offset: in a file of boxes the first byte of this one, which is contiguous there; None in a
            file of whole tensors, whose header locates the box.
        checksums: CRC32 of every block of 1 MiB of the box's bytes in row-major order.
    """

    tensor: TensorInfo
    file: str
    box: Box
    offset: int | None
    checksums: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return bytes_of(self.tensor.dtype, self.box.shape)

    def place_in(self, header: Header) -> int | None:
        """The first byte of the box, or of the whole tensor; None if its file has another there."""
        tensor, entry = self.tensor, header.tensors.get(self.tensor.name)
        if self.offset is None:
            return header.offsets[tensor.name] if entry == tensor else None
        entry = header.at(self.offset)
        if entry is None:
            return None
        begin = header.offsets[entry.name]
        if is_section(entry):
            fits = entry.dtype == tensor.dtype
            fits &= self.offset + self.nbytes <= begin + entry.nbytes
        else:
            fits = entry == tensor._replace(shape=self.box.shape) and begin == self.offset
        return self.offset if fits else None


# Tensors that ranks save together, in the same order on all of them; each with the file that holds
# it whole, or with its kind if ranks hold parts of it in separate files.
Table = Sequence[tuple[str, TensorInfo]]


class Group(NamedTuple):
    """The same box of several tensors of one dtype and shape, as one rank wrote it.

    Layers repeat shapes. So a rank has few groups, however many tensors a model has.

    Attributes:
        file: the file of boxes that holds these; "" if files hold whole tensors.
        dtype, shape: of each tensor.
        box: which part of each.
        tensors: their positions in the table of their set.
        offsets: of each box the first byte in ``file``, as 8 little-endian bytes; none if files
            hold whole tensors, whose headers say where each is.
        checksums: of each box, as in a `Chunk`, as 4 little-endian bytes.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    tensors: Ranges
    offsets: bytes
    checksums: bytes

    @property
    def box_bytes(self) -> int:
        """Bytes of the box of one tensor."""
        return bytes_of(self.dtype, self.box.shape)

    @property
    def nbytes(self) -> int:
        return len(self.tensors) * self.box_bytes

    def boxes(self) -> Iterator[tuple[int, int | None, tuple[int, ...]]]:
        """Of each box the position of its tensor, offset and checksums."""
        num = -(-self.box_bytes // BLOCK_BYTES)
        checksums = struct.iter_unpack(f"<{num}I", self.checksums)
        offsets: Iterable[int | None] = [None] * len(self.tensors)
        if self.file:
            offsets = [offset for (offset,) in struct.iter_unpack("<Q", self.offsets)]
        return zip(self.tensors, offsets, checksums, strict=True)

    def chunks(self, table: Table) -> Iterator[Chunk]:
        """Each box as a chunk.

        Raises:
            CorruptCheckpoint: if ``table`` has other tensors.
        """
        for position, offset, checksums in self.boxes():
            file, info = table[position] if position < len(table) else ("", None)
            if info is None or info[1:] != (self.dtype, self.shape):
                raise CorruptCheckpoint(
                    f"the manifests disagree: one has a {self.dtype} of shape {self.shape} where "
                    f"another has {info and info[1:]}"
                )
            yield Chunk(info, self.file or file, self.box, offset, checksums)


@dataclass(frozen=True)
class SetOfFiles:
    """Files that a set of ranks writes together.

    Attributes:
        ranks: the ranks that share the tensors in them.
        files: those that this rank writes to; each has its header when the checkpoint is committed.
        whole: whether the files hold whole tensors; otherwise each holds boxes of one rank or more.
        digest: of names, headers and sizes; equal on all ranks of the set.
        headers: of files of whole tensors; only in the manifest of the set's first rank.
        tensors: all of the set; also only there.
        groups: what this rank wrote.
    """

    ranks: Ranges
    files: dict[str, FileInfo]
    whole: bool
    digest: str
    headers: dict[str, str] = field(default_factory=dict)
    tensors: Table = ()
    groups: tuple[Group, ...] = ()

    def chunks(self, tables: Mapping[Ranges, Table]) -> Iterator[Chunk]:
        """What this rank wrote, each box as a chunk.

        Args:
            tables: as `tables_of` returns them.
        """
        table = self.tensors or tables.get(self.ranks, ())
        return (chunk for group in self.groups for chunk in group.chunks(table))


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint.

    Attributes:
        nonce: identifies the attempt; manifests of different attempts never belong together.
        rank, ranks: this rank and all ranks of the save, as global ranks.
        aliases: other names of tied tensors.
        small_files: what this rank saves in addition to its shards.
        writer: who wrote it: versions, host, time.
        optimizer_names: a digest of the names in this rank's optimizers; None in old manifests.
    """

    nonce: str
    name: str
    rank: int
    ranks: Ranges
    sets: tuple[SetOfFiles, ...]
    aliases: dict[str, str]
    small_files: dict[str, SmallFile]
    writer: dict[str, Any]
    optimizer_names: str | None = None

    @property
    def groups(self) -> Iterator[Group]:
        """What this rank wrote."""
        return (group for files in self.sets for group in files.groups)


def tables_of(manifests: Iterable[Manifest]) -> dict[Ranges, Table]:
    """The tensors of each set of ranks, by these."""
    sets = (files for manifest in manifests for files in manifest.sets)
    return {files.ranks: files.tensors for files in sets if files.tensors}


def kind_of(file: str) -> str:
    """Whether the tensors of a data file, or of a kind, are of the "model" or of its optimizer,
    "optim"."""
    return "optim" if file.startswith("optim") else "model"


def marker_name(rank: int, num_ranks: int) -> str:
    """The file name of the manifest of ``rank`` in `FOLDER`."""
    return f"rank-{rank:05d}-of-{num_ranks:05d}.json"


def failed_name(rank: int) -> str:
    """The file by which ``rank`` reports that it gave up this attempt."""
    return f"failed-{rank:05d}"


def state_name(rank: int) -> str:
    """The name of a rank's values that are not tensors."""
    return f"state-{rank:05d}.json"


def own_name(rank: int) -> str:
    """The file of tensors that only this rank has: buffers, and state that is not sharded."""
    return f"own-{rank:05d}.safetensors"


def section_of(rank: int, dtype: str, num: int) -> TensorInfo:
    """All that ``rank`` writes of a dtype, ``num`` elements, in a file of several ranks' boxes."""
    return TensorInfo(f"rank-{rank:05d}.{dtype}", dtype, (num,))


def is_section(entry: TensorInfo) -> bool:
    """Whether a file has a rank's boxes there, one after the other; otherwise a tensor."""
    return re.fullmatch(rf"rank-\d{{5,}}\.{entry.dtype}", entry.name) is not None


def parse_marker_name(name: str) -> tuple[int, int] | None:
    """Rank and number of ranks of a marker's file name; None for any other file."""
    match = re.fullmatch(r"rank-(\d{5,})-of-(\d{5,})\.json", name)
    return (int(match[1]), int(match[2])) if match else None


def hf_index_bytes(sets: Iterable[SetOfFiles]) -> bytes | None:
    """Hugging Face's index of the model's files, as it is written; None if there is one file.

    Files of single ranks are not in it, because readers of an index expect whole tensors.
    """
    files_of = [
        (file, header)
        for files in sets
        for file, header in files.headers.items()
        if files.whole and file.startswith("model")
    ]
    if len({file for file, _ in files_of}) <= 1:
        return None
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for file, header in files_of:
        for name, entry in json.loads(header).items():
            # Ranks that share no files may have written the same tensor: the first counts.
            if name != "__metadata__" and weight_map.setdefault(name, file) == file:
                total_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
    if len(set(weight_map.values())) <= 1:
        return None
    index: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def digest_of_hf_index(index: Any) -> str:
    """The SHA-256 of Hugging Face's index, however its JSON is written."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
