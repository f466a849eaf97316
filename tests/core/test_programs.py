"""Random programs on random models: the sharded model computes what the plain one does."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from harness import ours_only, run_on
from programs import Program, programs, run

pytestmark = ours_only("settings and functions that torch does not have")

# Shrinking would take minutes: a program is small as it is.
QUICK = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@QUICK
@given(programs())
def test_programs(program: Program) -> None:
    run_on(program.world_size, run, program)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(QUICK, max_examples=2000)
@given(programs())
def test_many_programs(program: Program) -> None:
    run_on(program.world_size, run, program)
