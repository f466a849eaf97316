"""`plan` where experts have a mesh of their own and the model may be cut into a pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from test_predict_expert_stages import BF16, H100, Experts, Model, on_meta, renamed
from test_predict_pipeline import batch, split

from by_keywords import SEARCHED, plan, predict, predict_planned, sweep
from fsdp2.planning import Hardware, Plan

SIZES = {"width": 512, "num_blocks": 8, "num_experts": 32}
MICRO_BATCHES = 8
COMMON: dict[str, Any] = {
    "mp_policy": BF16,
    "micro_batches": MICRO_BATCHES,
    "split_stages": split,
    "experts": Experts,
}


def slow_network() -> Hardware:
    """So slow that tokens should stay in their node."""
    return replace(H100, network_bandwidth=2e9)


def model() -> Model:
    return on_meta(**SIZES)


def planned(**options: Any) -> Plan:
    given: dict[str, Any] = {
        "activation_checkpointing": ("none",), "pipeline_ranks": [1, 2, 4], "schedule": "1F1B",
        "expert_ranks": [4, 8, 16], "strategy": "full", "wrap": "auto", "prefetch": 1,
        "reshard_after_forward": None, "accumulation": ("unsharded",), **COMMON, **options,
    }  # fmt: skip
    sample = batch(1, given.pop("length", 512))
    return plan(model(), sample, slow_network(), 32, **given)


@pytest.fixture(scope="module")
def chosen() -> Plan:
    return planned()


def test_it_is_the_fastest_of_all_combinations(chosen: Plan) -> None:
    """Over a slow network, a stage has the ranks of a node, and so have the experts."""
    assert (chosen.pipeline_ranks, chosen.candidate.expert_ranks) == (4, 8)
    table = sweep(
        model(), batch(1, 512), slow_network(), 32, pipeline_ranks=[1, 2, 4],
        expert_ranks=[4, 8, 16], **COMMON,
    )  # fmt: skip
    [(failed, why)] = table.failed
    assert failed == {"expert_ranks": 16, "pipeline_ranks": 4}
    assert "must divide the number of ranks of a stage, 8" in why
    best = table.best
    assert best is not None
    assert (best.pipeline_ranks, best.choices["expert_ranks"]) == (4, 8)
    assert best.seconds == chosen.chosen.seconds
    tried = {(o.candidate.pipeline_ranks, o.candidate.expert_ranks) for o in chosen.outcomes}
    assert {(1, 4), (1, 8), (1, 16), (4, 8)} <= tried


@pytest.mark.parametrize(("ranks", "length"), [(1, 2048), (2, 512)])
def test_expert_ranks_are_chosen_again_for_what_is_gathered_once(ranks: int, length: int) -> None:
    """Experts over one node are the fastest only if they are not gathered in each micro-batch."""
    given: dict[str, Any] = {"pipeline_ranks": ranks, "expert_ranks": [8, 16]}
    table = sweep(
        model(), batch(1, length), slow_network(), 32, reshard_after_forward=[None, False],
        **{**COMMON, **given},
    )  # fmt: skip
    seconds = {
        (p.choices["expert_ranks"], p.choices["reshard_after_forward"]): p.seconds
        for p in table.predictions
    }
    assert seconds[16, "default"] < seconds[8, "default"]
    assert seconds[8, False] < seconds[16, False]
    made = planned(**given, length=length, reshard_after_forward=SEARCHED, strategy=None)
    assert made.candidate.expert_ranks == 8
    assert made.chosen.seconds <= seconds[8, False]


def test_it_is_what_predict_says_of_the_same_configuration(chosen: Plan) -> None:
    same = predict_planned(chosen)
    assert (same.seconds, same.bubble_s, same.range, same.stages) == (
        chosen.chosen.seconds, chosen.bubble_s, chosen.range, chosen.stages,
    )  # fmt: skip
    assert (same.peak_bytes, same.needed_bytes, same.padding) == (
        chosen.chosen.peak_bytes, chosen.chosen.needed_bytes, chosen.padding,
    )  # fmt: skip


def test_larger_shards_are_those_of_other_units() -> None:
    """As `predict` has it, of stages that call their modules something else."""
    given: dict[str, Any] = {
        "expert_ranks": 2, "pipeline_ranks": 2, "reshard_after_forward": 4, "split_stages": renamed,
    }  # fmt: skip
    made = planned(**given)
    same = predict(
        model(), batch(1, 512), slow_network(), 32, schedule="1F1B", **{**COMMON, **given}
    )
    assert (same.seconds, same.peak_bytes) == (made.chosen.seconds, made.chosen.peak_bytes)


def test_what_the_plan_says(chosen: Plan, tmp_path: Path) -> None:
    text = str(chosen)
    for told in (
        "7 modules, over 8 ranks", "over 4 ranks (1F1B)", "Pipeline: over 4 ranks (1F1B); none is",
        "Experts: over 8 ranks; over 16 ranks is", ", pipeline none)", "all-to-all",
        "experts over 8, pipeline over 4 (1F1B)",
    ):  # fmt: skip
        assert told in text, told
    data = json.loads(json.dumps(chosen.to_dict()))
    assert (data["expert_ranks"], data["pipeline_ranks"], data["num_ranks"]) == (8, 4, 32)
    assert len(data["experts"]) == 7
    found = {(o["expert_ranks"], o["pipeline_ranks"]) for o in data["outcomes"]}
    assert found >= {(8, 4), (8, 1), (16, 1)}
    pytest.importorskip("matplotlib")
    chosen.picture(tmp_path / "plan.svg")
    assert "4 x 8 GPUs" in (tmp_path / "plan.svg").read_text()


def test_how_it_is_applied(chosen: Plan) -> None:
    match = (
        "cannot be applied in one call: call shard_experts for 'blocks.1.experts' and the others "
        r"with a mesh of \(ranks of a stage // 8, 8\), give each stage of split_stages on this rank"
    )
    with pytest.raises(ValueError, match=match):
        chosen.apply(model(), None)


def test_all_that_is_searched_by_itself(chosen: Plan) -> None:
    """Numbers of expert ranks are those of a stage: not more than it has."""
    made = planned(
        expert_ranks=None, pipeline_ranks=None, schedule=["1F1B", "InterleavedZeroBubble"],
        strategy=None, wrap=None,
    )  # fmt: skip
    assert {o.candidate.pipeline_ranks for o in made.outcomes} > {1}
    for outcome in made.outcomes:
        experts = outcome.candidate.expert_ranks
        assert experts in (8, 16, 32)
        assert 32 // (outcome.candidate.pipeline_ranks or 1) % experts == 0
    assert not [reason for reason in made.reasons if "expert_ranks" in reason]  # none is left out
    assert made.chosen.paced_s <= chosen.chosen.paced_s


def test_memory_decides_about_expert_ranks() -> None:
    """With experts over fewer ranks, each gathers more of them."""
    given: dict[str, Any] = {"pipeline_ranks": 2, "micro_batches": 2}
    local, spread = (planned(expert_ranks=n, **given).chosen.needed_bytes for n in (2, 8))
    assert spread < local
    tight = planned(expert_ranks=[2, 8], memory_budget=(spread + local) // 2, **given)
    assert tight.candidate.expert_ranks == 8
    with pytest.raises(ValueError, match=r"Nothing fits .*experts over 8, pipeline over 2"):
        planned(expert_ranks=[2, 8], memory_budget=spread // 2, **given)


def test_a_pipeline_whose_stages_have_too_few_ranks_is_left_out() -> None:
    made = planned(expert_ranks=[16], pipeline_ranks=[2, 4])
    assert {o.candidate.pipeline_ranks for o in made.outcomes} == {2}
    told = (
        "Pipeline over 4 ranks is left out: a stage has 8 ranks, and no number of expert_ranks "
        "divides these"
    )
    assert told in made.reasons


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"expert_ranks": []}, "expert_ranks is an empty list"),
        ({"expert_ranks": [3]}, "expert_ranks=3 must divide num_ranks=32"),
        (
            {"expert_ranks": [16], "pipeline_ranks": 4},
            "expert_ranks=16 must divide the ranks of a stage, 8 with pipeline_ranks=4",
        ),
        ({"expert_ranks": [64]}, "more than the 32 experts"),
        ({"experts": None, "expert_ranks": [8]}, "expert_ranks=8 needs experts="),
        (
            {"experts": "blocks.1.experts", "pipeline_ranks": 4, "expert_ranks": 8},
            "with 'blocks.3.experts.up': experts= must name the same modules in the stages",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned(**options)
