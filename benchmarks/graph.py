"""A step as one graph beside eager steps, compiled blocks, and SimpleFSDP.

    python -m benchmarks.graph [--quick] [--write-docs]
    python -m benchmarks.graph --device cuda --output DIR

Three measures, with variants that take turns in every round; ratios are taken within rounds.

- *host*: 16 blocks of 16 x 16 over a `fake` group of two in one process: what the host takes.
- *train*: forward and backward of a small language model on two ranks over gloo.
- *alone*: the same model, each variant in processes of its own: the highest resident memory during
  steps above that between them, collectives of one step, and seconds of the first call, with no
  cache of compiled code.

SimpleFSDP compiled by inductor ends with corrupted memory over gloo (docs/graph.md), so on two
ranks its backend is "aot_eager".

On a GPU *train* alone is measured, by one rank over NCCL, and a replay of a CUDA graph of the
compiled step is one more variant.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp2
from fsdp2.graph import compile_step
from fsdp2.transports.host.exchange import Exchange

from . import machine, models
from .host_ranks import ratios
from .models import LMConfig, StackConfig, lm_loss
from .ranks import progress, run_ranks
from .report import measured_on, row, show_table, write_record
from .scale.counting import counting
from .scale.curves import Counted
from .simple_fsdp import compiled, simple_fsdp

EAGER, BLOCKS, GRAPH = "eager", "compiled blocks", "compile_step"
EAGER_GRAPH = "compile_step, aot_eager"
SIMPLE, EAGER_SIMPLE = "SimpleFSDP", "SimpleFSDP, aot_eager"
CAPTURED = "compile_step in a CUDA graph"
TORCH, TORCH_BLOCKS = "torch FSDP2", "torch FSDP2, compiled blocks"
HOST = (EAGER, BLOCKS, GRAPH, EAGER_GRAPH, SIMPLE, TORCH, TORCH_BLOCKS)
RANKS = (EAGER, BLOCKS, GRAPH, EAGER_GRAPH, EAGER_SIMPLE, TORCH, TORCH_BLOCKS)
ON_GPU = (EAGER, BLOCKS, GRAPH, CAPTURED, TORCH, TORCH_BLOCKS)
WARM_UP_STEPS = 3
NUM_RANKS = 2
STACK = StackConfig(width=16, hidden=32, num_blocks=16, num_heads=2)
LM = LMConfig(vocab=2048, width=256, hidden=704, num_blocks=6, num_heads=4)
TOKENS = 256
BEGIN, END = "<!-- graph:begin -->", "<!-- graph:end -->"

Step = Callable[[], Tensor]


def make_step(name: str, model: nn.Module, loss_of: Callable[..., Tensor], *batch: Tensor) -> Step:
    """Forward and backward of ``model`` as the variant ``name`` has it; returns the loss."""
    mesh = init_device_mesh(batch[0].device.type, (dist.get_world_size(),))
    if name in (SIMPLE, EAGER_SIMPLE):
        simple_fsdp(model, mesh)
        call = compiled(model, "inductor" if name == SIMPLE else "aot_eager")
    else:
        shard = torch_fully_shard if name in (TORCH, TORCH_BLOCKS) else fsdp2.fully_shard
        for block in model.blocks:
            shard(block, mesh=mesh)
        call = shard(model, mesh=mesh)
        if name in (BLOCKS, TORCH_BLOCKS):
            for block in model.blocks:
                block.compile()
        if name in (GRAPH, EAGER_GRAPH, CAPTURED):
            backend = "aot_eager" if name == EAGER_GRAPH else "inductor"
            step = partial(compile_step(model, loss_of, backend=backend), *batch)
            return captured(step, model) if name == CAPTURED else step

    def eager_step() -> Tensor:
        loss = loss_of(call, *batch)
        loss.backward()
        return loss

    return eager_step


def captured(step: Step, model: nn.Module) -> Step:
    """Replays of a CUDA graph of ``step``; gradients are new in each."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def without_cached_angles() -> None:
    """Let each model compute the rotary angles: a cache would keep tensors of a trace."""
    models.rotation = models.rotation.__wrapped__


def make_stack() -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    """The model of *host*, its loss function, and its batch."""
    torch.manual_seed(0)
    return models.Stack(STACK), lambda model, x: model(x).sum(), torch.randn(1, 4, STACK.width)


def make_lm(num_blocks: int) -> tuple[nn.Module, Callable[..., Tensor], Tensor]:
    """The model of *train* and *alone*, its loss function, and its batch."""
    torch.manual_seed(0)
    model = models.LM(replace(LM, num_blocks=num_blocks))
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(LM.vocab, (1, TOKENS + 1), generator=generator)
    return model, lambda model, x: lm_loss(model(x[:, :-1]), x[:, 1:]), tokens


def measure(
    stack: bool, names: list[str], rounds: int, iters: int, device: str = "cpu"
) -> dict[str, Any]:
    """Seconds of steps of the variants, which take turns.

    Returns:
        For each variant ``losses`` of the first steps and ``rounds_s``, a median for each round.
    """
    without_cached_angles()
    torch.set_flush_denormal(True)  # what a fake reduce-scatter leaves behind may be denormal
    runs: dict[str, tuple[nn.Module, Step]] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        progress(f"graph: {name}")
        # A GPU is lent for minutes, and compiling takes most of them.
        num_blocks = LM.num_blocks if device == "cpu" else 3
        model, loss_of, batch = make_stack() if stack else make_lm(num_blocks)
        step = make_step(name, model.to(device), loss_of, batch.to(device))
        runs[name] = model, step
        losses = []
        for _ in range(WARM_UP_STEPS):
            losses.append(step().item())
            model.zero_grad()
        found[name] = {"losses": losses, "rounds_s": []}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            model, step = runs[name]
            seconds = []
            for _ in range(iters):
                dist.barrier()
                start = time.perf_counter()
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
                model.zero_grad()
            found[name]["rounds_s"].append(statistics.median(seconds))
        progress(f"graph: round {i + 1} of {rounds}")
    return found


def measure_alone(name: str) -> dict[str, Any]:
    """Peak memory, collectives of a step and the time of the first call, in this process."""
    torch._inductor.config.force_disable_caches = True
    # Blocks of 64 KiB and more go back to the system when they are freed.
    ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD
    without_cached_angles()
    progress(f"graph, alone: {name}")
    model, loss_of, batch = make_lm(LM.num_blocks)
    step = make_step(name, model, loss_of, batch)
    start = time.perf_counter()
    step()
    first_s = time.perf_counter() - start
    for _ in range(WARM_UP_STEPS):
        model.zero_grad()
        step()
    model.zero_grad()
    peaks = []
    for _ in range(5):
        counted: Counted = {}
        with counting(counted):
            step()
        peaks.append(counted["peak bytes"])
        model.zero_grad()
    with Collectives() as collectives:
        step()
    return {"first_s": first_s, "peak_bytes": min(peaks), "collectives": collectives.number}


class Collectives:
    """Context that counts gathers and reductions of tensors: torch's operators, and exchanges of
    fsdp2."""

    def __init__(self) -> None:
        self.number = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self._patches = [
            mock.patch.object(Exchange, name, self._counting(getattr(Exchange, name)))
            for name in ("all_gather", "reduce_scatter")
        ]

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.number += 1
            return method(*args)

        return call

    def __enter__(self) -> Collectives:
        for patch in self._patches:
            patch.start()
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for patch in self._patches:
            patch.stop()
        # Functional collectives end in these operators, too.
        names = [event.name for event in self._profile.events()]
        of_torch = [name for name in names if name.startswith("c10d::")]
        self.number += sum("gather" in name or "reduce_scatter" in name for name in of_torch)


def check(results: dict[str, dict[str, Any]]) -> None:
    """
    Raises:
        RuntimeError: If losses of two variants differ.
    """
    expected = results[EAGER]["losses"]
    for name, result in results.items():
        if not torch.allclose(torch.tensor(result["losses"]), torch.tensor(expected), rtol=1e-4):
            raise RuntimeError(f"{name} has losses {result['losses']}, {EAGER} has {expected}")


def table(record: dict[str, Any]) -> str:
    """Markdown: a row for each variant."""
    if "host" not in record:
        head = [row(["variant", "step"]), row(["---", "---:"])]
        return "\n".join([*head, *(row([n, ratio_cell(record["train"], n)]) for n in ON_GPU)])
    lines = [
        row(["variant", "host", "step", "peak memory", "collectives", "first call, s"]),
        row(["---", *["---:"] * 5]),
    ]
    alone = record["alone"]
    for name in dict.fromkeys((*HOST, *RANKS)):
        cells = [ratio_cell(record[measured], name) for measured in ("host", "train")]
        if name in alone:
            peak = alone[name]["peak_bytes"] / alone[EAGER]["peak_bytes"]
            cells += [
                f"{peak:.2f}",
                str(alone[name]["collectives"]),
                f"{alone[name]['first_s']:.0f}",
            ]
        lines.append(row([name, *cells, *["-"] * (5 - len(cells))]))
    return "\n".join(lines)


def ratio_cell(results: dict[str, dict[str, Any]], name: str) -> str:
    """The time of a variant in units of eager's, taken within rounds, with its range."""
    if name not in results:
        return "-"
    found = ratios(results[name]["rounds_s"], results[EAGER]["rounds_s"])
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def describe(record: dict[str, Any]) -> str:
    """A sentence on what was measured."""
    return (
        f"{measured_on(record)} Times and memory are ratios to fsdp2's eager steps. The model has "
        f"{LM.num_blocks} blocks of width {LM.width} and trains on {TOKENS} tokens."
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--iters", type=int, default=8, help="steps a round (default 8)")
    parser.add_argument("--quick", action="store_true", help="three variants, few rounds")
    parser.add_argument("--only-table", action="store_true", help="print what was measured before")
    parser.add_argument("--write-docs", action="store_true", help="table in docs/performance.md")
    results = machine.REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--output", type=Path, default=results, help="folder of the record")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        given = {"stack": False, "names": list(ON_GPU), "rounds": 5, "iters": 8, "device": "cuda"}
        found = run_ranks(measure, 1, given, device="cuda")
        check(found)
        record = {"name": "gpu-graph", **machine.describe(), "train": found}
        write_record(record, options.output)
        print(table(record))
        return 0
    if not options.only_table:
        rounds, iters = (3, 4) if options.quick else (options.rounds, options.iters)
        host, ranks = ([EAGER, BLOCKS, GRAPH],) * 2 if options.quick else (list(HOST), list(RANKS))
        given = {"rounds": rounds, "iters": iters}
        record = {
            "name": "graph",
            **machine.describe(),
            "alone": {name: run_ranks(measure_alone, NUM_RANKS, {"name": name}) for name in ranks},
            "host": run_ranks(measure, NUM_RANKS, {"stack": True, "names": host, **given}, True),
            "train": run_ranks(measure, NUM_RANKS, {"stack": False, "names": ranks, **given}),
        }
        check(record["train"])
        if options.quick:
            print(table(record))
            return 0
        write_record(record, options.output)
    show_table(options, "graph", lambda r: f"{describe(r)}\n\n{table(r)}", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
