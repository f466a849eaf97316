"""AdamW steps on flat tensors, beside those of FSDP1 and of plain tensors, taking turns.

    python -m benchmarks.flat [stack|lm ...]
    python -m benchmarks.flat stack --parts

`stack` has 576 small parameters in 64 units, `lm` is the 34M language model; rank 0 of a `fake`
group of two, so nothing is communicated. "default" is `torch.optim.AdamW` as it is; "plain" steps
as many plain tensors, each of a shard's size; "floor" as many plain tensors as `flat_step` shows.
Before every timed step its model runs forward and backward, as in training: caches are cold, and
what a step has to look at counts.
`--parts` times what `flat_step` does around the step of the flat tensors, and writes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2.optim.flat import FlatView
from fsdp2.optim.flat_plan import FlatPlan

from . import machine
from .hooks import make_stack, seconds_of
from .models import LMConfig, StackConfig, lm_loss
from .ranks import progress, run_ranks
from .steps import make_lm, random_tokens
from .variants import OURS, Variant, build, local_part

IMPLEMENTATIONS = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PLAIN, FSDP1, DEFAULT, LOCAL, FLAT = "plain", "FSDP1", "default", "local_step", "flat_step"
FLOOR = "floor"
STEPS = (PLAIN, FSDP1, DEFAULT, LOCAL, FLAT, FLOOR)
# Of the step of another, for `default` and for `flat_step`.
TARGETS = {"stack": (FSDP1, 1.5, 1.10), "lm": (PLAIN, 1.10, 1.0)}
WARM_UP_STEPS = 3
# What `flat_step` does around the step of the flat tensors; a part may contain others.
PARTS: dict[str, tuple[type, str]] = {
    "all before the step": (FlatView, "enter"),
    "- is the state what it was": (FlatPlan, "_state_is_current"),
    "- are the gradients where they were": (FlatPlan, "look"),
    "- give the flat tensors their gradients": (FlatPlan, "show"),
    "all after the step": (FlatView, "leave"),
    "- count the writes to the shards": (FlatPlan, "hide"),
    "- take over new state": (FlatPlan, "take_over"),
}


def make_model(name: str) -> tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]:
    """What makes the model, and what runs forward and backward."""
    if name == "stack":
        x = torch.randn(1, 4, StackConfig().width)
        return partial(make_stack, StackConfig()), lambda model: model(x).sum().backward()
    ids, targets = random_tokens(LMConfig(), 1, 8)
    return partial(make_lm, LMConfig()), lambda model: lm_loss(model(ids), targets).backward()


def zero(variant: Variant) -> None:
    """A fake reduce-scatter leaves anything behind: keep the weights finite."""
    for gradient in variant.local_gradients():
        gradient.zero_()


def measure(model: str, implementation: str, rounds: int, iters: int) -> dict[str, Any]:
    """Times the steps of `STEPS` in this process, interleaved: a list of seconds per round."""
    torch.set_flush_denormal(True)
    make, forward_backward = make_model(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # `flat_step` asks its model to put small units side by side: the default gets one of its own.
    variants = {name: build(name, make, mesh, bf16=False) for name in (FSDP1, OURS)}
    variants[DEFAULT] = build(OURS, make, mesh, bf16=False)
    adamw = partial(torch.optim.AdamW, lr=1e-6, **IMPLEMENTATIONS[implementation])
    ours = variants[OURS].model.parameters
    optimizers: dict[str, torch.optim.Optimizer] = {
        PLAIN: adamw(with_gradients(p.numel() for p in variants[OURS].local_parameters())),
        FSDP1: adamw(variants[FSDP1].model.parameters()),
        DEFAULT: adamw(variants[DEFAULT].model.parameters()),
        LOCAL: fsdp2.optim.local_step(adamw(ours())),
        FLAT: fsdp2.optim.flat_step(adamw(ours())),
    }

    def step(name: str) -> float:
        variant = variants.get(name, variants[OURS])
        variant.model.zero_grad()
        forward_backward(variant.model)
        zero(variant)
        return seconds_of(optimizers[name].step)

    step(FLAT)
    optimizers[FLOOR] = adamw(with_gradients(shown_numels(optimizers[FLAT])))
    found: dict[str, list[list[float]]] = {name: [] for name in STEPS}
    for name in STEPS * WARM_UP_STEPS:
        step(name)
    for i in range(rounds):
        gc.collect()
        for name in (*STEPS[i % len(STEPS) :], *STEPS[: i % len(STEPS)]):
            found[name].append([step(name) for _ in range(iters)])
    return found


def with_gradients(numels: Iterable[int]) -> list[nn.Parameter]:
    """Plain parameters, each with a gradient."""
    params = [nn.Parameter(torch.randn(numel)) for numel in numels]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def shown_numels(optimizer: torch.optim.Optimizer) -> list[int]:
    """The elements of the tensors that a flat step saw in its last step."""
    plans = vars(optimizer)["_local_view"]._plans.values()
    flat = [run.plain.numel() for plan in plans for run in plan.runs]
    return flat + [local_part(p).numel() for plan in plans for p in plan.others]


@contextmanager
def timed_parts() -> Iterator[dict[str, list[float]]]:
    """Seconds of every call of the `PARTS`; with one group of options each is called once."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    originals = {name: getattr(kind, method) for name, (kind, method) in PARTS.items()}

    def timed(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return originals[name](*args)
            finally:
                found[name].append(time.perf_counter() - start)

        return call

    for name, (kind, method) in PARTS.items():
        setattr(kind, method, timed(name))
    try:
        yield found
    finally:
        for name, (kind, method) in PARTS.items():
            setattr(kind, method, originals[name])


def measure_parts(model: str, implementation: str, rounds: int, iters: int) -> dict[str, Any]:
    """Median seconds of the parts and of the steps, in one process."""
    with timed_parts() as found:
        steps = measure(model, implementation, rounds, iters)
    parts = {name: statistics.median(found[name]) for name in PARTS}
    whole = {
        f"{name}, whole": statistics.median(chain.from_iterable(steps[name]))
        for name in (FSDP1, FLAT, FLOOR)
    }
    return {**whole, **parts}


def print_parts(models: list[str], rounds: int, iters: int) -> None:
    """A Markdown table of the parts."""
    for model in models:
        columns = []
        for implementation in IMPLEMENTATIONS:
            settings = {"model": model, "implementation": implementation}
            times = {"rounds": rounds, "iters": iters if model == "stack" else max(1, iters // 4)}
            columns.append(run_ranks(measure_parts, 2, {**settings, **times}, fake=True))
        print(f"| {model}, ms | " + " | ".join(IMPLEMENTATIONS) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for name in columns[0]:
            cells = " | ".join(f"{1e3 * column[name]:.3g}" for column in columns)
            print(f"| {name} | {cells} |")


def run(models: list[str], rounds: int, iters: int) -> dict[str, Any]:
    """The record of the measure, ready for JSON."""
    about = machine.describe()
    figures = []
    for model in models:
        for implementation in IMPLEMENTATIONS:
            settings = {"model": model, "implementation": implementation}
            times = {"rounds": rounds, "iters": iters if model == "stack" else max(1, iters // 4)}
            result = run_ranks(measure, 2, {**settings, **times}, fake=True)
            medians = {k: [statistics.median(s) for s in each] for k, each in result.items()}
            beside, *targets = TARGETS[model]
            steps_s = {name: statistics.median(s) for name, s in medians.items()}
            ratios = {}
            for name, target in zip((DEFAULT, FLAT), targets, strict=True):
                pairs = zip(medians[name], medians[beside], strict=True)
                each = [ours / theirs for ours, theirs in pairs]
                middle, low, high = statistics.median(each), min(each), max(each)
                ratios[name] = {"ratio": middle, "range": [low, high], "target": target}
                progress(f"flat: {model}, {implementation}, {name}: {middle:.2f} of {beside}")
            figures.append({**settings, "steps_s": steps_s, "beside": beside, "ratios": ratios})
    return {
        "name": "flat",
        **about,
        "config": {"settings": {"rounds": rounds, "iters": iters}},
        "figures": figures,
    }


def table(record: dict[str, Any]) -> str:
    """The figures as Markdown."""
    compared = (DEFAULT, FLAT)
    lines = [
        "| AdamW step, ms | " + " | ".join((*STEPS, *compared)) + " |",
        "|---" * (len(STEPS) + len(compared) + 1) + "|",
    ]
    for figure in record["figures"]:
        cells = [f"{figure['steps_s'][name] * 1e3:.3g}" for name in STEPS]
        for name in compared:
            found = figure["ratios"][name]
            low, high = found["range"]
            verdict = "" if found["ratio"] <= found["target"] else "not "
            cells.append(
                f"{found['ratio']:.2f} ({low:.2f} to {high:.2f}) of {figure['beside']}; "
                f"{found['target']:.2f} {verdict}met"
            )
        lines.append(f"| {figure['model']}, {figure['implementation']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes `flat.json`, prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flat", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="*", default=[], choices=[[], *TARGETS])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iters", type=int, default=12, help="steps per round and variant")
    parser.add_argument("--output", type=Path, default=machine.REPOSITORY / "benchmarks/results")
    parser.add_argument("--parts", action="store_true", help="time the parts of flat_step instead")
    options = parser.parse_args(arguments)
    if options.parts:
        print_parts(options.models or list(TARGETS), options.rounds, options.iters)
        return 0
    record = run(options.models or list(TARGETS), options.rounds, options.iters)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "flat.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    progress(f"written to {path}")
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
