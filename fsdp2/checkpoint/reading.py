"""Reading an open checkpoint: bytes into tensors, and the comparing of checksums on the way.

Checksums are of blocks: of 1 MiB of what one rank wrote of one tensor. Whoever wants to compare has
to read whole blocks, which a rank's shard does so anyway, but for its ends. So `read_verified` goes
block by block: straight into the tensor where the block lies there in one piece, through a small
buffer where it does not. Nothing is read twice.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from .boxes import Box, boxes_of_range, offset, run_numel, run_offsets, span, strides
from .checksum import crc32
from .errors import CorruptCheckpoint
from .manifest import BLOCK_BYTES, Chunk
from .source import Extent, Source, Stored
from .tensors import DTYPES, memory_of

PIECE_BLOCKS = 4  # read by one task: as many bytes as stay in a processor's cache
STAGE_BYTES = PIECE_BLOCKS * BLOCK_BYTES  # read at once where bytes cannot go straight into place
DIRECT_RUN_BYTES = 32 << 10  # runs of at least this size are read straight into place
MAX_PENDING = 64  # tasks at a time: memory does not grow with the checkpoint


@dataclass(frozen=True)
class Target:
    """A tensor to fill: ``local`` is the ``box`` of the checkpoint's tensor ``stored``."""

    name: str
    stored: Stored
    box: Box
    local: Tensor

    @property
    def takes_bytes(self) -> bool:
        """Whether bytes of the file are bytes of the tensor."""
        local = self.local
        return (
            local.device.type == "cpu"
            and local.is_contiguous()
            and not (local.is_conj() or local.is_neg())
            and local.dtype == DTYPES[self.stored.info.dtype]
        )


def in_threads(tasks: Iterable[Callable[[], int]], num_threads: int) -> Iterator[int]:
    """Run tasks, a few at a time ahead of the caller; after an error no more are started."""
    tasks = iter(tasks)
    pending: deque[Future[int]] = deque()
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        try:
            while True:
                for task in islice(tasks, MAX_PENDING - len(pending)):
                    pending.append(pool.submit(task))
                if not pending:
                    return
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


# -- blocks with checksums ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """Consecutive blocks of a chunk.

    Attributes:
        offsets: of the chunk's runs in its file, each ``run`` bytes long.
    """

    chunk: Chunk
    numbers: range
    offsets: Sequence[int]
    run: int

    @property
    def start(self) -> int:
        """Of their bytes in the chunk's."""
        return self.numbers.start * BLOCK_BYTES

    @property
    def stop(self) -> int:
        return min(self.numbers.stop * BLOCK_BYTES, self.chunk.nbytes)


def _blocks_of(stored: Stored, box: Box) -> Iterator[_Blocks]:
    """Every block that has a byte of ``box``, in pieces."""
    for chunk in stored.chunks:
        common = box.intersect(chunk.box)
        if common is None:
            continue
        size = chunk.tensor.itemsize
        extent = next(e for e in stored.extents if e.file == chunk.file and _holds(e, chunk))
        container = extent.box.shape
        run = run_numel(chunk.box, container)
        within = chunk.box.relative_to(extent.box)
        offsets = [extent.offset + o * size for o in run_offsets(within, container, run)]
        inside = common.relative_to(chunk.box)
        own_run = run_numel(inside, chunk.box.shape)
        blocks: set[int] = set()
        for start in run_offsets(inside, chunk.box.shape, own_run):
            blocks.update(
                range(
                    start * size // BLOCK_BYTES,
                    -(-(start + own_run) * size // BLOCK_BYTES),
                )
            )
        for numbers in _consecutive(blocks):
            for first in range(numbers.start, numbers.stop, PIECE_BLOCKS):
                part = range(first, min(first + PIECE_BLOCKS, numbers.stop))
                yield _Blocks(chunk, part, offsets, run * size)


def _holds(extent: Extent, chunk: Chunk) -> bool:
    return extent.box.intersect(chunk.box) == chunk.box


def _consecutive(numbers: set[int]) -> Iterator[range]:
    """Consecutive numbers as ranges."""
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


def _read_blocks(source: Source, blocks: _Blocks, out: memoryview) -> int:
    """Fill ``out`` with blocks, and compare each while it is in the processor's cache."""
    for number in blocks.numbers:
        start = number * BLOCK_BYTES
        data = out[start - blocks.start :][: min(BLOCK_BYTES, blocks.chunk.nbytes - start)]
        done = 0
        while done < len(data):  # once, unless the chunk lies in the file in several runs
            index, inside = divmod(start + done, blocks.run)
            num = min(blocks.run - inside, len(data) - done)
            source.read(blocks.chunk.file, data[done : done + num], blocks.offsets[index] + inside)
            done += num
        _compare(source, blocks.chunk, number, data)
    return len(out)


def _compare(source: Source, chunk: Chunk, number: int, data: memoryview) -> None:
    if crc32(data) != chunk.checksums[number]:
        raise CorruptCheckpoint(
            f"{source.path}/{chunk.file}: the checksum of tensor '{chunk.tensor.name}' is "
            f"wrong in block {number} of {len(chunk.checksums)} (of 1 MiB, counted in the "
            f"box at {list(chunk.box.start)} of shape {list(chunk.box.shape)})"
        )


class _Buffers(threading.local):
    """Memory of each thread, which stays in the processor's cache."""

    def __init__(self) -> None:
        self.tensor = torch.empty(STAGE_BYTES, dtype=torch.uint8)
        self.memory = memory_of(self.tensor)


def verify_boxes(
    source: Source,
    wanted: Iterable[tuple[Stored, Box]],
    num_threads: int = 2,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Compare checksums of every block that these boxes touch; returns the bytes read.

    Args:
        on_bytes: called in this thread with how many more bytes were found right.

    Raises:
        CorruptCheckpoint: naming the tensor and the block that differs.
    """
    buffers = _Buffers()

    def task(blocks: _Blocks) -> int:
        # Every block to the same place: memory that the processor has in its cache.
        for number in blocks.numbers:
            block = _Blocks(blocks.chunk, range(number, number + 1), blocks.offsets, blocks.run)
            _read_blocks(source, block, buffers.memory[: block.stop - block.start])
        return blocks.stop - blocks.start

    tasks = (partial(task, blocks) for stored, box in wanted for blocks in _blocks_of(stored, box))
    total = 0
    for num in in_threads(tasks, num_threads):
        total += num
        if on_bytes is not None:
            on_bytes(num)
    return total


def read_verified(source: Source, targets: Sequence[Target], num_threads: int = 2) -> None:
    """Fill all targets from a checkpoint with checksums, and compare them: one pass.

    Raises:
        CorruptCheckpoint: naming the tensor and the block that differs. Targets hold part of the
            checkpoint then, the wrong block perhaps too.
    """
    for target in targets:
        _check_covered(source, target)
    buffers = _Buffers()
    tasks = (task for target in targets for task in _verified_tasks(source, target, buffers))
    try:
        for _ in in_threads(tasks, num_threads):
            pass
    finally:
        _note_written(targets)


def _check_covered(source: Source, target: Target) -> None:
    """What no chunk has would stay as it is."""
    boxes = [target.box.intersect(chunk.box) for chunk in target.stored.chunks]
    covered = sum(box.numel for box in boxes if box is not None)
    if covered != target.box.numel:
        raise CorruptCheckpoint(
            f"{source.path}: the checksums of '{target.name}' are of {covered} elements, of the "
            f"{target.box.numel} that are needed"
        )


def _verified_tasks(
    source: Source, target: Target, buffers: _Buffers
) -> Iterator[Callable[[], int]]:
    place = _Places(target) if target.takes_bytes else None
    for blocks in _blocks_of(target.stored, target.box):
        out = place.of(blocks) if place is not None else None
        if out is not None:
            yield partial(_read_blocks, source, blocks, out)
        else:
            yield partial(_read_and_copy, source, blocks, target, buffers)


class _Places:
    """Where in a target's memory blocks lie, as far as they lie there in one piece."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._memory = memory_of(target.local)
        self._chunk: Chunk | None = None
        self._run = 0
        self._froms: list[int] = []
        self._tos: list[int] = []

    def of(self, blocks: _Blocks) -> memoryview | None:
        """The memory of ``blocks``; None if it is not one piece, or not all theirs."""
        if blocks.chunk is not self._chunk:
            self._chunk = blocks.chunk
            self._find_runs(blocks.chunk)
        index = bisect_right(self._froms, blocks.start) - 1
        if index < 0 or blocks.stop > self._froms[index] + self._run:
            return None
        first = self._tos[index] + blocks.start - self._froms[index]
        return self._memory[first : first + blocks.stop - blocks.start]

    def _find_runs(self, chunk: Chunk) -> None:
        """The runs of what chunk and target share, in both, in bytes."""
        box, size = self._target.box, chunk.tensor.itemsize
        common = box.intersect(chunk.box)
        assert common is not None
        inside, dest = common.relative_to(chunk.box), common.relative_to(box)
        run = min(run_numel(inside, chunk.box.shape), run_numel(dest, box.shape))
        self._run, self._froms, self._tos = run * size, [], []
        if run * size >= BLOCK_BYTES or run == common.numel:  # others have no whole block
            self._froms = [o * size for o in run_offsets(inside, chunk.box.shape, run)]
            self._tos = [o * size for o in run_offsets(dest, box.shape, run)]


def _read_and_copy(source: Source, blocks: _Blocks, target: Target, buffers: _Buffers) -> int:
    """Through a buffer: of blocks that are not all the target's, or in another form."""
    num_bytes = blocks.stop - blocks.start
    _read_blocks(source, blocks, buffers.memory[:num_bytes])
    chunk = blocks.chunk
    size = chunk.tensor.itemsize
    first = blocks.start // size
    values = buffers.tensor[:num_bytes].view(DTYPES[chunk.tensor.dtype])
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
    return num_bytes


def _narrow(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, num) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, num)
    return tensor


def _note_written(targets: Iterable[Target]) -> None:
    for target in targets:
        if target.local.numel():
            # Bytes that were written behind autograd's back: what was gathered is out of date.
            torch.autograd.graph.increment_version(target.local)


# -- without checksums --------------------------------------------------------------------------


def read_into(source: Source, targets: Sequence[Target], num_threads: int = 2) -> None:
    """Fill all targets, comparing nothing. Dtypes may differ; shapes have been checked."""
    tasks = [
        task
        for target in targets
        for extent in target.stored.extents
        for task in _plain_tasks(source, target, extent)
    ]
    try:
        if len(tasks) == 1:  # a piece of a stream: not worth threads
            tasks[0]()
        else:
            for _ in in_threads(tasks, num_threads):
                pass
    finally:
        _note_written(targets)


def _plain_tasks(source: Source, target: Target, extent: Extent) -> Iterator[Callable[[], int]]:
    """What to do to fill the part of ``target`` that lies in ``extent``."""
    common = target.box.intersect(extent.box)
    if common is None:
        return
    size = target.stored.info.itemsize
    inside, dest = common.relative_to(extent.box), common.relative_to(target.box)
    run = min(
        run_numel(inside, extent.box.shape),
        run_numel(dest, target.box.shape),
    )
    if target.takes_bytes and (run * size >= DIRECT_RUN_BYTES or run == common.numel):
        froms = run_offsets(inside, extent.box.shape, run)
        tos = run_offsets(dest, target.box.shape, run)
        memory = memory_of(target.local)
        for a, b in zip(froms, tos, strict=True):
            for first in range(0, run * size, STAGE_BYTES):
                num = min(STAGE_BYTES, run * size - first)
                out = memory[b * size + first : b * size + first + num]
                yield partial(source.read, extent.file, out, extent.offset + a * size + first)
        return
    for piece in inside.pieces(max(1, STAGE_BYTES // size), extent.box.shape):
        yield partial(_read_staged, source, target, extent, piece)


def _read_staged(source: Source, target: Target, extent: Extent, piece: Box) -> int:
    """Read all from the first to the last element of ``piece``, and copy what belongs to it."""
    container = extent.box.shape
    size = target.stored.info.itemsize
    data = bytearray(span(piece, container) * size)
    source.read(extent.file, memoryview(data), extent.offset + offset(piece, container) * size)
    flat = torch.frombuffer(data, dtype=DTYPES[target.stored.info.dtype])
    values = flat.as_strided(piece.shape, strides(container))
    start = tuple(a + b for a, b in zip(piece.start, extent.box.start, strict=True))
    with torch.no_grad():
        _narrow(target.local, Box(start, piece.shape).relative_to(target.box)).copy_(values)
    return len(data)
