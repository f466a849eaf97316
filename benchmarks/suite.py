"""The measures: what each runs, with which sizes, and which figures come out of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from . import copies, hooks, lm, lm2d, machine, memory
from .models import LMConfig, StackConfig
from .ranks import run_ranks
from .steps import check_agreement
from .variants import BASELINE, BEST_BASELINE, OURS, VARIANTS

# DDP does not run over a `fake` process group.
HOOK_VARIANTS = tuple(name for name in VARIANTS if name != "DDP")
# DDP and FSDP1 do not take parameters that are DTensors already.
TENSOR_PARALLEL_VARIANTS = ("plain", BASELINE, BEST_BASELINE, OURS)


# Measures with more ranks than `world_size`, by how many times. There even the plain model waits
# for others, so its times do not tell whether the machine was busy.
OVERSUBSCRIBED = {"lm-2d": lm2d.TENSOR_PARALLEL}


@dataclass(frozen=True)
class Settings:
    """Sizes and repetitions; the defaults are those of the published results.

    Attributes:
        world_size: Ranks over gloo, and the size of the `fake` group; the data-parallel ranks of
            `lm-2d`.
        rounds: Rounds of the timed measures; None takes each measure's own default.
        iters: Timed steps per round and variant; None likewise.
        variants: Names of what is compared; "plain" and torch's FSDP2 are needed.
        lm: The language model.
        stack: The stack of tiny blocks.
        batch_size: Sequences per rank in the timed steps of the language model.
        tokens: Tokens per sequence there.
        small_tokens: Tokens of the one sequence where bytes are counted.
    """

    world_size: int = 2
    rounds: int | None = None
    iters: int | None = None
    variants: tuple[str, ...] = VARIANTS
    lm: LMConfig = field(default_factory=LMConfig)
    stack: StackConfig = field(default_factory=StackConfig)
    batch_size: int = 2
    tokens: int = 64
    small_tokens: int = 8


def run(measure: str, settings: Settings) -> dict[str, Any]:
    """Runs one measure of `MEASURES`; returns its record, ready for JSON.

    Raises:
        DisagreementError: Variants that should train the same model do not.
    """
    about = machine.describe()
    runs, figures = MEASURES[measure](settings)
    return {
        "name": measure,
        **about,
        "wall_to_cpu_time": max(wall_to_cpu_time(run["plain"]) for run in runs.values())
        if measure not in OVERSUBSCRIBED
        else 1.0,
        "num_ranks": settings.world_size * OVERSUBSCRIBED.get(measure, 1),
        "config": {"settings": asdict(settings)},
        "figures": figures,
        "runs": runs,
    }


def wall_to_cpu_time(plain: dict[str, Any]) -> float:
    """How many times its CPU time the plain model's step took; 1 on an idle machine.

    It never waits for another rank, only for a core. Also 1 where nothing was timed.
    """
    if "cpu_rounds_s" not in plain:
        return 1.0
    wall_s = statistics.median(round_medians(plain["rounds_s"]))
    return wall_s / statistics.median(round_medians(plain["cpu_rounds_s"]))


Answer = tuple[dict[str, Any], list[dict[str, Any]]]


def run_lm(bf16: bool, settings: Settings) -> Answer:
    """Wall time of forward and backward of the language model."""
    results = run_ranks(
        lm.measure,
        settings.world_size,
        {
            "names": list(settings.variants),
            "config": settings.lm,
            "batch_size": settings.batch_size,
            "tokens": settings.tokens,
            "bf16": bf16,
            "rounds": settings.rounds or 7,
            "iters": settings.iters or 4,
        },
    )
    check_agreement(results, bf16)
    what = "bf16 compute, fp32 reduce" if bf16 else "fp32"
    rounds = {name: round_medians(result["rounds_s"]) for name, result in results.items()}
    cpu = {name: round_medians(result["cpu_rounds_s"]) for name, result in results.items()}
    figures = [
        timed_figure(f"LM forward+backward, {what}", "ms", rounds, 1e3, target=0.70),
        timed_figure("CPU time of the same", "ms", cpu, 1e3),
    ]
    return {"bf16" if bf16 else "fp32": results}, figures


def run_lm_2d(settings: Settings) -> Answer:
    """Wall time of forward and backward of the language model, tensor parallel x sharded."""
    results = run_ranks(
        lm2d.measure,
        settings.world_size * lm2d.TENSOR_PARALLEL,
        {
            "names": [name for name in settings.variants if name in TENSOR_PARALLEL_VARIANTS],
            "config": settings.lm,
            "batch_size": settings.batch_size,
            "tokens": settings.tokens,
            "rounds": settings.rounds or 7,
            "iters": settings.iters or 4,
        },
    )
    check_agreement(results, bf16=False)
    rounds = {name: round_medians(result["rounds_s"]) for name, result in results.items()}
    cpu = {name: round_medians(result["cpu_rounds_s"]) for name, result in results.items()}
    title = "2-D: tensor parallel x sharded LM forward+backward, fp32"
    figures = [
        timed_figure(title, "ms", rounds, 1e3, target=0.85),
        timed_figure("CPU time of the same", "ms", cpu, 1e3),
    ]
    return {"fp32": results}, figures


def run_hooks(settings: Settings) -> Answer:
    """Host time per unit."""
    results = run_ranks(
        hooks.measure,
        settings.world_size,
        {
            "names": [name for name in settings.variants if name in HOOK_VARIANTS],
            "config": settings.stack,
            "rounds": settings.rounds or 10,
            "iters": settings.iters or 12,
        },
        fake=True,
    )
    steps = {name: round_medians(result["rounds_s"]) for name, result in results.items()}
    cpu = {name: round_medians(result["cpu_rounds_s"]) for name, result in results.items()}
    units = settings.stack.num_blocks
    optimizer = {name: round_medians(r["optimizer_rounds_s"]) for name, r in results.items()}
    figures = [
        timed_figure("hook time per unit and step", "us", above_plain(steps, units), 1e6, 0.25),
        timed_figure("CPU time of the same", "us", above_plain(cpu, units), 1e6),
        timed_figure("forward+backward of that stack", "ms", steps, 1e3),
        timed_figure("AdamW step of that stack", "ms", optimizer, 1e3),
    ]
    return {"fp32": results}, figures


def run_memory(settings: Settings) -> Answer:
    """Memory above sharded state, in fp32 and in bf16."""
    runs, figures = run_counted(memory.measure, settings)
    for precision, results in runs.items():
        target = 0.60 if precision == "fp32" else None
        peaks = {name: result["peak_bytes"] for name, result in results.items()}
        held = {name: result["between_steps_bytes"] for name, result in results.items()}
        title = f"peak memory above own state, {precision}"
        figures.append(counted_figure(title, "MB", peaks, 1e-6, target))
        title = f"held between steps above own state, {precision}"
        figures.append(counted_figure(title, "MB", held, 1e-6, None) | {"ratios": {}})
    return runs, figures


def run_copies(settings: Settings) -> Answer:
    """Bytes copied outside collectives, in fp32 and in bf16."""
    runs, figures = run_counted(copies.measure, settings)
    for precision, results in runs.items():
        target = 0.05 if precision == "fp32" else None
        for key, title, goal in (
            ("above_plain_bytes", "copied outside collectives", target),
            ("largest_bytes", "largest single copy there", None),
            ("exchange_bytes", "moved inside an exchange of its own", None),
        ):
            values = {name: result[key] for name, result in results.items()}
            figures.append(counted_figure(f"{title}, {precision}", "MB", values, 1e-6, goal))
    return runs, figures


def run_counted(
    function: Callable[..., dict[str, Any]], settings: Settings
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Runs a measure that counts bytes in both precisions; the list is for its figures."""
    runs = {}
    for precision in ("fp32", "bf16"):
        bf16 = precision == "bf16"
        arguments = {
            "names": list(settings.variants),
            "config": settings.lm,
            "tokens": settings.small_tokens,
            "bf16": bf16,
        }
        runs[precision] = run_ranks(function, settings.world_size, arguments)
        check_agreement(runs[precision], bf16)
    return runs, []


MEASURES: dict[str, Callable[[Settings], Answer]] = {
    "lm": partial(run_lm, False),
    "lm-bf16": partial(run_lm, True),
    "lm-2d": run_lm_2d,
    "hooks": run_hooks,
    "memory": run_memory,
    "copies": run_copies,
}


def round_medians(rounds: list[list[float]]) -> list[float]:
    """The median of every round."""
    return [statistics.median(seconds) for seconds in rounds]


def above_plain(rounds: dict[str, list[float]], units: int) -> dict[str, list[float]]:
    """What each round took longer than the plain model's, per unit."""
    return {
        name: [(ours - plain) / units for ours, plain in zip(seconds, rounds["plain"], strict=True)]
        for name, seconds in rounds.items()
        if name != "plain"
    }


def timed_figure(
    title: str,
    unit: str,
    rounds: dict[str, list[float]],
    scale: float,
    target: float | None = None,
) -> dict[str, Any]:
    """A figure from times: medians over the rounds, and ratios taken within each round.

    Args:
        title: What was measured.
        unit: Of the values.
        rounds: For each variant one number of seconds per round.
        scale: From seconds to `unit`.
        target: What the ratio of ours to torch's FSDP2 should not exceed.
    """
    # A difference of two times can drown in noise; a ratio of such numbers says nothing.
    too_noisy = min(min(seconds) for seconds in rounds.values()) <= 0
    ratios = {
        name: [ours / theirs for ours, theirs in zip(seconds, rounds[BASELINE], strict=True)]
        for name, seconds in rounds.items()
        if not too_noisy
    }
    return {
        "title": title,
        "unit": unit,
        "values": {name: statistics.median(s) * scale for name, s in rounds.items()},
        "ratios": {name: statistics.median(r) for name, r in ratios.items()},
        "ratio_ranges": {name: [min(r), max(r)] for name, r in ratios.items()},
        "too_noisy": too_noisy,
        "target": target,
    }


def counted_figure(
    title: str, unit: str, values: dict[str, float], scale: float, target: float | None
) -> dict[str, Any]:
    """A figure from counted bytes, which has no spread."""
    base = values[BASELINE]
    ratios = {name: value / base for name, value in values.items()} if base else {}
    return {
        "title": title,
        "unit": unit,
        "values": {name: value * scale for name, value in values.items()},
        "ratios": ratios,
        "ratio_ranges": {name: [ratio, ratio] for name, ratio in ratios.items()},
        "too_noisy": False,
        "target": target,
    }
