"""Shows where the time of a step goes: `python -m benchmarks.profile_step --help`.

`lm` profiles forward and backward of the language model on rank 0 with torch.profiler: the
operations, and the ranges that a library names, by their own CPU time. `hooks` runs the stack of
tiny blocks over a `fake` group under cProfile: Python functions by their own time. Both slow down
what they look at, by different amounts: compare shares, not times.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from . import hooks
from .copies import WAIT
from .models import LMConfig, StackConfig
from .ranks import run_ranks
from .steps import make_lm, random_tokens, train_step
from .transport import around_waits
from .variants import OURS, VARIANTS, build

WARM_UP_STEPS = 3


def profile_lm(name: str, bf16: bool, iters: int, rows: int) -> dict[str, Any]:
    """Profiles some steps of the language model on this rank; returns the table as text."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    variant = build(name, partial(make_lm, LMConfig()), mesh, bf16)
    batch = random_tokens(LMConfig(), 2, 64)
    for _ in range(WARM_UP_STEPS):
        train_step(variant, batch)
        variant.model.zero_grad()
    with (
        around_waits(partial(record_function, WAIT)),
        profile(activities=[ProfilerActivity.CPU]) as profiler,
    ):
        for _ in range(iters):
            train_step(variant, batch)
            variant.model.zero_grad()
    averages = profiler.key_averages()
    return {"text": averages.table("self_cpu_time_total", row_limit=rows, max_name_column_width=50)}


def profile_hooks(name: str, iters: int, rows: int) -> dict[str, Any]:
    """Profiles the Python functions of some steps of the tiny blocks; returns tables as text."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = StackConfig()
    variant = build(name, partial(hooks.make_stack, config), mesh, bf16=False)
    run = hooks.Run(variant, config)
    for _ in range(hooks.WARM_UP_STEPS):
        run.forward_backward()
    profiler = cProfile.Profile()
    for _ in range(iters):
        variant.model.zero_grad()
        profiler.enable()
        run.forward_backward()
        profiler.disable()
    text = io.StringIO()
    statistics = pstats.Stats(profiler, stream=text).strip_dirs()
    for order in ("tottime", "cumulative"):
        statistics.sort_stats(order).print_stats(rows)
    return {"text": text.getvalue()}


def main() -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step",
        description="Shows where the time of a training step goes.",
    )
    parser.add_argument("measure", choices=["lm", "lm-bf16", "hooks"])
    parser.add_argument("--variant", default=OURS, choices=VARIANTS, metavar="NAME")
    parser.add_argument("--iters", type=int, default=5, help="profiled steps (default 5)")
    parser.add_argument("--rows", type=int, default=30, help="lines per table (default 30)")
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    arguments = {"name": options.variant, "iters": options.iters, "rows": options.rows}
    if options.measure == "hooks":
        answer = run_ranks(profile_hooks, options.world_size, arguments, fake=True)
    else:
        arguments["bf16"] = options.measure == "lm-bf16"
        answer = run_ranks(profile_lm, options.world_size, arguments)
    print(answer["text"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
