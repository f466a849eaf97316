"""One file that locates the bytes of a load, however many ranks saved.

Manifests hold the same information, but only all of them together: a rank that reads them at every
load reads more with every rank that saved. The rank that commits has read them, and writes this
file (`saving.indexing`)::

    records | stretches | places | contents | tail

- a *record* for each rank: its own data files, the digests of its small files, and the checksums of
  what it wrote;
- *partitions*: which rank has which box of a tensor. Layers repeat shapes, so one partition is
  for all tensors that are cut alike. Its entries are sorted by where they begin, and read in
  stretches: the contents say where each stretch begins, so a box is found by reading one or two;
- *places*: where the record of each rank is;
- *contents*: JSON of names, shapes, shared files and partitions, which every load reads;
- the *tail*, of a fixed size: where the contents are.

Each piece that is read at once has its own CRC32. So a load reads the contents, a stretch for each
shape, and the records of the ranks whose shards it needs.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ...dtensor.boxes import Box
from ..errors import CorruptCheckpoint
from .checksum import crc32
from .disk import read_exactly
from .header import FileInfo, TensorInfo, bytes_of, parse_json
from .manifest import BLOCK_BYTES
from .ranges import parsed_ranges
from .small_state import SmallFile, parsed_small_files
from .strict import MAX_SMALL_BYTES, Check, converted, open_regular

NAME = "index.fsdp2"
VERSION = 1
STRETCH = 128  # entries of a partition that are read at once
PLACE = struct.Struct("<QII")  # of a record: offset, bytes, CRC32
TAIL = struct.Struct("<8sIQII")  # magic, version, and of the contents offset, bytes, CRC32
MAGIC = b"fsdp2idx"
_HINT = "Without this file, the manifests next to it are read instead"


def entry_of(ndim: int) -> struct.Struct:
    """Of a partition: a rank's position, the group in its record, start and shape of the box."""
    return struct.Struct(f"<II{2 * ndim}Q")


class Row(NamedTuple):
    """A tensor in the contents.

    Attributes:
        file, offset: where it lies as a whole; None if it lies in files of boxes.
        partitions: each partition that it is in, and its position there.
    """

    info: TensorInfo
    file: str | None
    offset: int
    partitions: list[tuple[Partition, int]]


class Partition(NamedTuple):
    """A partition as `_listed` writes it.

    If several sets of ranks wrote a tensor, in files that they do not share, only the partitions of
    the first set count. In the partitions of the others its place stays empty (null).
    """

    number: int
    size: int  # of tensors
    dtype: str
    shape: tuple[int, ...]
    at: int
    num: int
    dim: int | None
    longest: int
    starts: tuple[int, ...]
    crcs: tuple[int, ...]


class BoxEntry(NamedTuple):
    """A box of each tensor of a partition, and where its checksums are.

    Attributes:
        position: of the rank that wrote it, among those that saved.
        group: which one of the record of that rank.
    """

    position: int
    group: int
    box: Box


class Written(NamedTuple):
    """A box of a tensor that a rank wrote.

    Attributes:
        file, info, offset: the file of boxes, and the first byte there; all None if a file holds
            the whole tensor.
        checksums: CRC32 of each block.
    """

    file: str | None
    info: FileInfo | None
    offset: int | None
    checksums: tuple[int, ...]


class RankRecord(NamedTuple):
    """What one rank wrote.

    Attributes:
        groups: for each group of tensors with the same box: their partition, the file of the boxes
            ("" where files hold whole tensors), and where in ``data`` their offsets in that file
            and their checksums begin.
    """

    files: dict[str, FileInfo]
    small_files: dict[str, SmallFile]
    groups: list[tuple[int, str, int]]
    data: memoryview


class Index:
    """An open index; `close` it.

    Args:
        path: of the file.

    Attributes:
        ranks: those that saved.
        speakers: of ranks whose optimizers have the same parameters, the first.
        tables: rows of the model's and of the optimizer's tensors, by name.
        files: those that several ranks wrote.
        bytes_read: so far.

    Raises:
        FileNotFoundError: if there is none.
        CorruptCheckpoint: here and in all methods, if what is there is not what was written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._shown = os.fspath(path)
        self._check = Check(f"{self._shown}: not an index")
        self._fd = open_regular(path)
        self.bytes_read = 0
        try:
            self._size = os.fstat(self._fd).st_size
            self._read_contents()
        except BaseException:
            self.close()
            raise
        # Without a limit: one tensor after the other needs all of those that it needs again.
        self.record = lru_cache(None)(self._record)
        self._near = lru_cache(None)(self._entries_near)

    def close(self) -> None:
        os.close(self._fd)

    # -- contents ---------------------------------------------------------------------------

    def _read_contents(self) -> None:
        tail = self._read(self._size - TAIL.size, TAIL.size, None)
        magic, version, at, num, crc = TAIL.unpack(tail)
        if magic != MAGIC or version != VERSION:
            raise CorruptCheckpoint(
                f"{self._shown}: not an index of version {VERSION}, which this fsdp2 reads. {_HINT}"
            )
        if num > MAX_SMALL_BYTES or at + num + TAIL.size != self._size:
            raise self._check.bad("the tail", f"{at} + {num} of {self._size} bytes")
        contents = self._check.table(
            parse_json(bytes(self._read(at, num, crc)), f"{self._shown}: its contents"), "it"
        )
        # The checksum reveals damage. An attacker's is right: so each value's kind is checked.
        converted(self._check.what, lambda: self._parse(contents))

    def _parse(self, contents: dict[str, Any]) -> None:
        check = self._check
        self.nonce = check.text(contents["nonce"], "nonce")
        self.name = check.text(contents["name"], "name")
        self.ranks = parsed_ranges(contents["ranks"], "ranks", check)
        self.speakers = check.numbers(contents["speakers"], "speakers")
        distinct = set(self.speakers)
        if not distinct or len(distinct) < len(self.speakers) or not distinct <= set(self.ranks):
            raise check.bad("speakers", "other ranks than those that saved")
        self.aliases = check.texts(contents["aliases"], "aliases")
        digest = contents["hf_index_sha256"]
        self.hf_index_sha256 = None if digest is None else check.text(digest, "hf_index_sha256")
        self.files = check.files(contents["files"])
        self._shared = list(self.files)
        self._places = check.number(contents["places"], "places")
        rows = [self._parsed_row(row) for row in check.items(contents["tensors"], "tensors")]
        partitions = enumerate(check.items(contents["partitions"], "partitions"))
        self.partitions = [
            self._parsed_partition(number, partition, rows) for number, partition in partitions
        ]
        for one, other in pairwise(self.partitions):
            if one.at + one.num * entry_of(len(one.shape)).size > other.at:
                raise check.bad("the places of partitions", "in each other")
        self.tables: dict[str, dict[str, Row]] = {"model": {}, "optim": {}}
        for kind, row in rows:
            self.tables[kind][row.info.name] = row
        if sum(map(len, self.tables.values())) != len(rows):
            raise check.bad("tensors", "two of one name")

    def _parsed_row(self, value: Any) -> tuple[str, Row]:
        kind, name, dtype, shape, *place = value
        info = self._check.tensor(name, dtype, shape)
        if kind not in ("model", "optim"):
            raise self._check.bad(f"the kind of {name!r}", kind)
        if kind == "optim" and (not name.startswith("optim.") or name.count(".") < 2):
            raise self._check.bad("the name of an optimizer's state", name)
        if not place:
            return kind, Row(info, None, 0, [])
        number, offset = self._check.numbers(place, f"the place of {name!r}")
        file = self._shared[number]
        if offset + info.nbytes > self.files[file].size:
            raise self._check.bad(f"the place of {name!r}", offset)
        return kind, Row(info, file, offset, [])

    def _parsed_partition(
        self, number: int, value: Any, rows: Sequence[tuple[str, Row]]
    ) -> Partition:
        check = self._check
        numbers = check.items(value["tensors"], "the tensors of a partition")
        tensors = [number for number in numbers if number is not None]
        check.numbers(tensors, "the tensors of a partition")
        dim, num = value["dim"], check.number(value["num"], "the entries of a partition")
        members = [None if number is None else rows[number][1] for number in numbers]
        dtype, shape = rows[tensors[0]][1].info[1:]
        starts = check.numbers(value["starts"], "the starts of a partition")
        crcs = check.numbers(value["crcs"], "the checksums of a partition")
        if len(set(tensors)) < len(tensors):
            raise check.bad("the tensors of a partition", "one twice")
        if any(row is not None and row.info[1:] != (dtype, shape) for row in members):
            raise check.bad("the tensors of a partition", "of different dtypes or shapes")
        if dim is not None and check.number(dim, "the dim of a partition") >= len(shape):
            raise check.bad("the dim of a partition", dim)
        if len(starts) != -(-num // STRETCH) or len(crcs) != len(starts):
            raise check.bad("the stretches of a partition", len(starts))
        if any(a > b for a, b in pairwise(starts)):
            raise check.bad("the starts of a partition", "unsorted")
        at = check.number(value["at"], "the place of a partition")
        longest = check.number(value["longest"], "the longest of a partition")
        partition = Partition(
            number, len(members), dtype, shape, at, num, dim, longest, starts, crcs
        )
        for position, row in enumerate(members):
            if row is not None:
                row.partitions.append((partition, position))
        return partition

    # -- what is read on demand -------------------------------------------------------------

    def near(self, partition: Partition, box: Box) -> Sequence[BoxEntry]:
        """The entries of a partition that overlap ``box``."""
        return self._near(partition.number, box)

    def _entries_near(self, number: int, box: Box) -> Sequence[BoxEntry]:
        partition = self.partitions[number]
        first, last = 0, len(partition.starts)
        if partition.dim is not None:
            begin, size = box.start[partition.dim], box.shape[partition.dim]
            first = max(0, bisect_left(partition.starts, begin - partition.longest + 1) - 1)
            last = bisect_left(partition.starts, begin + size)
        found = []
        for stretch in range(first, last):
            found += [
                e for e in self._stretch(partition, stretch) if e.box.intersect(box) is not None
            ]
        return found

    def _stretch(self, partition: Partition, stretch: int) -> Iterator[BoxEntry]:
        ndim = len(partition.shape)
        entry = entry_of(ndim)
        begin = stretch * STRETCH
        num = min(STRETCH, partition.num - begin)
        data = self._read(
            partition.at + begin * entry.size, num * entry.size, partition.crcs[stretch]
        )
        for position, group, *numbers in entry.iter_unpack(data):
            box = Box(tuple(numbers[:ndim]), tuple(numbers[ndim:]))
            if position >= len(self.ranks) or not box.within(partition.shape):
                raise self._check.bad("an entry of a partition", f"{position}, {box}")
            yield BoxEntry(position, group, box)

    def record_of(self, rank: int) -> RankRecord:
        """The record of one of `ranks`."""
        return self.record(self.ranks.position(rank))

    def _record(self, position: int) -> RankRecord:
        """The record of the rank at ``position`` among those that saved."""
        place = self._read(self._places + position * PLACE.size, PLACE.size, None)
        content, _, data = bytes(self._read(*PLACE.unpack(place))).partition(b"\n")
        check = self._check
        what = f"{self._shown}: the record of rank {self.ranks[position]}"
        table = check.table(parse_json(content, what), "a record")
        return converted(check.what, lambda: self._parsed_record(table, memoryview(data)))

    def _parsed_record(self, table: dict[str, Any], data: memoryview) -> RankRecord:
        check = self._check
        files = check.files(table["files"])
        groups = []
        for partition, file, at in check.items(table["groups"], "groups"):
            self.partitions[check.number(partition, "a partition")]
            if file != "" and check.file_name(file, "the file of a group") not in files:
                raise check.bad("the file of a group", file)
            groups.append((partition, file, check.number(at, "the place of a group")))
        return RankRecord(files, parsed_small_files(table["small_files"], check), groups, data)

    def written(self, partition: Partition, place: int, entry: BoxEntry) -> Written:
        """What the rank of an entry wrote of the tensor at ``place`` in a partition."""
        record = self.record(entry.position)
        what = f"a group of rank {self.ranks[entry.position]}"
        if entry.group >= len(record.groups):
            raise self._check.bad(what, entry.group)
        number, file, at = record.groups[entry.group]
        info = record.files[file] if file else None
        if number != partition.number:
            raise self._check.bad(what, f"of partition {number}")
        nbytes = bytes_of(partition.dtype, entry.box.shape)
        num_blocks = -(-nbytes // BLOCK_BYTES)
        offset = None
        if info is not None:
            (offset,) = self._numbers(record, "Q", at + 8 * place, 1)
            at += 8 * partition.size
            if offset + nbytes > info.size:
                raise self._check.bad(f"a place in {file}", offset)
        crcs = self._numbers(record, "I", at + 4 * num_blocks * place, num_blocks)
        return Written(file or None, info, offset, crcs)

    def _numbers(self, record: RankRecord, kind: str, at: int, num: int) -> tuple[int, ...]:
        numbers = struct.Struct(f"<{num}{kind}")
        if at + numbers.size > len(record.data):
            raise self._check.bad("the place of a group", at)
        return numbers.unpack_from(record.data, at)

    def _read(self, at: int, num: int, crc: int | None) -> memoryview:
        if at < 0 or at + num > self._size:
            raise CorruptCheckpoint(f"{self._shown}: truncated: it has {self._size} bytes")
        try:
            data = memoryview(bytearray(num if num <= MAX_SMALL_BYTES else -1))
        except (MemoryError, ValueError):
            raise self._check.bad("a part", f"{num} bytes") from None
        if read_exactly(self._fd, data, at) != num:
            raise CorruptCheckpoint(f"{self._shown}: it was cut while it was read")
        self.bytes_read += num
        if crc is not None and crc32(data) != crc:
            raise CorruptCheckpoint(
                f"{self._shown}: the checksum of bytes {at} to {at + num} is wrong. {_HINT}"
            )
        return data
