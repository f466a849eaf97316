"""Gradient clipping of many small sharded tensors: torch's function and ours, taking turns.

    python -m benchmarks.clip

1,000 gradients of 32 x 32 elements, sharded over a `fake` group of two in one process, so that
what is measured is host time: `torch.nn.utils.clip_grad_norm_` and `fsdp2.clip_grad_norm_` over
DTensors, and torch's over as many plain tensors of a shard's size. The first call of each is timed
apart, in a process of its own; it is what torch's dispatch of DTensors takes to set itself up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2

from . import machine
from .ranks import progress, run_ranks

PLAIN, TORCH, OURS = "plain tensors", "torch over DTensors", "fsdp2 over DTensors"
VARIANTS = (PLAIN, TORCH, OURS)
TARGET = 1 / 3


def make_parameters(num: int, *, plain: bool) -> list[nn.Parameter]:
    """Parameters with gradients of norm 1 or so: clipping to 0.5 multiplies in every call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = []
    for _ in range(num):
        local, grad = torch.zeros(16, 32), torch.full((16, 32), 1 / 500)
        if not plain:
            local = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            grad = DTensor.from_local(grad, mesh, [Shard(0)], run_check=False)
        param = nn.Parameter(local)
        param.grad = grad
        params.append(param)
    return params


def measure(names: list[str], num: int, rounds: int, iters: int) -> dict[str, Any]:
    """Times the named variants in this process, interleaved.

    Returns:
        For each variant `first_s`, the first call, and `rounds_s`, a list of times per round.
    """
    variants: dict[str, tuple[Callable[..., Tensor], list[nn.Parameter]]] = {}
    for name in names:
        function = fsdp2.clip_grad_norm_ if name == OURS else torch.nn.utils.clip_grad_norm_
        variants[name] = (function, make_parameters(num, plain=name == PLAIN))
    answer: dict[str, Any] = {name: {"rounds_s": []} for name in names}
    for name, (function, params) in variants.items():
        start = time.perf_counter()
        function(params, 0.5)
        answer[name]["first_s"] = time.perf_counter() - start
    for i in range(rounds):
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            function, params = variants[name]
            times = []
            for _ in range(iters):
                start = time.perf_counter()
                function(params, 0.5)
                times.append(time.perf_counter() - start)
            answer[name]["rounds_s"].append(times)
    return answer


def run(num: int, rounds: int, iters: int) -> dict[str, Any]:
    """The record of the measure, ready for JSON."""
    about = machine.describe()
    settings = {"num": num, "rounds": rounds, "iters": iters}
    first = {}
    for name in VARIANTS:
        alone = {"names": [name], "num": num, "rounds": 0, "iters": 0}
        first[name] = run_ranks(measure, 2, alone, fake=True)[name]["first_s"]
    result = run_ranks(measure, 2, {"names": list(VARIANTS), **settings}, fake=True)
    medians = {
        name: [statistics.median(times) for times in each["rounds_s"]]
        for name, each in result.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(medians[OURS], medians[TORCH], strict=True)]
    return {
        "name": "clip",
        **about,
        "config": {"settings": settings},
        "first_s": first,
        "steady_s": {name: statistics.median(times) for name, times in medians.items()},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "target": TARGET,
        "runs": result,
    }


def table(record: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| clip_grad_norm_ | first call, ms | later calls, ms |", "|---|---|---|"]
    for name in VARIANTS:
        first, steady = record["first_s"][name] * 1e3, record["steady_s"][name] * 1e3
        lines.append(f"| {name} | {first:.3g} | {steady:.3g} |")
    low, high = record["ratio_range"]
    verdict = "met" if record["ratio"] <= record["target"] else "not met"
    num = record["config"]["settings"]["num"]
    lines.append(
        f"\n{num} tensors; fsdp2 / torch: {record['ratio']:.3g} ({low:.3g} to {high:.3g}); "
        f"target {record['target']:.2f}, {verdict}."
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes `clip.json`, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clip", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--num", type=int, default=1000, help="gradients (default 1000)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iters", type=int, default=15, help="calls per round and variant")
    parser.add_argument("--output", type=Path, default=machine.REPOSITORY / "benchmarks/results")
    options = parser.parse_args(arguments)
    record = run(options.num, options.rounds, options.iters)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "clip.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    progress(f"written to {path}")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
