"""The checker catches every fault put into the runtime, or the fault is shown to be harmless.

Without these, a trace without violations would say little: a checker that sees nothing gives one.
"""

from __future__ import annotations

import pytest

import stream_mutations_on_device
import testdev
from fsdp2.testing import Kind, check
from harness import ours_only
from stream_mutations import MUTATIONS, PLANS
from stream_schedules import Plan, plan_of, traced

pytestmark = [
    ours_only("breaks what this runtime does"),
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
]
CAUGHT = [name for name, mutation in MUTATIONS.items() if mutation.kind is not None]
HARMLESS = [name for name, mutation in MUTATIONS.items() if mutation.kind is None]


def kinds(plan: Plan) -> set[Kind]:
    with traced(plan) as recorder:
        return {violation.kind for violation in check(recorder.events)}


@pytest.mark.parametrize("name", PLANS)
def test_without_a_fault_there_is_nothing_to_see(name: str) -> None:
    assert kinds(PLANS[name]) == set()


@pytest.mark.parametrize("name", CAUGHT)
def test_the_fault_is_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    with mutation.patch():
        assert mutation.kind in kinds(PLANS[mutation.plan])


@pytest.mark.parametrize("seeds", [2, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", HARMLESS)
def test_the_fault_is_harmless(name: str, seeds: int) -> None:
    mutation = MUTATIONS[name]
    assert mutation.reason
    with mutation.patch():
        shown = {plan: found for plan in PLANS if (found := kinds(PLANS[plan]))}
        shown |= {str(seed): found for seed in range(seeds) if (found := kinds(plan_of(seed)))}
    assert shown == {}


ON_DEVICE = {
    "compute does not wait for the gather": True,
    "the event of an all-reduce is recorded on the reduce-scatter's stream": True,
    "gathered storage is freed without a wait for compute": True,
    "gathers run on compute": False,
    "reductions are not limited in number": False,
}


@pytest.mark.long
@pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or "")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_the_fault_changes_what_is_computed(name: str) -> None:
    """`python -m stream_mutations_on_device` does this for all of them: the table in streams.md."""
    found = stream_mutations_on_device.outcomes(name, seeds=5)
    assert (set(found) != {stream_mutations_on_device.SAME}) == ON_DEVICE[name], found


def test_there_are_enough_faults() -> None:
    assert len(CAUGHT) >= 25
