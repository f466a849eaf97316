"""What a rank writes, and writing it: pure planning first, then bytes.

A plan is made from descriptions of tensors alone and agrees on all ranks that share the tensors.
The writer cuts a rank's bytes into pieces that fit in the processor's cache, computes their
checksums, and writes them into place; the disk works in the meantime.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...common.threads import submit
from ...dtensor.boxes import Box, run_numel, run_offsets
from ..errors import CheckpointError
from ..format.checksum import crc32
from ..format.disk import Disk
from ..format.header import FilePlan, TensorInfo, frame, plan_file, plan_files
from ..format.manifest import BLOCK_BYTES, Group, SetOfFiles, TensorPart, kind_of, section_of
from ..format.ranges import Ranges

PIECE_BYTES = 4 * BLOCK_BYTES  # per task: still in cache when it is written after its checksum
SYNC_BYTES = 64 << 20  # the disk is told to start after every so many bytes
SHARED_MIN_RUN_BYTES = 256 << 10
SHARED_MAX_RUNS = 2048
MAX_FILE_BYTES = 5_000_000_000
Places = dict[tuple[str, str], tuple[str, int]]  # by kind and name of a tensor: file, first byte


class Writers(NamedTuple):
    """Which ranks write their boxes into one file.

    Attributes:
        num: how many, at most.
        of_host: they are neighbours among all ranks, and so on one host if ``num`` divides its
            ranks; otherwise among those that share the tensors, so that files are few even if
            these are every eighth rank.
    """

    num: int = 1
    of_host: bool = False

    def group(self, members: Sequence[int], rank: int) -> Sequence[int]:
        """The ``members``, which share tensors, that write one file with ``rank``."""
        if self.of_host:
            return [r for r in members if r // self.num == rank // self.num]
        first = members.index(rank) // self.num * self.num
        return members[first : first + self.num]


@dataclass(frozen=True)
class PlannedChunk:
    """Bytes to write: a box of a tensor, and where the tensor (or the box alone) is in a file.

    Attributes:
        position: of the tensor in the table of its set; ``set_number``: which of the plan's sets.
        whole: whether the file holds the whole tensor; otherwise this box alone.
    """

    part: TensorPart
    set_number: int
    position: int
    file: str
    offset: int
    whole: bool

    def runs(self) -> tuple[int, list[int]]:
        """Length of the contiguous runs, and their offsets in the file, in bytes."""
        tensor, box = self.part.tensor, self.part.box
        container = tensor.shape
        if not self.whole:
            box, container = Box.whole(box.shape), box.shape
        run = run_numel(box, container)
        size = tensor.itemsize
        return run * size, [self.offset + o * size for o in run_offsets(box, container, run)]


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes in a save.

    Attributes:
        sets: without groups, which `recorded` adds.
        headers: of files of boxes the piece of the header that this rank writes, and at which byte.
            The rank that commits writes the headers of files of whole tensors.
    """

    sets: tuple[SetOfFiles, ...]
    chunks: tuple[PlannedChunk, ...]
    headers: dict[str, tuple[int, bytes]]

    @property
    def nbytes(self) -> int:
        return sum(c.part.box.numel * c.part.tensor.itemsize for c in self.chunks)

    def recorded(self, checksums: Iterable[Iterable[int]]) -> tuple[SetOfFiles, ...]:
        """The sets of files as the manifest lists them.

        Args:
            checksums: of the blocks of each chunk.
        """
        alike: list[dict[object, list[tuple[PlannedChunk, Iterable[int]]]]]
        alike = [{} for _ in self.sets]
        for chunk, sums in zip(self.chunks, checksums, strict=True):
            tensor, box = chunk.part.tensor, chunk.part.box
            key = ("" if chunk.whole else chunk.file, tensor.dtype, tensor.shape, box)
            alike[chunk.set_number].setdefault(key, []).append((chunk, sums))
        return tuple(
            replace(files, groups=tuple(map(_group, groups.values())))
            for files, groups in zip(self.sets, alike, strict=True)
        )


def _group(members: list[tuple[PlannedChunk, Iterable[int]]]) -> Group:
    first, _ = members[0]
    sums = [crc for _, of_chunk in members for crc in of_chunk]
    offsets = [] if first.whole else [chunk.offset for chunk, _ in members]
    return Group(
        file="" if first.whole else first.file,
        dtype=first.part.tensor.dtype,
        shape=first.part.tensor.shape,
        box=first.part.box,
        tensors=Ranges.of([chunk.position for chunk, _ in members]),
        offsets=struct.pack(f"<{len(offsets)}Q", *offsets),
        checksums=struct.pack(f"<{len(sums)}I", *sums),
    )


def plan_save(
    parts: Sequence[TensorPart],
    rank: int,
    ranks: tuple[int, ...],
    *,
    layout: str = "auto",
    max_file_bytes: int = MAX_FILE_BYTES,
    writers: Writers = Writers(),  # noqa: B008
) -> SavePlan:
    """Decide which bytes this rank writes where.

    Args:
        parts: what this rank holds, in an order that is the same on all ranks.
        rank, ranks: this rank, and all ranks of the save.
        layout: "shared": every rank writes its ranges of the final files; "per-rank": it writes
            files of boxes; "auto": shared, unless that would mean very many small ranges.
        writers: who writes the same file of boxes.
    """
    sets: list[SetOfFiles] = []
    chunks: list[PlannedChunk] = []
    headers: dict[str, tuple[int, bytes]] = {}
    for members in dict.fromkeys(part.ranks for part in parts):
        own = [part for part in parts if part.ranks == members]
        shared = layout == "shared" or (layout == "auto" and _suits_shared_files(own))
        if shared:
            files, places = _shared_files(own, members, ranks, max_file_bytes)
        else:
            group = writers.group(members, rank)
            files, places = _files_of_boxes(own, rank, group, ranks)
            for file, plan in files.items():
                headers[file] = _share(plan.header, group.index(rank), len(group))
        # Of equal shapes next to each other, so that a few ranges name the tensors of a group.
        ordered = sorted(own, key=lambda part: (part.kind, *part.tensor[1:]))
        positions = {(p.kind, p.tensor.name): position for position, p in enumerate(ordered)}
        for part in own:
            if part.writes and part.box.numel:
                key = part.kind, part.tensor.name
                chunks.append(
                    PlannedChunk(part, len(sets), positions[key], *places[key], whole=shared)
                )
        table = [
            (places[part.kind, part.tensor.name][0] if shared else part.kind, part.tensor)
            for part in ordered
            if rank == members[0]
        ]
        sets.append(
            SetOfFiles(
                Ranges.of(members),
                {file: plan.info for file, plan in files.items()},
                shared,
                _digest(files) if shared else _digest_of_tensors(own, writers),
                _texts(files) if shared and rank == members[0] else {},
                tuple(table),
            )
        )
    return SavePlan(tuple(sets), tuple(chunks), headers)


def _suits_shared_files(parts: Sequence[TensorPart]) -> bool:
    """Whether a rank's parts are few, or large, contiguous ranges of whole tensors.

    Small ranges are slow in shared files (on ext4, pieces of 4 KiB reach a fifth of full speed).
    """
    num_runs = num_bytes = 0
    for part in parts:
        if part.typical.numel:
            run = run_numel(part.typical, part.tensor.shape)
            num_runs += part.typical.numel // run
            num_bytes += part.typical.numel * part.tensor.itemsize
    return num_runs <= SHARED_MAX_RUNS or num_bytes >= num_runs * SHARED_MIN_RUN_BYTES


def _shared_files(
    parts: Sequence[TensorPart],
    members: tuple[int, ...],
    ranks: tuple[int, ...],
    max_file_bytes: int,
) -> tuple[dict[str, FilePlan], Places]:
    """Files of whole tensors, named as Hugging Face names them, and where each tensor is."""
    tag = ""
    if members != ranks:
        tag = f"-of-ranks-{hashlib.sha256(repr(members).encode()).hexdigest()[:8]}"
    files = {}
    for kind in ("model", "optim"):
        tensors = [part.tensor for part in parts if part.kind == kind]
        if not tensors:
            continue
        plans = plan_files(tensors, max_file_bytes)
        for i, plan in enumerate(plans):
            number = f"-{i + 1:05d}-of-{len(plans):05d}" if len(plans) > 1 else ""
            files[f"{kind}{tag}{number}.safetensors"] = plan
    return files, {
        (kind_of(file), tensor.name): (file, plan.offsets[tensor.name])
        for file, plan in files.items()
        for tensor in plan.tensors
    }


def _texts(files: dict[str, FilePlan]) -> dict[str, str]:
    return {file: plan.header for file, plan in files.items()}


def _files_of_boxes(
    parts: Sequence[TensorPart], rank: int, group: Sequence[int], ranks: tuple[int, ...]
) -> tuple[dict[str, FilePlan], Places]:
    """Files with the boxes that the ranks of a group write, and where this rank's boxes are.

    Boxes of a single rank have the names of their tensors. In files of several ranks there is one
    entry for a rank and dtype, so that each rank writes in a row, and the header stays small.
    """
    files: dict[str, FilePlan] = {}
    places: Places = {}
    alone = len(group) == 1
    of = f"rank-{rank:05d}" if alone else f"ranks-{group[0]:05d}-{group[-1]:05d}"
    if parts[0].ranks != ranks:
        of += f"-{hashlib.sha256(repr(parts[0].ranks).encode()).hexdigest()[:8]}"
    for kind in ("model", "optim"):
        of_kind = [part for part in parts if part.kind == kind]
        own = [part for part in of_kind if part.writes and part.box.numel]
        if alone:
            entries = [p.tensor._replace(shape=p.box.shape) for p in own]
        else:
            entries = _sections(of_kind, group)
        # Tensors without elements have no bytes to write: they only appear in a header.
        entries += [p.tensor for p in of_kind if not p.tensor.nbytes and p.ranks[0] in group]
        if not entries:
            continue
        file = f"{kind}-{of}.safetensors"
        plan = files[file] = plan_file(entries)
        filled: Counter[str] = Counter()  # bytes by dtype
        for part in own:
            name, dtype, _ = part.tensor
            entry = name if alone else section_of(rank, dtype, 0).name
            places[kind, name] = file, plan.offsets[entry] + filled[dtype]
            if not alone:
                filled[dtype] += part.box.numel * part.tensor.itemsize
        # What the other ranks leave room for: more would overwrite the bytes of the next one.
        room = {t.dtype: t.nbytes for t in entries if t.name == section_of(rank, t.dtype, 0).name}
        if not alone and filled != room:
            raise CheckpointError(
                f"Rank {rank} would write other bytes into {file} than the other ranks leave room "
                f"for: {dict(filled)}, not {room}. Save with layout='per-rank'"
            )
    return files, places


def _sections(parts: Sequence[TensorPart], group: Sequence[int]) -> list[TensorInfo]:
    """An entry for what each rank of a group writes of each dtype."""
    sections = []
    for rank in group:
        sizes: Counter[str] = Counter()
        for part in parts:
            assert part.written_by is not None
            sizes[part.tensor.dtype] += part.written_by(rank)
        sections += [section_of(rank, dtype, num) for dtype, num in sizes.items() if num]
    return sections


def _share(header: str, position: int, num: int) -> tuple[int, bytes]:
    """Where the piece of a header begins that one of ``num`` ranks writes, and the piece.

    As long as a piece is missing, zeros are in its place, which no reader accepts. The first one
    has the length before the JSON, the last one the spaces behind it.
    """
    framed, num_json = frame(header), len(header.encode())
    begin, end = (8 + num_json * at // num for at in (position, position + 1))
    begin = begin if position else 0
    return begin, framed[begin : end if position + 1 < num else None]


def _digest(files: dict[str, FilePlan]) -> str:
    content = [[file, plan.header, plan.size] for file, plan in files.items()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _digest_of_tensors(parts: Sequence[TensorPart], writers: Writers) -> str:
    tensors = [[p.kind, p.tensor.name, p.tensor.dtype, p.tensor.shape] for p in parts]
    content = [writers, tensors]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


class Progress:
    """How far a save has come; any thread may read it."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.written_bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.written_bytes += nbytes


class Writer:
    """Writes the chunks of a plan into the staging folder.

    Args:
        read: returns bytes ``start`` to ``stop`` of a part's local data, row-major, as a view
            that stays valid until the next call from the same thread.
    """

    def __init__(
        self,
        disk: Disk,
        plan: SavePlan,
        read: Callable[[TensorPart, int, int], memoryview],
        progress: Progress,
        *,
        num_threads: int = 2,
    ) -> None:
        self.disk = disk
        self.plan = plan
        self.read = read
        self.progress = progress
        self.num_threads = num_threads
        self._fds: dict[str, int] = {}

    def write(self, staging: int) -> list[list[int]]:
        """Write and fsync everything; returns the checksums of each chunk.

        A file of its final size whose ranges were never written reads as valid zeros. So headers,
        without which no reader accepts it, are written when the data is durable. Headers of files
        of boxes are written here, by each rank its share. The rank that commits writes the headers
        of files of whole tensors.
        """
        sizes = {file: info.size for s in self.plan.sets for file, info in s.files.items()}
        pool = ThreadPoolExecutor(max_workers=self.num_threads)
        syncing = ThreadPoolExecutor(max_workers=1)
        try:
            for file in sizes:
                self._fds[file] = self.disk.create(file, sizes[file], staging)
            results, syncs, since_sync = [], [], 0
            for chunk in self.plan.chunks:
                pieces = []
                for start, stop, ranges in _pieces(chunk):
                    pieces.append(submit(pool, self._write_piece, chunk, start, stop, ranges))
                    since_sync += stop - start
                results.append(pieces)
                if since_sync >= SYNC_BYTES:
                    since_sync = 0
                    # Only an early start. Pieces that are written later are made durable by the
                    # fsync of every file below.
                    wait_for = pieces[-1]
                    syncs.append(submit(syncing, self._sync_after, wait_for, chunk.file))
            # `result` raises what went wrong in a thread: no failed write may go unnoticed.
            checksums = [[crc for piece in pieces for crc in piece.result()] for pieces in results]
            for sync in syncs:
                sync.result()
            for file, fd in self._fds.items():
                self.disk.sync(fd, file)
            for file, (at, piece) in self.plan.headers.items():
                self.disk.write_at(self._fds[file], piece, at, f"header of {file}")
                self.disk.sync(self._fds[file], file)
        finally:
            pool.shutdown(cancel_futures=True)
            syncing.shutdown(cancel_futures=True)
            for fd in self._fds.values():
                self.disk.close(fd)
        return checksums

    def _write_piece(
        self, chunk: PlannedChunk, start: int, stop: int, ranges: list[tuple[int, int]]
    ) -> list[int]:
        data = self.read(chunk.part, start, stop)
        fd = self._fds[chunk.file]
        checksums = [crc32(data[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]
        done = 0
        for offset, nbytes in ranges:
            self.disk.write_at(fd, data[done : done + nbytes], offset, chunk.file)
            done += nbytes
        self.progress.add(len(data))
        return checksums

    def _sync_after(self, piece, file: str) -> None:
        piece.result()
        self.disk.start_sync(self._fds[file], file)


def _pieces(chunk: PlannedChunk):
    """Cut a chunk: (start, stop) in the bytes of its box, and ranges (offset, length) in the file.

    Every piece starts at a multiple of `BLOCK_BYTES`, so that no block of a checksum is cut.
    """
    run, offsets = chunk.runs()
    start, ranges, filled = 0, [], 0
    for offset in offsets:
        done = 0
        while done < run:
            nbytes = min(run - done, PIECE_BYTES - filled)
            ranges.append((offset + done, nbytes))
            done += nbytes
            filled += nbytes
            if filled == PIECE_BYTES:
                yield start, start + filled, ranges
                start, ranges, filled = start + filled, [], 0
    if filled:
        yield start, start + filled, ranges
