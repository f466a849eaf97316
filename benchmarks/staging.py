"""How long an asynchronous save blocks, beside a copy of its bytes: `python -m benchmarks.staging`.

Two ranks train with AdamW and save with ``blocking=False``; in turns, the same tensors are copied
into memory that is there. The first save makes the memory, so its time is beside a copy into
memory that is touched for the first time.

On the CPU, where the host copies. On a device a stream does, and `save` returns before.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.checkpoint import Checkpointer

from . import report
from .loads import MODELS, sharded
from .ranks import run_ranks


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The local tensors of a model and of its optimizer's state."""
    found = [p.detach() for p in model.parameters()]
    found += [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return [getattr(t, "_local_tensor", t) for t in found]


def copy(sources: list[Tensor], into: list[Tensor] | None) -> list[Tensor]:
    """Into tensors that are there, or new ones in one new piece of memory."""
    if into is None:
        whole = torch.empty(sum(-(-s.nbytes // 64) * 64 for s in sources), dtype=torch.uint8)
        into, start = [], 0
        for source in sources:
            part = whole[start : start + source.nbytes]
            into.append(part.view(source.dtype).view(source.shape))
            start += -(-source.nbytes // 64) * 64
    for source, target in zip(sources, into, strict=True):
        target.copy_(source)
    return into


def measure(folder: str, model: str, size: int, rounds: int) -> dict[str, Any]:
    """Seconds of each round, until the last rank could go on."""
    torch.manual_seed(0)
    of = sharded(model, size)
    optimizer = torch.optim.AdamW(of.parameters(), foreach=True)
    for parameter in of.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    sources = tensors(of, optimizer)
    checkpoints = Checkpointer(Path(folder) / "steps", keep=1)
    saved: list[float] = []
    copied: list[float] = []
    new: list[float] = []
    kept: list[Tensor] | None = None

    def slowest(begin: float) -> float:
        seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    for number in range(rounds + 1):
        gc.collect()
        dist.barrier()
        begin = time.perf_counter()
        made = copy(sources, None)
        new.append(slowest(begin))
        kept = kept or made
        del made
        dist.barrier()
        begin = time.perf_counter()
        copy(sources, kept)
        copied.append(slowest(begin))
        dist.barrier()
        begin = time.perf_counter()
        handle = checkpoints.save(number, model=of, optimizer=optimizer, blocking=False)
        saved.append(slowest(begin))
        handle.wait_committed()
        dist.barrier()
    checkpoints.close()
    num_bytes = sum(s.nbytes for s in sources)
    return {"saved": saved, "copied": copied, "new": new, "bytes": num_bytes, "num": len(sources)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staging", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(
        "| model | tensors | MB per rank | copy, ms | later saves, ms | ratio (range) "
        "| first save / copy into new memory |"
    )
    print(report.row(["---"] * 7))
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="bench_staging_") as folder:
            arguments = {"folder": folder, "model": model, "rounds": options.rounds}
            size = 4 if model == "matrices" else 64
            found = run_ranks(measure, options.ranks, {**arguments, "size": size})
        saved, copied = found["saved"][1:], found["copied"][1:]
        each = [a / b for a, b in zip(saved, copied, strict=True)]
        cells = [model, str(found["num"]), f"{found['bytes'] / 1e6:.0f}"]
        cells += [f"{1e3 * statistics.median(t):.1f}" for t in (copied, saved)]
        cells.append(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        cells.append(f"{found['saved'][0] / found['new'][0]:.2f}")
        print(report.row(cells), flush=True)


if __name__ == "__main__":
    main()
