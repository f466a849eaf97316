"""Compares the planner's simulation with published measurements.

Nothing is measured here: models are on the meta device and hardware is described. The figures and
settings of the sources were written down from memory; docs/planning.md lists the assumptions.
Writes benchmarks/results/published.json and prints a table.

    python -m benchmarks.published
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import Kernels, MixedPrecisionPolicy
from fsdp2.estimation.estimating import default_checkpoint_modules
from fsdp2.estimation.events import StepTrace
from fsdp2.estimation.setups import make_setup
from fsdp2.estimation.tracing import trace_step
from fsdp2.planner import Prediction, SimulatedStep, Simulator, find_hardware
from fsdp2.render.text import plural
from fsdp2.wrap import UnitDescription, units_of

from . import machine
from .models import lm_loss
from .published_megatron import (
    SIZES_OF_MEGATRON,
    MegatronBlock,
    MegatronGPT,
    cores_of,
    parallelize_megatron,
    split_megatron,
)
from .published_models import GPT, T5, Llama
from .report import row, write_readme

BF16 = torch.bfloat16


# Figures that tell a speed; the last one is relative.
SPEEDS = ("tokens/s/GPU", "TFLOPS/GPU", "s/step", "relative TFLOPS/GPU")


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        batch: sequences per GPU; with tensor or pipeline parallelism, of a micro-batch.
        reduce_dtype: of gradients.
        compiled: whether each block is compiled.
        tensor_ranks, pipeline_ranks: GPUs that share operators, and that have other stages.
        stages_per_rank, micro_batches: of the pipeline, whose schedule is 1F1B, interleaved if a
            rank has several stages.
    """

    model: str
    hardware: str
    num_gpus: int
    batch: int
    checkpointing: str
    reduce_dtype: str = "float32"
    compiled: bool = False
    tensor_ranks: int = 1
    pipeline_ranks: int = 1
    stages_per_rank: int = 1
    micro_batches: int = 1


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        what: "tokens/s/GPU", "TFLOPS/GPU", "s/step", "GiB" (reserved) or "relative TFLOPS/GPU" (to
            ``base``).
        calibrated: whether a number of the hardware was chosen to meet this row: the efficiency of
            each kind of GPU, and the jitter.
        remark: why the prediction is off, if it is.
    """

    source: str
    run: Run
    what: str
    published: float
    calibrated: bool = False
    base: Run | None = None
    remark: str = ""


def _llama(num_gpus: int, compiled: bool = False) -> Run:
    return Run("Llama 3 8B", "h100-torchtitan", num_gpus, 2, "selective", compiled=compiled)


def _gpt(num_gpus: int, batch: int) -> Run:
    return Run("GPT-175B", "a100-fsdp-paper", num_gpus, batch, "full", "bfloat16")


def _t5(num_gpus: int) -> Run:
    return Run("T5-11B", "a100-fsdp-paper", num_gpus, 8, "full", "bfloat16")


def _22b(recomputed: str) -> Run:
    return Run("Megatron 22B", "a100-80", 8, 4, recomputed, tensor_ranks=8)


def _175b(recomputed: str) -> Run:
    return Run(
        "Megatron 175B",
        "a100-80",
        64,
        1,
        recomputed,
        tensor_ranks=8,
        pipeline_ranks=8,
        stages_per_rank=3,
        micro_batches=64,
    )


CONTENTION = "collectives take multiprocessors, and nothing else; no allocator retries"
HIDDEN = (
    "in the simulation all but the first and last communication is hidden; stragglers, but no "
    "congestion"
)
ROWS = [
    Row("torchtitan", _llama(8), "tokens/s/GPU", 5762, calibrated=True),
    Row("torchtitan", _llama(128), "tokens/s/GPU", 5605, calibrated=True),
    Row("torchtitan", _llama(8), "GiB", 82.4),
    Row("torchtitan", _llama(128), "GiB", 67.0),
    Row("torchtitan", _llama(8, compiled=True), "tokens/s/GPU", 6667),
    Row("torchtitan", _llama(128, compiled=True), "tokens/s/GPU", 6514),
    Row("torchtitan", _llama(8, compiled=True), "GiB", 77.0),
    Row("torchtitan", _llama(128, compiled=True), "GiB", 62.0),
    Row("FSDP paper", _gpt(128, 2), "TFLOPS/GPU", 186, calibrated=True),
    Row("FSDP paper", _gpt(512, 2), "TFLOPS/GPU", 186),
    Row("FSDP paper", _gpt(128, 1), "TFLOPS/GPU", 173, remark=CONTENTION),
    Row("FSDP paper", _gpt(512, 1), "TFLOPS/GPU", 173, remark=CONTENTION),
    Row("Megatron", _22b("full"), "s/step", 1.42),
    Row("Megatron", _22b("attention"), "s/step", 1.10),
    Row("Megatron", _175b("full"), "s/step", 18.13),
    Row("Megatron", _175b("attention"), "s/step", 13.75),
    Row("FSDP paper", _t5(512), "relative TFLOPS/GPU", 0.93, base=_t5(8), remark=HIDDEN),
]

_MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # name: the model, number of token tensors, tokens of each
    "Llama 3 8B": (Llama, 1, 8192),
    "GPT-175B": (GPT, 1, 2048),
    "T5-11B": (T5, 2, 512),
}


def _loss(logits: Tensor) -> Tensor:
    return lm_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))


@cache
def _trace(
    model_name: str, batch: int, checkpointing: str, reduce_dtype: str, compiled: bool
) -> tuple[StepTrace, tuple[UnitDescription, ...]]:
    make, num_inputs, length = _MODELS[model_name]
    with torch.device("meta"):
        model = make()
        tokens = torch.empty(batch, length, dtype=torch.long)
    units = tuple(units_of(model, "auto"))
    blocks = default_checkpoint_modules(model, units)
    trace = trace_step(
        model,
        (tokens,) * num_inputs,
        [name for unit in units for name in unit.modules],
        loss_fn=_loss,
        mp_policy=MixedPrecisionPolicy(BF16, getattr(torch, reduce_dtype)),
        activation_checkpointing=checkpointing,
        checkpoint_modules=blocks,
        compiled=blocks if compiled else (),
        kernels=Kernels(fused_norms=False),  # torch had no fused RMS norm when these were made
    )
    return trace, units


@cache
def simulate(run: Run) -> SimulatedStep:
    """A step of a published run."""
    trace, units = _trace(run.model, run.batch, run.checkpointing, run.reduce_dtype, run.compiled)
    policy = MixedPrecisionPolicy(BF16, getattr(torch, run.reduce_dtype))
    simulator = Simulator(find_hardware(run.hardware))
    return simulator.run(trace, make_setup(units, run.num_gpus, mp_policy=policy))


@cache
def in_stages(run: Run) -> Prediction:
    """A step of a run with tensor and pipeline parallelism."""
    width, num_layers, num_heads = SIZES_OF_MEGATRON[run.model]
    with torch.device("meta"):
        model = MegatronGPT(width, num_layers, num_heads)
    num_stages = run.pipeline_ranks * run.stages_per_rank
    blocks = [f"layers.{i}" for i in range(num_layers // num_stages)]
    if run.checkpointing == "attention":
        blocks = cores_of(len(blocks))
    pipeline: dict[str, Any] = {}
    if run.pipeline_ranks > 1:
        pipeline = {
            "split_stages": split_megatron,
            "pipeline_ranks": run.pipeline_ranks,
            "schedule": "Interleaved1F1B" if run.stages_per_rank > 1 else "1F1B",
            "stages_per_rank": run.stages_per_rank,
        }
    return fsdp2.predict(
        model,
        torch.zeros(run.batch, 2048, dtype=torch.long),
        run.hardware,
        run.num_gpus,
        strategy="none",
        wrap=MegatronBlock,
        mp_policy=MixedPrecisionPolicy(torch.float16, getattr(torch, run.reduce_dtype)),
        activation_checkpointing="full",
        checkpoint_modules=blocks,
        parallelize=parallelize_megatron,
        tensor_ranks=run.tensor_ranks,
        micro_batches=run.micro_batches,
        loss_fn=torch.mean,
        **pipeline,
    )


def step_figures(run: Run) -> dict[str, Any]:
    """Seconds, FLOPs with recomputation and bytes of a step of one rank."""
    made: Prediction | SimulatedStep
    if run.tensor_ranks > 1:
        made = in_stages(run)
        step, reserved = made.step, made.reserved_bytes
    else:
        made = step = simulate(run)
        reserved = step.reserved
    return {
        "step_s": made.seconds,
        "exposed_s": made.exposed_s,
        "flops": step.flops,
        "reserved_bytes": reserved,
        "peak_parts": step.peak.parts,
    }


def efficiency(run: Run) -> float:
    """FLOP/s of the simulated step, with recomputation, as a part of the data sheet."""
    step = step_figures(run)
    peak = find_hardware(run.hardware).matmul_flops[BF16]
    return step["flops"] / step["step_s"] / peak


def predict(published: Row) -> float:
    """The simulated value of a published figure."""
    run = published.run
    step = step_figures(run)
    if published.what == "GiB":
        return step["reserved_bytes"] / 2**30
    if published.what == "s/step":
        return step["step_s"]
    if published.what == "tokens/s/GPU":
        return run.batch * _MODELS[run.model][2] / step["step_s"]
    rate = step["flops"] / step["step_s"]
    if published.base is not None:
        base = step_figures(published.base)
        return rate / (base["flops"] / base["step_s"])
    return rate / 1e12


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    header = ["source", "run", "figure", "published", "predicted", "error", ""]
    lines = [row(header), row(["---"] * len(header))]
    for result in results:
        run = result["row"]["run"]
        batch = plural(run["batch"], "sequence")
        name = f"{run['model']}, {run['num_gpus']} GPUs, {batch} each"
        if run["tensor_ranks"] > 1:
            name += f", TP {run['tensor_ranks']}, PP {run['pipeline_ranks']}"
            name += f", {run['checkpointing']} recomputed"
        name += ", compiled" * run["compiled"]
        note = "calibrated on this row" if result["row"]["calibrated"] else result["row"]["remark"]
        cells = [result["row"]["source"], name, result["row"]["what"]]
        cells += [f"{result['row']['published']:,}", f"{result['predicted']:,.4g}"]
        lines.append(row([*cells, f"{100 * result['error']:+.1f} %", note]))
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    """How good the predictions are, in sentences: errors of what nothing was chosen to meet, of
    each kind of GPU, and the order of runs."""
    lines = []
    for kind, name in (("a100", "A100"), ("h100", "H100")):
        held_out = [
            each
            for each in results
            if each["row"]["run"]["hardware"].startswith(kind) and not each["row"]["calibrated"]
        ]
        for figures, told in ((SPEEDS, "speed"), (("GiB",), "memory")):
            errors = sorted(abs(e["error"]) for e in held_out if e["row"]["what"] in figures)
            if errors:
                largest = errors[math.ceil(0.9 * len(errors)) - 1]
                lines.append(
                    f"{name}, {told}, {plural(len(errors), 'row')} held out: median error "
                    f"{100 * statistics.median(errors):.1f} %, 90th "
                    f"percentile {100 * largest:.1f} %."
                )
    # What is relative to another run has no efficiency of its own.
    timed = [each for each in results if each["row"]["what"] in SPEEDS[:3]]
    found = []
    for each in timed:
        ratio = 1 + each["error"]
        speed = 1 / ratio if each["row"]["what"] == "s/step" else ratio
        found.append((each["efficiency"] / speed, each["efficiency"]))
    lines.append(
        f"Rank correlation of the efficiency of {plural(len(found), 'run')}, calibrated rows "
        f"included: {rank_correlation(found):.2f}."
    )
    pairs = [
        (mine["predicted"] - other["predicted"]) * (published - mine["row"]["published"]) < 0
        for mine, other in combinations(timed, 2)
        for published in [other["row"]["published"]]
        if mine["row"]["run"]["model"] == other["row"]["run"]["model"]
        and max(published, mine["row"]["published"])
        > 1.03 * min(published, mine["row"]["published"])
    ]
    lines.append(
        f"Of pairs of runs of one model whose speeds differ by more than 3 %, {sum(pairs)} of "
        f"{len(pairs)} are in the right order."
    )
    return "\n".join(f"- {line}" for line in lines)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: the correlation of the ranks of both, ties having the mean of theirs."""
    return statistics.correlation(*(ranks_of(values) for values in zip(*pairs, strict=True)))


def ranks_of(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--write-docs", action="store_true", help="update docs/planning.md")
    options = parser.parse_args(arguments)
    results = []
    for published in ROWS:
        start = time.perf_counter()
        predicted = predict(published)
        results.append(
            {
                "row": asdict(published),
                "predicted": predicted,
                "error": predicted / published.published - 1,
                "efficiency": efficiency(published.run),
                **step_figures(published.run),
                "simulation_s": time.perf_counter() - start,
            }
        )
        print(f"{published.run.model}, {published.run.num_gpus} GPUs", file=sys.stderr)
    record = {"name": "published", **machine.describe(), "results": results}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "published.json").write_text(json.dumps(record, indent=1) + "\n")
    made = f"{table(results)}\n\n{summary(results)}"
    print(made)
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "planning.md"
        markers = ("<!-- published:begin -->", "<!-- published:end -->")
        write_readme(page, made, *markers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
