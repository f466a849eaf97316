"""All that one GPU can show, within nine minutes: `make gpu`.

A GPU is often lent for minutes. So the most important comes first, each part is a process that is
ended when its time is up, and the report is written anew after each: whatever ends the run, what
was found is in the file.

1. Every collective that the library calls, on a group of one rank with NCCL: dtypes, that the host
   does not wait.
2. The other tests marked `cuda`: streams, the caching allocator, graphs, offload.
3. Bodies of all suites that one rank can run, with NCCL (`pytest --device cuda`).
4. `benchmarks.gpu` with 8 simulated ranks, then with 64: step time, memory, a timeline.

What it cannot show: collectives of several ranks in one NCCL group call, and the multiprocessors
and memory bandwidth that NCCL's kernels take from compute. That needs several GPUs.

Without a GPU, or with `--small`, the same in small: tests on the device of threads and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import machine
from .gpu import device_description
from .ranks import progress

BUDGET_S = 540
# A part that could not even load torch in the time that is left is not begun.
LEAST_S = 15
KEPT_LINES = 60


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        name: in the report.
        arguments: of the interpreter.
        limit_s: after which it is ended, in seconds.
        result: a file that it writes, relative to the folder of results.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    result: str | None = None


def parts(folder: Path, *, small: bool) -> list[Part]:
    """What to run, the most important first."""
    tests = ("-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider")
    bench = ("-m", "benchmarks.gpu", "--output", str(folder))
    if small:
        tiny = ("--small", "--world-sizes", "4", "--loads", "0.5", "--rounds", "1", "--iters", "1")
        return [
            Part("collectives", (*tests, "tests/core/test_one_rank_group.py"), 300),
            Part("tests", (*tests, "tests/core/test_cuda.py", "-k", "cpu"), 120),
            Part("bench, 4 ranks", (*bench, *tiny), 120, "gpu-small.json"),
        ]
    cuda = (*tests, "-m", "cuda")
    return [
        Part("collectives", (*cuda, "tests/core/test_one_rank_group.py"), 90),
        Part("tests", (*cuda, "tests", "--ignore=tests/core/test_one_rank_group.py"), 150),
        Part("bodies", (*tests, "--device", "cuda", "-k", "1ranks", "tests"), 100),
        Part("bench, 8 ranks", (*bench, "--world-sizes", "8"), 180, "gpu.json"),
        Part("bench, 8 and 64 ranks", (*bench, "--world-sizes", "8", "64"), 300, "gpu.json"),
    ]


def run(todo: Sequence[Part], folder: Path, budget_s: float) -> dict[str, Any]:
    """Run the parts in turn; returns the report, as it was last written.

    Args:
        todo: the parts.
        folder: where `gpu-session.json` is written, after each part.
        budget_s: for all of them, in seconds. What does not fit is listed as not run.
    """
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {**machine.describe(), "gpu": device_description(device), "parts": []}
    for part in todo:
        left_s = budget_s - (time.monotonic() - started)
        if left_s < LEAST_S:
            report["parts"].append({"name": part.name, "outcome": "not run: no time was left"})
        else:
            progress(f"{part.name}: at most {min(part.limit_s, left_s):.0f} s")
            report["parts"].append(run_part(part, folder, min(part.limit_s, left_s)))
        _write(report, folder)
        progress(f"{part.name}: {report['parts'][-1]['outcome']}")
    return report


def run_part(part: Part, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one part, with all that it starts; returns what is known of it."""
    log = folder / f"gpu-session-{part.name.replace(', ', '-').replace(' ', '-')}.log"
    result = folder / part.result if part.result else None
    before = result.stat().st_mtime_ns if result and result.exists() else 0
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *part.arguments],
            cwd=machine.REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            outcome = "done" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            outcome = f"ended after {limit_s:.0f} s, its limit"
    wrote = bool(result and result.exists() and result.stat().st_mtime_ns != before)
    return {
        "name": part.name,
        "command": " ".join(["python", *part.arguments]),
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "result": part.result if wrote else None,
        "last_lines": log.read_text(errors="replace").splitlines()[-KEPT_LINES:],
    }


def _write(report: dict[str, Any], folder: Path) -> None:
    """In one step, so that a run that is ended leaves a whole file."""
    path = folder / "gpu-session.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status: 1 if a part was not done."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description="Tests and benchmarks on one GPU, the most important first, each result "
        "written when it is there.",
    )
    parser.add_argument("--small", action="store_true", help="in small, without a GPU")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help=f"default: {BUDGET_S}")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    options = parser.parse_args(arguments)
    small = options.small or not torch.cuda.is_available()
    if small and not options.small:
        progress("no CUDA device: in small, which says nothing about one")
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = run(parts(folder, small=small), folder, options.seconds)
    for part in report["parts"]:
        print(f"{part['name']}: {part['outcome']}")
    return 0 if all(part["outcome"] == "done" for part in report["parts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
