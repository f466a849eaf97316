"""The `Trainer` of transformers with the import of `fully_shard` changed in Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness import ours_only

pytestmark = [
    ours_only("compares with torch's implementation"),
    pytest.mark.long,
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("accelerate") is None,
        reason="transformers or accelerate is not installed",
    ),
]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "trainer_run.py"


def run(implementation: str, folder: Path, *checkpoint: str) -> dict[str, Any]:
    """What rank 0 writes down: [step, loss, gradient norm] of every step, and who sharded."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), implementation, str(folder), *checkpoint],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "out.json").read_text())


def test_losses_and_norms_of_every_step_and_after_a_resume(tmp_path: Path) -> None:
    theirs = run("torch", tmp_path / "torch")
    ours = run("fsdp2", tmp_path / "fsdp2")
    assert "fsdp2" not in theirs["made_by"]
    assert "fsdp2" in ours["made_by"]
    assert [step for step, _, _ in ours["records"]] == [1, 2, 3, 4, 5, 6]
    assert_same(ours, theirs)
    saved = str(tmp_path / "fsdp2" / "checkpoint-3")
    resumed = run("fsdp2", tmp_path / "resumed", saved)
    assert resumed["records"] == ours["records"]


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Losses to the last bit, norms nearly."""
    for (step, loss, norm), expected in zip(mine["records"], theirs["records"], strict=True):
        assert [step, loss] == expected[:2]
        assert norm == pytest.approx(expected[2], rel=1e-6, abs=0)
