"""Reads an open checkpoint's bytes into tensors and verifies checksums on the way.

A checksum covers a block: 1 MiB of what one rank wrote of one tensor. Verification reads whole
blocks; a rank's shard consists of whole blocks except at its ends. So `read_verified` goes block by
block: straight into the tensor where the block is contiguous there, otherwise through a small
buffer. Nothing is read twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.memory import memory_of
from ...dtensor.boxes import Box, boxes_of_range, offset, run_numel, run_offsets, span, strides
from ..errors import CorruptCheckpoint
from ..format.manifest import BLOCK_BYTES, Chunk
from ..format.tensors import DTYPES
from .source import Extent, Source, Stored
from .tasks import MAX_PENDING, NUM_THREADS, STAGE_BYTES, ReadTask, Stream, in_threads

PIECE_BLOCKS = STAGE_BYTES // BLOCK_BYTES  # read by one task
DIRECT_RUN_BYTES = 32 << 10  # runs of at least this size are read straight into place
MAX_SMALL = 64  # chunks of one block that one task reads: a task costs what two of them do


class Target(NamedTuple):
    """A tensor to fill: ``local`` is the ``box`` of the checkpoint's tensor ``stored``."""

    name: str
    stored: Stored
    box: Box
    local: Tensor

    @property
    def takes_bytes(self) -> bool:
        """Whether the bytes of the file can be read into the tensor's memory as they are."""
        local = self.local
        return (
            local.device.type == "cpu"
            and local.is_contiguous()
            and not (local.is_conj() or local.is_neg())
            and local.dtype == DTYPES[self.stored.info.dtype]
        )


# -- blocks with checksums ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """Consecutive blocks of a chunk.

    Attributes:
        first: first byte of the chunk's extent in its file.
        layout: where the bytes of the chunk are from there on.
    """

    chunk: Chunk
    numbers: range
    first: int
    layout: _Layout

    @property
    def start(self) -> int:
        """First byte, counted in the chunk."""
        return self.numbers.start * BLOCK_BYTES

    @property
    def stop(self) -> int:
        return min(self.numbers.stop * BLOCK_BYTES, self.chunk.nbytes)

    @property
    def place(self) -> tuple[str, int]:
        """The file, and where in it the first byte is."""
        index, inside = divmod(self.start, self.layout.run)
        return self.chunk.file, self.first + self.layout.offsets[index] + inside


class _Layout:
    """Where the bytes of a chunk are in its file, and those that a box shares with it in the box.

    Shapes alone decide it, and layers repeat shapes: `_Planner` makes it once for all of them.

    Attributes:
        numel: elements that the box shares with the chunk.
        run, offsets: length of the chunk's contiguous runs and their offsets from the first byte
            of the extent.
        own_run, froms, tos: runs that are contiguous in both chunk and box: their length, and their
            offsets there and here. None are listed if they are shorter than a block.
        pieces: numbers of consecutive blocks that contain a byte of the box, a few at a time.
        is_small: the chunk is one block, which lies in the file in one run.
        to: first byte in the box, if a small chunk lies there as a whole and in one run, else None.
    """

    def __init__(self, of_chunk: Box, of_extent: Box, box: Box, size: int) -> None:
        common = box.intersect(of_chunk)
        assert common is not None
        self.numel = common.numel
        run = run_numel(of_chunk, of_extent.shape)
        within = of_chunk.relative_to(of_extent)
        self.run = run * size
        self.offsets = [o * size for o in run_offsets(within, of_extent.shape, run)]
        inside, dest = common.relative_to(of_chunk), common.relative_to(box)
        own_run = run_numel(inside, of_chunk.shape)
        self.pieces = list(_pieces(run_offsets(inside, of_chunk.shape, own_run), own_run, size))
        run = min(own_run, run_numel(dest, box.shape))
        self.own_run = run * size
        self.froms: list[int] = []
        self.tos: list[int] = []
        if run * size >= BLOCK_BYTES or run == common.numel:  # shorter runs hold no whole block
            self.froms = [o * size for o in run_offsets(inside, of_chunk.shape, run)]
            self.tos = [o * size for o in run_offsets(dest, box.shape, run)]
        self.is_small = self.run == of_chunk.numel * size <= BLOCK_BYTES
        in_one = self.is_small and self.own_run == self.run and self.froms == [0]
        self.to = self.tos[0] if in_one else None


def _pieces(offsets: Iterable[int], run: int, size: int) -> Iterator[range]:
    """Numbers of the blocks that runs of ``run`` elements touch, at most `PIECE_BLOCKS` each."""
    numbers: set[int] = set()
    for start in offsets:
        numbers.update(range(start * size // BLOCK_BYTES, -(-(start + run) * size // BLOCK_BYTES)))
    for part in _consecutive(numbers):
        for first in range(part.start, part.stop, PIECE_BLOCKS):
            yield range(first, min(first + PIECE_BLOCKS, part.stop))


class _Needed(NamedTuple):
    """A chunk that overlaps a box of the tensor, and the extent of its file that holds it.

    Attributes:
        place: file and first byte: the order of reading, front to back.
    """

    chunk: Chunk
    extent: Extent
    layout: _Layout
    place: tuple[str, int]

    def blocks(self) -> Iterator[_Blocks]:
        """All blocks that contain a byte of the box, a few at a time."""
        for numbers in self.layout.pieces:
            yield _Blocks(self.chunk, numbers, self.extent.offset, self.layout)


class _Planner:
    """Finds what is needed for boxes of tensors; remembers layouts for one load."""

    def __init__(self) -> None:
        self._layout = lru_cache(MAX_PENDING)(_Layout)

    def needed(self, stored: Stored, box: Box) -> Iterator[_Needed]:
        """The chunks of a tensor that overlap ``box``."""
        for chunk, extent in stored.near(box):
            layout = self._layout(chunk.box, extent.box, box, chunk.tensor.itemsize)
            place = chunk.file, extent.offset + layout.offsets[0]
            yield _Needed(chunk, extent, layout, place)


def _consecutive(numbers: set[int]) -> Iterator[range]:
    """The numbers as ranges of consecutive ones."""
    start = previous = None
    for number in sorted(numbers):
        if previous is not None and number != previous + 1:
            yield range(start, previous + 1)  # type: ignore[arg-type]
            start = None
        if start is None:
            start = number
        previous = number
    if previous is not None:
        yield range(start, previous + 1)  # type: ignore[arg-type]


def _read_blocks(blocks: _Blocks, out: memoryview, stream: Stream) -> None:
    """Fill ``out`` with blocks, verifying each while it is in the processor's cache."""
    for number in blocks.numbers:
        start = number * BLOCK_BYTES
        _read_block(blocks, number, out[start - blocks.start :], stream)


def _read_and_drop(blocks: _Blocks, stream: Stream) -> None:
    """Verify blocks, reading all of them into the same buffer."""
    memory = memory_of(stream.buffer(BLOCK_BYTES))
    for number in blocks.numbers:
        _read_block(blocks, number, memory, stream)


def _read_block(blocks: _Blocks, number: int, out: memoryview, stream: Stream) -> None:
    chunk, layout, start = blocks.chunk, blocks.layout, number * BLOCK_BYTES
    data = out[: min(BLOCK_BYTES, chunk.nbytes - start)]
    done = found = 0
    while done < len(data):  # once, unless the chunk lies in the file in several runs
        index, inside = divmod(start + done, layout.run)
        num = min(layout.run - inside, len(data) - done)
        first = blocks.first + layout.offsets[index]
        found = stream.read_summed(chunk.file, data[done : done + num], first + inside, found)
        done += num
    _compare(stream.source, chunk, number, found)


def _compare(source: Source, chunk: Chunk, number: int, found: int) -> None:
    if found != chunk.checksums[number]:
        raise CorruptCheckpoint(
            f"{source.path}/{chunk.file}: the checksum of tensor '{chunk.tensor.name}' is "
            f"wrong in block {number} of {len(chunk.checksums)} (of 1 MiB, counted in the "
            f"box at {list(chunk.box.start)} of shape {list(chunk.box.shape)})"
        )


class _Small(NamedTuple):
    """A chunk of one block, which lies in the file from byte ``start`` on.

    Attributes:
        out: where it goes; None if it is only verified.
    """

    chunk: Chunk
    start: int
    out: memoryview | None


class _SmallTasks:
    """Collects small chunks in the order of their files, for tasks that read several.

    A model of many small tensors has as many chunks. A task for each one would cost more than
    reading it: Python takes time for a task, and threads take turns for it.
    """

    def __init__(self) -> None:
        self._smalls: list[_Small] = []
        self._num_bytes = 0

    def add(self, small: _Small) -> Iterator[ReadTask]:
        """Yields a task when there is enough for one."""
        self._smalls.append(small)
        self._num_bytes += small.chunk.nbytes
        if self._num_bytes >= STAGE_BYTES or len(self._smalls) == MAX_SMALL:
            yield from self.rest()

    def rest(self) -> Iterator[ReadTask]:
        """Yields a task for what is left, if anything is."""
        smalls, num_bytes = self._smalls, self._num_bytes
        self._smalls, self._num_bytes = [], 0
        if smalls:
            place = smalls[0].chunk.file, smalls[0].start
            yield ReadTask(num_bytes, partial(_read_smalls, smalls), place)


def _read_smalls(smalls: Sequence[_Small], stream: Stream) -> None:
    memory: memoryview | None = None
    for small in smalls:
        chunk, data = small.chunk, small.out
        if data is None:
            if memory is None:
                memory = memory_of(stream.buffer(BLOCK_BYTES))
            data = memory[: chunk.nbytes]
        found = stream.read_summed(chunk.file, data, small.start)
        _compare(stream.source, chunk, 0, found)


def verify_boxes(
    source: Source,
    wanted: Iterable[tuple[Stored, Box]],
    num_threads: int = NUM_THREADS,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Compare the checksums of all blocks that these boxes touch; returns the bytes read.

    Args:
        on_bytes: called in this thread with the number of further bytes that are right.

    Raises:
        CorruptCheckpoint: naming the tensor and the block that differs.
    """
    planner = _Planner()
    needed = [each for stored, box in wanted for each in planner.needed(stored, box)]
    needed.sort(key=attrgetter("place"))
    total = 0
    for num in in_threads(source, _verifying_tasks(needed), num_threads):
        total += num
        if on_bytes is not None:
            on_bytes(num)
    return total


def _verifying_tasks(needed: Sequence[_Needed]) -> Iterator[ReadTask]:
    small = _SmallTasks()
    for each in needed:
        if each.layout.is_small:
            yield from small.add(_Small(each.chunk, each.place[1], None))
            continue
        yield from small.rest()
        for blocks in each.blocks():
            run = partial(_read_and_drop, blocks)
            yield ReadTask(blocks.stop - blocks.start, run, blocks.place)
    yield from small.rest()


def read_verified(
    source: Source, targets: Sequence[Target], num_threads: int = NUM_THREADS
) -> None:
    """Fill all targets and compare checksums, in one pass.

    Raises:
        CorruptCheckpoint: naming the tensor and the block that differs. The targets then hold part
            of the checkpoint, possibly including the wrong block.
    """
    planner = _Planner()
    needed: list[tuple[_Needed, Target]] = []
    for target in targets:
        found = list(planner.needed(target.stored, target.box))
        _check_covered(source, target, found)
        needed += [(each, target) for each in found]
    needed.sort(key=lambda pair: pair[0].place)
    _fill(source, targets, _filling_tasks(needed), num_threads)


def _check_covered(source: Source, target: Target, needed: Sequence[_Needed]) -> None:
    """Refuse a target that the chunks do not cover: the rest would keep its old values."""
    covered = sum(each.layout.numel for each in needed)
    if covered != target.box.numel:
        raise CorruptCheckpoint(
            f"{source.path}: the checksums of '{target.name}' are of {covered} elements, of the "
            f"{target.box.numel} that are needed"
        )


def _filling_tasks(needed: Iterable[tuple[_Needed, Target]]) -> Iterator[ReadTask]:
    small = _SmallTasks()
    for each, target in needed:
        memory = memory_of(target.local) if target.takes_bytes else None
        to = each.layout.to
        if memory is not None and to is not None:
            out = memory[to : to + each.chunk.nbytes]
            yield from small.add(_Small(each.chunk, each.place[1], out))
        else:
            yield from small.rest()
            yield from _verified_tasks(each, target, memory)
    yield from small.rest()


def _verified_tasks(
    needed: _Needed, target: Target, memory: memoryview | None
) -> Iterator[ReadTask]:
    for blocks in needed.blocks():
        out = _place_of(blocks, memory) if memory is not None else None
        if out is not None:
            yield ReadTask(len(out), partial(_read_blocks, blocks, out), blocks.place)
        else:
            run = partial(_read_and_copy, blocks, target)
            yield ReadTask(blocks.stop - blocks.start, run, blocks.place)


def _place_of(blocks: _Blocks, memory: memoryview) -> memoryview | None:
    """The memory for ``blocks``; None if it is not contiguous, or the target lacks a part."""
    layout, start = blocks.layout, blocks.start
    index = bisect_right(layout.froms, start) - 1
    if index < 0 or blocks.stop > layout.froms[index] + layout.own_run:
        return None
    first = layout.tos[index] + start - layout.froms[index]
    return memory[first : first + blocks.stop - start]


def _read_and_copy(blocks: _Blocks, target: Target, stream: Stream) -> None:
    """Read through a buffer: blocks that the target has only in part, or in another form."""
    buffer = stream.buffer(blocks.stop - blocks.start)
    _read_blocks(blocks, memory_of(buffer), stream)
    chunk = blocks.chunk
    size = chunk.tensor.itemsize
    first = blocks.start // size
    values = buffer.view(DTYPES[chunk.tensor.dtype])
    for box in boxes_of_range(chunk.box.shape, first, blocks.stop // size):
        start = offset(box, chunk.box.shape) - first
        part = values[start : start + box.numel].view(box.shape)
        there = Box(tuple(map(sum, zip(box.start, chunk.box.start, strict=True))), box.shape)
        common = there.intersect(target.box)
        if common is not None:
            with torch.no_grad():
                _narrow(target.local, common.relative_to(target.box)).copy_(
                    _narrow(part, common.relative_to(there))
                )


def _narrow(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, num) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, num)
    return tensor


def _fill(
    source: Source, targets: Sequence[Target], tasks: Iterable[ReadTask], num_threads: int
) -> None:
    try:
        for _ in in_threads(source, tasks, num_threads):
            pass
    finally:
        _note_written(targets)


def _note_written(targets: Iterable[Target]) -> None:
    # Autograd did not see the writes, so whatever was gathered before is out of date.
    written = [target.local for target in targets if target.local.numel()]
    torch.autograd.graph.increment_version(written)


# -- without checksums --------------------------------------------------------------------------


def read_into(source: Source, targets: Sequence[Target], num_threads: int = NUM_THREADS) -> None:
    """Fill all targets without verifying. Dtypes may differ; shapes have been checked."""
    pairs = [(e, target) for target in targets for e in target.stored.extents_near(target.box)]
    pairs.sort(key=lambda pair: (pair[0].file, pair[0].offset))
    layout = lru_cache(MAX_PENDING)(_PlainLayout)
    tasks = (task for extent, target in pairs for task in _plain_tasks(target, extent, layout))
    _fill(source, targets, tasks, num_threads)


class _PlainLayout:
    """Where a box lies in an extent of a file, made once for all tensors of these shapes.

    Attributes:
        inside: the box in the extent, as far as it is there; None if it is elsewhere.
        run, froms, tos: as ``own_run`` and so on of `_Layout`; none are listed if they are short.
    """

    def __init__(self, of_extent: Box, box: Box, size: int) -> None:
        self.inside: Box | None = None
        self.run = 0
        self.froms: list[int] = []
        self.tos: list[int] = []
        common = box.intersect(of_extent)
        if common is None:
            return
        self.inside, dest = common.relative_to(of_extent), common.relative_to(box)
        run = min(run_numel(self.inside, of_extent.shape), run_numel(dest, box.shape))
        if run * size >= DIRECT_RUN_BYTES or run == common.numel:
            self.run = run * size
            self.froms = [o * size for o in run_offsets(self.inside, of_extent.shape, run)]
            self.tos = [o * size for o in run_offsets(dest, box.shape, run)]


def _plain_tasks(
    target: Target, extent: Extent, layout_of: Callable[[Box, Box, int], _PlainLayout]
) -> Iterator[ReadTask]:
    """The tasks that fill the part of ``target`` that is in ``extent``."""
    size = target.stored.info.itemsize
    layout = layout_of(extent.box, target.box, size)
    if layout.inside is None:
        return
    if target.takes_bytes and layout.froms:
        memory = memory_of(target.local)
        for from_, to in zip(layout.froms, layout.tos, strict=True):
            for first in range(0, layout.run, STAGE_BYTES):
                num = min(STAGE_BYTES, layout.run - first)
                out = memory[to + first : to + first + num]
                start = extent.offset + from_ + first
                run = partial(_read_straight, extent.file, out, start)
                yield ReadTask(num, run, (extent.file, start))
        return
    for piece in layout.inside.pieces(max(1, STAGE_BYTES // size), extent.box.shape):
        start = extent.offset + offset(piece, extent.box.shape) * size
        run = partial(_read_staged, target, extent, piece)
        yield ReadTask(piece.numel * size, run, (extent.file, start))


def _read_straight(file: str, out: memoryview, start: int, stream: Stream) -> None:
    stream.read(file, out, start)


def _read_staged(target: Target, extent: Extent, piece: Box, stream: Stream) -> None:
    """Read from the first to the last element of ``piece``, and copy the elements of ``piece``."""
    container = extent.box.shape
    size = target.stored.info.itemsize
    buffer = stream.buffer(span(piece, container) * size)
    stream.read(extent.file, memory_of(buffer), extent.offset + offset(piece, container) * size)
    flat = buffer.view(DTYPES[target.stored.info.dtype])
    values = flat.as_strided(piece.shape, strides(container))
    start = tuple(a + b for a, b in zip(piece.start, extent.box.start, strict=True))
    with torch.no_grad():
        _narrow(target.local, Box(start, piece.shape).relative_to(target.box)).copy_(values)
