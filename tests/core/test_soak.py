"""Thousands of steps, and a thousand models: nothing is left of what was done in between."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dropped import RECIPES, make_and_drop
from harness import cpu_only, ours_only, run_on
from leaks import EXACT, SIZES, count, fill_records, left
from programs import Program
from soak import MODEL, operations, soak

pytestmark = [ours_only("uses all of it"), cpu_only("counts what is in host memory")]

# torch.compile keeps guards and metrics of what was compiled, after `torch._dynamo.reset()`, too.
OF_TORCH = ("compiled",)
# What there may be more of after a thousand models or 5,000 operations: less than one object, five
# blocks or a kilobyte for each model. (Caches of torch, interned strings, tables that have grown.
# Of 3,700 blocks after 4,800 operations, 1,500 came with the first 500, 300 with the last 1,900.)
NOISE = {"objects": 500, "blocks of Python": 5000, "bytes of malloc": 1_000_000}
MANY = 10  # rounds; after fewer, bytes are not looked at, which records of collectives take


def left_of_many(rounds: int, names: list[str]) -> dict[str, str]:
    """What a rank holds more of after ``rounds`` rounds of all recipes, and again after as many.

    What is left of a model is left each time. Once, there may be more of anything: Python keeps a
    weak reference for each class that an abstract class was asked about, in whichever round that
    first happens. So the second time is only run, by all ranks, if one found something.
    """
    found: dict[str, str] = {}
    for again in (False, True):
        grown = left(*make_many(rounds, 0 if again else 1, names), objects=1)
        found = {name: each for name, each in grown.items() if name in found or not again}
        anywhere = torch.tensor(len(found))
        dist.all_reduce(anywhere)
        if not anywhere:
            break
    return found


def make_many(rounds: int, warm: int, names: list[str]) -> tuple[Counter[str], Counter[str]]:
    """What a rank holds after ``warm`` rounds of all recipes, and after ``rounds`` more."""
    for _ in range(warm):
        make_and_drop(names)
    if rounds >= MANY:
        fill_records()
    count()  # imports what it needs itself
    before = count()
    for _ in range(rounds):
        make_and_drop(names)
    return before, count()


def report(title: str, counts: list[tuple[Counter[str], Counter[str]]]) -> None:
    """What `pytest -s` shows."""
    print(f"\n{title}")
    for name in (*EXACT, *SIZES):
        ranks = "; ".join(f"{before[name]:,} -> {after[name]:,}" for before, after in counts)
        print(f"  {name}: {ranks}")


ALL = [name for name in RECIPES if name not in OF_TORCH]


def test_models_that_are_dropped_leave_nothing() -> None:
    assert run_on(2, left_of_many, 2, ALL) == [{}, {}]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_thousand_models_leave_nothing(world_size: int) -> None:
    rounds = -(-1000 // len(ALL))
    counts = run_on(world_size, make_many, rounds, 3, ALL, timeout_s=1700)
    report(f"{rounds * len(ALL)} models on {world_size} ranks", counts)
    for rank, (before, after) in enumerate(counts):
        assert not left(before, after, objects=3), f"rank {rank}"
        for name, noise in NOISE.items():
            assert after[name] - before[name] <= noise, f"rank {rank}: {name}"


def steps(world_size: int, num: int, start: int, **options: Any) -> None:
    """Check what is left of ``num`` operations on one model after the first ``start``."""
    program = Program(MODEL, world_size, options.pop("replicas", 1), options, "", ())
    run = run_on(world_size, soak, program, operations(num), start, timeout_s=1700)
    report(f"{num} operations on {world_size} ranks, after {start} and at the end", run)
    for rank, (before, after) in enumerate(run):
        # (Few operations are too few to have filled what torch keeps.)
        assert not left(before, after, objects=20 if num >= 1000 else 200), f"rank {rank}"
        if num >= 1000:
            for name, noise in NOISE.items():
                assert after[name] - before[name] <= noise, f"rank {rank}: {name}"


def test_operations_of_all_kinds_leave_nothing() -> None:
    steps(2, 60, 45, direct_min_bytes=60)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 4])
def test_five_thousand_operations_leave_nothing(world_size: int) -> None:
    steps(world_size, 5000, 100, direct_min_bytes=60, replicas=world_size // 2)
