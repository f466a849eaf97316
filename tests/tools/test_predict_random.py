"""Random configurations: what a step gathers, reduces, sends and holds is what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

from by_keywords import estimate
from estimate_grammar import Configuration, sample
from estimate_runs import differences, predict, run
from fsdp2 import CommPolicy, MixedPrecisionPolicy, explain
from harness import run_on
from random_models import Layer

FP32 = MixedPrecisionPolicy(torch.float32)


def check(configurations: Sequence[Configuration]) -> None:
    """Each predicted and run; those of one world size in one job."""
    wrong = []
    for size in sorted({made.world_size for made in configurations}):
        chosen = [made for made in configurations if made.world_size == size]
        ranks = run_on(size, run, chosen, timeout_s=30 + 15 * len(chosen))
        for made, real in zip(chosen, zip(*ranks, strict=True), strict=True):
            wrong += [f"{made}: {each}" for each in differences(made, list(real), predict(made))]
    assert not wrong, "\n".join(wrong)


def root(*inside: Layer, **attributes: Any) -> Layer:
    return Layer("linear", size=48, inside=inside, **attributes)


def made(model: Layer, wrap: Any, **options: Any) -> Configuration:
    shared = {"strategy": "full", "wrap": wrap, "mp_policy": MixedPrecisionPolicy()}
    shared.update(options.pop("shared", {}))
    return Configuration(model, (2,), shared, **options)


NOTHING, NORM = Layer("nothing"), Layer("batchnorm")
NAMED = {
    "some parameters get no gradient": made(
        root(Layer("linear", size=200, detached=True, inside=(Layer("linear", size=200),))), "root"
    ),
    "a unit writes into one of several inputs": made(
        root(Layer("linear", size=64, passes="nested", writes="input")), ["inside.0"]
    ),
    "recomputation ends in an inner unit": made(
        root(*[Layer("nothing", recomputed=True, inside=(NOTHING, NOTHING, NORM))] * 6),
        [f"inside.{i}.inside.2" for i in range(6)],
        batch=64,
    ),
    "recomputation ends in a unit that backward has left": made(
        root(Layer("empty", recomputed=True), recomputed=True), "class:Node"
    ),
    "a reentrant checkpoint": made(
        root(Layer("linear", size=150, repeats=2, recomputed="reentrant")), "size:1000"
    ),
    "frozen parameters are stored as they compute": made(
        root(Layer("linear", size=200, frozen=True)),
        ["inside.0"],
        shared={"mp_policy": replace(FP32, cast_frozen_params=True)},
    ),
    "resharded to one rank": made(
        root(Layer("linear"), Layer("linear")),
        ["inside.0", "inside.1"],
        shared={"reshard_after_forward": 1},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_what_random_configurations_have_found(name: str) -> None:
    check([NAMED[name]])


def test_random_configurations_run_as_predicted() -> None:
    check([each for each in sample(12) if each.world_size == 2])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_more_random_configurations_run_as_predicted(seed: int) -> None:
    check(sample(20, seed))


# -- without runs ----------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@pytest.mark.parametrize(("number", "same"), [(1, False), (4, True)])
def test_numbers_of_ranks_that_mean_true_or_false(number: int, same: bool) -> None:
    of: dict[str, Any] = {"wrap": ["0", "1"]}
    found = [
        estimate(two_layers(), 4, torch.zeros(2, 64), reshard_after_forward=each, **of).traffic
        for each in (number, same)
    ]
    assert found[0] == found[1]
    told = [explain(two_layers(), 4, reshard_after_forward=each, **of) for each in (number, same)]
    assert told[0] == told[1]


def test_explain_knows_that_frozen_parameters_are_cast() -> None:
    model = two_layers().requires_grad_(False)
    half = MixedPrecisionPolicy(torch.bfloat16, cast_frozen_params=True)
    whole = sum(p.numel() for p in model.parameters())
    assert explain(model, 4, mp_policy=half).totals.sharded_bytes == 2 * whole // 4


def test_what_replicate_does_not_know_changes_nothing() -> None:
    """`shard_model` calls it for the strategy "none"."""
    plain, told = (
        estimate(
            two_layers(),
            4,
            torch.zeros(2, 64),
            strategy="none",
            **options,
        ).traffic
        for options in ({}, {"reshard_after_forward": 2})
    )
    assert plain == told


def test_sums_of_replicas_under_a_policy_have_the_dtype_of_the_reduction() -> None:
    with torch.device("meta"):
        model = nn.Linear(512, 512, bias=False, dtype=torch.float64)
    options: dict[str, Any] = {"strategy": "none", "comm_policy": CommPolicy(reduce=torch.bfloat16)}
    x = torch.zeros(1, 512, dtype=torch.float64)
    peak = estimate(model, 4, x, device_type="cpu", optimizer=None, **options).worst.backward
    # Rows that are sent and received, the gradients as a matrix of shares, and a mean.
    assert peak.parts["communication buffers"] == 512 * 512 * (2 * 2 + 8 + 8 // 4)
