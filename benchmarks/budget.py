"""Memory within budgets of gathered bytes: what `estimate` says beside what a run needs.

For budgets from the least that works to what the whole model takes, a language model trains on two
ranks under a `Ledger`, as in `benchmarks.estimate`. The estimate sees the model on the meta device.
Prints a table, and the largest error.

    python -m benchmarks.budget [--budgets 10]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch

from fsdp2 import explain
from fsdp2.features.gather_budget import GatherBudgetError

from .estimate import Case, compare, predict
from .families import FAMILIES
from .report import row

WHAT = ("forward", "backward", "peak")


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; 1 if an estimate is off by more than 2 %."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--budgets", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--family", default="transformer", choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    case = Case(options.family)
    least, most = _range(case)
    results = []
    for i in range(options.budgets):
        budget = least + (most - least) * i // max(1, options.budgets - 1)
        results.append((budget, compare(replace(case, max_gathered_bytes=budget))))
    print(f"{options.family} on 2 ranks: predicted / measured MB, and the error")
    print(row(["budget, MB", *WHAT]))
    print(row(["---:"] * (1 + len(WHAT))))
    for budget, result in results:
        print(row([f"{budget / 1e6:.3f}", *(_cell(result, what) for what in WHAT)]))
    worst = max(abs(result["errors"][what]) for _, result in results for what in WHAT)
    print(f"largest error: {100 * worst:.2f} %")
    return int(worst > 0.02)


def _range(case: Case) -> tuple[int, int]:
    """The least budget that works, and the bytes of everything gathered."""
    least = 1
    while True:
        try:
            predict(replace(case, max_gathered_bytes=least))
            break
        except GatherBudgetError as error:
            least = error.least_bytes
    with torch.device("meta"):
        model = FAMILIES[case.family].model()
    made = explain(model, case.mesh[0], wrap=case.wrap, device_type="cpu")
    return least, made.totals.gathered_bytes


def _cell(result: dict[str, Any], what: str) -> str:
    predicted, measured = result["predicted"][what], result["measured"][what]
    return f"{predicted / 1e6:.3f} / {measured / 1e6:.3f} ({100 * result['errors'][what]:+.2f} %)"


if __name__ == "__main__":
    sys.exit(main())
