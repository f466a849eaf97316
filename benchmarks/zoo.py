"""Models that nobody tuned to: fsdp2 beside torch's FSDP2 (best settings) and DDP.

    python -m benchmarks.zoo [--quick] [--models NAME ...] [--settings NAME ...] [--write-docs]

Eight models (`zoo_models.py`) with a unit per block, in several settings, fp32 and bf16, over gloo
with one thread per rank. For each cell: forward and backward of all micro-batches of a step, all
variants taking turns in the same processes; the most bytes of live tensors in a step, parameters
and gradients included, counted by `ledger`; gathers and reductions of a step; and the loss after
five steps of SGD beside that of one process in fp32. bf16 means that parameters are cast and
gradients reduced in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fsdp2

from . import machine
from .graph import Collectives
from .host_ranks import ratios
from .ledger import Ledger
from .ranks import progress, run_ranks
from .report import measured_on, row, show_table, write_record
from .steps import mean_over_ranks
from .transport import around_waits
from .variants import BEST_BASELINE, OURS, Variant, average_gradients, use_best_settings
from .zoo_models import ENTRIES, Entry

PLAIN, DDP = "plain", "DDP"
BEGIN, END = "<!-- zoo:begin -->", "<!-- zoo:end -->"
LOSS_STEPS = 5
# When a reduction ends depends on other ranks: the peaks of fsdp2's steps differ by up to 2 %.
PEAK_STEPS = 3
# fp32: sums in another order are all that differs.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        ranks: their number; the batch is per rank.
        bf16: cast parameters, and reduce gradients, in bf16.
        accumulation: micro-batches of a step.
        sync: whether each of them reduces its gradients.
        checkpointing: units are recomputed in backward.
        hybrid: shards over half of the ranks, replicas over the other half.
        reshard: whether units are freed after forward.
    """

    ranks: int = 2
    bf16: bool = False
    accumulation: int = 1
    sync: bool = True
    checkpointing: bool = False
    hybrid: bool = False
    reshard: bool = True


SETTINGS = {
    "2 ranks": Setting(),
    "3 ranks": Setting(ranks=3),
    "4 ranks": Setting(ranks=4),
    "2 ranks, bf16": Setting(bf16=True),
    "accumulate 4": Setting(accumulation=4, sync=False),
    "accumulate 4, reduce each": Setting(accumulation=4),
    "checkpointing": Setting(checkpointing=True),
    "HSDP 2 x 2": Setting(ranks=4, hybrid=True),
    "reshard False": Setting(reshard=False),
}
QUICK = "2 ranks"
# Its statistics are fp32 buffers, with which torch's batch norm on the CPU takes no bf16 weights.
NOT_IN_BF16 = ("ResNet-50",)


def build(name: str, entry: Entry, setting: Setting) -> Variant:
    """A variant of the model of ``entry``, from the same initial weights at every call."""
    torch.manual_seed(0)
    model, units = entry.model(), entry.units()
    if setting.checkpointing:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, units))
    if name == PLAIN:
        return Variant(name, model, sharded=False, averages=False)
    if name == DDP:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Variant(name, model, sharded=False, averages=True)
    library: Any = fsdp2 if name == OURS else torch_fsdp
    half = setting.ranks // 2
    mesh = (
        init_device_mesh("cpu", (2, half), mesh_dim_names=("replicate", "shard"))
        if setting.hybrid
        else init_device_mesh("cpu", (setting.ranks,))
    )
    dtype = torch.bfloat16 if setting.bf16 else None
    policy = library.MixedPrecisionPolicy(param_dtype=dtype)
    shard = partial(library.fully_shard, mesh=mesh, mp_policy=policy)
    options = {} if setting.reshard else {"reshard_after_forward": False}
    for module in list(model.modules()):
        if isinstance(module, units):
            shard(module, **options)
    shard(model, **options)
    if name == BEST_BASELINE:
        use_best_settings(model, units)
    return Variant(name, model, sharded=True, averages=True)


class Run:
    """A variant in training."""

    def __init__(self, variant: Variant, entry: Entry, setting: Setting) -> None:
        self.variant, self.entry, self.setting = variant, entry, setting
        trained = [p for p in variant.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())
        self.batches = [entry.batch() for _ in range(setting.accumulation)]
        self.rounds_s: list[list[float]] = []

    def forward_backward(self) -> Tensor:
        """All micro-batches of a step; the loss of the last one."""
        last = self.setting.accumulation - 1
        for i, batch in enumerate(self.batches):
            with self._without_sync() if i < last and not self.setting.sync else nullcontext():
                loss = self.entry.loss(self.variant.model(*batch))
                loss.backward()
        return loss.detach()

    def _without_sync(self) -> Any:
        model: Any = self.variant.model
        if self.variant.name == DDP:
            return model.no_sync()
        if self.variant.name in (OURS, BEST_BASELINE):
            return _Unsynced(model)
        return nullcontext()

    def step(self) -> tuple[float, float]:
        """One training step: seconds of forward and backward, and the loss of this rank."""
        self.optimizer.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = self.forward_backward()
        seconds = time.perf_counter() - start
        average_gradients(self.variant)
        self.optimizer.step()
        return seconds, loss.item()

    def one_round(self, iters: int) -> None:
        """Times some steps; of each, the slowest rank counts."""
        gc.collect()
        seconds = torch.tensor([self.step()[0] for _ in range(iters)], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.rounds_s.append(seconds.tolist())


class _Unsynced:
    """Context without gradient sync, for either library."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.set_requires_gradient_sync(False)

    def __exit__(self, *error: object) -> None:
        self.model.set_requires_gradient_sync(True)


def measure(model: str, setting: dict[str, Any], rounds: int, iters: int) -> dict[str, Any]:
    """One cell: what is measured of each variant, on this rank."""
    entry, how = ENTRIES[model], Setting(**setting)
    names = [BEST_BASELINE, OURS, *([DDP] if not how.bf16 and not how.hybrid else [])]
    runs = {name: Run(build(name, entry, how), entry, how) for name in names}
    losses = {name: loss_of(run) for name, run in runs.items()}
    exact = loss_of(Run(build(PLAIN, entry, how), entry, how))
    for i in range(rounds):
        for run in [*runs.values()][i % len(runs) :] + [*runs.values()][: i % len(runs)]:
            run.one_round(iters)
    found = {}
    for name, run in runs.items():
        run.optimizer.zero_grad()
        with Collectives() as collectives:
            run.forward_backward()
        found[name] = {
            "rounds_s": [statistics.median(each) for each in run.rounds_s],
            "collectives": collectives.number,
            "loss_error": abs(losses[name] - exact) / abs(exact),
        }
    runs.clear()
    for name in names:
        found[name]["peak_bytes"] = peak_bytes(
            lambda name=name: build(name, entry, how), entry, how
        )
    return found


def loss_of(run: Run) -> float:
    """The mean loss over all ranks, after some steps."""
    for _ in range(LOSS_STEPS):
        loss = run.step()[1]
    return mean_over_ranks(loss)


def peak_bytes(make: Callable[[], Variant], entry: Entry, setting: Setting) -> int:
    """The most bytes of live tensors in a step, the median of `PEAK_STEPS` steps."""
    gc.collect()
    with Ledger(every_operation=False) as ledger, around_waits(ledger.paused):
        run = Run(make(), entry, setting)
        for _ in range(2):
            run.step()
        ledger.every_operation = True
        peaks = []
        for _ in range(PEAK_STEPS):
            run.optimizer.zero_grad()
            ledger.sample("between steps")
            start = ledger.now
            run.forward_backward()
            ledger.sample("after backward")
            peaks.append(max(ledger.live_bytes[start:]))
        return statistics.median_low(peaks)


def check(model: str, setting: str, found: dict[str, Any]) -> None:
    """
    Raises:
        RuntimeError: a variant in fp32 has other losses than one process.
    """
    for name, result in found.items():
        if not SETTINGS[setting].bf16 and not result["loss_error"] <= LOSS_TOLERANCE:
            raise RuntimeError(
                f"{model}, {setting}: the loss of {name} differs by {result['loss_error']:.2g}"
            )


def cell(found: dict[str, Any], name: str = OURS) -> str:
    """Time and peak of a variant in units of torch's FSDP2."""
    base = found[BEST_BASELINE]
    if name not in found:
        return "-"
    each = ratios(found[name]["rounds_s"], base["rounds_s"])
    memory = found[name]["peak_bytes"] / base["peak_bytes"]
    return f"{statistics.median(each):.2f} / {memory:.2f}"


def errors(found: dict[str, Any]) -> str:
    """How far the losses of fsdp2 and of torch's FSDP2 are from those of one process."""
    return " / ".join(f"{100 * found[name]['loss_error']:.3f} %" for name in (OURS, BEST_BASELINE))


def table(
    record: dict[str, Any], show: Callable[[dict[str, Any]], str] = cell, *, bf16: bool = False
) -> str:
    """Markdown: a row for each model, a column for each setting with a value, or each in bf16."""
    cells: dict[str, dict[str, Any]] = record["cells"]
    shown = {
        model: {name: show(found) for name, found in cells[model].items()}
        for model in ENTRIES
        if model in cells
    }
    measured = {name for each in shown.values() for name, text in each.items() if text != "-"}
    settings = [n for n, how in SETTINGS.items() if n in measured and (how.bf16 or not bf16)]
    lines = [row(["model", *settings]), row(["---", *["---:"] * len(settings)])]
    lines += [row([m, *(each.get(n, "-") for n in settings)]) for m, each in shown.items()]
    return "\n".join(lines)


def machine_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be the same for cells of two runs to stand in one table."""
    return record["machine"]["cpu"], record["machine"]["cores"], record["versions"]["torch"]


def describe(record: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    commits = {found["commit"] for each in record["cells"].values() for found in each.values()}
    earlier = " Some cells: earlier commits." if commits - {record["commit"]} else ""
    parts = [
        f"{measured_on(record)}{earlier}"
        " Time / peak memory of fsdp2, each divided by torch FSDP2's with its best settings:",
        table(record),
        "The same for DDP, which keeps whole parameters and gradients:",
        table(record, partial(cell, name=DDP)),
        "How far the loss after five steps differs from a single process in fp32, "
        "fsdp2 / torch FSDP2:",
        table(record, errors, bf16=True),
    ]
    return "\n\n".join(parts)


def run(
    models: list[str],
    settings: list[str],
    rounds: int,
    iters: int,
    *,
    before: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """The record of the measure, ready for JSON.

    Args:
        before: the record of an earlier run, whose cells are kept and not measured again.
        keep: gets what there is after each cell.
    """
    record = {"name": "zoo", **machine.describe(), "cells": before["cells"] if before else {}}
    cells: dict[str, dict[str, Any]] = record["cells"]
    for model in models:
        for name in settings:
            setting = SETTINGS[name]
            if name in cells.get(model, {}) or (setting.bf16 and model in NOT_IN_BF16):
                continue
            given = {"model": model, "setting": asdict(setting), "rounds": rounds, "iters": iters}
            start = time.perf_counter()
            found = run_ranks(measure, setting.ranks, given)
            check(model, name, found)
            found["commit"] = record["commit"]
            cells.setdefault(model, {})[name] = found
            progress(
                f"zoo: {model}, {name}: {cell(found)}, DDP {cell(found, DDP)}, "
                f"{time.perf_counter() - start:.0f} s"
            )
            keep(record)
    return record


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = list(ENTRIES)
    parser.add_argument("--models", nargs="+", default=known, choices=known, metavar="NAME")
    parser.add_argument(
        "--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--iters", type=int, default=2, help="steps a round (default 2)")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}, few rounds")
    parser.add_argument(
        "--add", action="store_true", help="keep the cells of the record that is there"
    )
    parser.add_argument("--only-table", action="store_true", help="print what was measured before")
    parser.add_argument("--write-docs", action="store_true", help="table in docs/performance.md")
    results = machine.REPOSITORY / "benchmarks" / "results"
    parser.add_argument("--output", type=Path, default=results, help="folder of the record")
    options = parser.parse_args(arguments)
    if options.quick:
        print(table(run(options.models, [QUICK], 3, 1)))
        return 0
    if not options.only_table:
        before = None
        if options.add:
            before = json.loads((options.output / "zoo.json").read_text())
            now = machine.describe()
            if machine_of(before) != machine_of(now):
                parser.error("--add: that record was measured on another machine or torch")
        keep = partial(write_record, folder=options.output)
        measures = options.models, options.settings, options.rounds, options.iters
        run(*measures, before=before, keep=keep)
    show_table(options, "zoo", describe, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
