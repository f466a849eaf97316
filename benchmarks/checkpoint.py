"""Saving and loading beside raw reads and writes, and beside torch.distributed.checkpoint.

`python -m benchmarks.checkpoint --help`. All ways save the same sharded parameters to the same
disk from the same processes, in turns; before a load the files' pages are dropped from the cache
where the system allows it. What is loaded is compared with what was saved, every time.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, load_model, save_model
from fsdp2.checkpoint.loading.opening import open_source

from . import machine, report
from .ranks import progress, run_ranks

RAW, OURS, DCP = "raw", "fsdp2", "DCP"
HF, CONSOLIDATED, FULL = "DCP Hugging Face", "DCP Hugging Face, consolidated", "full state dict"
SHARED = "raw, from fsdp2's files"
ONCE, META = "fsdp2, keep_on_error=False", "fsdp2, into a model on the meta device"
WAYS = (RAW, OURS, DCP, HF, CONSOLIDATED, FULL)
RAW_NEW = "raw, into new memory"
OTHER_LOADS = {RAW: (RAW_NEW,), OURS: (ONCE, META, SHARED)}  # of what these saved
PIECE_BYTES = 16 << 20
MIB = 1 << 20
BEGIN, END = "<!-- bench-ckpt:begin -->", "<!-- bench-ckpt:end -->"


class Weights(nn.Module):
    """Matrices of 64 MiB with a norm each, like a large language model's."""

    def __init__(self, num_matrices: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_matrices))


@dataclass
class Way:
    """One way of saving and loading; each is called by all ranks with a new folder."""

    save: Callable[[Path], object]
    load: Callable[[Path], object] | None


def make_ways(model: nn.Module) -> dict[str, Way]:
    """All ways for one sharded model."""
    rank = dist.get_rank()

    def state() -> dict[str, Any]:
        return {name: p.detach() for name, p in model.state_dict().items()}

    def save_raw(path: Path) -> None:
        path.mkdir(exist_ok=True)
        fd = os.open(path / f"raw-{rank}", os.O_WRONLY | os.O_CREAT)
        offset = 0
        for memory in _memories(model):
            for start in range(0, len(memory), PIECE_BYTES):
                offset += os.pwrite(fd, memory[start : start + PIECE_BYTES], offset)
        os.fsync(fd)
        os.close(fd)

    def load_raw(path: Path) -> None:
        fd = os.open(path / f"raw-{rank}", os.O_RDONLY)
        offset = 0
        for memory in _memories(model):
            for start in range(0, len(memory), PIECE_BYTES):
                offset += os.preadv(fd, [memory[start : start + PIECE_BYTES]], offset)
        os.close(fd)

    def save_hf(path: Path, consolidate: bool) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter

        writer = HuggingFaceStorageWriter(
            str(path), save_distributed=True, enable_consolidation=consolidate
        )
        dcp.save(state(), storage_writer=writer)

    def load_hf(path: Path) -> None:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        dcp.load(state(), storage_reader=HuggingFaceStorageReader(str(path)))

    def save_full(path: Path) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_model_state_dict(model, options=options)
        if rank == 0:
            path.mkdir(exist_ok=True)
            with (path / "full.pt").open("wb") as file:
                torch.save(full, file)
                os.fsync(file.fileno())

    return {
        RAW: Way(save_raw, load_raw),
        OURS: Way(lambda path: save_model(model, path), lambda path: load_model(model, path)),
        DCP: Way(
            lambda path: dcp.save(state(), storage_writer=FileSystemWriter(path)),
            lambda path: dcp.load(state(), storage_reader=FileSystemReader(path)),
        ),
        HF: Way(lambda path: save_hf(path, False), load_hf),
        CONSOLIDATED: Way(lambda path: save_hf(path, True), None),
        FULL: Way(save_full, None),
    }


def _load_raw_into_new(model: nn.Module, path: Path) -> None:
    """As raw, into memory that is touched for the first time, as `load_model` does from meta."""
    load = make_ways(model.to_empty(device="cpu"))[RAW].load
    assert load is not None
    load(path)


def read_shared(model: nn.Module, path: Path) -> None:
    """Raw reads of the bytes that `load_model` reads, from the files that `save_model` wrote.

    Other than with `RAW`, where each rank has a file of its own, the ranks read one file.
    """
    with open_source(path) as source:
        names = [name for name, _ in model.named_parameters()]
        for name, memory in zip(names, _memories(model), strict=True):
            (extent,) = source.tensors[name].extents
            start = extent.offset + dist.get_rank() * len(memory)  # rows divide evenly
            for first in range(0, len(memory), PIECE_BYTES):
                source.read(extent.file, memory[first : first + PIECE_BYTES], start + first)


def _locals(model: nn.Module) -> list[Tensor]:
    return [p._local_tensor.detach() for p in model.parameters()]  # type: ignore[attr-defined]


def _memories(model: nn.Module) -> list[memoryview]:
    from fsdp2.common.memory import memory_of

    return [memory_of(local) for local in _locals(model)]


# -- measuring ----------------------------------------------------------------------------------


@contextmanager
def anonymous_memory(result: dict[str, float]):
    """Samples this process's anonymous resident memory; gives its highest rise in MiB."""

    def now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
        raise RuntimeError("no RssAnon in /proc/self/status")

    gc.collect()
    start = peak = now()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.004):
            peak = max(peak, now())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        result["extra_mib"] = (peak - start) / 1024


COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
)


@contextmanager
def counted_collectives(result: dict[str, float]):
    """Counts calls of torch.distributed's collectives, nested ones once."""
    from torch.distributed import distributed_c10d as c10d

    count = depth = 0
    originals = {name: getattr(c10d, name) for name in COLLECTIVES}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, depth
            count += depth == 0
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    for name, function in originals.items():
        replaced = counting(function)
        setattr(c10d, name, replaced)
        setattr(dist, name, replaced)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(c10d, name, function)
            setattr(dist, name, function)
        result["collectives"] = count


def drop_caches(path: Path) -> bool:
    """Drop the pages of the files in ``path``, of all processes; whether that was possible."""
    os.sync()
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the slowest rank was done, and the extra memory of the hungriest in MiB."""
    memory: dict[str, float] = {}
    dist.barrier()
    with anonymous_memory(memory):
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
    slowest = torch.tensor([seconds, memory["extra_mib"]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest[0]), float(slowest[1])


def checksum(model: nn.Module) -> list[float]:
    """Something that differs if any shard does."""
    return [float(local.double().sum()) for local in _locals(model)]


def measure(folder: str, num_matrices: int, width: int, rounds: int) -> dict[str, Any]:
    """Every way, in turns, on this rank. Returns lists of seconds, MiB and counts."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(Weights(num_matrices, width), mesh=mesh)
    ways = make_ways(model)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return fully_shard(Weights(num_matrices, width), mesh=mesh)

    other_ways: dict[str, Callable[[nn.Module, Path], object]] = {
        RAW_NEW: _load_raw_into_new,
        ONCE: partial(load_model, keep_on_error=False),
        META: load_model,
        SHARED: read_shared,
    }
    expected = checksum(model)
    results: dict[str, Any] = {
        name: {"save_s": [], "save_mib": [], "load_s": [], "load_mib": []} for name in WAYS
    }
    results |= {name: {"load_s": [], "load_mib": []} for name in other_ways}
    dropped = True
    for number in range(rounds + 1):  # the first round warms up, and counts collectives
        order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
        for name in order:
            way, path = ways[name], Path(folder) / f"{number}-{WAYS.index(name)}"
            counts: dict[str, float] = {}
            _quiet(path)
            if number == 0:
                with counted_collectives(counts):
                    way.save(path)
                results[name]["save_collectives"] = counts["collectives"]
            else:
                seconds, mib = timed(lambda way=way, path=path: way.save(path))
                results[name]["save_s"].append(seconds)
                results[name]["save_mib"].append(mib)
            dist.barrier()
            if way.load is not None:
                args = path, expected, number
                dropped &= _measure_load(results[name], way.load, model, *args)
                others = OTHER_LOADS.get(name, ())
                for i in range(len(others)):
                    other = others[(i + number) % len(others)]
                    into = on_meta() if other in (META, RAW_NEW) else model
                    load = partial(other_ways[other], into)
                    _measure_load(results[other], load, into, *args)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
        if number:
            progress(f"round {number} of {rounds}: " + ", ".join(
                f"{name} {results[name]['save_s'][-1]:.2f} s" for name in WAYS))  # fmt: skip
    results["async"] = measure_async(model, Path(folder), rounds)
    results["caches_dropped"] = dropped
    results["bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    return results


def _measure_load(
    result: dict[str, Any],
    load: Callable[[Path], object],
    model: nn.Module,
    path: Path,
    expected: list[float],
    number: int,
) -> bool:
    """Load into ``model`` once, and compare; returns whether caches could be dropped."""
    dropped = True
    new_bytes = 0  # of the model itself, if it has no memory yet
    with torch.no_grad():
        for local in _locals(model):
            local.zero_()
            new_bytes += local.nbytes if local.is_meta else 0
    if dist.get_rank() == 0:
        dropped = drop_caches(path)
    dist.barrier()
    if number == 0:
        counts: dict[str, float] = {}
        with counted_collectives(counts):
            load(path)
        result["load_collectives"] = counts["collectives"]
    else:
        seconds, mib = timed(lambda: load(path))
        result["load_s"].append(seconds)
        result["load_mib"].append(mib - new_bytes / MIB)
    if checksum(model) != expected:
        raise RuntimeError(f"{path}: what was loaded is not what was saved")
    return dropped


def _quiet(path: Path) -> None:
    """Nothing is left to be written back when the clock starts."""
    gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def measure_async(model: nn.Module, folder: Path, rounds: int) -> dict[str, list[float]]:
    """How long an asynchronous save keeps training from going on."""
    blocked: dict[str, list[float]] = {OURS: [], DCP: []}
    checkpoints = Checkpointer(folder / "async", keep=1)
    group = dist.new_group(backend="gloo")  # DCP's thread communicates while this one does
    for number in range(rounds + 1):
        for name in (OURS, DCP) if number % 2 else (DCP, OURS):
            _quiet(folder)
            path = folder / f"async-{number}"
            pending: list[Any] = []

            def save(name=name, path=path, number=number, pending=pending) -> None:
                if name == OURS:
                    pending.append(checkpoints.save(number, model=model, blocking=False))
                else:
                    state = {n: p.detach() for n, p in model.state_dict().items()}
                    writer = FileSystemWriter(path)
                    pending.append(
                        dcp.async_save(state, storage_writer=writer, process_group=group)
                    )

            seconds, _ = timed(save)
            if number:  # the first allocates buffers
                blocked[name].append(seconds)
            if name == OURS:
                pending[0].wait_committed()
            else:
                pending[0].result()
            dist.barrier()
            if name == DCP and dist.get_rank() == 0:
                shutil.rmtree(path)
    checkpoints.close()
    return blocked


# -- reporting ----------------------------------------------------------------------------------


def ratios(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Of each round, with their median."""
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(each), "range": [min(each), max(each)]}


LOADS = {
    META: "verified load into a model on the meta device",
    ONCE: "verified load into a model with values, keep_on_error=False",
    OURS: "verified load into a model with values",
}


def figures(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets: what is compared with what, and what came out."""
    ours = results[OURS]
    asynchronous = results["async"]
    found = [
        ("save / raw write", ratios(ours["save_s"], results[RAW]["save_s"]), 1.25),
        *(
            (f"{title} / {of}", ratios(results[name]["load_s"], results[raw]["load_s"]), target)
            for name, title in LOADS.items()
            for raw, of, target in (
                (RAW, "raw read", 1.25),
                (SHARED, "raw read of the same files", None),
                (RAW_NEW, "raw read into new memory", None),
            )
            if raw != RAW_NEW or name == META
        ),
        ("save / DCP", ratios(ours["save_s"], results[DCP]["save_s"]), None),
        ("load / DCP", ratios(ours["load_s"], results[DCP]["load_s"]), None),
        (
            f"save / {CONSOLIDATED}",
            ratios(ours["save_s"], results[CONSOLIDATED]["save_s"]),
            0.2,
        ),
        ("blocked / DCP async_save", ratios(asynchronous[OURS], asynchronous[DCP]), 0.5),
    ]
    rows = [{"title": title, **ratio, "target": target} for title, ratio, target in found]
    peaks = {"save": max(ours["save_mib"])}
    peaks["load"] = max(max(results[name]["load_mib"]) for name in LOADS)
    for what, peak in peaks.items():
        title = f"extra memory of a {what}, MiB per rank"
        rows.append({"title": title, "median": peak, "range": [peak, peak], "target": 64})
    return rows


def table(record: dict[str, Any]) -> str:
    """Two Markdown tables: all ways, and the targets."""
    results, about = record["results"], record["machine"]
    caches = "dropped before loads" if results["caches_dropped"] else "dropped as far as allowed"
    lines = [
        f"{results['bytes'] / 1e9:.2f} GB of fp32 parameters over {record['world_size']} gloo "
        f"ranks; {about['cpu']}, {about['cores']} cores; torch {record['versions']['torch']}; "
        f"caches {caches}; medians of {len(results[RAW]['save_s'])} rounds; "
        f"{record['date'][:10]}, commit {(record['commit'] or 'none')[:12]}.",
        "",
        "| | save, s | extra MiB | collectives | load, s | extra MiB | collectives |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (RAW, RAW_NEW, SHARED, OURS, ONCE, META, DCP, HF, CONSOLIDATED, FULL):
        way = results[name]
        cells = ["-"] * 3
        if name in WAYS:
            cells = [f"{statistics.median(way['save_s']):.2f}", f"{max(way['save_mib']):.0f}"]
            # DTensor.full_tensor, which that uses, does not come by what is counted.
            cells.append("-" if name == FULL else str(int(way["save_collectives"])))
        if way["load_s"]:
            cells += [f"{statistics.median(way['load_s']):.2f}", f"{max(way['load_mib']):.0f}"]
            cells.append(str(int(way["load_collectives"])))
        else:
            cells += ["-"] * 3
        lines.append(report.row([name, *cells]))
    lines += ["", "| fsdp2 | figure | range | target |", "|---|---|---|---|"]
    for figure in record["figures"]:
        target = "-"
        if figure["target"] is not None:
            verdict = "met" if figure["median"] <= figure["target"] else "not met"
            target = f"{figure['target']}, {verdict}"
        low, high = (report.number(x) for x in figure["range"])
        lines.append(
            report.row(
                [figure["title"], report.number(figure["median"]), f"{low} to {high}", target]
            )
        )
    blocked = {n: statistics.median(s) * 1e3 for n, s in results["async"].items()}
    lines += ["", f"Blocked by an asynchronous save: fsdp2 {blocked[OURS]:.0f} ms, DCP "
              f"{blocked[DCP]:.0f} ms."]  # fmt: skip
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--matrices", type=int, default=24, help="of 4,096 x 4,096 (default 24)")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--output", type=Path, default=machine.REPOSITORY / "benchmarks/results")
    parser.add_argument("--write-readme", action="store_true")
    options = parser.parse_args(arguments)
    about = machine.describe()
    with tempfile.TemporaryDirectory(prefix="bench_ckpt_", dir=options.folder) as folder:
        results = run_ranks(
            measure,
            options.world_size,
            {
                "folder": folder,
                "num_matrices": options.matrices,
                "width": options.width,
                "rounds": options.rounds,
            },
        )
    record = {
        "name": "checkpoint",
        **about,
        "world_size": options.world_size,
        "figures": figures(results),
        "results": results,
    }
    path = report.write_record(record, options.output)
    print(table(record))
    progress(f"written to {path}")
    if options.write_readme:
        report.write_readme(
            machine.REPOSITORY / "benchmarks" / "README.md", table(record), BEGIN, END
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
