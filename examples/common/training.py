"""Code that the scripts of the model families share: options, steps, log, checkpoints, figures.

The scripts show forward, backward and the optimizer step; this file has the rest of a run.
"""

from __future__ import annotations

from common.interrupt import stop_requested  # isort: skip (before torch: it takes Ctrl-C)

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from common.lm_report import LossLog, Numbers, Progress, memory_in_use
from common.options import (
    OneLineParser,
    as_saved,
    checkpoint_folder,
    checkpoint_path,
    exit_if_finished,
    fail,
    make_folder,
    positive,
    positive_number,
    saved_run,
)
from common.processes import set_earlier_run_aside
from fsdp2.checkpoint import Checkpointer

STRATEGIES = ("full", "grad", "optimizer", "none", "hybrid")
WARM_UP_STEPS = 20  # of the learning rate
# Options that a resumed run may change. The strategy is one: a checkpoint holds whole tensors.
FREE = {"resume", "out", "steps", "stop_at", "strategy"}


def training_parser(doc: str | None, *, out: str, steps: int, batch: int, lr: float) -> Any:
    """A parser with the options that all families have."""
    parser = OneLineParser(
        description=(doc or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", default=f"runs/{out}", metavar="DIR", help="folder for log and checkpoints")
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and the batches")
    add("--steps", type=positive, default=steps, metavar="N", help="optimizer steps")
    add("--stop-at", type=positive, metavar="N", help="stop after this step, to --resume later")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--batch", type=positive, default=batch, metavar="N", help="examples per step, all ranks")
    add("--lr", type=positive_number, default=lr, metavar="X", help="peak learning rate")
    add("--strategy", choices=STRATEGIES, default="full", help="what is sharded over the ranks")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the options; with --resume, options not given come from the checkpoint."""
    options = parser.parse_args(argv)
    if options.resume:
        step, saved = saved_run(options.out)
        options = as_saved(parser, argv, saved["options"], FREE)
        exit_if_finished(options, step)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch % num_ranks:
        fail(f"--batch {options.batch} is not a multiple of the {num_ranks} processes")
    make_folder(options.out)
    return options


class Run:
    """A training run: the steps that are left, their log, checkpoints and figures.

    Args:
        unit: the unit of the speed: this many are processed per second.
        extra: called before a checkpoint is saved; its result is saved too, and is in `loaded`
            after a resume.

    Example::

        run = Run(options, device, model, optimizer, unit="images")
        for step in run.steps():
            loss = loss_of(model, batch_of(step))
            loss.backward()
            optimizer.step()
            run.record(loss)
            optimizer.zero_grad()
    """

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        unit: str,
        extra: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self.options, self.device, self.unit, self.extra = options, device, unit, extra
        self.model, self.optimizer = model, optimizer
        self.numbers = Numbers()
        self.out = Path(options.out)
        self.first_step, self.loaded = 0, {}
        self.last_step = min(options.steps, options.stop_at or options.steps)
        if not options.resume:
            set_earlier_run_aside(options.out)
        # Every rank writes its shards to ordinary safetensors files. It can read its shards from
        # files that any number of ranks wrote, with any strategy.
        self.checkpoints = Checkpointer(checkpoint_folder(options.out), keep=2)
        if options.resume:
            found = self.checkpoints.load("latest", model=model, optimizer=optimizer)
            self.first_step, self.loaded = found.step, found.extra
        self.interrupted = False
        self._loss = 0.0
        self._state: dict[str, int] = {}
        self._times: list[float] = []
        self._say(f"model        {_numel(model):,} parameters on {dist.get_world_size()} ranks")
        if self.first_step:
            self._say(f"resumed      after step {self.first_step}")

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1; log each afterwards, and save the last."""
        options = self.options
        last = self.last_step
        log = LossLog(self.out, first_step=self.first_step)
        progress = Progress(
            first_step=self.first_step,
            last_step=last,
            units_per_step=options.batch,
            unit=self.unit,
        )
        for step in range(self.first_step + 1, last + 1):
            rate = learning_rate_at(step, options)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            began = time.perf_counter()
            yield step
            self._times.append(time.perf_counter() - began)
            # All ranks learn the mean loss, and whether any rank was asked to stop: they must stop
            # after the same step.
            ranks = self.numbers.of_all_ranks(
                self._loss, memory_in_use(self.device), stop_requested()
            )
            loss, self.interrupted = float(ranks[:, 0].mean()), bool(ranks[:, 2].any())
            log.write(step, loss=loss, learning_rate=rate)
            progress.update(step, loss=loss, memory_bytes=float(ranks[:, 1].max()))
            if self.interrupted or step == last:
                self._save(step)
            if self.interrupted:
                self._say(f"stopped after step {step}; --resume continues from there")
                break
        progress.close()
        log.close()
        self.checkpoints.close()

    def record(self, loss: Tensor) -> None:
        """Record the loss, and this rank's memory while it still has gradients."""
        self._loss = loss.item()
        if not self._state:
            self._state = state_bytes(self.model, self.optimizer)

    def _save(self, step: int) -> None:
        saved = {k: v for k, v in vars(self.options).items() if k not in FREE or k == "steps"}
        extra = {"options": saved, **self.extra()}
        self.checkpoints.save(step, model=self.model, optimizer=self.optimizer, extra=extra)

    def report(self, **figures: Any) -> None:
        """Print memory, traffic and speed of the ranks, and write them to summary.json."""
        keys = ("parameters", "gradients", "optimizer")
        rows = self.numbers.of_all_ranks(*(self._state.get(key, 0) for key in keys)).long()
        ranks = [dict(zip(keys, row, strict=True)) for row in rows.tolist()]
        sent = fsdp2.explain(self.model).totals
        # The first steps gather memory and learn the order of the units.
        times = self._times[3:] or self._times
        step_s = statistics.median(times) if times else math.nan
        for i, rank in enumerate(ranks):
            parts = ", ".join(f"{key} {value / 1e6:.1f} MB" for key, value in rank.items())
            self._say(f"rank {i:<8}{parts}; together {sum(rank.values()) / 1e6:.1f} MB")
        self._say(
            f"sent         per rank and step {sent.sent_by_gathers / 1e6:.1f} MB by gathers, "
            f"{(sent.sent_by_reduction + sent.sent_by_all_reduction) / 1e6:.1f} MB by reductions"
        )
        self._say(
            f"speed        {self.options.batch / step_s:,.0f} {self.unit}/s, {step_s * 1e3:.0f} ms "
            f"per step (median of {len(times)})"
        )
        self._say(
            f"checkpoint   {checkpoint_path(self.options.out, self.last_step)} (to continue: "
            "--resume with a larger --steps)"
        )
        if dist.get_rank() == 0:
            summary = {**figures, "ranks": ranks, "sent_bytes": sent.sent_bytes, "step_s": step_s}
            (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    def _say(self, line: str) -> None:
        say(line)


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def learning_rate_at(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then cosine decay to a hundredth of the peak."""
    warm_up = min(WARM_UP_STEPS, options.steps)
    if step <= warm_up:
        return options.lr * step / warm_up
    done = (step - warm_up) / (options.steps - warm_up)
    return options.lr * (0.505 + 0.495 * math.cos(math.pi * done))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank holds of parameters, gradients and optimizer state."""
    states = [v for state in optimizer.state.values() for v in state.values()]
    return {
        "parameters": _nbytes(list(model.parameters())),
        "gradients": _nbytes([p.grad for p in model.parameters()]),
        "optimizer": _nbytes(states),
    }


def _nbytes(values: list[Any]) -> int:
    own = [v.to_local() if isinstance(v, DTensor) else v for v in values if isinstance(v, Tensor)]
    return sum(tensor.nbytes for tensor in own)


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
