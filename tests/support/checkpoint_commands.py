"""Runs the command `fsdp2 ckpt` on checkpoints that fixtures make, and reads what it answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint_cases import Tied, adamw, build, train, whole_state
from fsdp2.checkpoint import Checkpointer, save_model
from harness import run_on


def command(*args: object) -> int:
    from fsdp2.cli.main import main

    return main(["ckpt", *map(str, args)])


def save_on_ranks(folder: str, kind: str, layout: str) -> dict[str, Tensor]:
    """Train a little and save; answers with what was saved."""
    model = build(kind)
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    Checkpointer(folder, layout=layout).save(1, model=model, optimizer=optimizer)
    return whole_state(model, optimizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: two steps of one rank; `weights`: of step 2, in several files."""
    root = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    model = Tied()
    optimizer = adamw(model)
    checkpoints = Checkpointer(root / "run")
    for step in (1, 2):
        train(model, optimizer, range(step, step + 1))
        checkpoints.save(step, model=model, optimizer=optimizer)
    save_model(model, root / "weights", max_file_bytes=2000)
    return root


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """`per-rank` and `shared`: the same step, of three ranks with sharded columns."""
    root = tmp_path_factory.mktemp("ranks")
    for layout in ("per-rank", "shared"):
        state = run_on(3, save_on_ranks, str(root / layout), "columns", layout)[0]
    return root, state


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Of step 2, to be damaged."""
    return Path(shutil.copytree(folder / "run" / "step-000002", tmp_path / "copy"))


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A file of another library."""
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor([1, 2, 3]),
        "c": torch.tensor([0.5, float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7.0),
    }
    save_file(tensors, tmp_path / "hub.safetensors", metadata={"format": "pt"})
    return tmp_path / "hub.safetensors"


def change(source: Path, path: Path, **changes: Tensor | None) -> Path:
    """The file again with other tensors; None leaves one out."""
    tensors: dict[str, Tensor | None] = {**load_file(source), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, path)
    return path


def flip(path: Path, offset: int) -> None:
    """One bit."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on stderr; nothing is on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("fsdp2: error: ")
    assert err.count("\n") == 1
    return err


def answer_of(capsys: pytest.CaptureFixture[str]) -> Any:
    """The only line on stdout, as JSON; nothing is on stderr."""
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    return json.loads(out)


def offset_of(file: Path, name: str) -> int:
    """Where a tensor starts in a file."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]
