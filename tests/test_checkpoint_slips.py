"""Slips of a new user with checkpoints: each error names the thing and what to do."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from example_runs import EXAMPLES
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointMismatch,
    CorruptCheckpoint,
    load_model,
    peek,
)
from harness import ours_only

pytestmark = ours_only("checkpoints")


def test_a_step_that_is_no_number_is_answered_with_the_steps_there_are(tmp_path: Path) -> None:
    model, checkpoints = nn.Linear(2, 2), Checkpointer(tmp_path)
    checkpoints.save(3, model=model)
    checkpoints.save(5, model=model)
    with pytest.raises(ValueError, match=r"'latest', got 'lastest'; the last steps in .*: 3, 5"):
        checkpoints.load("lastest", model=model)
    with pytest.raises(ValueError, match=r"'latest', got 'lastest'; the last steps in .*: 3, 5"):
        peek(tmp_path, "lastest")


def test_what_does_not_fit_is_answered_with_arguments_that_exist(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=nn.Linear(2, 2))
    other = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatch, match=r"or translate by load_model\(names=\)"):
        checkpoints.load(model=other)
    with pytest.raises(CheckpointMismatch, match="or names= to translate names"):
        load_model(other, tmp_path / "step-000001")


def test_a_pickled_file_is_answered_with_how_to_load_it(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "weights.pt"
    torch.save(model.state_dict(), path)
    with pytest.raises(CorruptCheckpoint, match=r"weights\.pt is no safetensors .*torch\.load"):
        load_model(model, path)


def test_checkpoints_of_all_earlier_runs_of_an_example_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    processes = importlib.import_module("processes")
    for run in range(3):
        processes.set_earlier_run_aside(str(tmp_path))
        (tmp_path / "checkpoints" / f"of-run-{run}").mkdir(parents=True)
    assert (tmp_path / "checkpoints-1" / "of-run-0").is_dir()
    assert (tmp_path / "checkpoints-2" / "of-run-1").is_dir()
    assert f"are in {tmp_path / 'checkpoints-2'} now" in capsys.readouterr().out


def test_the_example_of_explain_runs_and_dir_lists_what_is_public() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    assert 'explain(Llama(), (8, 8), strategy="hybrid")' in (fsdp2.explain.__doc__ or "")
    assert "64 ranks" in str(fsdp2.explain(model, (8, 8), strategy="hybrid"))
    names = set(dir(fsdp2))
    assert {"checkpoint", "experts", "fully_shard", "materialize", "optim", "wrap"} <= names
    assert not {"runtime", "storage", "unit", "gradients"} & names
    for name in names:
        assert hasattr(fsdp2, name) or importlib.import_module(f"fsdp2.{name}"), name
