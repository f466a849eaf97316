"""Loads beside raw reads, by case: `python -m benchmarks.loads --help`.

The bytes that a rank needs are read by `load_model` from a checkpoint, and by ``preadv`` from a
file that holds just them, once into memory that is touched for the first time and once into memory
that is there. All take turns in the same processes. Cached: the files are in the page cache; from
disk: their pages were dropped. Every load is compared with what was saved.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
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
from fsdp2.checkpoint.format.checksum import LIBRARY
from fsdp2.common.memory import memory_of

from . import machine, report
from .models import Stack, StackConfig
from .ranks import progress, run_ranks

CASES = {
    "same ranks": (2, 2, "shared"),
    "same ranks, a file per rank": (2, 2, "per-rank"),
    "saved by 3, loaded by 2": (3, 2, "shared"),
    "saved by 2, loaded by 1": (2, 1, "shared"),
    "saved by 1, loaded by 1": (1, 1, "shared"),
    "Hugging Face, loaded by 2": (2, 2, "hub"),
}
NEW, OLD = "raw, into new memory", "raw, into memory that is there"
META, ONCE, VALUES = "meta device", "keep_on_error=False", "values"
# What each load is compared with: both write to memory of the same kind.
BESIDE = {META: NEW, ONCE: OLD, VALUES: OLD}
MODELS = ("matrices", "small")


def make(model: str, size: int) -> nn.Module:
    """`matrices`: ``size`` of 64 MiB; `small`: ``size`` blocks of 9 parameters, 2.6 MB each."""
    if model == "matrices":
        return nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(size)))
    return Stack(StackConfig(width=256, hidden=512, num_blocks=size))


def sharded(model: str, size: int, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        made = make(model, size)
    return fully_shard(made, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def save(folder: str, model: str, size: int) -> dict[str, Any]:
    """Saves the model in every layout."""
    torch.manual_seed(0)
    of = sharded(model, size)
    for layout in ("shared", "per-rank"):
        save_model(of, Path(folder, layout), layout=layout)
    save_model(of, Path(folder, "hub"))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder, "hub", ".fsdp2").iterdir():
            path.unlink()
        Path(folder, "hub", ".fsdp2").rmdir()
    return {}


def locals_of(model: nn.Module) -> list[Tensor]:
    return [p.to_local().detach() for p in model.parameters()]  # type: ignore[operator]


def read_raw(path: Path, memories: list[memoryview]) -> None:
    """All bytes of a file, front to back, one call per tensor."""
    fd, offset = os.open(path, os.O_RDONLY), 0
    for memory in memories:
        while memory:
            done = os.preadv(fd, [memory], offset)
            memory, offset = memory[done:], offset + done
    os.close(fd)


def read_new(path: Path, num_bytes: int) -> Tensor:
    """The same into a new piece of memory, which nothing has touched."""
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    read_raw(path, [memory_of(memory)])
    return memory


def drop(path: Path) -> None:
    """Drop the pages of the files in a folder from the page cache."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(
    folder: str, layout: str, model: str, size: int, rounds: int, cold: bool
) -> dict[str, Any]:
    """Seconds of each way in each round, until the last rank was done."""
    torch.manual_seed(0)
    held = sharded(model, size)
    expected = [local.clone() for local in locals_of(held)]
    num_bytes = sum(local.nbytes for local in expected)
    path = Path(folder, layout)
    raw = Path(folder, f"raw-{dist.get_rank()}")
    raw.mkdir()
    with (raw / "bytes").open("wb", buffering=0) as file:
        for local in expected:
            file.write(memory_of(local))
    trim = ctypes.CDLL(None).malloc_trim
    ways: dict[str, Callable[[nn.Module], object]] = {
        NEW: lambda into: read_new(raw / "bytes", num_bytes),
        OLD: lambda into: read_raw(raw / "bytes", [memory_of(x) for x in locals_of(into)]),
        META: lambda into: load_model(into, path),
        ONCE: lambda into: load_model(into, path, keep_on_error=False),
        VALUES: lambda into: load_model(into, path),
    }
    found: dict[str, Any] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            into = sharded(model, size, "meta") if name == META else held
            for local in locals_of(into):
                local.fill_(-1)
            gc.collect()
            trim(0)  # what was freed is not new memory
            if cold:
                drop(raw)
                drop(path)
            dist.barrier()
            begin = time.perf_counter()
            kept = ways[name](into)
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if name != NEW:
                same = map(torch.equal, locals_of(into), expected)
                if not all(same):
                    raise RuntimeError(f"{name}: what was loaded is not what was saved")
            del kept, into
            if number:
                found[name].append(float(seconds))
    return {"seconds": found, "tensors": len(expected), "bytes": num_bytes}


def case_row(title: str, where: str, found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    cells = [title, where]
    cells += [f"{1e3 * statistics.median(seconds[name]):.1f}" for name in (NEW, OLD)]
    for name, beside in BESIDE.items():
        each = sorted(a / b for a, b in zip(seconds[name], seconds[beside], strict=True))
        middle, low, high = statistics.median(each), each[0], each[-1]
        cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    each = [a / b for a, b in zip(seconds[VALUES], seconds[NEW], strict=True)]
    cells.append(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
    return report.row(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loads", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--size", type=int, default=8, help="matrices of 64 MiB, or small blocks")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, metavar="CASE")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options = parser.parse_args()
    about = machine.describe()
    arguments = {"model": options.model, "size": options.size}
    rows = []
    for case in options.cases:
        saved_by, loaded_by, layout = CASES[case]
        for cold in (False, True):
            with tempfile.TemporaryDirectory(prefix="bench_loads_", dir=options.folder) as folder:
                run_ranks(save, saved_by, {"folder": folder, **arguments})
                found = run_ranks(
                    partial(measure, folder, layout),
                    loaded_by,
                    {**arguments, "rounds": options.rounds, "cold": cold},
                )
            rows.append(case_row(case, "disk" if cold else "cache", found))
            progress(rows[-1])
    versions = about["versions"]
    print(
        f"{found['bytes'] / 1e6:.0f} MB in {found['tensors']} tensors per rank; "
        f"{about['machine']['cpu']}, {about['machine']['cores']} cores; torch {versions['torch']}; "
        f"checksums by {LIBRARY}; medians and ranges of {options.rounds} rounds; "
        f"{about['date'][:10]}, commit {(about['commit'] or 'none')[:12]}.\n"
    )
    heads = ["case", "from", f"{NEW}, ms", f"{OLD}, ms"]
    heads += [f"{name} / {beside}" for name, beside in BESIDE.items()] + [f"{VALUES} / {NEW}"]
    print(report.row(heads))
    print(report.row(["---"] * len(heads)))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
