"""torchtitan's `Trainer` on its debug models, with the import of `fully_shard` changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import ours_only

MODULES = ("torchtitan", "spmd_types", "torchdata", "tyro", "triton")
MISSING = [name for name in MODULES if find_spec(name) is None]

pytestmark = [
    ours_only("compares with torch's implementation"),
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(torch.__version__ < "2.15", reason="torchtitan 0.3 is for torch 2.15"),
]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "torchtitan_run.py"
LLAMA, DEEPSEEK = "llama3.llama3_debugmodel", "deepseek_v3.deepseek_v3_debugmodel"


def run(implementation: str, num_ranks: int, config: str, option: str, folder: Path) -> Any:
    """What each rank writes down: [step, loss, gradient norm] of every step, and who sharded."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    options = [option] if option else []
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), implementation, config, str(folder), *options],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"out{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("num_ranks", "config", "option"),
    [
        (2, LLAMA, ""),
        (4, LLAMA, "parallelism.data_parallel_replicate_degree=2"),
        (4, LLAMA, "parallelism.tensor_parallel_degree=2"),
        (4, LLAMA, "parallelism.pipeline_parallel_degree=2"),
        (4, DEEPSEEK, "parallelism.expert_parallel_degree=2"),
    ],
    ids=["sharded", "hybrid", "tensor parallel", "pipeline", "experts"],
)
def test_losses_and_norms_of_every_step(
    num_ranks: int, config: str, option: str, tmp_path: Path
) -> None:
    """To the last bit, apart from tensor parallelism, where sums are in another order."""
    theirs = run("torch", num_ranks, config, option, tmp_path / "torch")
    ours = run("fsdp2", num_ranks, config, option, tmp_path / "fsdp2")
    assert len(ours) == num_ranks
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine["made_by"].startswith("fsdp2.")
        assert expected["made_by"].startswith("torch.")
        assert [step for step, _, _ in mine["records"]] == [1, 2, 3, 4, 5, 6]
        if "tensor" not in option:
            assert mine["records"] == expected["records"]
            continue
        assert mine["records"][0][1] == expected["records"][0][1]
        for (_, loss, norm), (_, their_loss, their_norm) in zip(
            mine["records"], expected["records"], strict=True
        ):
            assert loss == pytest.approx(their_loss, rel=1e-4)
            assert norm == pytest.approx(their_norm, rel=1e-4)
