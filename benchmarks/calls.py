"""What one unit adds to a step, in numbers that no other process disturbs.

    python -m benchmarks.calls             # a table
    python -m benchmarks.calls --functions # and what is called, most often first

Forward and backward of the stack of `benchmarks.hooks`, with matrices of 16 x 16, so that bytes do
not matter: Python functions, C functions called from Python, and operators. Counted in a deep and
in a less deep stack, minus the plain model's. The difference per block is what a unit costs; what a
root costs once drops out. One process, as rank 0 of a `fake` group of two: its collectives are made
of operators too, and those are counted.

``tests/tools/test_calls.py`` holds the numbers of fsdp2 to limits.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from .hooks import WARM_UP_STEPS, make_stack
from .models import StackConfig
from .structure import make_group
from .variants import BASELINE, OURS, Variant, build

PLAIN = "plain"
DEPTHS = 2, 6
OPERATORS = ("aten::", "c10d::", "fsdp::")


@dataclass
class Counts:
    """What one unit adds to forward and backward.

    Attributes:
        python: calls by name of the Python function.
        c: calls of C functions by Python code.
        operators: by name, those that operators call included.
    """

    python: Counter[str]
    c: Counter[str]
    operators: Counter[str]

    def less(self, other: Counts) -> Counts:
        """These counts minus ``other``, which may leave negative ones."""
        return self._combine(other, lambda mine, theirs: mine - theirs)

    def over(self, units: int) -> Counts:
        """These counts per unit, rounded."""
        return self._combine(self, lambda mine, _: round(mine / units))

    def _combine(self, other: Counts, function: Callable[[int, int], int]) -> Counts:
        pairs = (
            (self.python, other.python),
            (self.c, other.c),
            (self.operators, other.operators),
        )
        combined = (
            Counter({name: function(a[name], b[name]) for name in {*a, *b}}) for a, b in pairs
        )
        return Counts(*combined)


def measure(name: str) -> Counts:
    """What each unit of the variant ``name`` adds to the plain model's forward and backward."""
    shallow, deep = (_count(name, depth).less(_count(PLAIN, depth)) for depth in DEPTHS)
    return deep.less(shallow).over(DEPTHS[1] - DEPTHS[0])


def measure_alone(names: list[str]) -> dict[str, Counts]:
    """Measure in a process that did nothing else; a default process group is made and left."""
    make_group()
    try:
        return {name: measure(name) for name in names}
    finally:
        dist.destroy_process_group()


def _count(name: str, num_blocks: int) -> Counts:
    config = StackConfig(width=16, hidden=32, num_blocks=num_blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    variant = build(name, partial(make_stack, config), mesh, bf16=False)
    x = torch.randn(1, 4, config.width)

    def step() -> None:
        variant.model(x).sum().backward()

    for _ in range(WARM_UP_STEPS):
        _next_step(variant)
        step()
    _next_step(variant)
    python, c = called_by(step)
    _next_step(variant)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    operators = Counter(
        {
            event.key: event.count
            for event in recorded.key_averages()
            if event.key.startswith(OPERATORS)
        }
    )
    return Counts(python, c, operators)


def _next_step(variant: Variant) -> None:
    variant.model.zero_grad()


def called_by(function: Callable[[], None]) -> tuple[Counter[str], Counter[str]]:
    """The Python and the C functions that ``function`` calls in this thread."""
    python: Counter[str] = Counter()
    c: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            python[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            c[argument.__qualname__] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection calls finalizers, and what other tests have put in `gc.callbacks`
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return python, c


def main() -> None:
    parser = argparse.ArgumentParser(description="calls and operators that a unit adds to a step")
    parser.add_argument("--functions", action="store_true", help="list what fsdp2 calls")
    options = parser.parse_args()
    measured = measure_alone([BASELINE, OURS])
    print(f"{'a unit adds to a step':24}{'Python calls':>14}{'C calls':>10}{'operators':>11}")
    for name, counts in measured.items():
        totals = (counts.python.total(), counts.c.total(), counts.operators.total())
        print(f"{name:24}{totals[0]:14}{totals[1]:10}{totals[2]:11}")
    if options.functions:
        ours = measured[OURS]
        for kind, names in ("Python", ours.python), ("C", ours.c), ("operators", ours.operators):
            print(f"\n{kind}:")
            for called, count in names.most_common():
                if count:
                    print(f"{count:5} {called}")


if __name__ == "__main__":
    main()
