"""Saves by several ranks inside one process, and what stops them between two system calls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load, load_file
from torch import Tensor
from typing_extensions import override

from fsdp2.checkpoint.errors import CheckpointError
from fsdp2.checkpoint.format.disk import Disk
from fsdp2.checkpoint.format.manifest import INDEX, TensorPart, marker_name, own_name, state_name
from fsdp2.checkpoint.format.tensors import describe
from fsdp2.checkpoint.loading.opening import open_source
from fsdp2.checkpoint.loading.reading import Target, read_verified
from fsdp2.checkpoint.loading.source import Source
from fsdp2.checkpoint.saving.attempt import STAGING
from fsdp2.checkpoint.saving.capture import Captured
from fsdp2.checkpoint.saving.job import SaveJob, SaveOptions
from fsdp2.checkpoint.saving.writing import Writers
from fsdp2.dtensor.boxes import Box, split_evenly

NAME = "step-000001"
TOGETHER = "two ranks per file"
LAYOUTS = ("shared", "per-rank", TOGETHER)
Before = Callable[[str, str], None]


class _Together(SaveOptions):
    """Of files of boxes, each is written by two ranks."""

    @override
    def writers(self, num_ranks: int) -> Writers:
        return Writers(2, of_host=True)


class Crash(BaseException):
    """The end of a rank."""


def nonce(attempt: int) -> str:
    return f"{'5a' * 8}0000-{attempt}"


def tensors(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """What is saved; every seed gives other bytes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 5, generator=generator)
    return {
        "embed": torch.randn(7, 6, generator=generator).bfloat16(),
        "scale": torch.randn((), generator=generator),
        "weight": weight,
        "empty": torch.zeros(0, 3),
        "counts": torch.randint(99, (5,), generator=generator),
        "optim.exp_avg.weight": weight * 0.5,
        "optim.step.weight": torch.tensor(float(seed)),
    }


def captured(whole: dict[str, Tensor], rank: int, num_ranks: int, seed: int) -> Captured:
    """The part of one rank: rows of every tensor; the first rank writes 0-dim ones."""
    ranks = tuple(range(num_ranks))
    result = Captured(own={"own": torch.tensor([seed, rank])}, values={"seed": seed, "rank": rank})
    for name, tensor in whole.items():
        kind = "optim" if name.startswith("optim.") else "model"
        shape = tuple(tensor.shape)
        box, typical, writes, local = Box.whole(shape), Box.whole(shape), rank == 0, tensor
        if shape:
            start, num = split_evenly(shape[0], num_ranks, rank)
            box = Box((start,) + (0,) * (len(shape) - 1), (num, *shape[1:]))
            typical = Box.whole((split_evenly(shape[0], num_ranks, 0)[1], *shape[1:]))
            local, writes = tensor[start : start + num], True
        by = partial(_written, shape, num_ranks)
        info = describe(name, tensor)
        result.parts.append(TensorPart(kind, info, box, typical, ranks, writes, by))
        if writes:
            result.locals[kind, name] = local
    return result


def _written(shape: tuple[int, ...], num_ranks: int, rank: int) -> int:
    """How many elements of a tensor a rank writes."""
    if not shape:
        return int(rank == 0)
    return split_evenly(shape[0], num_ranks, rank)[1] * prod(shape[1:])


def make_job(
    root: Path,
    rank: int,
    num_ranks: int = 2,
    *,
    attempt: int = 1,
    seed: int = 1,
    name: str = NAME,
    before: Before | None = None,
    layout: str = "shared",
    whole: dict[str, Tensor] | None = None,
    max_file_bytes: int = 200,
    num_threads: int = 1,
) -> SaveJob:
    whole = tensors(seed) if whole is None else whole
    kind = _Together if layout == TOGETHER else SaveOptions
    of_boxes = "per-rank" if layout == TOGETHER else layout
    options = kind(of_boxes, max_file_bytes, num_threads=num_threads)
    return SaveJob(
        root,
        name,
        nonce(attempt),
        rank,
        tuple(range(num_ranks)),
        captured(whole, rank, num_ranks, seed),
        options,
        Disk(before),
    )


def run(job: SaveJob) -> None:
    job.begin()
    job.write()


def save(root: Path, num_ranks: int = 2, *, attempt: int = 1, seed: int = 1, **options) -> None:
    """All ranks, one after the other."""
    for rank in range(num_ranks):
        run(make_job(root, rank, num_ranks, attempt=attempt, seed=seed, **options))


def mark(root: Path, num_ranks: int = 2, *, attempt: int = 1, seed: int = 1, **options) -> None:
    """Everything of all ranks except committing."""
    for rank in range(num_ranks):
        job = make_job(root, rank, num_ranks, attempt=attempt, seed=seed, **options)
        job.attempt.commit = lambda: False  # type: ignore[method-assign]
        run(job)


def committed(
    root: Path,
    seed: int,
    num_ranks: int = 2,
    *,
    name: str = NAME,
    whole: dict[str, Tensor] | None = None,
) -> bool:
    """Whether there is a checkpoint; if so, checks that every byte is that of ``seed``."""
    if not os.path.lexists(root / name):
        return False
    whole = tensors(seed) if whole is None else whole
    with open_source(root / name, by_manifests=True) as source:
        assert len({m.nonce for m in source.manifests.values()}) == 1
        assert sorted(source.manifests) == list(range(num_ranks))
        stored = {**source.tensors, **source.optimizer}
        assert stored.keys() == whole.keys()
        boxes = {name: Box.whole(s.info.shape) for name, s in stored.items()}
        read = {name: torch.empty_like(t) for name, t in whole.items()}
        targets = [Target(n, s, boxes[n], read[n]) for n, s in stored.items()]
        read_verified(source, targets, num_threads=1)
        same_by_index(root / name, source)
        for rank in range(num_ranks):
            values = json.loads(source.small_file(rank, state_name(rank)))
            assert values == {"seed": seed, "rank": rank}
            assert load(source.small_file(rank, own_name(rank)))["own"].tolist() == [seed, rank]
        shared = all(files.whole for files in source.manifests[0].sets)
    for tensor_name, tensor in whole.items():
        assert torch.equal(read[tensor_name].view(-1), tensor.view(-1)), tensor_name
    if shared:
        others_read(root / name, whole)
    return True


def same_by_index(folder: Path, by_manifests: Source) -> None:
    """The index says the same as the manifests of all ranks."""
    with open_source(folder) as source:
        assert source.index is not None
        assert not source.manifests
        assert (source.ranks, source.speakers) == (by_manifests.ranks, by_manifests.speakers)
        assert source.aliases == by_manifests.aliases
        for table, other in (
            (source.tensors, by_manifests.tensors),
            (source.optimizer, by_manifests.optimizer),
        ):
            assert table.keys() == other.keys()
            for name, stored in other.items():
                box = Box.whole(stored.info.shape)
                assert table[name].info == stored.info
                assert sorted(table[name].near(box)) == sorted(stored.near(box))
        for rank in source.ranks:
            assert source.small_files(rank) == by_manifests.small_files(rank)


def others_read(folder: Path, whole: dict[str, Tensor]) -> None:
    """The files are ordinary ones, and their index names what is in them."""
    files = sorted(folder.glob("*.safetensors"))
    contents = {file.name: load_file(file) for file in files}
    merged = {name: t for content in contents.values() for name, t in content.items()}
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], t) for name, t in whole.items())
    if sum(file.name.startswith("model") for file in files) > 1:
        weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        assert all(name in contents[file] for name, file in weight_map.items())
        assert weight_map.keys() == {name for name in whole if not name.startswith("optim.")}


def leftovers(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if STAGING.fullmatch(name))


class At:
    """A ``before`` of `Disk` that records calls and does something at one of them.

    Args:
        number: of the call, from 0; None to record only.
        then: what to do.
        dead: whether that call and all later ones raise `Crash`.
    """

    def __init__(
        self,
        number: int | None = None,
        then: Callable[[], None] = lambda: None,
        *,
        dead: bool = False,
    ) -> None:
        self.calls: list[tuple[str, str]] = []
        self.number = number
        self.then = then
        self.dead = dead

    def __call__(self, call: str, operand: str) -> None:
        number = len(self.calls)
        self.calls.append((call, operand))
        if number == self.number:
            self.then()
        if self.dead and self.number is not None and number >= self.number:
            raise Crash

    @property
    def reached(self) -> bool:
        return self.number is not None and len(self.calls) > self.number

    def marked(self, rank: int, num_ranks: int) -> bool:
        """Whether the marker of ``rank`` got its name before the end."""
        done = self.calls[: self.number]
        return any(c == "rename" and o.endswith(f"> {marker_name(rank, num_ranks)}")
                   for c, o in done)  # fmt: skip


class Held:
    """A function in a thread that stands still before its call number ``number``."""

    def __init__(self, number: int, body: Callable[[Before], object]) -> None:
        self._go = threading.Event()
        self._stands = threading.Event()
        self.before = At(number, self._stand)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        assert self._stands.wait(30)

    def _stand(self) -> None:
        self._stands.set()
        assert self._go.wait(30)

    def _run(self, body: Callable[[Before], object]) -> None:
        try:
            body(self.before)
        except BaseException as error:
            self.error = error
        finally:
            self._stands.set()

    def finish(self) -> None:
        self._go.set()
        self._thread.join(30)
        if self.error is not None and not isinstance(self.error, CheckpointError):
            raise self.error


def fork(body: Callable[[], object]) -> int:
    """Run in a child, which exits with 0 if ``body`` returns and 1 if it raises."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exits(pids: Sequence[int]) -> list[int]:
    """Exit codes; negative: the signal that ended it."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: fsync takes no time."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)
