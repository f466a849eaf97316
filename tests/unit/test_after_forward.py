"""What becomes of a unit's gathered parameters when its forward ends: the whole table."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

from fsdp2.features.secondary_shards import keeps_after_forward
from fsdp2.runtime.states import AfterForward
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_config import UnitConfig

KEEP, FREE, CARRY = AfterForward.KEEP, AfterForward.FREE, AfterForward.CARRY


def decided(chosen: bool | int | None, *, is_root: bool = False, **facts: bool) -> AfterForward:
    unit = unit_with(chosen, is_root=is_root)
    return unit.after_forward(**{"runs_next": False, "ends_forward": False, **facts})


def unit_with(chosen: bool | int | None, *, is_root: bool = False, **settings: bool) -> Unit:
    mesh: Any = None
    config = UnitConfig(reshard_after_forward=chosen, **settings)
    unit = Unit((nn.Linear(1, 1),), mesh, torch.device("cpu"), config)
    unit.choose_reshard(is_root=is_root)
    return unit


def test_units_that_run_again_at_once_and_those_that_a_user_keeps_are_kept() -> None:
    for chosen, differentiable in product((None, True, False, 2), (True, False)):
        assert decided(chosen, differentiable=differentiable, runs_next=True) is KEEP
    for differentiable, ends in product((True, False), repeat=2):
        assert decided(False, differentiable=differentiable, ends_forward=ends) is KEEP


def test_what_a_root_keeps_by_default_is_for_a_backward() -> None:
    assert decided(None, is_root=True, differentiable=True) is KEEP
    assert decided(None, is_root=True, differentiable=False) is FREE


def test_the_last_unit_of_forward_is_carried_into_backward() -> None:
    for chosen in (None, True):
        assert decided(chosen, differentiable=True, ends_forward=True) is CARRY
        assert decided(chosen, differentiable=True) is FREE
        assert decided(chosen, differentiable=False, ends_forward=True) is FREE


def test_units_that_are_resharded_to_groups_of_ranks_are_freed() -> None:
    for size, differentiable, ends in product((1, 2), (True, False), (True, False)):
        assert decided(size, differentiable=differentiable, ends_forward=ends) is FREE


def test_secondary_shards_are_kept_only_for_a_gather_in_backward() -> None:
    for size, has_graph, gathers in product((True, False, 1, 2), (True, False), (True, False)):
        unit = unit_with(size, unshard_in_backward=gathers)
        unit.has_graph = has_graph
        assert keeps_after_forward(unit) == (type(size) is int and has_graph and gathers)
