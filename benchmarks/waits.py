"""What training waits for at a checkpoint, beside the bytes alone: `python -m benchmarks.waits`.

An asynchronous save stands beside a copy of the tensors that it saves, loads stand beside raw reads
of the bytes that a rank needs, from a file that holds just them, in the page cache. All take turns
in the same two processes, after saves and loads that make what is kept. Every load is compared with
what was saved. `benchmarks.staging` and `benchmarks.loads` have more cases of each.

On a machine that others use, the times of a process that works are those of the scheduler too, so
there are ratios of CPU time as well: of the calling thread for saves, whose writing goes on in
others, of the process for loads.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.checkpoint import Checkpointer, load_model, save_model
from fsdp2.checkpoint.format.checksum import LIBRARY
from fsdp2.common.memory import memory_of

from . import machine, report
from .loads import MODELS, locals_of, read_new, read_raw, sharded
from .ranks import progress, run_ranks
from .staging import copy, tensors

SIZES = {"matrices": 4, "small": 64}
COPY, SAVE = "copy", "asynchronous save"
NEW, OLD = "raw read into new memory", "raw read"
META, ONCE = "load, model on the meta device", "load, keep_on_error=False"
PLAIN = "load, keep_on_error=False, verify_checksums=False"
VALUES = "load"
BESIDE = {SAVE: COPY, META: NEW, PLAIN: OLD, ONCE: OLD, VALUES: OLD}
BEGIN, END = "<!-- waits:begin -->", "<!-- waits:end -->"


class Ways:
    """All that is measured, for one sharded model."""

    def __init__(self, folder: Path, model: str, size: int) -> None:
        torch.manual_seed(0)
        self.model = sharded(model, size)
        self.on_meta: Callable[[], nn.Module] = lambda: sharded(model, size, "meta")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.expected = [local.clone() for local in locals_of(self.model)]
        self.sources = tensors(self.model, self.optimizer)
        self.kept = copy(self.sources, None)
        self.checkpoints = Checkpointer(folder / "steps", keep=1)
        self.num_saves = 0
        self.path, self.raw = folder / "weights", folder / f"raw-{dist.get_rank()}"
        save_model(self.model, self.path)
        with self.raw.open("wb", buffering=0) as file:
            for local in self.expected:
                file.write(memory_of(local))

    def calls(self) -> dict[str, Callable[[nn.Module], Any]]:
        """By name; all but saves and copies write to the model that they are given."""
        num_bytes = sum(local.nbytes for local in self.expected)
        return {
            COPY: lambda into: copy(self.sources, self.kept),
            SAVE: lambda into: self._save(),
            NEW: lambda into: read_new(self.raw, num_bytes),
            OLD: lambda into: read_raw(self.raw, [memory_of(x) for x in locals_of(into)]),
            META: lambda into: load_model(into, self.path),
            PLAIN: lambda into: load_model(
                into, self.path, keep_on_error=False, verify_checksums=False
            ),
            ONCE: lambda into: load_model(into, self.path, keep_on_error=False),
            VALUES: lambda into: load_model(into, self.path),
        }

    def _save(self) -> Any:
        self.num_saves += 1
        return self.checkpoints.save(
            self.num_saves, model=self.model, optimizer=self.optimizer, blocking=False
        )


def measure(folder: str, model: str, size: int, rounds: int) -> dict[str, Any]:
    """Seconds until the last rank was done, and CPU seconds of all, of each way in each round."""
    ways = Ways(Path(folder), model, size)
    calls = ways.calls()
    found: dict[str, list[list[float]]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 2):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            into = ways.on_meta() if name == META else ways.model
            clock = time.thread_time if name in (COPY, SAVE) else time.process_time
            if name not in (COPY, SAVE):
                for local in locals_of(into):
                    local.fill_(-1)
            gc.collect()
            dist.barrier()
            cpu, begin = clock(), time.perf_counter()
            kept = calls[name](into)
            wall, used = torch.tensor(time.perf_counter() - begin), torch.tensor(clock() - cpu)
            dist.all_reduce(wall, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            if name == SAVE:
                kept.wait_committed()
            elif name == NEW:
                read_raw(ways.raw, [memory_of(x) for x in locals_of(ways.model)])
            check(name, locals_of(into), ways.expected)
            del kept, into
            dist.barrier()
            if number > 1:
                found[name].append([float(wall), float(used)])
    ways.checkpoints.close()
    saved, loaded = (sum(t.nbytes for t in of) for of in (ways.sources, ways.expected))
    numbers = len(ways.sources), len(ways.expected)
    return {"seconds": found, "saved": saved, "loaded": loaded, "numbers": numbers}


def check(name: str, values: list[Tensor], expected: list[Tensor]) -> None:
    if not all(map(torch.equal, values, expected)):
        raise RuntimeError(f"{name}: what is there is not what was saved")


def ratio(ours: list[float], theirs: list[float]) -> str:
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def rows(model: str, found: dict[str, Any]) -> list[str]:
    lines = []
    for name, beside in BESIDE.items():
        ours, theirs = (
            [[pair[i] for pair in found["seconds"][of]] for i in range(2)] for of in (name, beside)
        )
        what = "saved" if name == SAVE else "loaded"
        number = found["numbers"][name != SAVE]
        cells = [f"{model}: {number} tensors, {found[what] / 1e6:.0f} MB", name, beside]
        cells += [f"{1e3 * statistics.median(times[0]):.1f}" for times in (theirs, ours)]
        cells += [ratio(ours[i], theirs[i]) for i in range(2)]
        lines.append(report.row(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waits", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--write", action="store_true", help="the table into docs/performance.md")
    options = parser.parse_args()
    about = machine.describe()
    heads = ["per rank", "fsdp2", "baseline", "baseline, ms", "fsdp2, ms"]
    heads += ["time ratio (range)", "CPU time ratio"]
    lines = [report.row(heads), report.row(["---"] * len(heads))]
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="bench_waits_", dir=options.folder) as folder:
            arguments = {"folder": folder, "model": model, "size": SIZES[model]}
            found = run_ranks(measure, 2, {**arguments, "rounds": options.rounds})
        lines += rows(model, found)
        progress("\n".join(lines[-len(BESIDE) :]))
    text = (
        f"{about['machine']['cpu']}, {about['machine']['cores']} cores; 2 ranks; torch "
        f"{about['versions']['torch']}; checksums by {LIBRARY}; medians of {options.rounds} "
        f"rounds; {about['date'][:10]}, commit {(about['commit'] or 'none')[:12]}.\n\n"
    ) + "\n".join(lines)
    print(text)
    if options.write:
        page = machine.REPOSITORY / "docs" / "performance.md"
        report.write_readme(page, text, BEGIN, END)


if __name__ == "__main__":
    main()
