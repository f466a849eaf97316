"""Makes the index of a checkpoint from the manifests of all ranks, read one after the other."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ...dtensor.boxes import Box
from ..format.checksum import crc32
from ..format.header import TensorInfo, frame
from ..format.index import MAGIC, PLACE, STRETCH, TAIL, VERSION, FileInfo, entry_of
from ..format.manifest import Manifest, digest_of_hf_index, kind_of
from ..format.ranks import Ranks
from ..format.strict import MAX_SMALL_BYTES


@dataclass
class _Partition:
    """Tensors of one dtype and shape, and the boxes that ranks wrote of each of them."""

    number: int
    tensors: tuple[int, ...]
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
        self.owners: dict[int, Ranks] = {}
        # Of a tensor in the files of a set of ranks that holds it whole: the file, and where.
        self.places: dict[tuple[str, str, Ranks], tuple[str, int]] = {}
        self.partitions: dict[tuple[int, ...], _Partition] = {}
        self.files: dict[str, FileInfo] = {}
        self.empty: dict[tuple[str, str], TensorInfo] = {}  # no rank writes a chunk of these
        self.aliases: dict[str, str] = {}
        self.speakers: dict[str | int, int] = {}

    def record(self, manifest: Manifest) -> bytes:
        """The record of a rank; remembers what is common to all."""
        position = len(self.ranks)
        self.ranks.append(manifest.rank)
        self.aliases.update(manifest.aliases)
        names = manifest.optimizer_names
        self.speakers.setdefault(manifest.rank if names is None else names, manifest.rank)
        own = self._add_files(manifest)
        set_of = {file: s.ranks for s in reversed(manifest.sets) for file in s.sizes}
        alike: dict[tuple[str, tuple[int, ...], Box, str], list[tuple[int, Any]]] = {}
        for chunk in manifest.chunks:
            number = self._number(kind_of(chunk.file), chunk.tensor)
            ranks = set_of[chunk.file]
            # Ranks that share no files may have written the same tensor: the first ones count.
            if self.owners.setdefault(number, ranks) == ranks:
                file = chunk.file if chunk.file in own else ""
                key = (file, chunk.tensor.shape, chunk.box, chunk.tensor.dtype)
                alike.setdefault(key, []).append((number, chunk))
        groups: list[tuple[int, str, int]] = []
        data = bytearray()
        for (file, shape, box, _), members in alike.items():
            numbers = tuple([number for number, _ in members])
            partition = self.partitions.get(numbers)
            if partition is None:
                partition = self.partitions[numbers] = _Partition(
                    len(self.partitions), numbers, shape
                )
            partition.entries.append((position, len(groups), box))
            groups.append((partition.number, file, len(data)))
            if file:
                data += struct.pack(f"<{len(members)}Q", *[c.offset for _, c in members])
            for _, chunk in members:
                data += struct.pack(f"<{len(chunk.checksums)}I", *chunk.checksums)
        content = {"files": own, "small_files": manifest.small_files, "groups": groups}
        return json.dumps(content, separators=(",", ":")).encode() + b"\n" + data

    def rows(self) -> list[list[Any]]:
        """What the contents say of each tensor."""
        for (kind, _), tensor in self.empty.items():
            self._number(kind, tensor)  # last: another rank may have one of the name with bytes
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

    def _add_files(self, manifest: Manifest) -> dict[str, FileInfo]:
        """Note shared files and what is in them; returns the files of this rank alone."""
        own = {}
        for files in manifest.sets:
            for file, header in files.headers.items():
                framed = frame(header)
                sha256 = hashlib.sha256(framed).hexdigest()
                info = FileInfo(files.sizes[file], len(framed), sha256)
                if files.whole:
                    self.files[file] = info
                else:
                    own[file] = info
                for name, entry in json.loads(header).items():
                    if name == "__metadata__":
                        continue
                    if files.whole:
                        place = file, len(framed) + entry["data_offsets"][0]
                        self.places[kind_of(file), name, files.ranks] = place
                    if entry["data_offsets"][0] == entry["data_offsets"][1]:
                        tensor = TensorInfo(name, entry["dtype"], tuple(entry["shape"]))
                        self.empty.setdefault((kind_of(file), name), tensor)
        return own


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
    for partition in builder.partitions.values():
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
            "ranks": Ranks.of(builder.ranks).listed(),
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
