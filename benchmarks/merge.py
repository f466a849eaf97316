"""1,000 small modules: sharded one by one, merged by `merge_units`, and grouped by hand.

Forward and backward of a chain of small linear layers on two ranks. The variants take turns in
every round; ratios are taken within rounds. By hand: `fully_shard` of lists of so many layers, and
of the whole model alone; the best of them is what the merged units are compared with. "in
containers" has as many units as are left by `merge_units`, each an `nn.Sequential`: its hooks run
once for all layers in it, so beside the merged units it shows what hooks of every layer take.

    python -m benchmarks.merge [--rounds 5] [--modules 1000]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp2

from .ranks import progress, run_ranks
from .report import row

WIDTH = 32
ROWS = 16
HAND_MADE = (10, 30, 100, 300)
MERGED, ONE_BY_ONE = "merge_units", "one by one"
CONTAINERS = "in containers"
TORCH = "torch FSDP2, one by one"
TARGET = 1.3


def measure(modules: int, rounds: int, min_bytes: int) -> dict[str, Any]:
    """Seconds of a step per variant and round, on this rank."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    def chain() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(modules)))

    def by_hand(size: int) -> nn.Module:
        model = chain()
        for start in range(0, modules, size):
            fsdp2.fully_shard(list(model[start : start + size]))
        return fsdp2.fully_shard(model)

    def in_containers(num_units: int) -> nn.Module:
        layers = list(chain())
        size = -(-modules // num_units)
        starts = range(0, modules, size)
        model = nn.Sequential(*(nn.Sequential(*layers[i : i + size]) for i in starts))
        for container in model:
            fsdp2.fully_shard(container)
        return fsdp2.fully_shard(model)

    def one_by_one(shard: Callable[[nn.Module], Any]) -> nn.Module:
        model = chain()
        for layer in model:
            shard(layer)
        shard(model)
        return model

    progress("sharding the variants")
    models: dict[str, nn.Module] = {f"{n} by hand": by_hand(n) for n in HAND_MADE if n <= modules}
    models["the model alone"] = fsdp2.fully_shard(chain())
    models[ONE_BY_ONE] = one_by_one(fsdp2.fully_shard)
    models[MERGED] = one_by_one(fsdp2.fully_shard)
    merged = fsdp2.merge_units(models[MERGED], min_bytes=min_bytes)
    models[CONTAINERS] = in_containers(max(1, len(merged.merged)))
    models[TORCH] = one_by_one(torch_fully_shard)
    x = torch.randn(ROWS, WIDTH)

    def step(model: nn.Module) -> float:
        dist.barrier()
        start = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        seconds = time.perf_counter() - start
        model.zero_grad()
        return seconds

    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 2):
        progress(f"round {number}")
        for name, model in models.items():
            took = step(model)
            if number >= 2:  # the first two learn the order
                seconds[name].append(took)
    return {"seconds": seconds, "groups": len(merged.merged)}


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; 1 if merged units miss the target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merge", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--modules", type=int, default=1000, help="layers (default 1000)")
    parser.add_argument("--min-bytes", type=int, default=2**20, help="of a unit (default 1 MiB)")
    options = parser.parse_args(arguments)
    given = {"modules": options.modules, "rounds": options.rounds, "min_bytes": options.min_bytes}
    found = run_ranks(measure, 2, given)
    seconds = {name: list(of_one) for name, of_one in found["seconds"].items()}
    medians = {name: statistics.median(of_one) for name, of_one in seconds.items()}
    hand_made = [name for name in seconds if name not in (MERGED, ONE_BY_ONE, TORCH)]
    best = min(hand_made, key=medians.__getitem__)
    print(
        f"{options.modules} layers of {WIDTH} x {WIDTH}, 2 ranks over gloo; {found['groups']} units"
    )
    print(row(["variant", "step, ms", f"of '{best}', the best by hand"]))
    print(row(["---", "---:", "---:"]))
    ratio = 0.0
    for name, of_one in seconds.items():
        ratios = sorted(a / b for a, b in zip(of_one, seconds[best], strict=True))
        middle = statistics.median(ratios)
        if name == MERGED:
            ratio = middle
        shown = f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(row([name, f"{1000 * medians[name]:.1f}", shown]))
    print(f"merge_units: {ratio:.2f}, target at most {TARGET}")
    return int(ratio > TARGET)


if __name__ == "__main__":
    sys.exit(main())
