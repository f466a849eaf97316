"""What `fsdp2.profile` costs while it is on: `python -m benchmarks.profile_cost`.

Steps with and without take turns in the same processes. `lm`: forward and backward of the language
model on two ranks over gloo. `hooks`: 64 tiny blocks over a process group that communicates
nothing, so that almost only the host's work is left: the most that a profile can cost, as CPU time.

Page faults are counted too: pages that a step is the first to touch. If a step has as many
without a profile as with one, they are not what a profile costs.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

from .hooks import make_stack
from .models import LMConfig, StackConfig
from .ranks import run_ranks
from .steps import make_lm, random_tokens, train_step
from .variants import OURS, build

WARM_UP_STEPS = 5


def take_turns(
    model: torch.nn.Module, step: Callable[[], object], clock: Callable[[], float], rounds: int
) -> dict[str, Any]:
    """Seconds and page faults of each step, without and with a profile, one after the other."""

    def timed() -> tuple[float, int]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = clock()
        step()
        seconds = clock() - begin
        return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

    for _ in range(WARM_UP_STEPS):
        step()
    off: list[tuple[float, int]] = []
    on: list[tuple[float, int]] = []
    gc.disable()
    for i in range(2 * rounds):
        gc.collect()
        if (i + i // 2) % 2:
            with fsdp2.profile(model):
                on.append(timed())
        else:
            off.append(timed())
    seconds = {"off_s": [s for s, _ in off], "on_s": [s for s, _ in on]}
    faults = {"off_faults": [n for _, n in off], "on_faults": [n for _, n in on]}
    return {**seconds, **faults, "units": len(fsdp2.explain(model).units)}


def lm(rounds: int) -> dict[str, Any]:
    """The language model, on the clock of the wall."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    variant = build(OURS, partial(make_lm, LMConfig()), mesh, False)
    batch = random_tokens(LMConfig(), 2, 64)
    step = partial(train_step, variant, batch)
    return take_turns(variant.model, step, time.perf_counter, rounds)


def hooks(rounds: int) -> dict[str, Any]:
    """The stack of tiny blocks, by CPU time."""
    torch.set_flush_denormal(True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    variant = build(OURS, partial(make_stack, StackConfig()), mesh, bf16=False)
    x = torch.randn(1, 4, StackConfig().width)

    def step() -> None:
        variant.model.zero_grad()
        variant.model(x).sum().backward()

    return take_turns(variant.model, step, time.process_time, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25, metavar="N", help="steps of each kind")
    rounds = parser.parse_args().rounds
    found = {
        "lm, 2 ranks over gloo": run_ranks(lm, 2, {"rounds": rounds}),
        "lm, 1 rank": run_ranks(lm, 1, {"rounds": rounds}),
        "hooks, host only": run_ranks(hooks, 2, {"rounds": rounds}, fake=True),
    }
    print(
        "| measure | units | step without, ms | with, ms | ratio of medians | middle half "
        "| page faults without | with |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, measured in found.items():
        off, on = (1e3 * statistics.median(measured[key]) for key in ("off_s", "on_s"))
        faults = [statistics.median(measured[key]) for key in ("off_faults", "on_faults")]
        pairs = [b / a for a, b in zip(measured["off_s"], measured["on_s"], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        print(
            f"| {name} | {measured['units']} | {off:.1f} | {on:.1f} | {on / off:.3f} "
            f"| {low:.3f} to {high:.3f} | {faults[0]:.0f} | {faults[1]:.0f} |"
        )


if __name__ == "__main__":
    main()
