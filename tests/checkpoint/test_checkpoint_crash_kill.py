"""Processes are killed at random moments of a save: any checkpoint found afterwards is complete."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from torch import Tensor

from checkpoint_crash import (
    LAYOUTS,
    NAME,
    Before,
    committed,
    exits,
    fork,
    leftovers,
    make_job,
    memory_folder,
    tensors,
)
from fsdp2.checkpoint import CheckpointExists
from fsdp2.checkpoint.saving.job import SaveHandle
from harness import ours_only

pytestmark = ours_only("checkpoints")

ROWS = 100_000  # 2 MB of weights, 2 MB of optimizer state
NUM_RANKS = 2
EXISTS = 17  # a process found another checkpoint under the name


class Processes:
    """One process per rank, which save; they start together, and note their calls."""

    def __init__(self, root: Path, whole: dict[str, Tensor], attempt: int, layout: str) -> None:
        self.options = {
            "attempt": attempt, "seed": attempt, "whole": whole, "layout": layout,
            "max_file_bytes": 1 << 20, "num_threads": 2,
        }  # fmt: skip
        self.root = root
        self._notes = mmap.mmap(-1, 16 * NUM_RANKS)
        waits, self._go = os.pipe()
        self.pids = [fork(self._body(rank, waits)) for rank in range(NUM_RANKS)]
        os.close(waits)

    def _body(self, rank: int, waits: int) -> Callable[[], None]:
        def body() -> None:
            os.close(self._go)
            job = make_job(self.root, rank, before=self._counter(rank), **self.options)
            os.read(waits, 1)
            try:
                job.begin()
                handle = SaveHandle(job, None)
                handle._run()
                handle.wait_committed(0.05)
            except TimeoutError:
                pass
            except CheckpointExists:
                os._exit(EXISTS)

        return body

    def _counter(self, rank: int) -> Before:
        num = 0

        def before(call: str, operand: str) -> None:
            nonlocal num
            num += 1
            struct.pack_into("qd", self._notes, 16 * rank, num, time.monotonic())

        return before

    def calls(self, rank: int) -> int:
        return struct.unpack_from("q", self._notes, 16 * rank)[0]

    def last_call(self) -> float:
        """When it was."""
        return max(struct.unpack_from("d", self._notes, 16 * r + 8)[0] for r in range(NUM_RANKS))

    def start(self) -> float:
        os.close(self._go)
        return time.monotonic()

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def wait(self) -> list[int]:
        return exits(self.pids)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory: what a killed process wrote is there as on any disk, and it is quick."""
    with memory_folder() as folder:
        yield folder


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many writes as a large checkpoint has."""
    monkeypatch.setattr("fsdp2.checkpoint.saving.writing.PIECE_BYTES", 1 << 20)
    monkeypatch.setattr("fsdp2.checkpoint.saving.writing.SYNC_BYTES", 1 << 20)


def measure(root: Path, whole: dict[str, Tensor], layout: str) -> tuple[float, int]:
    """Seconds and calls of a save that nobody interrupts."""
    seconds, calls = [], []
    for _ in range(3):
        processes = Processes(root, whole, 1, layout)
        start = processes.start()
        assert processes.wait() == [0] * NUM_RANKS
        seconds.append(processes.last_call() - start)
        calls.append(max(processes.calls(rank) for rank in range(NUM_RANKS)))
        assert committed(root, 1, whole=whole)
        shutil.rmtree(root / NAME)
    return statistics.median(seconds), max(calls)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kills", [4, pytest.param(200, marks=pytest.mark.long)])
def test_a_save_that_is_killed_is_not_there_or_whole(folder: Path, layout: str, kills: int) -> None:
    """Every other kill is at a random time, the others around a random call.

    Then other processes save other bytes under the same name: refused, or whole.
    """
    rng = random.Random(kills)
    whole = {attempt: tensors(attempt, ROWS) for attempt in (1, 2)}
    duration, num_calls = measure(folder, whole[1], layout)
    outcomes: Counter[str] = Counter()
    for i in count():
        root = folder / str(i)
        root.mkdir()
        processes = Processes(root, whole[1], 1, layout)
        ranks = [[0], [1], [0, 1]][i // 2 % 3]
        wait_for_moment(
            processes, ranks[0], rng, duration if i % 2 else num_calls, by_time=bool(i % 2)
        )
        processes.kill(ranks)
        codes = processes.wait()
        assert all(code in (0, -signal.SIGKILL) for code in codes)
        there = committed(root, 1, whole=whole[1])
        killed = -signal.SIGKILL in codes
        outcomes[f"{'killed' if killed else 'too late'}, {'whole' if there else 'nothing'}"] += 1
        left = leftovers(root)

        again = Processes(root, whole[2], 2, layout)
        again.start()
        assert again.wait() == [EXISTS if there else 0] * NUM_RANKS
        seed = 1 if there else 2
        assert committed(root, seed, whole=whole[seed])
        assert leftovers(root) == left
        if not there:
            for rank in range(NUM_RANKS):
                with pytest.raises(CheckpointExists):
                    make_job(root, rank, whole=whole[1]).attempt.commit()
        shutil.rmtree(root)
        if outcomes["killed, nothing"] + outcomes["killed, whole"] >= kills:
            break
    print(f"\n{layout}: {duration * 1e3:.0f} ms, {num_calls} calls; {dict(outcomes)}")
    assert outcomes["killed, nothing"] > kills // 5


def wait_for_moment(
    processes: Processes, rank: int, rng: random.Random, end: float, *, by_time: bool
) -> None:
    """Start, and return at a random time up to ``end``, or near a random call up to it."""
    moment, start = rng.uniform(0, end), processes.start()
    if by_time:
        time.sleep(moment)
        return
    while processes.calls(rank) < moment and time.monotonic() - start < 0.5:
        time.sleep(0)
    time.sleep(rng.uniform(0, 2e-4))
