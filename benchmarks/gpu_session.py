"""All that one GPU can show, in three parts of at most 570 s each: `make gpu PART=A`, then B, C.

A GPU is often lent for minutes, in commands of ten minutes. So each part fits into one command, the
most important comes first, and what was found is in a file at once, whatever ends the run.

- **A, truth.** What machine it is; every collective that the library calls, on one rank with NCCL;
  the other tests marked `cuda` (streams, the allocator, graphs, offload); training beside torch's
  FSDP2 on two and on four ranks that share the GPU; suites on two ranks.
- **B, figures.** `benchmarks.gpu` with 8 simulated ranks and with 64: step time, memory, a
  timeline; the same with so few tokens that the host is what takes time; host time of each call.
- **C, the rest.** Two ranks with NaNs and delays (`tests/support/chaos.py`); asynchronous saves;
  compiled blocks; offload; `fsdp2 measure`; more suites on two ranks.

Each step of a part is a process that is ended when its time is up. A test that hangs is cut after
20 s, and the others go on, in a new process if need be. A part leaves `gpu-session-A.json` (what
became of each step and test), `gpu-session-A.log` (everything printed, each failure when it is
known), and the records of benchmarks: 8 files at most.

What one GPU cannot show: the speed of collectives, and the multiprocessors and memory bandwidth
that NCCL's kernels take from compute.

Without a GPU, or with `--small`: in small on the CPU, which shows that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import machine
from .gpu import Settings, device_description
from .ranks import progress

sys.path.append(str(machine.REPOSITORY / "tests" / "support"))
import run_log

BUDGET_S = 570
# A step that could not even load torch in the time that is left is not begun.
LEAST_S = 15
KEPT_LINES = 40
# Of a test in pytest's own process, and of a body on ranks, which the harness ends (it is
# pytest's turn only where starting ranks hangs).
TEST_LIMIT_S, RANKS_LIMIT_S = 20, 150

COLLECTIVES = "core/test_one_rank_group"
# What takes data between streams, the host and other ranks, the most telling first.
SUITES = (
    "core/test_parity_models",
    "core/test_mixed_precision",
    "core/test_accumulation",
    "core/test_reshard",
    "core/test_prefetch",
    "core/test_offload",
    "core/test_gradients",
)
MORE_SUITES = (
    "core/test_views",
    "core/test_large_root",
    "core/test_replicate",
    "core/test_comm_policy",
    "core/test_gather_budget",
    "core/test_frozen_kept",
    "core/test_activation_checkpoint",
    "optim/test_step_in_backward",
    "optim/test_clip",
    "checkpoint/test_checkpoint_exact",
    "checkpoint/test_full_state",
    "core/test_recovery",
    "core/test_peer",
    "graph/test_compile_step",
)


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: in the report.
        arguments: of the interpreter.
        limit_s: after which it is ended, in seconds.
        results: files that it writes, relative to the folder of results.
        environment: more variables.
        needs: the name of an earlier step; not run unless a test of that has passed.
    """

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    results: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    needs: str | None = None

    @property
    def tests(self) -> bool:
        return "pytest" in self.arguments


# ------------------------------------------------------------------------------- the parts


def pytest(name: str, files: Sequence[str], limit_s: float, *options: str) -> Step:
    """Tests in pytest's own process. (By file: to collect all takes longer than to run some.)"""
    limit = ("--timeout", str(TEST_LIMIT_S), "--timeout-method", "thread")
    return Step(name, (*_PYTEST, *limit, *options, *_paths(files)), limit_s)


_PYTEST = (
    *("-m", "pytest", "-q", "--tb=short", "--no-summary", "-p", "no:cacheprovider"),
    *("-o", "console_output_style=classic"),
)


def _paths(files: Sequence[str]) -> list[str]:
    return [f"tests/{name}.py" for name in files]


def bodies(
    name: str,
    files: Sequence[str],
    limit_s: float,
    chosen: str,
    *,
    device: str = "cuda",
    needs: str | None = None,
    **environment: str,
) -> Step:
    """Bodies on ranks that share the GPU.

    Args:
        chosen: for `pytest -k`.
    """
    options = ("--timeout", str(RANKS_LIMIT_S), "--device", device, "-k", chosen)
    variables = {"FSDP2_TEST_RANKS_PER_GPU": "4", "FSDP2_TEST_JOB_S": str(TEST_LIMIT_S)}
    return Step(
        name,
        (*_PYTEST, *options, *_paths(files)),
        limit_s,
        environment=tuple((variables | environment).items()),
        needs=needs,
    )


def script(name: str, module: str, limit_s: float, *options: str, result: str) -> Step:
    """A benchmark that writes one file."""
    return Step(name, ("-m", module, *options), limit_s, (result,))


def bench(name: str, limit_s: float, folder: Path, *options: str) -> Step:
    """`benchmarks.gpu` with 8 blocks, without pictures; `options` count more."""
    # (As many blocks as fit would take five minutes.)
    short = ("--blocks", "8", "--rounds", "4", "--iters", "3", "--no-pictures")
    to = ("--name", name, "--output", str(folder))
    return script(name, "benchmarks.gpu", limit_s, *short, *to, *options, result=f"{name}.json")


def cuda_tests() -> list[str]:
    """The other files that have tests marked `cuda`, or take the mark from one of these."""
    tests = machine.REPOSITORY / "tests"
    mark = re.compile(r"mark\.cuda\b|^from test_cuda import .*\b(each_device|cuda_only)\b", re.M)
    files = [path for path in tests.glob("*/test_*.py") if mark.search(path.read_text())]
    names = sorted(str(path.relative_to(tests).with_suffix("")) for path in files)
    return [name for name in names if name != COLLECTIVES]


def truth(folder: Path) -> list[Step]:
    """Part A."""
    two = "two ranks"
    return [
        Step("machine", ("-m", "benchmarks.gpu_probe"), 40),
        pytest("collectives", [COLLECTIVES], 60, "-m", "cuda"),
        pytest("cuda", cuda_tests(), 130, "-m", "cuda"),
        bodies(two, ["core/test_two_ranks"], 100, "2ranks"),
        bodies("four ranks", ["core/test_two_ranks"], 100, "4ranks", needs=two),
        bodies("suites", SUITES, BUDGET_S, "2ranks", needs=two),
    ]


def figures(folder: Path) -> list[Step]:
    """Part B."""
    host_bound = ("--blocks", "32", "--tokens", "128", "--loads", "0.25")
    first = bench("gpu", 170, folder, "--world-sizes", "8", "--pictures")
    drawn = tuple(f"gpu-8-ranks-load-{load:g}.png" for load in Settings().loads)
    to, cost = ("--output", str(folder)), "gpu-host-cost.json"
    return [
        replace(first, results=(*first.results, *drawn)),
        script("host cost", "benchmarks.gpu_host_cost", 80, *to, result=cost),
        bench("gpu-64-ranks", 150, folder, "--world-sizes", "64"),
        bench("gpu-host-bound", 120, folder, "--world-sizes", "8", *host_bound),
    ]


def rest(folder: Path) -> list[Step]:
    """Part C."""
    hidden = ("--world-sizes", "8", "--loads", "0.25", "--rounds", "2")
    to = ("--output", str(folder))
    quick, full = "gpu-measured-quick.json", "gpu-measured.json"
    measure = ("measure", "--quiet", "--out")
    with_chaos = ("core/test_two_ranks", "core/test_cuda")
    bad = "2ranks or (parity and not cpu)"
    return [
        bodies("chaos", with_chaos, 70, bad, FSDP2_TEST_CHAOS="1"),
        script("saves", "benchmarks.gpu_saves", 70, *to, result="gpu-saves.json"),
        bench("gpu-compiled", 90, folder, "--compile", "--blocks", "4", *hidden),
        script("graph", "benchmarks.graph", 90, "--device", "cuda", *to, result="gpu-graph.json"),
        script(
            "measure, quick", "fsdp2", 45, *measure, str(folder / quick), "--quick", result=quick
        ),
        Step("offload", ("-m", "benchmarks.offload", "--rounds", "3"), 60),
        script("measure", "fsdp2", 145, *measure, str(folder / full), result=full),
        bodies("more suites", MORE_SUITES, BUDGET_S, "2ranks"),
    ]


def small_truth(folder: Path) -> list[Step]:
    """Part A on the CPU."""
    return [
        Step("machine", ("-m", "benchmarks.gpu_probe"), 120),
        bodies("two ranks", ["core/test_two_ranks"], 120, "2ranks and fp32", device="cpu"),
    ]


def small_figures(folder: Path) -> list[Step]:
    """Part B on the CPU."""
    tiny = ("--small", "--blocks", "2", "--world-sizes", "4", "--loads", "0.5", "--rounds", "1")
    to, cost = ("--small", "--output", str(folder)), "gpu-host-cost.json"
    return [
        bench("gpu-small", 120, folder, *tiny, "--iters", "1"),
        script("host cost", "benchmarks.gpu_host_cost", 120, *to, result=cost),
    ]


def small_rest(folder: Path) -> list[Step]:
    """Part C on the CPU."""
    to = ("--small", "--saves", "2", "--output", str(folder))
    return [script("saves", "benchmarks.gpu_saves", 120, *to, result="gpu-saves-small.json")]


PARTS = {"A": truth, "B": figures, "C": rest}
SMALL_PARTS = {"A": small_truth, "B": small_figures, "C": small_rest}


# ------------------------------------------------------------------------------ running them


def run(steps: Sequence[Step], part: str, folder: Path, budget_s: float) -> dict[str, Any]:
    """Run the steps in turn; returns the report, as it was last written.

    Args:
        steps: what to run.
        part: its name, in those of the files.
        folder: where the report is written, after each step.
        budget_s: for all of them, in seconds. What does not fit is listed as not run.
    """
    deadline = time.monotonic() + budget_s
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = {**machine.describe(), "gpu": device_description(device), "steps": []}
    log = folder / f"gpu-session-{part}.log"
    log.unlink(missing_ok=True)
    done: dict[str, dict[str, Any]] = {}
    for step in steps:
        left_s = deadline - time.monotonic()
        if left_s < LEAST_S:
            found: dict[str, Any] = {"outcome": "not run: no time was left"}
        elif step.needs in done and not done[step.needs].get("tests", {}).get("passed"):
            found = {"outcome": f"not run: no test of {step.needs!r} has passed"}
        else:
            progress(f"{part}, {step.name}: at most {min(step.limit_s, left_s):.0f} s")
            found = run_step(step, log, folder, min(step.limit_s, left_s))
        done[step.name] = {"name": step.name, **found}
        report["steps"] = list(done.values())
        _write(report, folder / f"gpu-session-{part}.json")
        print(summary(done[step.name]), flush=True)
    return report


def summary(found: dict[str, Any]) -> str:
    """A line about a step, and one about each test that did not pass."""
    counts = ", ".join(f"{number} {word}" for word, number in found.get("tests", {}).items())
    line = f"{found['name']}: {found['outcome']}"
    if "seconds" in found:
        line += f" ({found['seconds']} s{', ' + counts if counts else ''})"
    return "\n    ".join([line, *found.get("not_passed", ())])


def run_step(step: Step, log: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Run one step, with all that it starts; returns what is known of it.

    Tests go on in a new process where one has ended before all were over.
    """
    began = time.monotonic()
    with log.open("a") as output:
        output.write(f"\n{run_log.HEADING}{step.name}\n")
    tests: dict[str, str] = {}
    while True:
        code = _run_process(step, log, began + limit_s - time.monotonic())
        text = run_log.last_run(log.read_text(errors="replace"))
        before, tests = tests, run_log.outcomes(text)
        is_over = run_log.OVER in text or len(tests) == len(before)
        if not step.tests or code is None or is_over:
            break
    found: dict[str, Any] = {
        "command": " ".join(["python", *step.arguments]),
        "outcome": _outcome(step, code, tests, limit_s),
        "seconds": round(time.monotonic() - began, 1),
    }
    if step.tests:
        found["tests"] = dict(Counter(tests.values()))
        bad = [f"{word}: {name}" for name, word in tests.items() if word != "passed"]
        found["not_passed"] = [line for line in bad if not line.startswith("skipped")]
    else:
        found["results"] = [name for name in step.results if (folder / name).exists()]
    return found | {"last_lines": text.splitlines()[-KEPT_LINES:]}


def _outcome(step: Step, code: int | None, tests: dict[str, str], limit_s: float) -> str:
    if code is None:
        return f"ended after {limit_s:.0f} s, its limit"
    if step.tests and set(tests.values()) & {"failed", run_log.HUNG}:
        return "tests failed"
    return "done" if code == 0 else f"failed with status {code}"


def _run_process(step: Step, log: Path, limit_s: float) -> int | None:
    """The exit status; None where it had to be ended."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **dict(step.environment)}
    if step.tests:
        environment[run_log.VARIABLE] = str(log)
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *step.arguments],
            cwd=machine.REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            return process.wait(max(0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Its ranks too, also where it has ended without them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write(report: dict[str, Any], path: Path) -> None:
    """In one step, so that a run that is ended leaves a whole file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status: 1 if a step was not done."""
    results = os.environ.get("OUT") or machine.REPOSITORY / "benchmarks" / "results"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description="Tests and benchmarks on one GPU, the most important first, each result "
        "written when it is there.",
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="steps whose names begin so")
    parser.add_argument("--small", action="store_true", help="in small, without a GPU")
    parser.add_argument(
        "--seconds", type=float, default=BUDGET_S, help=f"of a part (default: {BUDGET_S})"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(results), metavar="DIR", help=f"default: {results}"
    )
    parser.add_argument("--commit", help="where there is no .git to ask")
    options = parser.parse_args(arguments)
    if options.commit:
        os.environ[machine.COMMIT] = options.commit
    small = options.small or not torch.cuda.is_available()
    if small and not options.small:
        progress("no CUDA device: in small, which says nothing about one")
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for part in options.part:
        steps = (SMALL_PARTS if small else PARTS)[part](folder)
        if options.only:
            steps = [step for step in steps if step.name.startswith(tuple(options.only))]
        report = run(steps, part, folder, options.seconds)
        outcomes += [step["outcome"] for step in report["steps"]]
    return 0 if all(outcome == "done" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
