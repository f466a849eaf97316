"""Compares the planner's simulation with published measurements.

Nothing is measured here: models are on the meta device and hardware is described. Each figure names
the table or section that it is from, and was compared with the text there. Settings that a source
does not give are assumptions, and so are the models: docs/planning/accuracy.md lists them.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from fsdp2.planning import find_hardware
from fsdp2.render.text import plural

from . import machine
from .published_runs import FAMILIES, Run, figures_of
from .report import row, write_readme, write_record

BEGIN, END = "<!-- published:begin -->", "<!-- published:end -->"

# Figures that tell a speed; the last two are of a part of a run, and relative.
SPEEDS = ("tokens/s/GPU", "TFLOPS/GPU", "s/step", "ms/block", "relative TFLOPS/GPU")


@dataclass(frozen=True)
class Row:
    """A published figure.

    Attributes:
        what: "tokens/s/GPU", "TFLOPS/GPU", "s/step", "GiB" (reserved), "ms/block" (forward and
            backward) or "relative TFLOPS/GPU" (to ``base``).
        where: in the source (`SOURCES`).
        calibrated: whether a number of the hardware was chosen to meet this row: the efficiency of
            each kind of GPU, and the jitter.
    """

    source: str
    run: Run
    what: str
    published: float
    where: str
    calibrated: bool = False
    base: Run | None = None


_GITHUB = "https://github.com/pytorch/torchtitan/blob/main/benchmarks"
SOURCES = {
    "torchtitan": f"{_GITHUB}/llama3_h100_202412_torchtitan.md",
    "FSDP paper": "https://arxiv.org/abs/2304.11277",
    "Megatron": "https://arxiv.org/abs/2205.05198",
    "Megatron 2021": "https://arxiv.org/abs/2104.04473",
    "Llama 3": "https://arxiv.org/abs/2407.21783",
}


def _llama(num_gpus: int, compiled: bool = False) -> Run:
    return Run("Llama 3 8B", "h100-torchtitan", num_gpus, 2, "selective", compiled=compiled)


def _gpt(num_gpus: int, batch: int) -> Run:
    return Run("GPT-175B", "a100-fsdp-paper", num_gpus, batch, "full", "bfloat16")


def _t5(num_gpus: int) -> Run:
    return Run("T5-11B", "a100-fsdp-paper", num_gpus, 8, "full", "bfloat16")


def _22b(recomputed: str, *, parts: bool = True, blocks: int | None = None) -> Run:
    run = Run("Megatron 22B", "a100-80", 8, 4, recomputed, tensor_ranks=8)
    return replace(run, parts=parts, blocks=blocks)


def _block(published: float, recomputed: str, *, parts: bool) -> Row:
    """Of table 4 of "Reducing Activation Recomputation"."""
    run = _22b(recomputed, parts=parts, blocks=4)
    return Row("Megatron", run, "ms/block", published, "table 4")


def _piped(size: str, num_gpus: int, recomputed: str, *pipeline: int) -> Run:
    """Of table 5 of "Reducing Activation Recomputation"."""
    ranks, stages, micro_batches = pipeline
    return Run(
        f"Megatron {size}",
        "a100-80",
        num_gpus,
        1,
        recomputed,
        tensor_ranks=8,
        pipeline_ranks=ranks,
        stages_per_rank=stages,
        micro_batches=micro_batches,
    )


def _of_2021(size: str, num_gpus: int, batch: int, micro_batch: int, *degrees: int) -> Run:
    """Of "Efficient Large-Scale Language Model Training".

    Args:
        batch: sequences of all GPUs.
        micro_batch: of a replica.
        degrees: tensor ranks, pipeline ranks and stages of each.
    """
    tensor, ranks, stages = degrees
    replicas, rest = divmod(num_gpus, tensor * ranks)
    assert not rest, (size, num_gpus)
    micro_batches, rest = divmod(batch, replicas * micro_batch)
    assert not rest, (size, num_gpus)
    return Run(
        f"Megatron {size}",
        "a100-80",
        num_gpus,
        micro_batch,
        "full",
        "float16",
        tensor_ranks=tensor,
        pipeline_ranks=ranks,
        parts=False,
        stages_per_rank=stages,
        micro_batches=micro_batches,
    )


def _table_1(size: str, published: float, *settings: int) -> Row:
    return Row("Megatron 2021", _of_2021(size, *settings), "TFLOPS/GPU", published, "table 1")


def _table_2(size: str, published: float, num_gpus: int) -> Row:
    batch, ranks, stages = {"175B": (1536, 12, 1), "530B": (2240, 35, 3)}[size]
    run = _of_2021(size, num_gpus, batch, 1, 8, ranks, stages)
    return Row("Megatron 2021", run, "TFLOPS/GPU", published, "table 2")


def _405b(num_gpus: int, micro_batches: int) -> Run:
    """Of table 4 of the paper; that a stage frees what it sent is in its section on pipelines."""
    return Run(
        "Llama 3 405B",
        "h100",
        num_gpus,
        1,
        "none",
        tensor_ranks=8,
        pipeline_ranks=16,
        stages_per_rank=8,
        micro_batches=micro_batches,
        holds_sent=False,
    )


ROWS = [
    Row("torchtitan", _llama(8), "tokens/s/GPU", 5762, "table 1", calibrated=True),
    Row("torchtitan", _llama(128), "tokens/s/GPU", 5605, "table 3", calibrated=True),
    Row("torchtitan", _llama(8), "GiB", 82.4, "table 1"),
    Row("torchtitan", _llama(128), "GiB", 67.0, "table 3"),
    Row("torchtitan", _llama(8, compiled=True), "tokens/s/GPU", 6667, "table 1"),
    Row("torchtitan", _llama(128, compiled=True), "tokens/s/GPU", 6514, "table 3"),
    Row("torchtitan", _llama(8, compiled=True), "GiB", 77.0, "table 1"),
    Row("torchtitan", _llama(128, compiled=True), "GiB", 62.0, "table 3"),
    # "More than 173 and 186 TFLOPS", with "linear scalability from 128 GPUs to 512". Two sequences
    # on 128 GPUs are no row: the allocator ran out of memory there, and that run was slower.
    Row("FSDP paper", _gpt(512, 2), "TFLOPS/GPU", 186, "section 5.4", calibrated=True),
    Row("FSDP paper", _gpt(128, 1), "TFLOPS/GPU", 173, "section 5.4"),
    Row("FSDP paper", _gpt(512, 1), "TFLOPS/GPU", 173, "section 5.4"),
    _block(19.6, "none", parts=False),
    _block(19.0, "none", parts=True),
    _block(27.2, "full", parts=False),
    _block(20.9, "attention", parts=False),
    _block(20.3, "attention", parts=True),
    Row("Megatron", _22b("full"), "s/step", 1.42, "table 5"),
    Row("Megatron", _22b("attention"), "s/step", 1.10, "table 5"),
    Row("Megatron", _piped("175B", 64, "full", 8, 3, 64), "s/step", 18.13, "table 5"),
    Row("Megatron", _piped("175B", 64, "attention", 8, 3, 64), "s/step", 13.75, "table 5"),
    Row("Megatron", _piped("530B", 280, "full", 35, 3, 280), "s/step", 49.05, "table 5"),
    Row("Megatron", _piped("530B", 280, "attention", 35, 3, 280), "s/step", 37.83, "table 5"),
    Row("Megatron", _piped("530B", 2240, "attention", 35, 3, 280), "s/step", 39.15, "section 6.3"),
    Row("Megatron", _piped("1T", 512, "full", 64, 1, 512), "s/step", 94.42, "table 5"),
    Row("Megatron", _piped("1T", 512, "attention", 64, 1, 512), "s/step", 71.49, "table 5"),
    # GPUs, batch, micro-batch, tensor ranks, pipeline ranks, stages of each.
    _table_1("1.7B", 137, 32, 512, 16, 1, 1, 1),
    _table_1("3.6B", 138, 64, 512, 16, 2, 1, 1),
    _table_1("7.5B", 142, 128, 512, 16, 4, 1, 1),
    _table_1("18.4B", 135, 256, 1024, 8, 8, 1, 1),
    _table_1("39.1B", 138, 512, 1536, 4, 8, 2, 1),
    _table_1("76.1B", 140, 1024, 1792, 2, 8, 4, 3),
    _table_1("145.6B", 148, 1536, 2304, 2, 8, 8, 2),
    _table_1("310.1B", 155, 1920, 2160, 1, 8, 16, 2),
    _table_1("530B", 163, 2520, 2520, 1, 8, 35, 3),
    _table_1("1T", 163, 3072, 3072, 1, 8, 64, 1),
    _table_2("175B", 153, 384),
    _table_2("175B", 149, 768),
    _table_2("175B", 141, 1536),
    _table_2("530B", 171, 560),
    _table_2("530B", 167, 1120),
    _table_2("530B", 159, 2240),
    Row("Llama 3", _405b(8192, 32), "TFLOPS/GPU", 430, "table 4"),
    Row("Llama 3", _405b(16384, 16), "TFLOPS/GPU", 400, "table 4"),
    Row("FSDP paper", _t5(512), "relative TFLOPS/GPU", 0.93, "section 5.4", base=_t5(8)),
]


def efficiency(run: Run) -> float:
    """FLOP/s of the step, with recomputation, as a part of the data sheet; of all ranks."""
    step = figures_of(run)
    peak = find_hardware(run.hardware).matmul_flops[torch.bfloat16]
    return step.flops / step.step_s / peak


def block_ms(run: Run) -> float:
    """Milliseconds of a block's forward and backward: what another two add to a step of two."""
    assert run.blocks == 4
    four, two = (figures_of(replace(run, blocks=blocks)) for blocks in (4, 2))
    return 500 * (four.step_s - four.optimizer_s - two.step_s + two.optimizer_s)


def predict(published: Row) -> float:
    """The planner's value of a published figure."""
    run = published.run
    if published.what == "ms/block":
        return block_ms(run)
    step = figures_of(run)
    if published.what == "GiB":
        return step.reserved_bytes / 2**30
    if published.what == "s/step":
        return step.step_s
    if published.what == "tokens/s/GPU":
        return run.batch * FAMILIES[run.model].length / step.step_s
    rate = step.flops / step.step_s
    if published.base is not None:
        base = figures_of(published.base)
        return rate / (base.flops / base.step_s)
    return rate / 1e12


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table of all rows."""
    header = ["source", "run", "figure", "published", "predicted", "error"]
    lines = [row(header), row(["---"] * len(header))]
    for result in results:
        told = result["row"]
        cells = [f"{told['source']}, {told['where']}", _told(told["run"]), told["what"]]
        cells += [f"{told['published']:,}", f"{result['predicted']:,.4g}"]
        note = ", calibrated" * told["calibrated"]
        lines.append(row([*cells, f"{100 * result['error']:+.1f} %{note}"]))
    return "\n".join(lines)


def digest(results: list[dict[str, Any]]) -> str:
    """A Markdown table of errors by source and figure; of calibrated rows it has the number."""
    header = ["source", "figure", "rows", "calibrated", "median error", "largest error"]
    lines = [row(header), row(["---"] * len(header))]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in results:
        groups.setdefault((each["row"]["source"], each["row"]["what"]), []).append(each)
    for (source, what), found in groups.items():
        where = " and ".join(dict.fromkeys(each["row"]["where"] for each in found))
        if where.count("table") > 1:
            where = where.replace("and table ", "and ").replace("table", "tables")
        errors = [each["error"] for each in found if not each["row"]["calibrated"]]
        cells = [f"[{source}]({SOURCES[source]}), {where}", what, str(len(found))]
        cells.append(str(len(found) - len(errors)))
        median = statistics.median(map(abs, errors))
        cells += [f"{100 * median:.1f} %", f"{100 * max(errors, key=abs):+.1f} %"]
        lines.append(row(cells))
    return "\n".join(lines)


def results_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What a record has of all rows, as they are now."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["source"], row["what"], *row["run"].values()

    found = {key(each["row"]): each for each in record["results"]}
    return [found[key(asdict(each))] | {"row": asdict(each)} for each in ROWS]


def text_of(results: list[dict[str, Any]]) -> str:
    """What the page has."""
    return f"{digest(results)}\n\n{order(results)} {fitting(results)}"


def _told(run: dict[str, Any]) -> str:
    """A run in words."""
    batch = plural(run["batch"], "sequence")
    name = f"{run['model']}, {plural(run['num_gpus'], 'GPU')}, {batch} each"
    if run["model"].startswith("Megatron") or run["pipeline_ranks"] > 1:
        name += f", TP {run['tensor_ranks']}, PP {run['pipeline_ranks']}"
        name += f" x {run['stages_per_rank']}" * (run["stages_per_rank"] > 1)
        name += f", {run['checkpointing']} recomputed"
        if run["tensor_ranks"] > 1:
            name += ", parts of sequences" if run["parts"] else ", whole sequences"
    return name + ", compiled" * run["compiled"]


def summary(results: list[dict[str, Any]]) -> str:
    """How good the predictions are, in sentences: errors of what nothing was chosen to meet, of
    each kind of GPU, and the order of runs."""
    lines = []
    for kind, name in (("a100", "A100"), ("h100", "H100")):
        others = [
            each
            for each in results
            if each["row"]["run"]["hardware"].startswith(kind) and not each["row"]["calibrated"]
        ]
        for figures, told in ((SPEEDS, "speed"), (("GiB",), "memory")):
            errors = sorted(abs(e["error"]) for e in others if e["row"]["what"] in figures)
            if errors:
                largest = errors[math.ceil(0.9 * len(errors)) - 1]
                lines.append(
                    f"{name}, {told}, {plural(len(errors), 'row')} without the calibrated ones: "
                    f"median error {100 * statistics.median(errors):.1f} %, 90th percentile "
                    f"{100 * largest:.1f} %."
                )
    # What is relative to another run has no efficiency of its own.
    found = []
    for each in (each for each in results if each["row"]["what"] in SPEEDS[:3]):
        ratio = 1 + each["error"]
        speed = 1 / ratio if each["row"]["what"] == "s/step" else ratio
        found.append((each["efficiency"] / speed, each["efficiency"]))
    lines.append(
        f"Rank correlation of the efficiency of {plural(len(found), 'run')}, calibrated rows "
        f"included: {rank_correlation(found):.2f}."
    )
    return "\n".join(f"- {line}" for line in [*lines, order(results), fitting(results)])


def order(results: list[dict[str, Any]]) -> str:
    """How many pairs of runs of a model are in the right order."""
    timed = [each for each in results if each["row"]["what"] in SPEEDS[:3]]
    pairs = [
        (mine["predicted"] - other["predicted"]) * (published - mine["row"]["published"]) < 0
        for mine, other in combinations(timed, 2)
        for published in [other["row"]["published"]]
        if _kind(mine) == _kind(other)
        and max(published, mine["row"]["published"])
        > 1.03 * min(published, mine["row"]["published"])
    ]
    return (
        f"Of pairs of runs of one model whose speeds differ by more than 3 %, {sum(pairs)} of "
        f"{len(pairs)} are in the right order."
    )


def _kind(result: dict[str, Any]) -> tuple[str, ...]:
    """Equal for rows that can be compared: of other sources, programs differ, too."""
    return result["row"]["source"], result["row"]["run"]["model"], result["row"]["what"]


def fitting(results: list[dict[str, Any]]) -> str:
    """Whether the planner says of all these runs, which were made, that they fit into memory."""
    runs = {
        tuple(each["row"]["run"].items()): each["needed_bytes"] / each["memory_bytes"]
        for each in results
        if each["row"]["what"] != "ms/block"  # of no run
    }
    refused = [
        f"{_told(dict(run))} ({100 * part:.0f} % of its memory)"
        for run, part in runs.items()
        if part > 1
    ]
    most = f"the fullest GPU of one needs {100 * max(runs.values()):.0f} % of its memory"
    if not refused:
        return f"All {plural(len(runs), 'run')} fit: {most}."
    return f"Of {plural(len(runs), 'run')}, these would be refused: {'; '.join(refused)}."


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
    parser.add_argument("--only-table", action="store_true", help="of the results that are there")
    parser.add_argument("--write-docs", action="store_true", help="into docs/planning/accuracy.md")
    options = parser.parse_args(arguments)
    path = options.output / "published.json"
    if not options.only_table:
        record = {"name": "published", **machine.describe(), "results": run()}
        write_record(record, options.output)
    results = results_of(json.loads(path.read_text()))
    print(f"{table(results)}\n\n{digest(results)}\n\n{summary(results)}")
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "planning" / "accuracy.md"
        write_readme(page, text_of(results), BEGIN, END)
    return 0


def run() -> list[dict[str, Any]]:
    """Predicts all rows."""
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
                **figures_of(published.run)._asdict(),
                "memory_bytes": find_hardware(published.run.hardware).memory_bytes,
                "simulation_s": time.perf_counter() - start,
            }
        )
        print(f"{published.run.model}, {published.run.num_gpus} GPUs", file=sys.stderr)
    return results


if __name__ == "__main__":
    sys.exit(main())
