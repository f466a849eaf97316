"""Every strategy on every example: time, bytes and traffic of a step, for docs/choosing.md.

Of each example (`examples/`) the model is trained plainly (one rank's batch, nothing communicated),
under torch's DDP, and by `fsdp2.shard_model` with each strategy, on two ranks over gloo. All of
them live in the same processes and take turns; a ratio is taken within a round. Then one step of
each is done again under a `Ledger`, which counts the bytes of all live tensors, and the bytes of
messages are counted. Writes benchmarks/results/choosing.json and prints a table; the page has a
shorter one.

    python -m benchmarks.choosing [--only-table] [--write-docs]
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fsdp2

from . import machine
from .host_ranks import ratios
from .ledger import Ledger
from .ranks import progress, run_ranks
from .report import number, row, write_readme, write_record
from .steps import mean_over_ranks
from .transport import around_waits, counting_sent
from .variants import Variant, average_gradients, local_part

WARM_UP_STEPS = 2
SEED = 0
# name: arguments of `shard_model`; None: not sharded by it.
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "DDP": None,
    "none": {"strategy": "none"},
    "optimizer": {"strategy": "optimizer"},
    "grad": {"strategy": "grad"},
    "full": {"strategy": "full"},
}
BF16 = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Beside "full": what else can be chosen.
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "language model": {
        "full, bf16": {"strategy": "full", "mp_policy": BF16},
        "full, one unit": {"strategy": "full", "wrap": "root"},
        "full, checkpointing": {"strategy": "full", "recompute": True},
        "full, prefetch 2": {"strategy": "full", "prefetch": 2},
    },
    "recommender": {"full, small tables whole": {"strategy": "full", "replicate_below": 131072}},
}


@dataclass(frozen=True)
class Example:
    """What is trained.

    Attributes:
        model: makes it; whether to recompute activations.
        batch: makes this rank's arguments of forward, and the target.
        loss: of output and target.
        wrap: as of `shard_model`.
    """

    model: Callable[[bool], nn.Module]
    batch: Callable[[], tuple[tuple[Tensor, ...], Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    wrap: Any


def examples() -> dict[str, Example]:
    """The examples, with their default sizes; the data are random, in their shapes."""
    folder = str(machine.REPOSITORY / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from common.lm_model import Block, LanguageModel, ModelConfig
    from train_recommender import DECADES, GENRES_OF_A_MOVIE, DeepAndWide
    from train_resnet import Residual, ResNet18
    from train_weather import FUTURE, PAST, WeatherModel
    from train_weather import Block as WeatherBlock

    # Importing them made Ctrl-C a request to stop after the step; here it just interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    genres = torch.randint(20, (9066, GENRES_OF_A_MOVIE))
    decades = torch.randint(DECADES, (9066,))

    def recommender(recompute: bool) -> nn.Module:
        model = DeepAndWide(671, 20, genres=genres, decades=decades, buckets=100_003, dim=32)
        model.init_weights()
        return model

    def tokens() -> tuple[tuple[Tensor, ...], Tensor]:
        return (torch.randint(256, (4, 128)),), torch.randint(256, (4, 128))

    return {
        "language model": Example(
            lambda recompute: LanguageModel(ModelConfig(recompute=recompute)),
            tokens,
            lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
            Block,
        ),
        "ResNet-18": Example(
            lambda recompute: ResNet18(),
            lambda: ((torch.randn(32, 1, 8, 8),), torch.randint(10, (32,))),
            F.cross_entropy,
            Residual,
        ),
        "weather": Example(
            lambda recompute: WeatherModel(3, 12, recompute=recompute),
            lambda: ((torch.randn(32, PAST, 3, 12),), torch.randn(32, FUTURE, 3)),
            F.mse_loss,
            WeatherBlock,
        ),
        "recommender": Example(
            recommender,
            lambda: (
                (torch.randint(671, (512,)), torch.randint(9066, (512,))),
                torch.randint(2, (512,)).float(),
            ),
            F.binary_cross_entropy_with_logits,
            nn.Embedding,
        ),
    }


class Trainee:
    """One model with its optimizer and batch."""

    def __init__(self, name: str, example: Example, options: dict[str, Any] | None) -> None:
        torch.manual_seed(SEED)
        options = dict(options or {})
        model = example.model(options.pop("recompute", False))
        if name == "DDP":
            # Like it: gradients are views of its buckets, so that they exist once.
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        elif options:
            model = fsdp2.shard_model(model, **{"wrap": example.wrap, **options})
        self.name, self.model, self.loss = name, model, example.loss
        # One kernel for all parameters, and no scratch memory, in every variant alike.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1000 + dist.get_rank())
        self.batch, self.target = example.batch()
        self.rounds_s: list[list[float]] = []
        self.losses: list[float] = []

    def forward_backward(self) -> float:
        loss = self.loss(self.model(*self.batch), self.target)
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        """Seconds of a whole step, optimizer too; nothing of it is another rank's."""
        start = time.perf_counter()
        loss = self.forward_backward()
        passed = time.perf_counter() - start
        if self.name == "plain":  # outside the timing, so that it stays the same model
            average_gradients(Variant("plain", self.model, sharded=False, averages=False))
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(mean_over_ranks(loss))
        return passed + time.perf_counter() - start

    def one_round(self, iters: int) -> None:
        """Times some steps; each counts as long as the slowest rank took."""
        gc.collect()
        seconds = []
        for _ in range(iters):
            dist.barrier()
            seconds.append(self.step())
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.rounds_s.append(slowest.tolist())


def measure(name: str, rounds: int, iters: int) -> dict[str, Any]:
    """Times all variants of an example in turns, then counts the bytes of each; on this rank."""
    example = examples()[name]
    variants = {**VARIANTS, **MORE.get(name, {})}
    progress(f"{name}: timing {', '.join(variants)}")
    trainees = [Trainee(key, example, options) for key, options in variants.items()]
    for trainee in trainees:
        for _ in range(WARM_UP_STEPS):
            trainee.step()
    for i in range(rounds):
        turn = i % len(trainees)  # each round begins with another one
        for trainee in trainees[turn:] + trainees[:turn]:
            trainee.one_round(iters)
    timed = {t.name: {"rounds_s": t.rounds_s, "losses": t.losses} for t in trainees}
    check_losses(timed)
    del trainees, trainee
    gc.collect()
    progress(f"{name}: counting")
    return {key: timed[key] | count(key, example, options) for key, options in variants.items()}


def check_losses(timed: dict[str, dict[str, Any]]) -> None:
    """All variants train the same model.

    Raises:
        RuntimeError: if losses differ by more than rounding.
    """
    for name, result in timed.items():
        allowed = 0.05 if "bf16" in name else 1e-3
        for ours, plain in zip(result["losses"], timed["plain"]["losses"], strict=True):
            if not abs(ours - plain) <= allowed * abs(plain):
                raise RuntimeError(f"{name}: loss {ours}, of the plain model {plain}")


def count(name: str, example: Example, options: dict[str, Any] | None) -> dict[str, int]:
    """The bytes that a rank holds in a step, and sends."""
    ledger = Ledger(every_operation=False)
    with ledger, around_waits(ledger.paused), counting_sent() as sent:
        trainee = Trainee(name, example, options)
        for _ in range(WARM_UP_STEPS):
            trainee.step()
        sent.clear()
        ledger.every_operation = True
        ledger.sample("step begins")
        start = ledger.now
        trainee.forward_backward()
        trainee.optimizer.step()
        ledger.sample("step ends")
        parameters = list(trainee.model.parameters())
        states = [v for s in trainee.optimizer.state.values() for v in s.values()]
        held = {
            "parameters": _nbytes(parameters),
            "gradients": _nbytes([p.grad for p in parameters]),
            "optimizer": _nbytes(states),
            "peak": max(ledger.live_bytes[start:]),
        }
    num_ranks = dist.get_world_size()
    if name == "DDP":  # its all-reduces are out of sight: as a ring
        return held | {"sent": 2 * held["gradients"] * (num_ranks - 1) // num_ranks}
    if name != "plain":
        explained = fsdp2.explain(trainee.model).totals.sent_bytes
        if abs(explained - sum(sent.values())) > 0.01 * explained:
            raise RuntimeError(f"{name}: explained {explained} bytes sent, counted {sent}")
    return held | {"sent": sum(sent.values())}


def _nbytes(values: list[Any]) -> int:
    return sum(local_part(v).nbytes for v in values if isinstance(v, Tensor))


# -- report --------------------------------------------------------------------------------------

COLUMNS = (
    "example", "strategy", "step, ms", "step / plain", "step / DDP", "parameters", "gradients",
    "optimizer", "peak", "sent per step",
)  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """A Markdown table; bytes are of a rank, in MB (10^6)."""
    lines = [row(list(COLUMNS)), row(["---"] * len(COLUMNS))]
    for example, runs in results.items():
        for name, run in runs.items():
            cells = [example, name, number(1e3 * statistics.median(medians(run)))]
            for base in ("plain", "DDP"):
                found = ratios(medians(run), medians(runs[base]))
                spread = f" ({min(found):.2f} to {max(found):.2f})" if name != base else ""
                cells.append(f"{statistics.median(found):.2f}{spread}")
            keys = ("parameters", "gradients", "optimizer", "peak", "sent")
            lines.append(row([*cells, *(f"{run[key] / 1e6:.1f}" for key in keys)]))
    return "\n".join(lines)


def page_table(results: dict[str, dict[str, Any]]) -> str:
    """The table of the page, a column per example: time over DDP's, peak MB, MB sent."""
    strategies = list(dict.fromkeys(name for runs in results.values() for name in runs))
    lines = [row(["strategy", *results]), row(["---"] * (1 + len(results)))]
    for name in strategies:
        cells = [page_cell(runs, name) if name in runs else "" for runs in results.values()]
        lines.append(row([name, *cells]))
    return "\n".join(lines)


def page_cell(runs: dict[str, Any], name: str) -> str:
    """What a strategy costs: the median ratio within rounds, and bytes of a rank."""
    made = runs[name]
    ratio = statistics.median(ratios(medians(made), medians(runs["DDP"])))
    return f"{ratio:.2f}, {made['peak'] / 1e6:.0f}, {made['sent'] / 1e6:.0f}"


def medians(run: dict[str, Any]) -> list[float]:
    """Of each round."""
    return [statistics.median(seconds) for seconds in run["rounds_s"]]


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choosing")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="turns of each variant")
    parser.add_argument("--iters", type=int, default=2, metavar="N", help="steps of a turn")
    parser.add_argument("--examples", nargs="+", default=list(examples()), metavar="NAME")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--only-table", action="store_true", help="of the results that are there")
    parser.add_argument("--write-docs", action="store_true", help="put it into docs/choosing.md")
    options = parser.parse_args(arguments)
    unknown = set(options.examples) - set(examples())
    if unknown or options.rounds < 1 or options.iters < 1:
        parser.error(f"no example {', '.join(unknown)}" if unknown else "--rounds, --iters: from 1")
    path = options.output / "choosing.json"
    if not options.only_table:
        about = machine.describe()
        results = {
            name: run_ranks(
                measure, 2, {"name": name, "rounds": options.rounds, "iters": options.iters}
            )
            for name in options.examples
        }
        record = {"name": "choosing", **about, "num_ranks": 2, "results": results}
        write_record(record, options.output)
    record = json.loads(path.read_text())
    print(f"{describe(record)}\n\n{table(record['results'])}")
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "choosing.md"
        text = f"{describe(record)}\n\n{page_table(record['results'])}"
        write_readme(page, text, "<!-- choosing:begin -->", "<!-- choosing:end -->")
    return 0


def describe(record: dict[str, Any]) -> str:
    """One line on where the figures are from."""
    versions, where = record["versions"], record["machine"]
    commit = (record["commit"] or "unknown")[:12] + " with changes" * record["uncommitted_changes"]
    return (
        f"{where['cpu']}, {where['cores']} cores; 2 ranks of one thread over gloo; torch "
        f"{versions['torch']}, Python {versions['python']}; {record['date'][:10]}, commit {commit}."
    )


if __name__ == "__main__":
    sys.exit(main())
