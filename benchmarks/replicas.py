"""Loads by ranks of one host that want the same bytes: `python -m benchmarks.replicas --help`.

Would it pay if one rank of a host read what several want, and handed it on through shared memory?
The files are dropped from the page cache, then all ranks load at once. Three ways take turns:
`load_model`, the same without checksums, and a prototype of handing on, without checksums: one rank
for each shard reads a piece after the other into shared memory, and all copy it from there.

Counted for each: how often the ranks read each byte that they want (``rchar`` of /proc/self/io),
and how often the disk had to deliver it (``read_bytes``). What a rank reads while another waits for
the same page comes out of the page cache.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.checkpoint import load_model, save_model
from fsdp2.common.memory import memory_of

from . import machine, report
from .loads import drop, locals_of, make
from .ranks import progress, run_ranks

LOAD, UNVERIFIED, HANDED_ON = "load_model", "without checksums", "handed on"
PIECE_BYTES = 8 << 20
PAUSE_S = 0.0002


def sharded(size: int, replicas: int) -> nn.Module:
    mesh = (replicas, dist.get_world_size() // replicas)
    names = ("replicate", "shard")
    return fully_shard(
        make("matrices", size), mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names)
    )


class HandedOn:
    """One rank for each shard reads; all that have it copy.

    Args:
        path: a file with the bytes of the shard, which these ranks share.
        leads: whether this rank reads.
    """

    def __init__(self, path: Path, leads: bool) -> None:
        self._path, self._leads = path, leads
        self._size = path.stat().st_size
        # The first page counts the pieces that are there.
        fd = os.open(f"{path}.shared", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, mmap.PAGESIZE + self._size)
        self._shared = mmap.mmap(fd, mmap.PAGESIZE + self._size)
        os.close(fd)

    def reset(self) -> None:
        self._shared[:8] = bytes(8)

    def load(self, into: list[Tensor]) -> None:
        data = memoryview(self._shared)[mmap.PAGESIZE :]
        fd = os.open(self._path, os.O_RDONLY)
        at, pieces = 0, 0
        for memory in map(memory_of, into):
            while memory:
                num = min(PIECE_BYTES, len(memory))
                piece = data[at : at + num]
                if self._leads:
                    done = os.preadv(fd, [piece], at)
                    if done != num:
                        raise RuntimeError(f"{self._path} ended at byte {at + done}")
                    self._shared[:8] = (pieces + 1).to_bytes(8, "little")
                while int.from_bytes(self._shared[:8], "little") <= pieces:
                    time.sleep(PAUSE_S)
                memory[:num] = piece
                memory, at, pieces = memory[num:], at + num, pieces + 1
        os.close(fd)


def read_so_far() -> Tensor:
    """Bytes that this process has read, and that the disk had to read for it."""
    table = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return torch.tensor([int(table["rchar"]), int(table["read_bytes"])], dtype=torch.float64)


def measure(folder: str, size: int, replicas: int, rounds: int) -> dict[str, Any]:
    """Of each way the seconds of each round, until the last rank was done, and what was read."""
    torch.manual_seed(0)
    held = sharded(size, replicas)
    expected = [local.clone() for local in locals_of(held)]
    path = Path(folder, "weights")
    save_model(held, path)
    num_shards = dist.get_world_size() // replicas
    leads = dist.get_rank() < num_shards
    raw = Path("/dev/shm", f"{Path(folder).name}-{dist.get_rank() % num_shards}")
    on_disk = Path(folder, f"shard-{dist.get_rank() % num_shards}")
    if leads:
        with on_disk.open("wb", buffering=0) as file:
            for local in expected:
                file.write(memory_of(local))
        raw.symlink_to(on_disk)
    dist.barrier()
    handed_on = HandedOn(raw, leads)
    ways: dict[str, Callable[[], object]] = {
        LOAD: lambda: load_model(held, path, keep_on_error=False),
        UNVERIFIED: lambda: load_model(held, path, keep_on_error=False, verify_checksums=False),
        HANDED_ON: lambda: handed_on.load(locals_of(held)),
    }
    found: dict[str, Any] = {name: {"seconds": [], "read": []} for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            for local in locals_of(held):
                local.fill_(-1)
            handed_on.reset()
            if dist.get_rank() == 0:
                drop(Path(folder))
            dist.barrier()
            before, begin = read_so_far(), time.perf_counter()
            ways[name]()
            seconds = torch.tensor(time.perf_counter() - begin)
            read = read_so_far() - before
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            dist.all_reduce(read)
            if not all(map(torch.equal, locals_of(held), expected)):
                raise RuntimeError(f"{name}: what was loaded is not what was saved")
            if number:
                found[name]["seconds"].append(float(seconds))
                found[name]["read"].append([float(each) for each in read])
    dist.barrier()
    if leads:
        raw.unlink()
        Path(f"{raw}.shared").unlink()
    num_bytes = sum(local.nbytes for local in expected) * num_shards
    return {"ways": found, "bytes": num_bytes}


def rows(replicas: int, num_ranks: int, found: dict[str, Any]) -> list[str]:
    title = f"{replicas} replicas of {num_ranks // replicas} shards"
    beside = found["ways"][LOAD]["seconds"]
    listed = []
    for name, each in found["ways"].items():
        ratios = sorted(a / b for a, b in zip(each["seconds"], beside, strict=True))
        by_ranks, by_disk = (
            statistics.median(read[i] for read in each["read"]) / found["bytes"] for i in (0, 1)
        )
        middle = statistics.median(ratios)
        ratio = f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        listed.append(report.row([title, name, f"{by_ranks:.2f}", f"{by_disk:.2f}", ratio]))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replicas", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=8, help="matrices of 64 MiB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options = parser.parse_args()
    about, lines = machine.describe(), []
    for replicas in (r for r in range(1, options.ranks + 1) if options.ranks % r == 0):
        with tempfile.TemporaryDirectory(prefix="bench_replicas_", dir=options.folder) as folder:
            arguments = {"size": options.size, "replicas": replicas, "rounds": options.rounds}
            found = run_ranks(partial(measure, folder), options.ranks, arguments)
        for line in rows(replicas, options.ranks, found):
            lines.append(line)
            progress(line)
    print(
        f"{options.size} matrices of 64 MiB, {options.ranks} ranks, pages dropped before a load; "
        f"{about['machine']['cpu']}, {about['machine']['cores']} cores; medians and ranges of "
        f"{options.rounds} rounds; {about['date'][:10]}, commit {(about['commit'] or 'none')[:12]}."
        "\n"
    )
    heads = ["case", "way", "read by ranks", "read by the disk", f"time / {LOAD}"]
    print(report.row(heads))
    print(report.row(["---"] * len(heads)))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
