"""`plan` of steps with many micro-batches: few are simulated, and the result is that of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from test_plan import BF16, on_meta, tokens

from by_keywords import plan, predict
from fsdp2.planning import Plan, find_hardware
from fsdp2.planning.outcomes import MOST_COMPARED
from fsdp2.planning.replay.replay import Player

NUM = 24
# A slow network, so that ways to sum gradients differ.
SLOW = replace(find_hardware("h100"), network_bandwidth=20e9)
MODEL: dict[str, int] = {"width": 512, "num_blocks": 3}
FIXED: dict[str, Any] = {"mp_policy": BF16, "micro_batches": NUM}


@pytest.fixture(scope="module")
def made() -> tuple[Plan, int]:
    """The plan, and how many micro-batches were played for it."""
    micro_batch = Player._micro_batch
    with mock.patch.object(
        Player, "_micro_batch", autospec=True, side_effect=micro_batch
    ) as played:
        found = plan(
            on_meta(**MODEL), tokens(), SLOW, 64, activation_checkpointing=("none",), **FIXED
        )
    return found, played.call_count


def test_few_micro_batches_are_played(made: tuple[Plan, int]) -> None:
    found, played = made
    num = len(found.outcomes)
    # A replay is two steps. Of all, one has 3 and one has 4 micro-batches; of those that are
    # compared, one or two have all.
    assert num > 2 * MOST_COMPARED
    assert played < 2 * (3 + 4) * num + 2 * NUM * 2 * MOST_COMPARED
    assert played < 2 * NUM * num


def test_the_chosen_one_is_what_predict_says(made: tuple[Plan, int]) -> None:
    found, _ = made
    assert found.chosen.seconds == seconds_of(found.chosen.candidate)
    assert found.step.seconds == found.chosen.seconds


def test_the_others_are_what_predict_says_but_for_rounding(made: tuple[Plan, int]) -> None:
    found, _ = made
    others = sorted(found.outcomes, key=lambda o: o.seconds)[MOST_COMPARED:]
    kinds = {o.candidate.accumulation: o for o in others}
    assert kinds.keys() == {"unsharded", "sharded"}
    for outcome in (*kinds.values(), others[0], others[-1]):
        assert outcome.seconds == pytest.approx(seconds_of(outcome.candidate), rel=1e-5)


def test_as_many_as_are_played_anyway_are_not_estimated() -> None:
    options = {**FIXED, "micro_batches": 8}
    with mock.patch("fsdp2.planning.searching.with_micro_batches") as estimated:
        plan(on_meta(**MODEL), tokens(), SLOW, 64, activation_checkpointing=("none",), **options)
    estimated.assert_not_called()


def seconds_of(candidate: Any) -> float:
    wraps = {"blocks": "auto", "one": "root"}
    mesh = candidate.mesh if len(candidate.mesh) > 1 else candidate.mesh[0]
    return predict(
        on_meta(**MODEL),
        tokens(),
        SLOW,
        mesh,
        strategy=candidate.strategy,
        wrap=wraps[candidate.wrap],
        reshard_after_forward=candidate.reshard,
        prefetch=candidate.prefetch,
        accumulation=candidate.accumulation,
        **FIXED,
    ).seconds
