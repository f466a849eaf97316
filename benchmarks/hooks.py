"""Host time of the hooks: many tiny units over a process group that communicates nothing.

64 blocks of 9 small parameters, 4 tokens, one process as rank 0 of a `fake` group of two: what a
step takes longer than the plain model's is Python, dispatch, and the copies of a few kilobytes.
The gathered values are meaningless there, so losses are not compared; that every parameter has a
gradient of its shard's shape is.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .models import Stack, StackConfig
from .ranks import progress
from .variants import Variant, build, local_part

WARM_UP_STEPS = 5


def make_stack(config: StackConfig) -> Stack:
    """The stack of tiny blocks, with the same initial weights at every call."""
    torch.manual_seed(0)
    return Stack(config)


def measure(names: list[str], config: StackConfig, rounds: int, iters: int) -> dict[str, Any]:
    """Times the named variants in this process, interleaved as in `lm.measure`.

    Args:
        names: Variants, in the order of the first round.
        config: Sizes of the model.
        rounds: How often each variant has its turn.
        iters: Timed steps per turn.

    Returns:
        For each variant, a list per round: `rounds_s`, wall times of forward and backward,
        `cpu_rounds_s`, CPU times of the same, and `optimizer_rounds_s`, of the AdamW step.
    """
    torch.set_flush_denormal(True)  # what a fake reduce-scatter leaves behind may be denormal
    runs = []
    for name in names:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        runs.append(Run(build(name, partial(make_stack, config), mesh, bf16=False), config))
    for run in runs:
        for _ in range(WARM_UP_STEPS):
            run.step()
    for i in range(rounds):
        for run in runs[i % len(runs) :] + runs[: i % len(runs)]:
            run.one_round(iters)
        medians = ", ".join(
            f"{run.variant.name} {statistics.median(run.rounds_s[-1]) * 1e3:.1f}" for run in runs
        )
        progress(f"hooks: round {i + 1} of {rounds}, ms: {medians}")
    return {
        run.variant.name: {
            "rounds_s": run.rounds_s,
            "cpu_rounds_s": run.cpu_rounds_s,
            "optimizer_rounds_s": run.optimizer_rounds_s,
        }
        for run in runs
    }


class Run:
    """One variant in training, and how long its steps took."""

    def __init__(self, variant: Variant, config: StackConfig) -> None:
        self.variant = variant
        self.optimizer = torch.optim.AdamW(variant.model.parameters(), lr=1e-6)
        self.x = torch.randn(1, 4, config.width)
        self.rounds_s: list[list[float]] = []
        self.cpu_rounds_s: list[list[float]] = []
        self.optimizer_rounds_s: list[list[float]] = []

    def forward_backward(self) -> None:
        """What is timed."""
        self.variant.model(self.x).sum().backward()

    def step(self) -> tuple[float, float, float]:
        """One step: wall and CPU seconds of forward and backward, and seconds of the optimizer."""
        self.optimizer.zero_grad()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.forward_backward()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        for gradient in self.variant.local_gradients():
            gradient.zero_()  # never written in a fake reduce-scatter: keep the weights finite
        return wall_s, cpu_s, seconds_of(self.optimizer.step)

    def one_round(self, iters: int) -> None:
        """Times some steps; checks that they left gradients."""
        gc.collect()
        steps = [self.step() for _ in range(iters)]
        walls, cpus, optimizers = map(list, zip(*steps, strict=True))
        self.rounds_s.append(walls)
        self.cpu_rounds_s.append(cpus)
        self.optimizer_rounds_s.append(optimizers)
        check_gradients(self.variant)


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def check_gradients(variant: Variant) -> None:
    """Raises RuntimeError where a parameter has no gradient of its own local shape."""
    for name, p in variant.model.named_parameters():
        shape = local_part(p.detach()).shape
        if p.grad is None or local_part(p.grad).shape != shape:
            raise RuntimeError(f"{variant.name}: {name} has no gradient of shape {tuple(shape)}")
