"""Wall time of forward and backward of the language model, all variants interleaved.

Every variant lives in the same processes at the same time. A round runs a few steps of each, one
variant after the other; the next round begins with another one, so that no variant always
follows the same neighbour. Between the steps, outside the timing, an SGD step changes the weights:
a library that reused results of an old step would give other losses than the plain model.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from .models import LMConfig
from .ranks import progress
from .steps import make_lm, mean_over_ranks, random_tokens, train_step
from .variants import Variant, average_gradients, build, gradient_norm

LEARNING_RATE = 1e-2
WARM_UP_STEPS = 3


def measure(
    names: list[str],
    config: LMConfig,
    batch_size: int,
    tokens: int,
    bf16: bool,
    rounds: int,
    iters: int,
) -> dict[str, Any]:
    """Times the named variants on this rank.

    Args:
        names: Variants, in the order of the first round.
        config: Sizes of the model.
        batch_size: Sequences per rank.
        tokens: Tokens per sequence.
        bf16: Compute in bf16, reduce in fp32.
        rounds: How often each variant has its turn.
        iters: Timed steps per turn.

    Returns:
        For each variant: `rounds_s`, a list of step times per round, each the slowest rank's;
        `cpu_rounds_s`, this rank's CPU time of the same steps; `losses` and `gradient_norms`, of
        the last step of each round.
    """
    runs = []
    for name in names:
        progress(f"lm{' bf16' if bf16 else ''}: building {name}")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        variant = build(name, partial(make_lm, config), mesh, bf16)
        runs.append(Run(variant, config, batch_size, tokens))
    return take_turns(runs, f"lm{' bf16' if bf16 else ''}", rounds, iters)


def take_turns(runs: list[Run], title: str, rounds: int, iters: int) -> dict[str, Any]:
    """Warms up all variants and times them in turns; returns the results of each by name."""
    for run in runs:
        for _ in range(WARM_UP_STEPS):
            run.step()
    for i in range(rounds):
        for run in runs[i % len(runs) :] + runs[: i % len(runs)]:
            run.one_round(iters)
        medians = ", ".join(
            f"{run.variant.name} {statistics.median(run.rounds_s[-1]) * 1e3:.0f}" for run in runs
        )
        progress(f"{title}: round {i + 1} of {rounds}, ms: {medians}")
    return {run.variant.name: run.results() for run in runs}


class Run:
    """One variant in training, and what was seen of it."""

    def __init__(self, variant: Variant, config: LMConfig, batch_size: int, tokens: int) -> None:
        self.variant = variant
        self.config = config
        self.optimizer = torch.optim.SGD(variant.model.parameters(), lr=LEARNING_RATE)
        self.batches = self.make_batches(batch_size, tokens)
        self.num_steps = 0
        self.rounds_s: list[list[float]] = []
        self.cpu_rounds_s: list[list[float]] = []
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []

    def make_batches(self, *sizes: int) -> list[Tensor]:
        """What this rank trains on, one after the other; (batch size, tokens) are its sizes."""
        return [random_tokens(self.config, *sizes, seed) for seed in range(4)]

    def forward_backward(self, batch: Tensor) -> float:
        """What is timed; returns this rank's loss."""
        return train_step(self.variant, batch)

    def average(self) -> None:
        """Averages the gradients of a variant that does not communicate by itself."""
        average_gradients(self.variant)

    def norm(self) -> float:
        """The 2-norm of all gradients."""
        return gradient_norm(self.variant)

    def step(self) -> tuple[float, float, float]:
        """One training step; returns wall and CPU seconds of forward and backward, and the loss."""
        batch = self.batches[self.num_steps % len(self.batches)]
        self.optimizer.zero_grad()
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        loss = self.forward_backward(batch)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        self.average()
        self.optimizer.step()
        self.num_steps += 1
        return wall_s, cpu_s, loss

    def one_round(self, iters: int) -> None:
        """Times some steps and takes down the last one's loss and gradient norm."""
        gc.collect()  # so that no variant pays for the garbage of the one before
        steps = [self.step() for _ in range(iters)]
        wall_s = torch.tensor([wall for wall, _, _ in steps], dtype=torch.float64)
        dist.all_reduce(wall_s, op=dist.ReduceOp.MAX)
        self.rounds_s.append(wall_s.tolist())
        self.cpu_rounds_s.append([cpu for _, cpu, _ in steps])
        self.losses.append(mean_over_ranks(steps[-1][2]))
        self.gradient_norms.append(self.norm())

    def results(self) -> dict[str, Any]:
        """Everything that was seen, ready for JSON."""
        return {
            "rounds_s": self.rounds_s,
            "cpu_rounds_s": self.cpu_rounds_s,
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
        }
