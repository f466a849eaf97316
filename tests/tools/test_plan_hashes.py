"""Estimates, predictions, tables and plans of small models stay the same, to the last digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

import plan_hashes
from plan_cases import CASES, H100

KNOWN = plan_hashes.KEPT.read()
OTHER_TORCH = pytest.mark.skipif(
    plan_hashes.KEPT.are_of_another_torch(), reason="operators of another torch"
)


@OTHER_TORCH
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * case.long) for name, case in CASES.items()],
)
def test_it_is_what_it_was(name: str) -> None:
    """Where this fails and the change meant it: ``python -m plan_hashes --write``."""
    assert plan_hashes.hashes_of(name) == KNOWN[name]


def test_every_case_is_known() -> None:
    assert CASES.keys() == KNOWN.keys()


@OTHER_TORCH
def test_a_change_in_the_twelfth_digit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "predict: usual"
    nudged = replace(H100, network_bandwidth=H100.network_bandwidth * (1 + 1e-12))
    monkeypatch.setitem(CASES, name, replace(CASES[name], hardware=nudged))
    assert plan_hashes.hashes_of(name)["numbers"] != KNOWN[name]["numbers"]
