"""Running the examples as a user runs them: by torchrun, in processes of their own.

Most of such a run would be the import of torch. So where torchrun itself is not what is tested,
the ranks are forked with torch imported already, and given the variables that torchrun sets.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import fork_context

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 120


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    # On the CPU also where there is a GPU: these tests are about the programs.
    fixed = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | fixed | extra


def launch(num_ranks: int, script: str, *options: str) -> list[str]:
    """The command that `make` runs."""
    launcher = [sys.executable, str(EXAMPLES / "launch.py"), "--nproc-per-node", str(num_ranks)]
    return [*launcher, str(EXAMPLES / script), *options]


def run_forked(
    num_ranks: int, script: str, options: list[str], printed: Path, *, without: Sequence[str] = ()
) -> None:
    """Run a script to its end, in ranks that are forked and not started by torchrun."""
    run_in_turn(num_ranks, script, [(options, printed)], without=without)


def run_in_turn(
    num_ranks: int,
    script: str,
    runs: list[tuple[list[str], Path]],
    *,
    without: Sequence[str] = (),
) -> None:
    """The same with several sets of options, in the same processes: imports are done once.

    Args:
        runs: options, and the file for what is printed.
        without: modules that cannot be imported.
    """
    run_scripts(num_ranks, [(script, *run) for run in runs], without=without)


def run_scripts(
    num_ranks: int, runs: list[tuple[str, list[str], Path]], *, without: Sequence[str] = ()
) -> None:
    """The same with a script for each run: its path below `examples`, options, printed."""
    ranks = []
    ports = [free_port() for _ in runs]
    for rank in range(num_ranks):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
        }
        args = (variables, ports, runs, without)
        ranks.append(fork_context().Process(target=run_rank, args=args))
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S + 15 * len(runs)
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    printed = [path.read_text() for *_, path in runs if path.exists()]
    assert codes == [0] * num_ranks, (codes, *printed)


def free_port() -> int:
    """A port for rank 0 to listen at.

    Not one of those that the system deals out (from 32768 on): between here and the start of
    rank 0, a process group of a test that runs beside this one could be given it.
    """
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_rank(
    variables: dict[str, Any],
    ports: list[int],
    runs: list[tuple[str, list[str], Path]],
    without: Sequence[str],
) -> None:
    """The main function of one rank."""
    sys.modules.update(dict.fromkeys(without))  # type: ignore[arg-type]
    os.environ.update(environment(**{name: str(value) for name, value in variables.items()}))
    for port, (script, options, printed) in zip(ports, runs, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [str(EXAMPLES / script), *options]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def succeed(command: list[str], timeout_s: float = TIMEOUT_S, **extra: str) -> str:
    done = subprocess.run(
        command, env=environment(**extra), capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def loss_values(out: Path) -> list[float]:
    return [row["loss"] for row in losses(out)]


def loss_at(printed: str, step: int, steps: int) -> float:
    line = next(each for each in printed.splitlines() if each.startswith(f"step {step}/{steps}:"))
    return float(line.split("loss ")[1].split(",")[0])
