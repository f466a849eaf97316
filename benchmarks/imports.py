"""How long imports and the command line's help take, beside torch alone.

    python -m benchmarks.imports [--rounds N]

Each line is a new process. Processes take turns, medians are taken over the rounds, and what a line
takes longer than torch's is the median of the differences within rounds: that holds better than
times where others use the machine. CPU time is that of the process.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "from torch.distributed.fsdp import fully_shard"
OURS = "from fsdp2 import fully_shard"
IMPORTS = (TORCH, f"{TORCH}; import fsdp2", f"{TORCH}; {OURS}", f"{TORCH}; from fsdp2 import *")
COMMANDS = ("--help", "--version", "ckpt --help")
# What the installed command does.
COMMAND = "import sys; from fsdp2.cli.main import main; sys.exit(main({arguments}))"


def seconds(program: str) -> tuple[float, float]:
    """Wall and CPU time of a new process."""
    before, start = _cpu(), time.perf_counter()
    _run(program)
    return time.perf_counter() - start, _cpu() - before


def _run(program: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def slowest(program: str, number: int = 8) -> list[tuple[float, str]]:
    """The files of fsdp2 that take longest by themselves: `python -X importtime`."""
    rows = re.findall(r"(\d+) \| +\d+ \| +(fsdp2\S*)", _run(program, "-X", "importtime"))
    return sorted(((int(us) / 1e6, name) for us, name in rows), reverse=True)[:number]


def main() -> None:
    parser = argparse.ArgumentParser(description="time of imports and of the command's help")
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    programs = {line: line for line in IMPORTS} | {
        f"fsdp2 {line}": COMMAND.format(arguments=line.split()) for line in COMMANDS
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            taken[name].append(seconds(program))
    width = max(map(len, programs))
    print(f"{'':{width}}  wall, s   CPU, s  above torch: wall      CPU")
    for name, times in taken.items():
        wall, cpu = (statistics.median(each) for each in zip(*times, strict=True))
        pairs = list(zip(times, taken[TORCH], strict=True))
        more, more_cpu = (statistics.median(a[i] - b[i] for a, b in pairs) for i in (0, 1))
        above = f"{more:18.3f}{more_cpu:9.3f}" if name in IMPORTS[1:] else ""
        print(f"{name:{width}}{wall:9.3f}{cpu:9.3f}{above}")
    print(f"\nfiles of `{OURS}` by their own time, ms:")
    for own, name in slowest(f"{TORCH}; {OURS}"):
        print(f"{1000 * own:7.1f}  {name}")


if __name__ == "__main__":
    main()
