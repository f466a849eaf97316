"""`fsdp2 compare`: a prediction beside a profile of the run that it predicted."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import harness
from by_keywords import plan, predict, sweep
from fsdp2 import fully_shard, profile
from fsdp2.cli.main import main
from fsdp2.planning import Comparison, Hardware, compare, find_hardware
from fsdp2.planning.simulation.unit_figures import unit_figures, waited_s
from fsdp2.profiling import Profile
from harness import cached_mesh, distributed

pytestmark = harness.ours_only("predictions and profiles")

WIDTH, ROWS = 64, 8


class Model(nn.Module):
    """Three blocks between two layers that belong to the root."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, WIDTH)) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return self.last(x).sum()


def predicted(**options: Any) -> Any:
    with torch.device("meta"):
        model, x = Model(), torch.empty(ROWS, WIDTH)
    hardware = options.pop("hardware", "h100")
    return predict(model, x, hardware, options.pop("num_ranks", 2), **options)


def profiled(micro_batches: int = 1, recomputes: bool = False, **options: Any) -> dict[str, Any]:
    """A profile of two steps, after one that is not in it."""
    model, mesh = Model(recomputes), cached_mesh(2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    root = fully_shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for i in range(micro_batches):
            root.set_requires_gradient_sync(i == micro_batches - 1)
            model(torch.ones(ROWS, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    p = profile_of_two(model, step)
    made = p.as_dict()
    p.save_json(path := Path(f"profile{made['rank']}.json"))
    saved = json.loads(path.read_text())
    assert saved == json.loads(json.dumps({"fsdp2_profile": 1, "num_ranks": 2, **made}))
    return saved


def profile_of_two(model: nn.Module, step: Callable[[], None]) -> Profile:
    """Of two steps, after one that is not in it."""
    step()
    with profile(model) as made:
        for _ in range(2):
            step()
    return made


def errors(made: Comparison, *whats: str) -> dict[str, float | None]:
    found = {each.what: each.error for each in made.step}
    return {what: found[what] for what in whats}


COUNTED = (
    *("gathers", "sent by gathers", "reductions", "sent by reductions"),
    "peak of gathered",
)


@pytest.mark.parametrize(
    ("run", "prediction"),
    [
        ({}, {}),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"micro_batches": 2}, {"micro_batches": 2, "accumulation": "unsharded"}),
        ({"recomputes": True}, {"activation_checkpointing": "full"}),
    ],
    ids=["plain", "kept", "accumulated", "recomputed"],
)
@distributed(2)
def test_what_is_counted_is_as_predicted(
    run: dict[str, Any], prediction: dict[str, Any], tmp_path: Path
) -> None:
    """Bytes and numbers of messages have no noise: of the step, and of every unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        measured = profiled(**run)
    made = compare(predicted(**prediction), measured)
    assert errors(made, *COUNTED) == dict.fromkeys(COUNTED, 0.0)
    gathered = {each.unit: each.error for each in made.units if each.what == "gathered"}
    assert gathered == dict.fromkeys(("(root)", "blocks.0", "blocks.1", "blocks.2"), 0.0)
    assert [w for w in made.warnings if "timed on the host" not in w] == []
    assert all(each.measured > 0 for each in made.step if each.kind == "seconds")


def of_pipeline(folder: Path) -> None:
    """Write a profile of two steps of a pipeline with experts, of two stages over two ranks."""
    import test_predict_expert_stages as tests
    from torch.distributed.pipelining import Schedule1F1B

    mesh = cached_mesh(2, 2, names=("pipeline", "shard"))
    rank, group = mesh.get_local_rank("pipeline"), mesh.get_group("pipeline")
    torch.manual_seed(0)
    stage = tests.sharded(tests.split(tests.Model(), 2)[rank], 2, True)  # type: ignore[arg-type]
    device = torch.device("cpu")
    run = Schedule1F1B(
        tests.PipelineStage(stage, rank, 2, device, group=group), 8, loss_fn=tests.loss
    )
    optimizer = torch.optim.AdamW(stage.parameters(), foreach=False)
    tokens = torch.zeros(16, 16, dtype=torch.long)

    def step() -> None:
        if rank == 0:
            run.step(tokens, return_outputs=False)
        else:
            run.step(target=tokens, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    p = profile_of_two(stage, step)
    p.save_json(folder / f"profile{torch.distributed.get_rank()}.json")


def test_experts_in_a_pipeline(tmp_path: Path) -> None:
    import test_predict_expert_stages as tests

    harness.run_on(4, of_pipeline, tmp_path)
    target = torch.zeros(32, dtype=torch.long)
    prediction = predict(
        tests.on_meta(), tests.batch(), "h100", 4, pipeline_ranks=2, micro_batches=8,
        split_stages=tests.split, experts=tests.Experts, expert_ranks=2,
        wrap=[tests.Dense, tests.Mixture], loss_fn=lambda y: tests.loss(y, target),
    )  # fmt: skip
    for rank in (0, 1):
        made = compare(prediction, json.loads((tmp_path / f"profile{rank}.json").read_text()))
        assert errors(made, *COUNTED) == dict.fromkeys(COUNTED, 0.0)
        assert {each.unit for each in made.units} == {
            *("(root)", "blocks.0", "blocks.1", "blocks.1.experts")
        }
        assert [w for w in made.warnings if "timed on the host" not in w] == []
    with pytest.raises(ValueError, match=r"is of rank 2, .* a rank below 2"):
        compare(prediction, json.loads((tmp_path / "profile2.json").read_text()))


# -- the figures of a simulated step ---------------------------------------------------------------


def host_free() -> Hardware:
    return replace(find_hardware("h100"), launch_s=0.0, call_host_s=0.0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_ranks": 64},
        {"num_ranks": 64, "strategy": "hybrid"},
        {"activation_checkpointing": "full", "micro_batches": 3},
        {"num_ranks": 64, "hardware": replace(host_free(), host_ordered=True, overlap=0.3)},
    ],
    ids=["2", "64", "hybrid", "recomputed", "in order"],
)
def test_units_add_up_to_the_step(options: dict[str, Any]) -> None:
    step = predicted(**{"hardware": host_free(), **options}).step
    units = unit_figures(step)
    assert (units[0].name, units[-1].name) == ("(root)", "(outside)")
    whole = sum(unit.forward_s + unit.backward_s for unit in units)
    assert whole == pytest.approx(step.compute_s)
    for stream, kinds in (("all-gather", "gather"), ("reduce-scatter all-reduce", "reduce")):
        busy = sum(step.stream_s.get(name, 0.0) for name in stream.split())
        assert sum(getattr(unit, kinds).seconds for unit in units) == pytest.approx(busy)
    # The host takes no time here, so all that compute waits for is communication.
    waits = sum(unit.gather.exposed_s + unit.reduce.exposed_s for unit in units)
    assert waits + step.stragglers_s == pytest.approx(step.exposed_s)
    assert waited_s(step) == pytest.approx(step.exposed_s)


def test_waits_for_the_host_are_not_waits_for_communication() -> None:
    step = predicted().step
    assert 0 < waited_s(step) < 0.5 * step.exposed_s


def test_memory_of_a_unit_is_that_at_its_borders() -> None:
    made = predicted(num_ranks=64)
    units = {unit.name: unit.peak_bytes for unit in unit_figures(made.step)}
    assert set(units) == {"(root)", "blocks.0", "blocks.1", "blocks.2", "(outside)"}
    states = {sum(parts.values()) for _, parts in made.step.samples}
    assert set(units.values()) <= states
    assert max(units.values()) <= made.peak_bytes
    # Activations of all blocks, and two of them gathered.
    assert units["blocks.2"] > units["blocks.0"]


# -- figures and errors ----------------------------------------------------------------------------


def measured(**changes: Any) -> dict[str, Any]:
    """A profile of a GPU whose every figure is twice that of `predicted`."""
    theirs = predicted().to_dict()
    none = dict.fromkeys(("count", "seconds", "nbytes", "sent_bytes", "exposed_s"), 0)

    def traffic(unit: dict[str, Any], kind: str) -> dict[str, Any]:
        return {name: 2 * value for name, value in unit[kind].items()}

    units = [
        {
            "name": unit["name"],
            "forward_s": 2 * unit["forward_s"],
            "backward_s": unit["backward_s"],
            "recompute_s": unit["backward_s"],
            "gather": traffic(unit, "gather"),
            "reduce_scatter": traffic(unit, "reduce"),
            "all_reduce": dict(none),
            "peak_bytes": 2 * unit["peak_bytes"],
        }
        for unit in theirs["units"]
        if unit["name"] != "(outside)"
    ]
    total = {
        name: sum(unit[name] for unit in units)
        for name in ("forward_s", "backward_s", "recompute_s")
    }
    for kind in ("gather", "reduce_scatter", "all_reduce"):
        total[kind] = {name: sum(unit[kind][name] for unit in units) for name in none}
    step = {
        "exposed_s": 2 * theirs["waited_s"],
        "optimizer_s": 2 * theirs["optimizer_s"],
        "peak_gathered_bytes": 2 * theirs["peak_gathered_bytes"],
        "peak_bytes": 2 * max(unit["peak_bytes"] for unit in theirs["units"]),
    }
    return {
        "fsdp2_profile": 1,
        "num_ranks": 2,
        "host_timed": False,
        "steps": [step, dict(step)],
        "step_s": 2 * theirs["step_s"],
        "units": units,
        "total": total,
        **changes,
    }


def test_every_figure_has_its_error() -> None:
    made = compare(predicted(), measured())
    assert {each.what for each in made.step} >= {"step", "peak at unit boundaries", "optimizer"}
    # (What was not there is predicted right. Each of twice as many gathers has as many bytes.)
    rest = {each.what: each for each in made.step}["outside units"]
    assert rest.measured > rest.predicted  # the host, too
    for each in (*made.step, *made.units):
        if each is rest:
            continue
        once = each.what == "gathered" or not each.measured
        assert each.error == pytest.approx(0.0 if once else -0.5), each
    assert {each.what for each in made.units} == {
        *("forward", "backward", "exposed", "gathered", "memory")
    }
    assert "gathers of '(root)'" in made.warnings[0]  # twice as many


def test_the_loss_is_in_no_unit() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(ROWS, WIDTH)
    small, large = (
        predict(model, x, host_free(), 2, loss_fn=lambda y, n=n: y * torch.ones(n).sum())
        for n in (1, 10**9)
    )
    assert large.seconds > 2 * small.seconds
    rows = [{r.what: r.predicted for r in compare(m, measured()).step} for m in (small, large)]
    assert rows[1]["compute"] == pytest.approx(rows[0]["compute"])
    assert rows[1]["outside units"] > rows[0]["outside units"] + 0.5 * small.seconds


def test_units_of_only_one_side_are_named() -> None:
    theirs, ours = predicted().to_dict(), measured()
    theirs["units"][1]["name"] = "blocks.7"
    told = compare(theirs, ours).warnings
    assert told[0] == "Only the prediction has 1 unit 'blocks.7'."
    assert told[1] == "Only the profile has 1 unit 'blocks.0'."


def test_an_optimizer_that_did_not_step_is_named() -> None:
    ours = measured()
    for step in ours["steps"]:
        step["optimizer_s"] = 0.0
    assert "No optimizer stepped during the profile." in compare(predicted(), ours).warnings


def test_a_plan_can_be_compared() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(ROWS, WIDTH)
    made = plan(model, x, "h100", 2)
    ours = measured()
    assert compare(made, ours).step[0].predicted == made.chosen.seconds
    assert compare(made.to_dict(), ours).to_dict() == compare(made, ours).to_dict()


def renamed(data: dict[str, Any]) -> dict[str, Any]:
    for unit in data["units"]:
        unit["name"] = f"other.{unit['name']}"
    return data


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


def broken(data: dict[str, Any]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    del data["units"][0]["gather"]["count"]
    return data


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda p, m: (m, p), "The prediction is a profile: the prediction comes first"),
        (lambda p, m: (p, p), "The profile is a prediction"),
        (lambda p, m: (p, [m]), "The profile is a list, not an object"),
        (lambda p, m: (p, {**m, "steps": []}), "has no step"),
        (lambda p, m: (p, {**m, "num_ranks": 8}), "is for 2 ranks, the profile of 8"),
        (
            lambda p, m: ({**p, "pipeline_ranks": 2}, {**m, "rank": 1}),
            "is of rank 1, which has other stages .* of a rank below 1",
        ),
        (lambda p, m: (p, renamed(m)), "no name in common.*'blocks.0'.*'other.blocks.0'"),
        (lambda p, m: (without(p, "units"), m), "The prediction has no 'units'.*this version"),
        (lambda p, m: (p, without(m, "total")), "The profile has no 'total'"),
        (lambda p, m: (broken(p), m), "has no 'count': was it edited"),
        (lambda p, m: (p, {**m, "step_s": "long"}), "has a wrong value .*: was it edited"),
        (lambda p, m: ({**p, "fsdp2_prediction": 2}, m), "The prediction has format 2.*reads 1"),
        (lambda p, m: (p, {**m, "fsdp2_profile": 2}), "The profile has format 2"),
    ],
)
def test_what_cannot_be_compared_is_an_error(wrong: Any, match: str) -> None:
    theirs, ours = wrong(predicted().to_dict(), measured())
    with pytest.raises(ValueError, match=f"(?s){match}"):
        compare(theirs, ours)


def test_a_table_of_predictions_is_an_error() -> None:
    with torch.device("meta"):
        model, x = Model(), torch.empty(ROWS, WIDTH)
    many = sweep(model, x, "h100", [2, 4])
    with pytest.raises(ValueError, match="a table of several"):
        compare(many.to_dict(), measured())


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    paths = tmp_path / "step.json", tmp_path / "profile.json"
    paths[0].write_text(json.dumps(predicted().to_dict()))
    paths[1].write_text(json.dumps(measured()))
    return str(paths[0]), str(paths[1])


def test_the_command_prints_a_table_and_draws(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "new" / "compared.png"
    assert main(["compare", *files, "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert str(compare(predicted(), measured())).splitlines() == out.splitlines()
    assert "-50.0 %" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_json(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *files, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["step"][0]["error"] == pytest.approx(-0.5)
    assert {row["unit"] for row in printed["units"]} >= {"(root)", "blocks.1"}


def test_the_command_says_what_is_wrong(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{")
    for args, told in (
        ((files[1], files[0]), "The prediction is a profile"),
        ((files[0], str(wrong)), "wrong.json is not JSON"),
        ((files[0], str(tmp_path / "none.json")), "none.json: No such file"),
    ):
        assert main(["compare", *args]) == 2
        assert told in capsys.readouterr().err


def test_without_matplotlib_the_table_is_printed(
    files: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", *files, "--picture", str(tmp_path / "compared.png")]) == 2
    out, err = capsys.readouterr()
    assert "exposed communication" in out
    assert "Pictures need matplotlib" in err
