"""Makes the index of a checkpoint from the manifests of all ranks, read one after the other."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...dtensor.boxes import Box
from ..errors import CheckpointError
from ..format.checksum import crc32
from ..format.header import FileInfo, TensorInfo
from ..format.index import MAGIC, PLACE, STRETCH, TAIL, VERSION, entry_of
from ..format.manifest import (
    Group,
    Manifest,
    SetOfFiles,
    Table,
    digest_of_hf_index,
    kind_of,
)
from ..format.ranges import Ranges
from ..format.small_state import listed_small_files
from ..format.strict import MAX_SMALL_BYTES


@dataclass
class _Partition:
    """Tensors of one dtype and shape, and the boxes that ranks wrote of each of them.

    Attributes:
        tensors: their numbers; None for one that other ranks wrote too, and before these.
    """

    number: int
    tensors: tuple[int | None, ...]
    dtype: str
    shape: tuple[int, ...]
    # The rank by its position, which group of its record it is, and the box.
    entries: list[tuple[int, int, Box]] = field(default_factory=list)

    def dim(self) -> int | None:
        """The dim in which boxes begin at the most places; None for 0-dim tensors."""
        dims = range(len(self.shape))
        starts = [len({box.start[d] for *_, box in self.entries}) for d in dims]
        return max(dims, key=starts.__getitem__, default=None)


class _Builder:
    """Gathers what manifests say, in the order of ranks."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.tensors: list[tuple[str, TensorInfo]] = []  # with their kinds, by number
        self.numbers: dict[tuple[str, str], int] = {}
        self.tables: dict[Ranges, Table] = {}
        self.owners: dict[int, Ranges] = {}
        # Of a tensor in the files of a set of ranks that holds it whole: the file, and where.
        self.places: dict[tuple[str, str, Ranges], tuple[str, int]] = {}
        # By set and tensors; None for those that other ranks wrote before.
        self.partition_of: dict[tuple[Ranges, Ranges], _Partition | None] = {}
        self.partitions: list[_Partition] = []
        self.files: dict[str, FileInfo] = {}
        self.aliases: dict[str, str] = {}
        self.speakers: dict[str | int, int] = {}

    def record(self, manifest: Manifest) -> bytes:
        """The record of a rank; remembers what is common to all."""
        position = len(self.ranks)
        self.ranks.append(manifest.rank)
        self.aliases.update(manifest.aliases)
        names = manifest.optimizer_names
        self.speakers.setdefault(manifest.rank if names is None else names, manifest.rank)
        groups: list[tuple[int, str, int]] = []
        data = bytearray()
        for files in manifest.sets:
            if files.tensors:
                self.tables[files.ranks] = files.tensors
            self._find_places(files)
            for group in files.groups:
                partition = self._partition(files.ranks, group)
                if partition is not None:
                    partition.entries.append((position, len(groups), group.box))
                    groups.append((partition.number, group.file, len(data)))
                    data += group.offsets + group.checksums
        own = {f: info for s in manifest.sets if not s.whole for f, info in s.files.items()}
        small = listed_small_files(manifest.small_files)
        content = {"files": own, "small_files": small, "groups": groups}
        return json.dumps(content, separators=(",", ":")).encode() + b"\n" + data

    def _partition(self, ranks: Ranges, group: Group) -> _Partition | None:
        key = ranks, group.tensors
        if key not in self.partition_of:
            numbers = tuple([self._number_in(ranks, each, group) for each in group.tensors])
            partition = _Partition(len(self.partitions), numbers, group.dtype, group.shape)
            owned = set(numbers) != {None}
            self.partition_of[key] = partition if owned else None
            self.partitions += [partition] * owned
        found = self.partition_of[key]
        if found is not None and (found.dtype, found.shape) != (group.dtype, group.shape):
            raise CheckpointError(
                f"Ranks disagree on the dtype and shape of tensors: {found.dtype} of shape "
                f"{found.shape}, and {group.dtype} of shape {group.shape}"
            )
        return found

    def _number_in(self, ranks: Ranges, position: int, group: Group) -> int | None:
        """The number of a tensor that these ranks wrote; None if other ranks did before."""
        table = self.tables.get(ranks, ())
        if position >= len(table) or table[position][1][1:] != (group.dtype, group.shape):
            raise CheckpointError(
                f"The manifest of rank {ranks[0]} does not describe what it saves with others"
            )
        where, tensor = table[position]
        number = self._number(kind_of(where), tensor)
        return number if self.owners.setdefault(number, ranks) == ranks else None

    def rows(self) -> list[list[Any]]:
        """What the contents say of each tensor."""
        # Last those without bytes: another rank may have one of the name with bytes.
        for where, tensor in itertools.chain(*self.tables.values()):
            if not tensor.nbytes:
                self._number(kind_of(where), tensor)
        files = {file: number for number, file in enumerate(self.files)}
        found: list[list[Any]] = []
        for number, (kind, tensor) in enumerate(self.tensors):
            row: list[Any] = [kind, tensor.name, tensor.dtype, list(tensor.shape)]
            if number in self.owners:  # else it has no bytes
                place = self.places.get((kind, tensor.name, self.owners[number]))
                row += [] if place is None else [files[place[0]], place[1]]
            found.append(row)
        return found

    def _number(self, kind: str, tensor: TensorInfo) -> int:
        number = self.numbers.setdefault((kind, tensor.name), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append((kind, tensor))
        return number

    def _find_places(self, files: SetOfFiles) -> None:
        """Remember files that ranks write together, and where tensors lie in them."""
        for file, header in files.headers.items():
            self.files[file] = info = files.files[file]
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    place = file, info.header_bytes + entry["data_offsets"][0]
                    self.places[kind_of(file), name, files.ranks] = place


class TooLarge(Exception):
    """There can be no index: it would be larger than what is read of one."""


def index_parts(
    manifests: Iterable[Manifest], hf_index: Callable[[], bytes | None]
) -> Iterator[bytes]:
    """The bytes of an index, piece after piece.

    Args:
        manifests: of all ranks, in their order; they agree (`check_agreement`).
        hf_index: called after them for Hugging Face's index, if there is one.

    Raises:
        TooLarge: when all manifests were read.
    """
    builder, places, at = _Builder(), bytearray(), 0
    first: Manifest | None = None
    largest = 0
    for manifest in manifests:
        first = first or manifest
        record = builder.record(manifest)
        largest = max(largest, len(record))
        if largest > MAX_SMALL_BYTES:
            continue
        places += PLACE.pack(at, len(record), crc32(record))
        at += len(record)
        yield record
    assert first is not None
    partitions = []
    for partition in builder.partitions:
        listed, stretches = _listed(partition, at)
        partitions.append(listed)
        at += len(stretches)
        yield stretches
    yield bytes(places)
    index = hf_index()
    contents = json.dumps(
        {
            "nonce": first.nonce,
            "name": first.name,
            "ranks": Ranges.of(builder.ranks).listed(),
            "speakers": list(builder.speakers.values()),
            "aliases": builder.aliases,
            "hf_index_sha256": None if index is None else digest_of_hf_index(json.loads(index)),
            "files": builder.files,
            "tensors": builder.rows(),
            "partitions": partitions,
            "places": at,
        },
        separators=(",", ":"),
    ).encode()
    if max(largest, len(contents)) > MAX_SMALL_BYTES:
        raise TooLarge
    yield contents
    at += len(places)
    yield TAIL.pack(MAGIC, VERSION, at, len(contents), crc32(contents))


def _listed(partition: _Partition, at: int) -> tuple[dict[str, Any], bytes]:
    """What the contents say of a partition whose entries begin at byte ``at``, and the entries."""
    dim = partition.dim()
    if dim is not None:
        partition.entries.sort(key=lambda entry: (entry[2].start[dim], entry[2], entry[0]))
    entry = entry_of(len(partition.shape))
    entries = [entry.pack(p, group, *box.start, *box.shape) for p, group, box in partition.entries]
    firsts = range(0, len(entries), STRETCH)
    stretches = [b"".join(entries[first : first + STRETCH]) for first in firsts]
    listed = {
        "tensors": partition.tensors,
        "at": at,
        "num": len(entries),
        "dim": dim,
        "longest": 0 if dim is None else max(box.shape[dim] for *_, box in partition.entries),
        "starts": [0 if dim is None else partition.entries[i][2].start[dim] for i in firsts],
        "crcs": list(map(crc32, stretches)),
    }
    return listed, b"".join(stretches)
