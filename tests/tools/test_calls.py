"""Limits to what a unit adds to a step, in calls and operators: `python -m benchmarks.calls`.

They are what was measured when they were set. Whoever needs more says in the commit what for.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

from benchmarks import calls
from benchmarks.calls import Counts
from benchmarks.variants import OURS


@pytest.fixture(scope="module")
def measured() -> dict[str, Counts]:
    with ProcessPoolExecutor(1, mp_context=harness.fork_context()) as pool:
        return pool.submit(calls.measure_alone, [OURS]).result(timeout=harness.JOB_TIMEOUT_S)


def test_a_unit_adds_few_calls_and_operators(measured: dict[str, Counts]) -> None:
    ours = measured[OURS]
    # Three find autograd's node in each backward instead of keeping it, and two ask whether modules
    # hold what they should.
    assert ours.python.total() <= 159, ours.python.most_common(40)
    # 23 of them tell events that no part hears.
    assert ours.c.total() <= 167, ours.c.most_common(40)
    assert ours.operators.total() <= 70, ours.operators
    assert ours.allocations["number"] <= 5, ours.allocations
    if sys.version_info[:2] == (3, 11):  # each Python has bytecodes of its own
        assert ours.bytecodes.total() <= 6400, ours.bytecodes.most_common(40)


def test_nothing_is_called_for_each_parameter(measured: dict[str, Counts]) -> None:
    """A block has nine of them. (In C, the references to each are counted.)"""
    python = measured[OURS].python
    assert max(python.values()) < 9, python.most_common(5)


def test_a_unit_gathers_twice_and_reduces_once(measured: dict[str, Counts]) -> None:
    """What the limits rely on: these are calls of a whole step, per unit."""
    python = measured[OURS].python
    assert python["GroupTransport.all_gather"] == 2
    assert python["GroupTransport.reduce_scatter"] == 1


def test_counts_are_taken_apart() -> None:
    deep = Counts(Counter(f=24, g=3), Counter(len=8), Counter())
    shallow = Counts(Counter(f=8, h=4), Counter(len=8), Counter())
    added = deep.less(shallow).over(4)
    assert (added.python["f"], added.python["h"], added.c.total()) == (4, -1, 0)
