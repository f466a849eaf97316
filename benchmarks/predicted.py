"""Predicted and measured step times: five models, four strategies, two sizes of a micro-batch.

Measures this machine on as many ranks as will train (`fsdp2.planning.measure`), writes the hardware
file, and predicts each step from it (`fsdp2.predict`). Then trains for real: all strategies and
batches of a model live in the same processes and take turns. The shapes of the models are none of
those that the measurement times. Writes benchmarks/results/predicted.json and prints a table.

    python -m benchmarks.predicted [--ranks 4] [--write-docs]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.planning import Hardware, find_hardware, measure, write_hardware
from fsdp2.planning.trace.checkpointing import apply_checkpointing
from fsdp2.planning.workload import default_checkpoint_modules
from fsdp2.wrap import units_of

from . import machine
from .families import ResNet
from .models import LM, Block, LMConfig, Stack, StackConfig, lm_loss, rotation
from .ranks import progress, run_ranks
from .report import row, write_readme
from .steps import mean_over_ranks

BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"
WARM_UP_STEPS = 2
# The target: errors of at most the first; of steps that differ by more than the second, the order.
CLOSE, DIFFER = 0.15, 0.10

# Name: arguments of `predict`. On two ranks the hybrid of nodes has nothing to replicate.
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"strategy": "full"},
    "grad": {"strategy": "grad"},
    "none": {"strategy": "none"},
    "full, checkpointing": {"strategy": "full", "activation_checkpointing": "full"},
    "hybrid": {"strategy": "hybrid"},
}


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        make: makes the model on the default device.
        batch: of a number of samples.
        loss: of the model's output.
        samples: the two sizes of a micro-batch of a rank.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Callable[[Tensor], Tensor]
    samples: tuple[int, int]


class TiedLM(nn.Module):
    """A language model whose head is its embedding, and whose heads share keys and values."""

    def __init__(self, vocab: int, width: int, hidden: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = nn.ModuleList(Block(width, hidden, 6, 2) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wide_mlp() -> nn.Module:
    """Four large matrices; 12.6M parameters."""
    widths = (768, 3072, 1536, 3072, 256)
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def _tokens(vocab: int, length: int) -> Callable[[int], Tensor]:
    return lambda samples: torch.randint(vocab, (samples, length))


def _next_token(logits: Tensor) -> Tensor:
    return lm_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))


def _first_class(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


MODELS: dict[str, Model] = {
    "language model": Model(
        lambda: LM(LMConfig(vocab=4000, width=384, hidden=1056, num_blocks=6, num_heads=6)),
        _tokens(4000, 96),
        _next_token,
        (2, 6),
    ),
    "wide MLP": Model(
        wide_mlp, lambda samples: torch.randn(samples, 768), _first_class, (48, 192)
    ),
    "ResNet": Model(
        lambda: ResNet(40), lambda samples: torch.randn(samples, 3, 32, 32), _first_class, (3, 12)
    ),
    "small layers": Model(
        lambda: Stack(StackConfig(width=96, hidden=160, num_blocks=40)),
        lambda samples: torch.randn(samples, 48, 96),
        lambda x: x.square().mean(),
        (2, 10),
    ),
    "tied LM": Model(
        lambda: TiedLM(10000, 288, 800, 5), _tokens(10000, 160), _next_token, (1, 4)
    ),
}  # fmt: skip


def strategies_of(num_ranks: int) -> list[str]:
    """Four of two ranks; five of more."""
    return [name for name in STRATEGIES if name != "hybrid" or num_ranks > 2]


def mesh_shape(strategy: str, num_ranks: int) -> tuple[int, ...]:
    """The hybrid has two replicas; others have one dim."""
    return (2, num_ranks // 2) if strategy == "hybrid" else (num_ranks,)


# -- on the ranks ----------------------------------------------------------------------------------


def measure_hardware(path: str, quick: bool) -> dict[str, Any]:
    """Measures this rank with all others; rank 0 writes the file."""
    made = measure(quick=quick, progress=lambda what: progress(f"measuring: {what}"))
    if dist.get_rank() == 0:
        write_hardware(made, path)
    return {}


class Trainee:
    """One model with its optimizer, sharded in one way, and batches of both sizes."""

    def __init__(self, model: Model, strategy: str) -> None:
        torch.manual_seed(0)
        made = model.make()
        options = dict(STRATEGIES[strategy])
        if options.pop("activation_checkpointing", None):
            for name in default_checkpoint_modules(made, units_of(made, "auto")):
                module: Any = made.get_submodule(name)
                module.forward = apply_checkpointing(module.forward, "full")
        shape = mesh_shape(strategy, dist.get_world_size())
        names = ("replicate", "shard") if len(shape) == 2 else None
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.model = fsdp2.shard_model(made, mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss = model.loss
        torch.manual_seed(1000 + dist.get_rank())
        self.batches = {samples: model.batch(samples) for samples in model.samples}
        self.seconds: dict[int, list[list[float]]] = {samples: [] for samples in model.samples}
        self.losses: list[float] = []

    def step(self, samples: int) -> tuple[float, float]:
        """Seconds of forward and backward, and of the optimizer."""
        start = time.perf_counter()
        loss = self.loss(self.model(self.batches[samples]))
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        self.losses.append(mean_over_ranks(loss.item()))
        return middle - start, end - middle

    def one_turn(self, samples: int, iters: int) -> None:
        """Times some steps; each counts as long as the slowest rank took."""
        gc.collect()
        found = []
        for _ in range(iters):
            dist.barrier()
            found.append(self.step(samples))
        slowest = torch.tensor([(a + b, b) for a, b in found], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds[samples] += slowest.tolist()


def train(name: str, rounds: int, iters: int) -> dict[str, Any]:
    """Times all strategies and batches of a model in turns, on this rank.

    Returns:
        By strategy and samples: seconds of each step, and of its optimizer.
    """
    progress(f"training: {name}")
    model = MODELS[name]
    trainees = {each: Trainee(model, each) for each in strategies_of(dist.get_world_size())}
    turns = [(trainee, samples) for trainee in trainees.values() for samples in model.samples]
    for trainee, samples in turns:
        for _ in range(WARM_UP_STEPS):
            trainee.step(samples)
    for i in range(rounds):
        # Each round begins with another strategy; each strategy has the same order of batches.
        first = len(model.samples) * (i % len(trainees))
        for trainee, samples in turns[first:] + turns[:first]:
            trainee.one_turn(samples, iters)
    check_losses({each: trainee.losses for each, trainee in trainees.items()})
    return {each: trainee.seconds for each, trainee in trainees.items()}


def check_losses(losses: dict[str, list[float]]) -> None:
    """All strategies train the same model.

    Raises:
        RuntimeError: if losses differ by more than rounding.
    """
    first, expected = next(iter(losses.items()))
    for name, found in losses.items():
        for ours, theirs in zip(found, expected, strict=True):
            if not abs(ours - theirs) <= 1e-3 * abs(theirs) + 1e-6:
                raise RuntimeError(f"{name}: loss {ours}, of '{first}' {theirs}")


# -- prediction ------------------------------------------------------------------------------------


def predict(name: str, hardware: Hardware, num_ranks: int) -> dict[str, dict[str, Any]]:
    """By strategy and samples: predicted seconds of a step, and their parts."""
    progress(f"predicting: {name}")
    model = MODELS[name]
    found: dict[str, dict[str, Any]] = {}
    for strategy in strategies_of(num_ranks):
        found[strategy] = {}
        for samples in model.samples:
            rotation.cache_clear()  # or a trace would meet the tensors of another one
            made = fsdp2.predict(
                fsdp2.planning.Workload(model.make(), model.batch(samples), loss_fn=model.loss),
                fsdp2.planning.Sharding(**STRATEGIES[strategy]),
                fsdp2.planning.Cluster(hardware, mesh=mesh_shape(strategy, num_ranks)),
            )
            found[strategy][str(samples)] = {
                "seconds": made.seconds,
                "optimizer_s": made.step.optimizer_s,
                "kernels_s": made.step.compute_s,
                "exposed_s": made.step.exposed_s,
            }
    rotation.cache_clear()
    return found


# -- report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One configuration.

    Attributes:
        predicted, measured: seconds of a step.
        spread: half of what lies between the quartiles of the measured steps, relative.
    """

    model: str
    strategy: str
    samples: int
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def rows_of(results: dict[str, Any]) -> list[Row]:
    """Of one number of ranks; a measured step is the median of all its turns."""
    made = []
    for model, result in results.items():
        for strategy, batches in result["measured"].items():
            for samples, steps in batches.items():
                seconds = [whole for whole, _ in steps]
                middle = statistics.median(seconds)
                low, _, high = statistics.quantiles(seconds, n=4)
                predicted = result["predicted"][strategy][samples]["seconds"]
                spread = (high - low) / 2 / middle
                made.append(Row(model, strategy, int(samples), predicted, middle, spread))
    return made


def ordered(rows: list[Row], *, within: bool) -> tuple[int, int]:
    """Of the pairs that differ by more than `DIFFER`: how many are ordered right, and all.

    Args:
        within: only pairs of the same model.
    """
    right = number = 0
    for a, b in combinations(rows, 2):
        if within and a.model != b.model:
            continue
        if max(a.measured, b.measured) > (1 + DIFFER) * min(a.measured, b.measured):
            number += 1
            right += (a.predicted < b.predicted) == (a.measured < b.measured)
    return right, number


def summary(rows: list[Row]) -> str:
    """The target, and what became of it, in a sentence."""
    errors = sorted(abs(each.error) for each in rows)
    close = sum(error <= CLOSE for error in errors)
    worst = statistics.quantiles(errors, n=10, method="inclusive")[-1]
    right, of_all = ordered(rows, within=False)
    spread = max(each.spread for each in rows)
    return (
        f"{close} of {len(rows)} predictions are within {100 * CLOSE:.0f} % of the measured step; "
        f"median error {100 * statistics.median(errors):.0f} %, 90th percentile {100 * worst:.0f} "
        f"%. Of pairs that differ by more than {100 * DIFFER:.0f} %, {right} of {of_all} are "
        f"ordered right. Spread of a step: up to ± {100 * spread:.0f} %."
    )


def table(rows: list[Row]) -> str:
    """A Markdown table: milliseconds and the error of each."""
    heads = ["model", "strategy", "samples", "predicted, ms", "measured, ms", "error"]
    lines = [row(heads), row(["---"] * len(heads))]
    for each in rows:
        lines.append(row([
            each.model, each.strategy, str(each.samples), f"{1e3 * each.predicted:.0f}",
            f"{1e3 * each.measured:.0f} (± {100 * each.spread:.0f} %)", f"{100 * each.error:+.0f} %"
        ]))  # fmt: skip
    return "\n".join(lines)


def by_model(runs: dict[str, list[Row]]) -> str:
    """A Markdown table of several numbers of ranks: the steps of each model in a line."""
    heads = ["model"]
    for ranks in runs:
        heads += [f"{ranks} ranks: within {100 * CLOSE:.0f} %", "largest error"]
    lines = [row(heads), row(["---"] * len(heads))]
    for model in dict.fromkeys(each.model for rows in runs.values() for each in rows):
        cells = [model]
        for rows in runs.values():
            errors = sorted((each.error for each in rows if each.model == model), key=abs)
            close = sum(abs(error) <= CLOSE for error in errors)
            cells += [f"{close} of {len(errors)}", f"{100 * errors[-1]:+.0f} %" if errors else "-"]
        lines.append(row(cells))
    return "\n".join(lines)


def text_of(record: dict[str, Any]) -> str:
    """What the page has: where from, a summary for each number of ranks, and a table."""
    runs = {ranks: rows_of(each["results"]) for ranks, each in sorted(record["runs"].items())}
    places = {
        f"{each['machine']['cpu']}, {each['machine']['cores']} cores; "
        f"torch {each['versions']['torch']}; ranks of one thread over gloo."
        for each in record["runs"].values()
    }
    lines = [f"- {ranks} ranks: {summary(rows)}" for ranks, rows in runs.items()]
    return "\n".join([*sorted(places), "", *lines, "", by_model(runs)])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, predicts and trains on a number of ranks."""
    about = machine.describe()
    ranks = options.ranks
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        path = options.hardware or Path(folder) / "ours.json"
        if options.hardware is None:
            run_ranks(measure_hardware, ranks, {"path": str(path), "quick": options.quick})
        hardware = find_hardware(str(path))
    arguments = {"rounds": options.rounds, "iters": options.iters}
    measured = {
        name: run_ranks(train, ranks, {"name": name, **arguments}) for name in options.models
    }
    results = {
        name: {"predicted": predict(name, hardware, ranks), "measured": measured[name]}
        for name in options.models
    }
    return {**about, "results": results}


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="an even number")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each step")
    parser.add_argument("--iters", type=int, default=2, metavar="N", help="steps of a turn")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--hardware", type=Path, metavar="FILE", help="measured before")
    parser.add_argument("--quick", action="store_true", help="measure a few small sizes only")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--write-docs", action="store_true", help="into docs/planning/accuracy.md")
    options = parser.parse_args(arguments)
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    if options.ranks < 2 or options.ranks % 2:
        parser.error("--ranks: an even number, from 2")
    if options.rounds * options.iters < 2 or min(options.rounds, options.iters) < 1:
        parser.error("--rounds, --iters: at least two steps")
    path = options.output / "predicted.json"
    record = json.loads(path.read_text()) if path.exists() else {"name": "predicted", "runs": {}}
    record["runs"][str(options.ranks)] = run(options)  # those of other numbers stay
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    text = text_of(record)
    print("\n\n".join(table(rows_of(each["results"])) for each in record["runs"].values()), "\n")
    print(text)
    if options.write_docs:
        write_readme(machine.REPOSITORY / "docs" / "planning" / "accuracy.md", text, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
