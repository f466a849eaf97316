"""The threads that read: tasks on ranges of files, and a reader for each thread.

Each thread reads its own stretch, in file order and through its own descriptor, because the
system's readahead follows a descriptor: two threads that took turns on one descriptor were a third
slower (two processes, one file, nothing cached).

Where ranks have no cores to spare, threads only help to wait for the disk. What is in the page
cache is then read by the calling thread: four threads on one core took half as long again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.host import num_cores
from ...dtensor.placement import ranks_of_host
from ..format.checksum import crc32
from ..format.manifest import BLOCK_BYTES
from .source import Source

STAGE_BYTES = 4 * BLOCK_BYTES  # buffer for bytes that cannot go straight into place
STEP_BYTES = 256 << 10  # between two looks at a checksum: they are still in the core's own cache
MAX_PENDING = 1024  # tasks at a time, of up to `STAGE_BYTES` each
NUM_THREADS = 4


class Stream:
    """One thread's reader: a buffer, and its own descriptor, so that it has its own readahead.

    Args:
        shared: use the source's descriptor instead; for callers that read piece after piece.
    """

    def __init__(self, source: Source, *, shared: bool = False) -> None:
        self.source = source
        self._shared = shared
        self._file = ""
        self._fd = -1
        self._buffer: Tensor | None = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read(self, file: str, out: memoryview, offset: int) -> None:
        """Read as `Source.read` does."""
        fd = self._descriptor(file)
        for first in range(0, len(out), BLOCK_BYTES):
            self.source.read(file, out[first : first + BLOCK_BYTES], offset + first, fd)

    def read_summed(self, file: str, out: memoryview, offset: int, sum_before: int = 0) -> int:
        """The same; returns the CRC32 of what came before, whose own is given, and of this."""
        fd, read = self._descriptor(file), self.source.read
        if len(out) <= STEP_BYTES:
            read(file, out, offset, fd)
            return crc32(out, sum_before)
        for first in range(0, len(out), STEP_BYTES):
            part = out[first : first + STEP_BYTES]
            read(file, part, offset + first, fd)
            sum_before = crc32(part, sum_before)
        return sum_before

    def _descriptor(self, file: str) -> int | None:
        if self._shared:
            return None
        if file != self._file:
            self.__exit__()
            self._file, self._fd = file, self.source.reopen(file)
        return self._fd

    def buffer(self, num_bytes: int) -> Tensor:
        """Memory that stays in the processor's cache; the same memory at every call."""
        if self._buffer is None:
            self._buffer = torch.empty(STAGE_BYTES, dtype=torch.uint8, device="cpu")
        return self._buffer[:num_bytes]


class ReadTask(NamedTuple):
    """A task on a range of a file's bytes.

    Attributes:
        place: the file and the first byte, if the page cache may be asked for it.
    """

    num_bytes: int
    run: Callable[[Stream], object]
    place: tuple[str, int] | None = None


def in_threads(source: Source, tasks: Iterable[ReadTask], num_threads: int) -> Iterator[int]:
    """Run tasks, a stretch of consecutive ones per thread; yields the bytes of each finished task.

    Memory does not grow with the checkpoint. After an error, no further task starts.
    """
    tasks = iter(tasks)
    if cores_of_rank() < 2:
        tasks = yield from _while_cached(source, tasks)
    batch = list(islice(tasks, MAX_PENDING))
    if len(batch) == 1:
        batch[0].run(Stream(source, shared=True))
        yield batch[0].num_bytes
        return
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        while batch:
            done: SimpleQueue[int | BaseException] = SimpleQueue()
            stop = threading.Event()
            try:
                for stretch in _stretches(batch, num_threads):
                    pool.submit(_run_stretch, source, stretch, done, stop)
                for _ in batch:
                    result = done.get()
                    if isinstance(result, BaseException):
                        raise result
                    yield result
            finally:
                stop.set()
            batch = list(islice(tasks, MAX_PENDING))


def cores_of_rank() -> int:
    """How many cores each rank of this host has."""
    return num_cores() // max(1, ranks_of_host())


def _while_cached(
    source: Source, tasks: Iterator[ReadTask]
) -> Generator[int, None, Iterator[ReadTask]]:
    """Run tasks in this thread, up to the first that has to wait for the disk; returns the rest."""
    stream = Stream(source, shared=True)
    for task in tasks:
        if task.place is None or not source.is_cached(*task.place):
            return chain([task], tasks)
        task.run(stream)
        yield task.num_bytes
    return tasks


def _stretches(tasks: Sequence[ReadTask], num: int) -> list[list[ReadTask]]:
    """Cut into ``num`` stretches with about the same number of bytes."""
    total = max(1, sum(task.num_bytes for task in tasks))
    parts: list[list[ReadTask]] = [[] for _ in range(num)]
    before = 0
    for task in tasks:
        parts[min(num - 1, before * num // total)].append(task)
        before += task.num_bytes
    return [part for part in parts if part]


def _run_stretch(
    source: Source,
    stretch: Sequence[ReadTask],
    done: SimpleQueue[int | BaseException],
    stop: threading.Event,
) -> None:
    try:
        with Stream(source) as stream:
            for task in stretch:
                if stop.is_set():
                    return
                task.run(stream)
                done.put(task.num_bytes)
    except BaseException as error:
        stop.set()
        done.put(error)
