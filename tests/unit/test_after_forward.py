"""What becomes of a unit's gathered parameters when its forward ends: the whole table."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import nn

from fsdp2.runtime.schedule import Residency
from fsdp2.runtime.states import AfterForward
from fsdp2.runtime.unit import Unit
from fsdp2.runtime.unit_config import UnitConfig

KEEP, TO_REPEAT, FREE = AfterForward.KEEP, AfterForward.KEEP_TO_REPEAT, AfterForward.FREE
FOR_BACKWARD = AfterForward.KEEP_FOR_BACKWARD
TO_SECONDARY = AfterForward.FREE_TO_SECONDARY


def decided(chosen: bool | int | None, *, is_root: bool = False, **facts: bool) -> AfterForward:
    mesh: Any = None
    config = UnitConfig(
        reshard_after_forward=chosen, unshard_in_backward=facts.pop("unshard_in_backward", True)
    )
    unit = Unit((nn.Linear(1, 1),), mesh, torch.device("cpu"), config)
    unit.choose_reshard(is_root=is_root)
    return Residency().after_forward(unit, **{"runs_next": False, "ends_forward": False, **facts})


def test_units_that_run_again_at_once_and_those_that_a_user_keeps_are_kept() -> None:
    for differentiable in (True, False):
        for chosen in (None, True, 2):
            assert decided(chosen, differentiable=differentiable, runs_next=True) is TO_REPEAT
        assert decided(False, differentiable=differentiable, runs_next=True) is KEEP
        assert decided(None, is_root=True, differentiable=differentiable, runs_next=True) is KEEP
    for differentiable, ends in product((True, False), repeat=2):
        assert decided(False, differentiable=differentiable, ends_forward=ends) is KEEP


def test_what_a_root_keeps_by_default_is_for_a_backward() -> None:
    assert decided(None, is_root=True, differentiable=True) is KEEP
    assert decided(None, is_root=True, differentiable=False) is FREE


def test_the_last_unit_of_forward_is_kept_for_backward() -> None:
    for chosen in (None, True):
        assert decided(chosen, differentiable=True, ends_forward=True) is FOR_BACKWARD
        assert decided(chosen, differentiable=True) is FREE
        assert decided(chosen, differentiable=False, ends_forward=True) is FREE


def test_secondary_shards_are_kept_only_for_a_gather_in_backward() -> None:
    for size, ends in product((1, 2), (True, False)):  # 1 is not True
        assert decided(size, differentiable=True, ends_forward=ends) is TO_SECONDARY
        assert decided(size, differentiable=False, ends_forward=ends) is FREE
        now = decided(size, differentiable=True, ends_forward=ends, unshard_in_backward=False)
        assert now is FREE
