"""Opens a checkpoint of this package: by its index, or by the manifests of all ranks.

The index locates the bytes of this rank, and only the files that hold them are opened. Checkpoints
of earlier releases and snapshots in memory have no index: their manifests together hold the same
information.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...dtensor.boxes import Box, overlapping
from ..errors import CheckpointError, CorruptCheckpoint, some
from ..format.header import Header, parse_json
from ..format.index import NAME, BoxEntry, Index, Partition, Row
from ..format.manifest import (
    FOLDER,
    INDEX,
    Chunk,
    Manifest,
    digest_of_hf_index,
    hf_index_bytes,
    kind_of,
    marker_name,
    parse_marker_name,
    tables_of,
)
from ..format.marker import load, read_marker
from ..format.ranges import Ranges
from ..format.strict import MAX_SMALL_BYTES, open_regular, read_small
from ..saving.attempt import check_agreement
from ..saving.indexing import TooLarge, index_parts
from .source import Extent, Source, Stored


def open_own(source: Source, by_manifests: bool) -> None:
    """Fill in ``source``, whose folder is open; see `open_source`."""
    folder = source.path / FOLDER
    if folder.is_symlink():
        raise CorruptCheckpoint(f"{folder} is a symbolic link, which this checkpoint never had")
    if by_manifests or not os.path.lexists(folder / NAME):
        _open_by_manifests(source, folder)
    else:
        _open_by_index(source, folder / NAME)


# -- by the index -------------------------------------------------------------------------------


def _open_by_index(source: Source, path: Path) -> None:
    try:
        index = source.index = Index(path)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing now") from None
    source.ranks, source.speakers, source.aliases = index.ranks, index.speakers, index.aliases
    source.small_files = lambda rank: index.record_of(rank).small_files
    checked: set[tuple[object, ...]] = set()
    for kind, table in (("model", source.tensors), ("optim", source.optimizer)):
        for name, row in index.tables[kind].items():
            table[name] = Indexed(row.info, source=source, index=index, row=row, checked=checked)
    sha256 = index.hf_index_sha256
    if sha256 is not None and digest_of_hf_index(_read_hf_index(source)) != sha256:
        raise _other_hf_index(source)


@dataclass
class Indexed(Stored):
    """A tensor that the index locates. Finding the files that hold a box opens them.

    Attributes:
        checked: for all tensors, the boxes of partitions that were found to be covered.
    """

    source: Source = field(kw_only=True, repr=False)
    index: Index = field(kw_only=True, repr=False)
    row: Row = field(kw_only=True)
    checked: set[tuple[object, ...]] = field(kw_only=True, repr=False)
    # The last answer: a load asks first which files it needs, then what to read.
    _found: tuple[Box, list[tuple[Chunk, Extent]]] | None = field(default=None, repr=False)

    @override
    def near(self, box: Box) -> list[tuple[Chunk, Extent]]:
        if self._found is None or self._found[0] != box:
            self._found = box, self._find(box) if box.numel else []
        return self._found[1]

    def _find(self, box: Box) -> list[tuple[Chunk, Extent]]:
        entries = [
            (partition, place, entry)
            for partition, place in self.row.partitions
            for entry in self.index.near(partition, box)
        ]
        key = (*(partition.number for partition, _ in self.row.partitions), box)
        if key not in self.checked:
            self._check_covered(box, [entry for *_, entry in entries])
            self.checked.add(key)
        return [self._chunk(*each) for each in entries]

    def _chunk(self, partition: Partition, place: int, entry: BoxEntry) -> tuple[Chunk, Extent]:
        file, info, offset, checksums = self.index.written(partition, place, entry)
        if file is None or offset is None:
            extent = self._whole()
        else:
            extent = Extent(file, entry.box, offset)
            self.source.open_file(file, info)
        return Chunk(self.info, extent.file, entry.box, offset, checksums), extent

    @override
    def extents_near(self, box: Box) -> list[Extent]:
        if not box.numel:
            return []
        return (
            [extent for _, extent in self.near(box)] if self.row.file is None else [self._whole()]
        )

    def _whole(self) -> Extent:
        """Of a tensor that lies in a file as a whole."""
        file = self.row.file
        if file is None:
            raise CorruptCheckpoint(
                f"{self.source.path}: the index names no file that holds '{self.info.name}'"
            )
        self.source.open_file(file, self.index.files[file])
        return Extent(file, Box.whole(self.info.shape), self.row.offset)

    def _check_covered(self, box: Box, entries: list[BoxEntry]) -> None:
        """Refuse a box that the entries do not cover: the rest would keep its old values."""
        common = [box.intersect(entry.box) for entry in entries]
        covered = sum(each.numel for each in common if each is not None)
        if covered != box.numel or overlapping([entry.box for entry in entries]):
            raise CorruptCheckpoint(
                f"{self.source.path}: the index lists {covered} elements of '{self.info.name}', of "
                f"the {box.numel} at {box.start} of shape {box.shape}"
            )


# -- by the manifests ---------------------------------------------------------------------------


def _open_by_manifests(source: Source, folder: Path) -> None:
    markers = {rank: num for name in os.listdir(folder) if (rank_num := parse_marker_name(name))
               for rank, num in [rank_num]}  # fmt: skip
    if not markers:
        raise CorruptCheckpoint(f"{folder} has no manifest")
    num_ranks = max(markers.values())
    for rank in sorted(markers):
        name = marker_name(rank, num_ranks)
        try:
            data = read_marker(folder / name)
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
    source.ranks = Ranges.of(source.manifests)
    source.speakers = _speakers(manifests)
    source.small_files = lambda rank: source.manifests[rank].small_files
    if missing:
        raise _incomplete(source, missing)
    _collect(source)
    try:
        check_agreement(manifests)
    except CheckpointError as error:
        raise CorruptCheckpoint(f"{source.path}: {error}") from error
    hf_index = hf_index_bytes(files for manifest in manifests for files in manifest.sets)
    if hf_index is not None and _read_hf_index(source) != json.loads(hf_index):
        raise _other_hf_index(source)
    if os.path.lexists(folder / NAME):
        _compare_index(source, folder / NAME, index_parts(manifests, lambda: hf_index))


def _speakers(manifests: Iterable[Manifest]) -> tuple[int, ...]:
    """The first of the ranks whose optimizers have the same parameters; all that do not say."""
    found: dict[str | int, int] = {}
    for manifest in manifests:
        names = manifest.optimizer_names
        found.setdefault(manifest.rank if names is None else names, manifest.rank)
    return tuple(found.values())


def _read_hf_index(source: Source) -> Any:
    """Hugging Face's index: compared with what was written, though only other libraries read it."""
    path = source.path / INDEX
    try:
        return parse_json(read_small(path, MAX_SMALL_BYTES), str(path))
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{path} is missing") from None


def _other_hf_index(source: Source) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{source.path / INDEX}: the index is not the one that was written")


def _compare_index(source: Source, path: Path, parts: Iterable[bytes]) -> None:
    """Compare the index with what the manifests say."""
    same = False
    with open(open_regular(path), "rb") as file, suppress(TooLarge, CheckpointError):
        same = all(file.read(len(part)) == part for part in parts) and not file.read(1)
    if not same:
        raise CorruptCheckpoint(f"{path}: the index is not the one that was written")


def _collect(source: Source) -> None:
    """Fill in tensors from the headers of the files and the chunks of the manifests."""
    headers: dict[str, Header] = {}
    owner: dict[tuple[str, str], Ranges] = {}
    wholes: dict[tuple[int, ...], Box] = {}
    for manifest in source.manifests.values():
        source.aliases.update(manifest.aliases)
        for files in manifest.sets:
            for file, info in files.files.items():
                source.open_file(file, info)
                if source.files[file] != info.size:
                    raise CorruptCheckpoint(
                        f"{source.path}/{file}: expected {info.size} bytes, the file has "
                        f"{source.files[file]}"
                    )
                if file not in headers:
                    headers[file] = source.read_header(file)
    for ranks, chunk in source.chunks():
        tensor, file, box, in_file_of_boxes, _ = chunk
        name = tensor.name
        table = _table_of(source, file, name)
        stored = table.get(name)
        if stored is None:
            stored = table[name] = Stored(tensor)
        if owner.setdefault((kind_of(file), name), ranks) != ranks:
            continue  # the same tensor again, written by ranks that share no files with these
        if file not in headers:
            raise CorruptCheckpoint(f"{source.path}: '{name}' lies in {file}, of no manifest")
        offset = chunk.place_in(headers[file])
        if offset is None or tensor != stored.info:
            raise CorruptCheckpoint(
                f"{source.path}/{file}: tensor '{name}' is not what the manifest says"
            )
        if in_file_of_boxes is not None or not stored.extents:
            holds = box
            if in_file_of_boxes is None:
                holds = wholes.get(tensor.shape) or Box.whole(tensor.shape)
                wholes[tensor.shape] = holds
            stored.extents.append(Extent(file, holds, offset))
        stored.chunks.append(chunk)
    apart: set[tuple[Box, ...]] = set()  # equal layers are cut in the same way
    for stored in (*source.tensors.values(), *source.optimizer.values()):
        boxes = tuple([chunk.box for chunk in stored.chunks])
        if boxes not in apart:
            _check_apart(source, stored.info.name, boxes)
            apart.add(boxes)
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if tensor.nbytes == 0:  # no rank writes a chunk of zero bytes
                extent = Extent(file, Box.whole(tensor.shape), header.offsets[name])
                table = _table_of(source, file, name)
                table.setdefault(name, Stored(tensor, [extent]))


def _table_of(source: Source, file: str, name: str) -> dict[str, Stored]:
    if kind_of(file) == "model":
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


def _incomplete(source: Source, missing: list[int]) -> CorruptCheckpoint:
    manifests = source.manifests.values()
    have = sum(group.nbytes for manifest in manifests for group in manifest.groups)
    what = f"{have} bytes"
    tables = tables_of(manifests)
    if all(files.ranks in tables for manifest in manifests for files in manifest.sets):
        infos = {info.name: info for table in tables.values() for _, info in table}
        what = f"{have} of {sum(info.nbytes for info in infos.values())} bytes"
    return CorruptCheckpoint(
        f"{source.path}: the manifest of rank {some(missing)} is missing: the shards that are "
        f"there cover {what}"
    )
