"""The states of a unit: the whole table of transitions, and who may change a state."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2.runtime.unit as unit_module
from fsdp2.runtime.states import GATHERED, RESHARDED, TRANSITIONS, State
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_config import UnitConfig

EVENTS = sorted({event for _, event in TRANSITIONS})


def unit_in(state: State) -> Unit:
    mesh: Any = None
    unit = Unit((nn.Linear(1, 1),), mesh, torch.device("cpu"), UnitConfig())
    unit.state = state
    return unit


@pytest.mark.parametrize(("state", "event"), list(product(State, EVENTS)))
def test_what_is_not_in_the_table_is_refused(state: State, event: str) -> None:
    unit, after = unit_in(state), TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{state.value}, where {event} is not allowed"):
            unit.transition(event)
        assert unit.state is state
    else:
        unit.transition(event)
        assert unit.state is after


def test_gathers_are_refused_before_anything_is_launched() -> None:
    unused: Any = None  # would be an AttributeError
    for state in State:
        if (state, "start_unshard") not in TRANSITIONS:
            with pytest.raises(AssertionError):
                unit_in(state).start_unshard(unused)
        if (state, "wait_unshard") not in TRANSITIONS:
            with pytest.raises(AssertionError):
                unit_in(state).wait_unshard(unused)


def test_every_state_can_be_reached_and_left_for_the_shards() -> None:
    def reached(start: State) -> set[State]:
        found = {start}
        while True:
            more = {to for (state, _), to in TRANSITIONS.items() if state in found} - found
            if not more:
                return found
            found |= more

    assert reached(State.SHARDED) == set(State)
    assert all(State.SHARDED in reached(state) for state in State)
    assert {*RESHARDED, State.GATHERING, *GATHERED} == set(State)


def test_nothing_else_of_the_package_sets_a_state() -> None:
    package = Path(unit_module.__file__).parents[1]
    found = [
        f"{path.name}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\.state = (State\.|after\b)", line)
    ]
    assert [line.split("  #")[0] for line in found] == [
        "unit.py: self.state = State.SHARDED",
        "unit.py: self.state = after",
    ]
