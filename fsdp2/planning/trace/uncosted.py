"""Operators without a cost: they are listed, and too many of them are an error.

A step that omits the arithmetic of its experts looks fast, and its plan is wrong without a sign.
The FLOPs of an operator without a formula are unknown, but the bytes that it reads and writes are
not. They decide whether the operator matters.
"""

from __future__ import annotations

from ...render.text import plural, show_bytes
from .events import StepTrace

# Part of the bytes of a step.
TOLERATED = 0.01
CHOICES = ("error", "list")


def without_cost(trace: StepTrace, unknown_costs: str = "error") -> list[str]:
    """One line for each operator of ``trace`` without a cost, those with the most bytes first.

    Raises:
        ValueError: with ``unknown_costs="error"``, if they are more than 1 % of the step's bytes.
    """
    named = sorted(trace.uncosted.items(), key=lambda item: -item[1].nbytes)
    lines = [
        f"Without a cost: {name}, {plural(each.calls, 'call')}, {show_bytes(each.nbytes)}"
        for name, each in named
    ]
    share = sum(each.nbytes for _, each in named) / max(1, trace.nbytes)
    if unknown_costs == "error" and share > TOLERATED:
        listed = "\n  ".join(lines)
        raise ValueError(
            f"Operators of unknown cost read and write {100 * share:.1f} % of the bytes of a step, "
            f"so its FLOPs and its time would be wrong:\n  {listed}\n"
            f"Register their costs: fsdp2.planning.register_cost('{named[0][0]}', flops=...), "
            "with 0 FLOPs if they only move bytes. Or pass unknown_costs='list', which counts "
            "their bytes and no FLOPs"
        )
    return lines
