"""Programs of other libraries, run with torch's `fully_shard` and with ours.

A program is a file beside the test. It is started on every rank with the name of an implementation
("torch" or "fsdp2"), a folder and options; it calls `change_imports` before the library is
imported, trains, and writes with `write` what the test compares.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._composable.fsdp
import torch.distributed.fsdp

import fsdp2

ROOT = Path(__file__).parents[2]
NAMES = (
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "fully_shard",
    "register_fsdp_forward_method",
)


def change_imports(implementation: str) -> None:
    """For "fsdp2", what a library imports from torch is ours: its import lines, changed."""
    if implementation == "torch":
        return
    for package in (torch.distributed.fsdp, torch.distributed._composable.fsdp):
        for name in NAMES:
            setattr(package, name, getattr(fsdp2, name))


def write(folder: str, records: Any, model: torch.nn.Module) -> None:
    """Write down ``records`` of this rank and who sharded ``model``."""
    made_by = {
        base.__module__.split(".")[0]
        for module in model.modules()
        for base in type(module).__mro__
        if base.__name__ == "FSDPModule"
    }
    by = "fsdp2" if "fsdp2" in made_by else "".join(made_by)
    written = json.dumps({"records": records, "made_by": by})
    Path(folder, f"out{dist.get_rank()}.json").write_text(written)


def run(program: Path, implementation: str, folder: Path, *options: str, num_ranks: int = 2) -> Any:
    """The records of every rank."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, *launch, str(program), implementation, str(folder), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-12000:]
    written = [json.loads((folder / f"out{rank}.json").read_text()) for rank in range(num_ranks)]
    assert [each["made_by"] for each in written] == [implementation] * num_ranks
    return [each["records"] for each in written]


def run_both(program: Path, folder: Path, *options: str, num_ranks: int = 2) -> tuple[Any, Any]:
    """The records of every rank: with our `fully_shard`, and with torch's."""
    ours, theirs = (
        run(program, implementation, folder / implementation, *options, num_ranks=num_ranks)
        for implementation in ("fsdp2", "torch")
    )
    return ours, theirs
