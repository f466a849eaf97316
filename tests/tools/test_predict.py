"""`predict` and `sweep`: one configuration, or many from the same traces; and fixed choices."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not predict", allow_module_level=True)

import fsdp2
from by_keywords import plan, predict, sweep
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.cli.main import main
from fsdp2.planning import Cluster, Plan, Prediction, Sharding, Workload, find_hardware
from fsdp2.planning import traces as traces_module

H100 = find_hardware("h100")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, width: int = 512, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def batch(samples: int = 4, length: int = 512) -> Tensor:
    return torch.empty(samples, length, dtype=torch.long, device="meta")


def predicted(num_ranks: Any = 64, hardware: Any = H100, **options: Any) -> Prediction:
    return predict(on_meta(), batch(), hardware, num_ranks, mp_policy=BF16, **options)


def planned(num_ranks: int = 64, hardware: Any = H100, **options: Any) -> Plan:
    return plan(on_meta(), batch(), hardware, num_ranks, mp_policy=BF16, **options)


# -- one configuration ---------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "a slow network": {"hardware": replace(H100, network_bandwidth=2e9)},
    "micro-batches": {"micro_batches": 3},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
    "units of 2 blocks, kept": {"reshard_after_forward": False, "prefetch": 2},
    "recomputed": {"checkpoint": "full", "strategy": "hybrid"},
}

# They differ from the others in what a step takes, not in how it is looked for.
ALIKE = ("usual", "offloaded", "a slow network")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in SETTINGS],
)
def test_a_prediction_of_what_is_planned_is_what_was_planned(setting: str) -> None:
    """Exactly: of the chosen configuration, of the slowest and of one that is not the default."""
    options = dict(SETTINGS[setting])
    made = planned(**options)
    for name in ("checkpoint", "strategy", "reshard_after_forward", "prefetch"):
        options.pop(name, None)
    slowest = max(made.outcomes, key=lambda o: o.seconds)
    other = max(made.outcomes, key=lambda o: o.candidate.complexity)
    wraps = {"blocks": "auto", "one": "root", "2 blocks": _pairs()}
    for outcome in (made.chosen, slowest, other):
        c = outcome.candidate
        same = predicted(
            **{**options, "num_ranks": c.mesh if len(c.mesh) > 1 else c.mesh[0]},
            strategy=c.strategy,
            wrap=wraps[c.wrap],
            reshard_after_forward=c.reshard,
            prefetch=c.prefetch,
            activation_checkpointing=c.checkpointing,
            accumulation=c.accumulation or "unsharded",
        )
        assert same.seconds == outcome.seconds
        assert same.exposed_s == outcome.exposed_s
        assert same.peak_bytes == outcome.peak_bytes
        assert same.needed_bytes == outcome.needed_bytes
        assert same.fits == outcome.fits


def test_all_wait_for_the_slowest_rank() -> None:
    slow = predicted(hardware=replace(H100, speeds=[0.5] * 8))
    mixed = predicted(hardware=replace(H100, speeds=[1.0, 0.5] * 4))
    assert mixed.seconds == slow.seconds > predicted().seconds


def _pairs() -> list[Any]:
    return ["embedding", ("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"), "head"]


def test_what_does_not_fit_is_predicted_and_says_so() -> None:
    made = predicted(memory_budget=10**6)
    assert not made.fits
    assert "does not fit" in str(made)
    assert made.needed_bytes > made.memory_budget == 10**6
    free = predicted()
    assert (free.seconds, free.fits) == (made.seconds, True)


def test_rates_and_what_bounds_the_step() -> None:
    made = predicted(micro_batches=3)
    assert made.samples_per_s == pytest.approx(4 * 3 * 64 / made.seconds)
    assert made.tokens_per_s == pytest.approx(4 * 512 * 3 * 64 / made.seconds)
    assert predicted(hardware=replace(H100, network_bandwidth=1e9)).bound == "communication"
    assert predicted(hardware=replace(H100, launch_s=0.1)).bound == "host"
    assert predicted(8, hardware=replace(H100, matmul_efficiency=1e-4)).bound == "compute"
    data = json.loads(json.dumps(made.to_dict()))
    assert data["step_s"] == made.seconds
    assert data["micro_batches"] == 3
    assert data["param_dtype"] == "bfloat16"
    features = predict(nn.Linear(8, 8), torch.zeros(2, 8), "h100", 2)
    assert (features.samples, features.tokens_per_s) == (2, None)


def test_hybrid_without_a_mesh_replicates_nodes() -> None:
    assert predicted(strategy="hybrid").mesh_shape == (8, 8)
    assert predicted(4, strategy="hybrid").mesh_shape == (1, 4)
    assert predicted((2, 32), strategy="hybrid").mesh_shape == (2, 32)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"strategy": "ful"}, ValueError, "did you mean 'full'"),
        ({"num_ranks": 12}, ValueError, "a multiple of the 8 GPUs"),
        ({"num_ranks": (3, 4)}, ValueError, "a multiple of the 8 GPUs"),
        ({"num_ranks": 2.5}, TypeError, "num_ranks must be an int"),
        ({"activation_checkpointing": "ful"}, ValueError, "did you mean 'full'"),
        ({"reshard_after_forward": 7}, ValueError, "divides the number of shards"),
        ({"prefetch": -1}, ValueError, "prefetch must be at least 0"),
        ({"memory_budget": 0}, ValueError, "memory_budget must be a positive"),
        ({"max_gathered_bytes": 1000}, RuntimeError, "The least budget that works"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        predicted(**options)


# -- many ----------------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], str]]:
    """The shapes and checkpointing of all steps that are traced from now on."""
    made: list[tuple[tuple[int, ...], str]] = []
    real = traces_module.trace_step

    def traced(options: Any, modules: Any) -> Any:
        workload = options.workload
        made.append((tuple(workload.sample_input.shape), workload.activation_checkpointing))
        return real(options, modules)

    monkeypatch.setattr(traces_module, "trace_step", traced)
    return made


def test_one_trace_for_each_batch_and_checkpointing_not_for_each_cell(traces: list) -> None:
    made = sweep(
        on_meta(),
        batch(),
        H100,
        [8, (2, 32), 1024],
        samples=[1, 4],
        context=[256, 512],
        activation_checkpointing=["none", "full"],
        strategy=["full", "none"],
        mp_policy=BF16,
    )
    assert len(made.predictions) == 3 * 2 * 2 * 2 * 2
    assert sorted(traces) == sorted(
        ((samples, context), mode)
        for samples in (1, 4)
        for context in (256, 512)
        for mode in ("none", "full")
    )
    assert made.num_traced == len(traces) == 8
    # Each cell is the prediction of that configuration by itself.
    for cell in made.predictions[::11]:
        alone = predict(
            on_meta(),
            batch(cell.samples, cell.context),
            H100,
            cell.mesh_shape,
            activation_checkpointing=cell.choices["activation_checkpointing"],
            strategy=cell.choices["strategy"],
            mp_policy=BF16,
        )
        assert (alone.seconds, alone.needed_bytes) == (cell.seconds, cell.needed_bytes)
    assert made.best is max(made.predictions, key=lambda p: p.samples_per_s or 0)
    text = str(made)
    for word in ("Ranks", "Samples", "Context", "Checkpointing", "Strategy", "Tokens/s", "1024"):
        assert word in text
    assert json.loads(json.dumps(made.to_dict()))["num_traced"] == 8


def test_a_plan_traces_once_for_each_checkpointing(traces: list) -> None:
    planned()
    assert sorted(traces) == [((4, 512), mode) for mode in ("full", "none", "selective")]


def test_combinations_that_cannot_run_are_named_and_the_others_predicted() -> None:
    options: Any = {"reshard_after_forward": [None, 16], "mp_policy": BF16}
    made = sweep(on_meta(), batch(), H100, [8, 64], **options)
    assert len(made.predictions) == 3
    [(what, why)] = made.failed
    assert what == {"num_ranks": 8, "reshard_after_forward": 16}
    assert "divides the number of shards" in why
    assert "Cannot run: num_ranks 8, reshard_after_forward 16" in str(made)
    with pytest.raises(ValueError, match="divides the number of shards"):
        sweep(on_meta(), batch(), H100, 8, reshard_after_forward=16)


def test_masks_and_other_tensors_of_a_sweep() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
            seen.append((tuple(x.shape), tuple(mask.shape), tuple(scale.shape)))
            return self.linear((mask.float() @ x) * scale)

    seen: list[Any] = []
    sample = (torch.zeros(2, 6, 8), torch.zeros(2, 6, 6, dtype=torch.bool), torch.zeros(8))
    sweep(Masked(), sample, H100, 8, samples=3, context=[6, 12])
    assert seen == [((3, n, 8), (3, n, n), (8,)) for n in (6, 12)]
    with pytest.raises(ValueError, match="two dims of length 8: which of them is the context"):
        sweep(Masked(), (torch.zeros(2, 8, 8), *sample[1:]), H100, 8, context=16)
    with pytest.raises(ValueError, match="no tensor of two dims"):
        sweep(nn.Linear(8, 8), torch.zeros(8), H100, 8, context=16)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_ranks": []}, ValueError, "num_ranks is an empty list"),
        ({"num_ranks": [8, 12]}, ValueError, "a multiple of the 8 GPUs"),
        ({"samples": [0]}, ValueError, "samples must be at least 1"),
        ({"context": "512"}, TypeError, "context must be an int"),
        ({"strategy": ["full", "hybrids"]}, ValueError, "did you mean 'hybrid'"),
    ],
)
def test_bad_sweeps(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        sweep(on_meta(), batch(), H100, options.pop("num_ranks", 8), **options)


@pytest.mark.parametrize(
    ("over", "error", "match"),
    [
        ({"prefetc": [1, 2]}, TypeError, "sweep has no 'prefetc' .* did you mean 'prefetch'"),
        ({"loss_fn": [None]}, TypeError, "sweep has no 'loss_fn' to choose in over"),
        ({"prefetch": 2}, TypeError, "over: prefetch must be a list of values, got 2"),
        ({"prefetch": []}, ValueError, "over: prefetch is an empty list"),
        ({"micro_batches": [2, 0]}, ValueError, "micro_batches must be at least 1, got 0"),
    ],
)
def test_fields_that_cannot_be_varied(over: Any, error: type, match: str) -> None:
    workload = Workload(on_meta(), batch())
    with pytest.raises(error, match=match):
        fsdp2.planning.sweep(workload, Sharding(), Cluster(H100, 8), over)


def test_limits_policies_and_units_can_be_varied() -> None:
    """A step is traced once: none of them changes it."""
    over = {"wrap": ["auto", "root"], "replicate_below": [0, 10_000], "memory_budget": [1e6, 1e12]}
    made = fsdp2.planning.sweep(Workload(on_meta(), batch()), Sharding(), Cluster(H100, 8), over)
    assert made.num_traced == 1
    assert [p.fits for p in made.predictions] == [False, True] * 4
    alone = fsdp2.predict(
        Workload(on_meta(), batch()),
        Sharding(wrap="root", replicate_below=10_000),
        Cluster(H100, 8),
    )
    assert made.predictions[-1].seconds == alone.seconds != made.predictions[0].seconds


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "either num_ranks or mesh, got num_ranks=None and mesh=None"),
        ({"num_ranks": 8, "mesh": (2, 4)}, ValueError, "either num_ranks or mesh"),
        ({"num_ranks": 12}, ValueError, "a multiple of the 8 GPUs"),
        ({"num_ranks": "8"}, TypeError, "num_ranks must be an int, got '8'"),
        ({"mesh": (2, 2, 2)}, ValueError, r"mesh must be ranks or \(replicas, shards\)"),
        ({"num_ranks": 8, "memory_budget": "all"}, TypeError, "memory_budget must be a number"),
    ],
)
def test_clusters_that_cannot_be(options: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Cluster("h100", **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model": None}, TypeError, "model must be an nn.Module, got None"),
        ({"samples": 0}, ValueError, "samples must be at least 1"),
        ({"micro_batches": 1.5}, TypeError, "micro_batches must be an int"),
        ({"accumulation": "shard"}, ValueError, "accumulation must be .*did you mean 'sharded'"),
        ({"unknown_costs": "no"}, ValueError, "unknown_costs must be one of"),
        ({"offload_optimizer": "cpu"}, TypeError, "offload_optimizer must be a StateOffload"),
    ],
)
def test_workloads_that_cannot_be(options: Any, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        Workload(**{"model": on_meta(), "sample_input": batch(), **options})


# -- a plan in which something is fixed ----------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed", "expected"),
    [
        ({"strategy": "hybrid"}, {"strategy": {"hybrid"}}),
        pytest.param(
            {"strategy": "grad"},
            {"strategy": {"grad"}, "reshard": {None}},
            marks=pytest.mark.long,
        ),
        ({"strategy": "full"}, {"strategy": {"full"}, "mesh": {(64,)}}),
        ({"mesh_shape": (4, 16)}, {"strategy": {"hybrid"}, "mesh": {(4, 16)}}),
        ({"mesh_shape": 64}, {"strategy": {"full", "none"}, "mesh": {(64,)}}),
        ({"wrap": "root"}, {"wrap": {"one"}}),
        ({"wrap": ["embedding", "blocks.*"]}, {"wrap": {"given"}}),
        pytest.param(
            {"reshard_after_forward": False}, {"reshard": {False}}, marks=pytest.mark.long
        ),
        ({"reshard_after_forward": None}, {"reshard": {None}}),
        ({"reshard_after_forward": 16}, {"reshard": {16}, "mesh": {(64,), (4, 16), (2, 32)}}),
        ({"prefetch": 2}, {"prefetch": {2}}),
        ({"checkpoint": "selective"}, {"checkpointing": {"selective"}}),
    ],
)
def test_what_is_fixed_is_kept_and_the_rest_searched(fixed: Any, expected: Any) -> None:
    options = {"checkpoint": "none", **fixed}
    made = planned(**options)
    for name, values in expected.items():
        assert {getattr(o.candidate, name) for o in made.outcomes} == values
    searched = ("strategy", "wrap", "reshard", "prefetch")
    varied = [n for n in searched if len({getattr(o.candidate, n) for o in made.outcomes}) > 1]
    assert varied
    assert "wrap" in varied or "wrap" in fixed
    if "wrap" in fixed:
        assert made.sharding.wrap == fixed["wrap"]
    kept = {"strategy", "prefetch", "reshard_after_forward"} & set(fixed)
    assert {name: getattr(made.sharding, name) for name in kept} == {
        name: fixed[name] for name in kept
    }


def test_what_is_not_a_default_is_fixed_and_over_has_choices() -> None:
    workload = Workload(on_meta(), batch(), activation_checkpointing="full")
    over = {"strategy": ["full", "grad"], "wrap": ["auto"], "reshard_after_forward": [None, 16]}
    made = fsdp2.plan(workload, Cluster(H100, 64), Sharding(prefetch=2), over=over)
    found = [o.candidate for o in made.outcomes]
    assert {c.checkpointing for c in found} == {"full"}
    assert {c.prefetch for c in found} == {2}
    assert {c.strategy for c in found} == {"full", "grad"}
    assert {c.reshard for c in found} == {None, 16}
    assert made.sharding.strategy == made.candidate.strategy
    mesh = fsdp2.plan(workload, Cluster(H100, mesh=(4, 16)), over={"wrap": ["auto"]})
    assert {o.candidate.mesh for o in mesh.outcomes} == {(4, 16)}
    with pytest.raises(TypeError, match=r"plan has no 'stratgy' .* did you mean 'strategy'"):
        fsdp2.plan(workload, Cluster(H100, 8), over={"stratgy": ["full"]})


def test_a_fixed_plan_is_the_best_of_the_free_one() -> None:
    free = planned(checkpoint="none", wrap="auto", prefetch=1)
    for strategy in ("full", "none"):
        fixed = planned(checkpoint="none", wrap="auto", prefetch=1, strategy=strategy)
        same = {str(o.candidate): o for o in free.outcomes if o.candidate.strategy == strategy}
        both = [o for o in fixed.outcomes if str(o.candidate) in same]
        assert both
        assert all(o == same[str(o.candidate)] for o in both)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"strategy": "hybird"}, ValueError, "did you mean 'hybrid'"),
        ({"wrap": "rot"}, ValueError, "did you mean 'root'"),
        ({"checkpoint": "ful"}, ValueError, "activation_checkpointing must be one of .*'full'"),
        ({"reshard_after_forward": "no"}, TypeError, "must be a bool, a number of ranks or None"),
        ({"reshard_after_forward": 7}, ValueError, "No mesh of 64 ranks goes with"),
        ({"mesh_shape": (4, 8)}, ValueError, "4 x 8 is not a mesh of num_ranks=64"),
        ({"mesh_shape": 64, "strategy": "hybrid"}, ValueError, "needs a mesh of two dims"),
        ({"prefetch": 0}, ValueError, "prefetch must be at least 1"),
    ],
)
def test_fixed_choices_that_cannot_be(options: dict[str, Any], error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        planned(**options)


# -- the command line ----------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

def batch():
    return torch.zeros(2, 8, 32)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("models_to_predict", None)
    path = tmp_path / "models_to_predict.py"
    path.write_text(MODELS)

    def run(name: str, *args: str) -> tuple[int, str, str]:
        given = (name, f"{path}:model", "--input", f"{path}:batch", "--hardware", "h100")
        code = main([*given, *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_command(command: Any, tmp_path: Path) -> None:
    code, out, err = command("predict", "--world-size", "8", "--strategy", "none")
    assert (code, err) == (0, "")
    assert "Strategy" in out
    data = json.loads(command("predict", "--world-size", "8", "--json", "--reshard", "4")[1])
    assert (data["strategy"], data["reshard_after_forward"]) == ("full", 4)
    lists = ("--world-size", "8,64", "--samples", "1,2", "--checkpointing", "none,full")
    code, out, err = command("predict", *lists)
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 + 2 * 2 * 2
    assert json.loads(command("predict", *lists, "--json")[1])["num_traced"] == 4
    code, out, err = command("predict", *lists, "--picture", str(tmp_path / "x.png"))
    assert (code, out) == (2, "")
    assert "--picture is of one configuration" in err
    code, _, err = command("predict", "--world-size", "8", "--strategy", "full,ful")
    assert code == 2
    assert "'ful' is none of full, grad" in err


def test_the_command_plan_with_fixed_choices(command: Any) -> None:
    fixed = ("--strategy", "full", "--reshard", "false", "--prefetch", "2", "--wrap", "root")
    args = ("--world-size", "16", "--checkpointing", "none", "--json")
    data = json.loads(command("plan", *args, *fixed)[1])
    made = data["shard_model"]
    assert (made["strategy"], made["reshard_after_forward"]) == ("full", False)
    assert (made["prefetch"], made["wrap"]) == (2, "root")
    code, _, err = command("plan", *args, "--reshard", "maybe")
    assert code == 2
    assert "is not default, true, false or a number of ranks" in err


def test_compute_is_of_the_innermost_unit() -> None:
    """Backward reaches the last block and the root with the same tensor, the block first; and a
    unit that is left gives way to the one around it, which may not be the root."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * self.scale)

    model = nn.Sequential(Outer(), Outer())
    units = ["0.first", "0.last", "0", "1.first", "1.last", "1"]
    step = predict(model, torch.zeros(4, 16), "h100", 2, wrap=units).step
    found: dict[str, list[str]] = {"forward": [], "backward": []}
    for launch in step.launches:
        if launch.stream == "compute":
            found[launch.phase].append(launch.unit)
    outside = ["", ""]  # the loss
    inside = ["0.first", "0", "0.last", "1.first", "1", "1.last"]
    assert found["forward"] == [*inside, *outside[:1]]
    assert found["backward"] == [*outside[1:], *reversed(inside)]
