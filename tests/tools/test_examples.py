"""The examples, run as a user runs them: by torchrun, in processes of their own.

The model is tiny and the runs are a few steps long. What they show is that the programs work,
that a resumed run is exactly the run it continues, and how they answer mistakes and Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import load_file

from example_runs import (
    EXAMPLES,
    TIMEOUT_S,
    environment,
    launch,
    loss_at,
    loss_values,
    losses,
    run_forked,
    run_in_turn,
)
from fsdp2.checkpoint import peek

TINY = "--dim 32 --hidden 64 --heads 2 --layers 2 --length 32 --eval-bytes 2048 --sample-bytes 8"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text: a few modules of the standard library."""
    path = tmp_path_factory.mktemp("text") / "text.py"
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse.py", "dataclasses.py", "inspect.py", "typing.py")
    path.write_bytes(b"".join((library / name).read_bytes() for name in names))
    return path


@pytest.fixture(scope="module")
def six_steps(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of six steps on two ranks."""
    out = tmp_path_factory.mktemp("six_steps")
    train(2, f"--batch 6 --steps 6 {profiled(out)}", text, out)
    return out


def train_arguments(flags: str, text: Path, out: Path) -> list[str]:
    return [*TINY.split(), *flags.split(), "--data", str(text), "--out", str(out)]


def profiled(out: Path) -> str:
    """The option that records a step of the run in `out`, beside it."""
    return f"--profile {out.with_name(f'{out.name}-profile')}"


def train(num_ranks: int, flags: str, text: Path, out: Path) -> None:
    """Run train_lm.py to its end."""
    train_in_turn(num_ranks, text, (flags, out))


def train_in_turn(num_ranks: int, text: Path, *runs: tuple[str, Path]) -> None:
    """Run train_lm.py several times in the same processes, each with flags and a folder."""
    for _, out in runs:
        out.mkdir(parents=True, exist_ok=True)
    each = [(train_arguments(flags, text, out), out / "printed.txt") for flags, out in runs]
    run_in_turn(num_ranks, "train_lm.py", each)


def test_training_logs_every_step_and_reports(six_steps: Path) -> None:
    rows = losses(six_steps)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss"] < rows[0]["loss"]
    summary = json.loads((six_steps / "summary.json").read_text())
    bits = summary["held_out_bits_per_byte"]
    assert bits["trigram"] < bits["bigram"] < bits["model"] < 8.5
    whole, ranks = summary["sizes"]["unsharded"], summary["sizes"]["ranks"]
    for key in ("parameters", "parameter_bytes", "optimizer_bytes"):
        assert sum(rank[key] for rank in ranks) == whole[key]
        assert ranks[0][key] == whole[key] / 2


def test_a_step_is_profiled(six_steps: Path) -> None:
    for rank in range(2):
        trace = json.loads(
            (six_steps.with_name(f"{six_steps.name}-profile") / f"rank{rank}.json").read_text()
        )
        names = {event["args"].get("name") for event in trace["traceEvents"]}
        assert {f"rank {rank} (cpu)", "all-gather", "reduce-scatter"} <= names


def assert_sent_as_profiled(out: Path) -> None:
    """The bytes that a run reports are those that `--profile` counted in a step of rank 0."""
    trace = json.loads((out.with_name(f"{out.name}-profile") / "rank0.json").read_text())
    counted = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    for event in trace["traceEvents"]:
        if event.get("cat") in counted:
            counted[event["cat"]] += event["args"]["sent bytes"]
    sent = json.loads((out / "summary.json").read_text())["sent_bytes_per_rank_and_step"]
    assert counted["all-gather"] > counted["reduce-scatter"] > 0
    assert {name.replace("_", "-"): value for name, value in sent.items()} == counted


def test_sent_bytes_are_those_of_the_profile(six_steps: Path) -> None:
    assert_sent_as_profiled(six_steps)


def test_the_printed_checkpoint_is_one(six_steps: Path) -> None:
    printed = (six_steps / "printed.txt").read_text()
    line = next(each for each in printed.splitlines() if each.startswith("checkpoint "))
    assert line.split()[1] == str(six_steps / "checkpoints" / "step-000006")
    assert Path(line.split()[1], "model.safetensors").is_file()


def test_checkpoint_is_ordinary_safetensors(six_steps: Path) -> None:
    files = {str(f.relative_to(six_steps)) for f in six_steps.rglob("*") if f.is_file()}
    step = "checkpoints/step-000006"
    assert {f for f in files if ".fsdp2/" not in f} - {"loss.png", "printed.txt"} == {
        "losses.jsonl",
        f"{step}/model.safetensors",
        f"{step}/optim.safetensors",
        "summary.json",
    }
    weights = load_file(six_steps / step / "model.safetensors")
    assert weights["embedding.weight"].shape == (256, 32)


@pytest.mark.parametrize(
    "flags", [pytest.param("", marks=pytest.mark.long), "--bf16 --ac --accumulate 2 --offload"]
)
def test_resumed_run_is_bitwise_the_uninterrupted_run(
    flags: str, text: Path, six_steps: Path, tmp_path: Path
) -> None:
    whole, parts = six_steps, tmp_path / "parts"
    runs = [(f"--batch 6 {flags} --steps 6 --stop-at 3", parts), ("--resume", parts)]
    if flags:
        whole = tmp_path / "whole"
        runs.insert(0, (f"--batch 6 {flags} --steps 6 {profiled(whole)}", whole))
    train_in_turn(2, text, *runs)
    if flags:
        assert_sent_as_profiled(whole)
    assert "resumed      after step 3" in (parts / "printed.txt").read_text()
    assert losses(parts) == losses(whole)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_resumed_by_another_number_of_processes(
    num_ranks: int, text: Path, six_steps: Path, tmp_path: Path
) -> None:
    """Twelve sequences a step, whoever computes them: the losses go on as they would have."""
    train(2, "--batch 6 --steps 6 --stop-at 3", text, tmp_path / "parts")
    assert loss_values(tmp_path / "parts") == loss_values(six_steps)[:3]
    train(num_ranks, "--resume", text, tmp_path / "parts")
    assert loss_values(tmp_path / "parts") == pytest.approx(loss_values(six_steps), rel=1e-4)


@pytest.mark.long
def test_steps_as_one_graph(text: Path, six_steps: Path, tmp_path: Path) -> None:
    """A run that began eagerly goes on in a graph, with the losses that it would have had."""
    train(2, "--batch 6 --steps 6 --stop-at 3", text, tmp_path)
    train(2, "--resume --graph", text, tmp_path)
    assert loss_values(tmp_path) == pytest.approx(loss_values(six_steps), rel=1e-4)


def test_losses_do_not_depend_on_how_the_model_is_sharded(
    text: Path, six_steps: Path, tmp_path: Path
) -> None:
    """Same weights, same batches: one rank alone, and two ranks that replicate (HSDP)."""
    train(1, "--batch 12 --steps 6", text, tmp_path / "one")
    train(2, "--batch 6 --replicate 2 --steps 6", text, tmp_path / "replicated")
    assert loss_values(tmp_path / "one") == pytest.approx(loss_values(six_steps), rel=1e-5)
    assert loss_values(tmp_path / "replicated") == pytest.approx(loss_values(six_steps), rel=1e-5)


def test_missing_extras_are_named(text: Path, tmp_path: Path) -> None:
    arguments = train_arguments("--steps 2", text, tmp_path / "out")
    extras = ("tqdm", "matplotlib")
    run_forked(1, "train_lm.py", arguments, tmp_path / "printed.txt", without=extras)
    printed = (tmp_path / "printed.txt").read_text()
    assert "tqdm is not installed" in printed
    assert "matplotlib is not installed" in printed
    assert "step 2/2: loss" in printed
    assert not (tmp_path / "out" / "loss.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stepz 3", "unrecognized arguments: --stepz 3"),
        ("--steps 0", "argument --steps: 0 is not 1 or more"),
        ("--steps many", "argument --steps: invalid whole number value: 'many'"),
        ("--lr -1", "argument --lr: -1 is not above 0"),
        (
            "--graph --offload",
            "--graph: offloaded parameters need eager steps: leave out --offload",
        ),
        ("--replicate 3", "--replicate 3 does not divide the 2 processes evenly"),
        ("--dim 100", "--dim 100 is not a multiple of twice --heads 8"),
        ("--data nowhere", "--data: there is no file or folder nowhere"),
        ("--resume --out nowhere", "--resume: there is no checkpoint in nowhere"),
        ("--out /dev/null", "--out: cannot make the folder /dev/null: File exists"),
    ],
)
def test_bad_option_is_named_in_one_line(
    flags: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(flags.split(), 2, monkeypatch, capsys) == message


def test_resume_refuses_other_settings(
    six_steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["--resume", "--out", str(six_steps)]
    message = refused([*resume, "--batch", "5"], 2, monkeypatch, capsys)
    assert message == "--resume: the checkpoint was made with --batch 6"
    longer = options_module().parse_options([*resume, "--steps", "9"])
    assert (longer.steps, longer.dim) == (9, 32)


def test_resume_of_a_finished_run_says_so_at_once(
    six_steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, flags, expected in (
        ("0", "", "step-000006 is of step 6, and --steps is 6: nothing to do. A larger --steps"),
        ("0", "--stop-at 4", "is of step 6, and --stop-at is 4: nothing to do"),
        ("1", "", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            options_module().parse_options(["--resume", "--out", str(six_steps), *flags.split()])
        assert ended.value.code == 0
        printed = capsys.readouterr().out
        assert expected in printed
        assert bool(printed) == bool(expected)


def refused(
    arguments: list[str],
    world_size: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """The one line with which the options are refused."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train_lm.py"])
    with pytest.raises(SystemExit) as ended:
        options_module().parse_options(arguments)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line.removeprefix("train_lm.py: error: ").strip()


def options_module() -> ModuleType:
    specification = importlib.util.spec_from_file_location(
        "options", EXAMPLES / "common" / "options.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_bad_option_ends_all_ranks_with_one_line_and_status_2(tmp_path: Path) -> None:
    """By a script that does no more: importing torch in every rank would be most of the test."""
    script = tmp_path / "train.py"
    script.write_text("from common.options import OneLineParser\nOneLineParser().parse_args()\n")
    path = os.pathsep.join([str(EXAMPLES), environment()["PYTHONPATH"]])
    done = subprocess.run(
        launch(2, str(script), "--stepz"),
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    assert done.stderr == "train.py: error: unrecognized arguments: --stepz\n"


@pytest.mark.parametrize("num_ranks", ["0", "two"])
def test_bad_number_of_ranks_is_named_in_one_line(num_ranks: str) -> None:
    command = [sys.executable, str(EXAMPLES / "launch.py"), "--nproc-per-node", num_ranks, "x.py"]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 2
    assert done.stderr.startswith("launch.py: error: argument --nproc-per-node: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_ctrl_c_finishes_the_step_and_saves(text: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        launch(2, "train_lm.py", *train_arguments("--steps 100000", text, tmp_path)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_steps(process, tmp_path / "losses.jsonl", 3)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()
    step = losses(tmp_path)[-1]["step"]
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert f"stopped after step {step}" in printed
    assert peek(tmp_path / "checkpoints").step == step


def wait_for_steps(process: subprocess.Popen[str], log: Path, num_steps: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not log.exists() or log.read_text().count("\n") < num_steps:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "the training did not get going"
        time.sleep(0.05)


@pytest.mark.long
def test_tensor_parallel_example_learns(tmp_path: Path) -> None:
    run_forked(4, "train_2d.py", ["--steps", "4"], tmp_path / "printed.txt")
    printed = (tmp_path / "printed.txt").read_text()
    assert "blocks.0.attention.wo.weight" in printed
    assert loss_at(printed, 4, 4) < loss_at(printed, 1, 4)


def test_pipelines(tmp_path: Path) -> None:
    """A schedule that splits backward, with gradients reduced in each micro-batch, and another."""
    schedules = (["--schedule", "ZBVZeroBubble", "--accumulate-sharded"], ["--schedule", "1F1B"])
    runs = [
        (["--steps", "3", *options], tmp_path / f"printed{i}.txt")
        for i, options in enumerate(schedules)
    ]
    run_in_turn(4, "train_pipeline.py", runs)
    losses = [loss_at(printed.read_text(), 3, 3) for _, printed in runs]
    # The model and its data are the same, however it is cut.
    assert abs(losses[0] - losses[1]) <= 0.002


def test_experts(tmp_path: Path) -> None:
    printed = tmp_path / "printed.txt"
    run_forked(4, "train_moe.py", ["--steps", "4"], printed)
    text = printed.read_text()
    line = next(each for each in text.splitlines() if each.startswith("feed_forward.experts.up"))
    assert "('efsdp', 'ep')" in line
    assert "here (2, 128, 192)" in line
    assert loss_at(text, 4, 4) < loss_at(text, 1, 4)
