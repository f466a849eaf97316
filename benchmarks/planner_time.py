"""How long `fsdp2.plan` takes for large models on many ranks: `python -m benchmarks.planner_time`.

CPU seconds of one core, tracing and simulation together. Nothing is communicated and no memory is
allocated for the models, so the number of ranks costs nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fsdp2
from fsdp2 import MixedPrecisionPolicy

from . import machine, report
from .published_models import (
    DeepSeek,
    Llama,
    deepseek_batch,
    llama_405b,
    llama_batch,
    next_token_loss,
)
from .ranks import progress

BEGIN, END = "<!-- planner-time:begin -->", "<!-- planner-time:end -->"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], str, int, dict[str, Any], float | None]
# Model, batch, hardware, ranks, other arguments of `plan`, seconds that it may take.
CASES: dict[str, Case] = {
    "Llama 3 8B": (Llama, llama_batch, "h100", 16384, {}, 10.0),
    # On H100s its activations and gathered blocks do not fit without tensor parallelism.
    "Llama 3.1 405B": (llama_405b, llama_batch, "h200", 16384, {}, 30.0),
    "DeepSeek-V3 671B": (
        DeepSeek, deepseek_batch, "h100", 2048, {"experts": "layers.*.experts"}, None,
    ),
}  # fmt: skip


def measure(name: str) -> list[str]:
    """A row of the table."""
    make, batch, hardware, num_ranks, options, target = CASES[name]
    with torch.device("meta"):
        model = make()
    begin = time.process_time()
    made = fsdp2.plan(
        fsdp2.planning.Workload(model, batch(), loss_fn=next_token_loss, **options),
        fsdp2.planning.Cluster(hardware, num_ranks),
        fsdp2.planning.Sharding(mp_policy=POLICY),
    )
    seconds = time.process_time() - begin
    if target is not None:
        progress(f"{seconds:.1f} s; the target of {target:.0f} s is "
                 f"{'met' if seconds <= target else 'missed'}")  # fmt: skip
    progress(f"chosen: {made.chosen.candidate}")
    return [name, f"{num_ranks:,} {hardware}", str(len(made.outcomes)), f"{seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_time", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--write-docs", action="store_true", help="into docs/planning/method.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = ["model", "ranks", "configurations", "CPU s"]
    lines = [report.row(heads), report.row(["---"] * len(heads))]
    for name in options.models:
        progress(name)
        lines.append(report.row(measure(name)))
    about = machine.describe()
    where = f"{about['machine']['cpu']}, one core; torch {about['versions']['torch']}."
    text = f"{where}\n\n" + "\n".join(lines)
    print(text)
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "planning" / "method.md"
        report.write_readme(page, text, BEGIN, END)


if __name__ == "__main__":
    main()
