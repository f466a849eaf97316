"""`plan` with pipelines: when it chooses one, what it says of it, and what it leaves out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from test_predict_pipeline import Even, Model, Stage, even_stages, on_meta, split

from by_keywords import Stages, make_setup, plan, predict, predict_planned
from fsdp2 import MixedPrecisionPolicy
from fsdp2.cli.main import main
from fsdp2.planning import Hardware, Plan, Simulator, StateOffload, find_hardware, searching
from fsdp2.planning.replay.pipeline import RankStage
from fsdp2.planning.replay.schedules import SPLIT
from fsdp2.planning.simulation.pipeline_estimates import estimate_pipeline, stages_alone
from fsdp2.planning.simulation.pipeline_times import replay_pipeline, simulate_pipeline
from harness import distributed

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MICRO_BATCHES = 8


def slow_network() -> Hardware:
    """So slow that sums of gradients should stay in their node."""
    return replace(H100, network_bandwidth=2e9)


def tokens(samples: int = 1, width: int = 1024) -> Tensor:
    return torch.empty(samples, 64, width, device="meta", requires_grad=True)


def planned(hardware: Hardware, num_ranks: int = 32, **options: Any) -> Plan:
    common: dict[str, Any] = {
        "mp_policy": BF16, "micro_batches": MICRO_BATCHES, "split_stages": even_stages,
        "activation_checkpointing": ("none",), **options,
    }  # fmt: skip
    sample = common.pop("sample", tokens())
    return plan(on_meta(Even, width=1024), sample, hardware, num_ranks, **common)


@pytest.fixture(scope="module")
def piped() -> Plan:
    return planned(slow_network())


def test_a_slow_network_makes_it_a_pipeline(piped: Plan) -> None:
    assert piped.pipeline_ranks in (2, 4, 8)
    assert piped.num_ranks == 32
    whole = [o for o in piped.outcomes if o.candidate.pipeline_ranks == 1]
    assert min(o.paced_s for o in whole) > 1.05 * piped.chosen.paced_s
    assert len(piped.stages) == piped.pipeline_ranks
    assert piped.chosen.peak_bytes == max(stage["peak_bytes"] for stage in piped.stages)
    assert 0 < piped.bubble_s < piped.chosen.exposed_s


def test_within_a_node_it_is_none() -> None:
    """Sums of gradients are hidden there, and the bubble would not be."""
    made = planned(H100, 8, sample=tokens(64))
    assert (made.pipeline_ranks, made.candidate.schedule, made.stages) == (1, None, [])
    simulated = [o for o in made.outcomes if o.candidate.is_pipeline]
    assert simulated
    fastest = min(simulated, key=lambda o: o.paced_s)
    if fastest.paced_s < made.chosen.paced_s * 0.995:  # less than is known of the hardware
        assert fastest.paced_s > made.chosen.paced_s * 0.97
        assert any("Faster by so little" in reason for reason in made.reasons)
    assert "Pipeline: none; over" in str(made)


def test_it_is_what_predict_says_of_the_same_configuration(piped: Plan) -> None:
    same = predict_planned(piped)
    assert (same.seconds, same.bubble_s, same.range) == (
        piped.chosen.seconds, piped.bubble_s, piped.range,
    )  # fmt: skip
    assert (same.peak_bytes, same.needed_bytes) == (
        piped.chosen.peak_bytes, piped.chosen.needed_bytes,
    )  # fmt: skip
    assert same.stages == piped.stages


def test_what_the_plan_says(piped: Plan, tmp_path: Path) -> None:
    text = str(piped)
    assert f"over {piped.pipeline_ranks} ranks ({piped.candidate.schedule}" in text
    assert "of waiting for other stages; allocated by rank: " in text
    assert "Pipeline: over" in text
    assert "none is" in text
    data = json.loads(json.dumps(piped.to_dict()))
    assert (data["pipeline_ranks"], data["schedule"]) == (
        piped.pipeline_ranks,
        piped.candidate.schedule,
    )
    assert (data["num_ranks"], data["stages"]) == (32, piped.stages)
    found = {outcome["pipeline_ranks"] for outcome in data["outcomes"]}
    assert found >= {1, piped.pipeline_ranks}
    piped.picture(tmp_path / "plan.svg")
    assert f"{piped.pipeline_ranks} x " in (tmp_path / "plan.svg").read_text()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The searches for pipelines of the plans of a test."""
    made: list[Any] = []

    class Noted(searching.PipelineSearch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(searching, "PipelineSearch", Noted)
    return made


def test_estimates_from_stages_alone_are_near_simulations(searches: list[Any]) -> None:
    """What decides which pipelines are simulated is not far from what they then come to."""
    # Of the last, steps take many seconds, in which what slows ranks down evens out.
    uneven = replace(slow_network(), matmul_efficiency=1e-4, jitter=0.6)
    plans = [planned(H100), planned(slow_network())]
    plans.append(planned(uneven, micro_batches=32))
    assert max(outcome.seconds for outcome in plans[-1].outcomes) > 4
    for each, search in zip(plans, searches, strict=True):
        checked = 0
        for outcome in each.outcomes:
            if outcome.candidate.is_pipeline:
                estimate = search.estimates[outcome.candidate]
                assert estimate.seconds == pytest.approx(outcome.seconds, rel=0.05)
                assert estimate.needed_bytes == pytest.approx(outcome.needed_bytes, rel=0.08)
                checked += 1
        assert checked


# Of schedules that split backwards: how far sums on shards may be off. Their reductions queue, and
# how long depends on what other stages of the rank do meanwhile.
QUEUES = 0.27


@pytest.mark.parametrize("accumulation", ["unsharded", "sharded"])
@pytest.mark.parametrize(
    ("strategy", "mesh", "reshard"),
    [("full", 8, None), ("full", 8, False), ("hybrid", (8, 8), None), ("none", 8, None)],
)
@pytest.mark.parametrize(
    "schedule",
    ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
     "DualPipeV"],
)  # fmt: skip
def test_an_estimate_of_each_schedule_is_near_its_simulation(
    schedule: str, strategy: str, mesh: Any, reshard: bool | None, accumulation: str
) -> None:
    """Gathers, reductions and sums are small beside kernels nowhere here: each must be counted."""
    pipeline = (schedule, 1 if schedule in ("1F1B", "GPipe") else 2)
    queues = accumulation == "sharded" and strategy != "none"
    time = 0.03 if not queues else QUEUES if schedule in SPLIT else 0.15
    how = {"reshard_after_forward": reshard, "accumulation": accumulation}
    near(traced_even(), pipeline, strategy, mesh, time=time, memory=0.045, **how)


def near(
    steps: Stages,
    pipeline: tuple[str, int],
    strategy: str,
    mesh: Any = 8,
    *,
    time: float,
    memory: float,
    **how: Any,
) -> None:
    """An estimate is as near its simulation."""
    simulator, schedule = Simulator(H100), pipeline[0]
    parts = parts_over_four(steps, pipeline, mesh, strategy=strategy, **how)
    alone = stages_alone(simulator, parts, schedule)
    estimate = estimate_pipeline(simulator, parts, schedule, alone)
    replays = replay_pipeline(simulator, parts, schedule)
    simulated = simulate_pipeline(simulator, parts, schedule, replays)
    assert estimate.seconds == pytest.approx(max(s.seconds for s in simulated), rel=time)
    needed = max(step.needed_bytes for step in simulated)
    assert estimate.needed_bytes == pytest.approx(needed, rel=memory)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "LoopedBFS"])
def test_an_estimate_of_different_stages_on_a_rank(schedule: str) -> None:
    """Of four, one has the embedding, or the head: no rank has more than one of these."""
    made = Stages(
        on_meta(Model, width=1024, num_blocks=16, vocabulary=32000),
        torch.zeros(1, 2048, dtype=torch.long, device="meta"),
        split_stages=split, mp_policy=BF16,
    )  # fmt: skip
    # Estimates take from the peak of each stage alone what the rank holds briefly, and the peaks of
    # these stages are not at the same moment of a step: 4 to 6 % less than simulated.
    near(made, (schedule, 4), "none", time=0.02, memory=0.06)


def test_an_estimate_knows_which_stages_are_gathered() -> None:
    """Of four on a rank, schedules free one before the next is gathered."""
    few = torch.empty(1, 4, 2048, device="meta", requires_grad=True)
    model = on_meta(Even, width=2048, num_blocks=16)
    made = Stages(model, few, split_stages=even_stages, mp_policy=BF16)
    near(made, ("LoopedBFS", 4), "grad", time=0.05, memory=0.07)


def parts_over_four(
    steps: Stages, pipeline: tuple[str, int], mesh: Any, **how: Any
) -> list[RankStage]:
    """The stages of a pipeline over four ranks with 16 micro-batches."""
    schedule, stages_per_rank = pipeline
    made = steps.get(4 * stages_per_rank, splits_backward=schedule in SPLIT)
    how |= {"mp_policy": BF16, "pipeline_ranks": 4, "micro_batches": 16}
    return [
        RankStage(i, stage.trace, make_setup(stage.units, mesh, **how), stage.split)
        for i, stage in enumerate(made)
    ]


@cache
def traced_even() -> Stages:
    model = on_meta(Even, width=1024, num_blocks=16)
    return Stages(model, tokens(), split_stages=even_stages, mp_policy=BF16)


def test_where_estimates_say_too_little_others_are_tried(searches: list[Any]) -> None:
    """It fits by its stages alone and not in truth: the plan is another one, not an error."""
    options: dict[str, Any] = {"micro_batches": 32, "pipeline_ranks": 4, "schedule": "1F1B"}
    free = planned(slow_network(), **options).chosen
    budget = free.needed_bytes - 1
    assert searches[0].estimates[free.candidate].needed_bytes <= budget
    made = planned(slow_network(), memory_budget=budget, **options)
    assert made.chosen.fits
    assert made.chosen.candidate != free.candidate
    assert free.candidate in [outcome.candidate for outcome in made.outcomes]


def test_fixed_choices_and_what_is_left_out() -> None:
    made = planned(
        slow_network(),
        pipeline_ranks=[4, 16],
        schedule=["1F1B", "Interleaved1F1B"],
        strategy="full",
    )
    assert made.pipeline_ranks == 4
    assert made.sharding.strategy == "full"
    assert {o.candidate.pipeline_ranks for o in made.outcomes} == {4}
    assert any(
        reason.startswith("Pipeline over 16 ranks (1F1B) is left out: schedule='1F1B' needs")
        for reason in made.reasons
    )
    mesh = planned(slow_network(), pipeline_ranks=2, mesh_shape=(2, 8))
    assert (mesh.mesh_shape, mesh.sharding.strategy) == ((2, 8), "hybrid")


def test_the_number_of_samples_limits_it() -> None:
    """Of 32 batches of 8 micro-batches, a pipeline over 4 ranks leaves 8."""
    made = planned(H100, max_samples=8 * MICRO_BATCHES)
    assert made.pipeline_ranks in (4, 8)


def test_memory_decides_about_the_schedule() -> None:
    free = planned(slow_network(), pipeline_ranks=4, schedule="GPipe")
    both = planned(
        slow_network(), pipeline_ranks=4, schedule=["GPipe", "1F1B"],
        memory_budget=free.chosen.needed_bytes - 1, strategy=free.sharding.strategy,
        accumulation=(free.workload.accumulation,), wrap=free.sharding.wrap,
        reshard_after_forward=free.sharding.reshard_after_forward,
    )  # fmt: skip
    assert both.workload.schedule == "1F1B"
    assert both.chosen.needed_bytes < free.chosen.needed_bytes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split_stages": None, "pipeline_ranks": 2}, "pipeline_ranks=2 needs split_stages="),
        ({"pipeline_ranks": 3}, "pipeline_ranks=3 must divide num_ranks=32"),
        ({"pipeline_ranks": 0}, "pipeline_ranks must be at least 1"),
        ({"pipeline_ranks": []}, "pipeline_ranks is an empty list"),
        ({"schedule": "1f1b"}, "schedule must be one of .*did you mean '1F1B'"),
        ({"schedule": "GPipe", "stages_per_rank": 2}, r"stages_per_rank=\[2\] goes with none"),
        ({"stages_per_rank": 0}, "stages_per_rank must be at least 1"),
        ({"accumulation": ("every",)}, "do not reduce gradients in every micro-batch"),
        ({"max_saved_bytes": 0}, "max_saved_bytes does not go together with pipeline_ranks=2"),
        ({"offload_optimizer": StateOffload()}, "offload_optimizer does not go together"),
        ({"mesh_shape": (4, 8), "pipeline_ranks": 2}, "with pipeline_ranks=.2."),
        ({"pipeline_ranks": 2, "micro_batches": 1, "schedule": "1F1B"}, "at least as many"),
        (
            {"pipeline_ranks": 2, "split_stages": lambda model, num: [model]},
            "must return 2 modules",
        ),
        ({"pipeline_ranks": 2, "memory_budget": 1 << 20}, "Nothing fits .* pipeline over 2"),
    ],
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned(H100, **options)


def test_ranks_of_different_speeds_get_the_same_batches() -> None:
    made = planned(replace(slow_network(), speeds=[1, 1, 1, 0.5]), pipeline_ranks=4)
    assert made.split is None
    assert any("or a pipeline, nothing else" in reason for reason in made.reasons)


@distributed(4)
def test_a_plan_of_a_pipeline_is_applied() -> None:
    """Its stages train as the model does on one process."""
    torch.manual_seed(0)
    model, alone = Model(width=32, num_blocks=4), Model(width=32, num_blocks=4)
    alone.load_state_dict(model.state_dict())
    batch = torch.randint(0, 48, (4, 2, 16))
    made = plan(
        on_meta(width=32, num_blocks=4), batch[0].to("meta"), slow_network_of_nodes(2), 4,
        micro_batches=4, split_stages=split, pipeline_ranks=2, schedule="1F1B",
        activation_checkpointing=("full",), strategy="full",
    )  # fmt: skip
    mesh = made.make_mesh("cpu")
    assert mesh.mesh_dim_names == ("pipeline", "shard")
    [stage] = made.apply(model, mesh)
    assert isinstance(stage, Stage)
    rank = mesh.get_local_rank("pipeline")
    given = PipelineStage(stage, rank, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    run = Schedule1F1B(given, 4, loss_fn=lambda y, t: y.square().mean())
    whole = batch.flatten(0, 1)
    run.step(*((whole,) if rank == 0 else ()), **({"target": whole} if rank else {}))
    for part in batch:
        (alone(part).square().mean() / 4).backward()
    expected = split(alone, 2)[rank]
    for (name, param), (_, other) in zip(
        stage.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert param.grad is not None, name
        assert other.grad is not None
        torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6)
    dist.barrier()


def slow_network_of_nodes(ranks: int) -> Hardware:
    return replace(slow_network(), ranks_per_node=ranks)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    path = tmp_path / "planned_models.py"
    path.write_text(
        "import test_predict_pipeline as tests\n"
        "model, batch, split = tests.Model, tests.batch, tests.split\n"
    )
    code = main(
        ("plan", f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100", "--json",
         "--quiet", "--world-size", "8", "--pipeline-ranks", "2,4", "--split-stages",
         f"{path}:split", "--schedule", "GPipe,1F1B", "--micro-batches", "4")
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["pipeline_ranks"] in (2, 4)
    assert data["schedule"] in ("GPipe", "1F1B")


def test_units_of_stages_as_a_whole() -> None:
    """``wrap="root"`` says the same of every stage."""
    common: dict[str, Any] = {
        "split_stages": split, "pipeline_ranks": 2, "micro_batches": 4, "mp_policy": BF16,
    }  # fmt: skip
    sample = torch.zeros(2, 16, dtype=torch.long, device="meta")
    blocks, one = (predict(on_meta(), sample, H100, 16, wrap=w, **common) for w in ("auto", "root"))
    num_gathers = [
        sum(getattr(launch.work, "kind", "") == "all_gather" for launch in each.step.launches)
        for each in (blocks, one)
    ]
    assert num_gathers[1] < num_gathers[0]


def test_replicas_that_sum_on_shards() -> None:
    """The reduction at the end has sums of shards only, and no gradient of its own."""
    made = predict(
        on_meta(), torch.zeros(2, 16, dtype=torch.long, device="meta"), H100, (2, 4),
        split_stages=split, pipeline_ranks=2, micro_batches=4, mp_policy=BF16,
        strategy="hybrid", accumulation="sharded",
    )  # fmt: skip
    assert made.step.stream_s["all-reduce"] > 0
