"""Ranks of one benchmark on several hosts (`benchmarks.hosts`), whose links have limited speed.

A benchmark starts itself once per rank, each on its host; rank 0 writes what all have measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import machine
from .hosts import Host, hosts, why_not
from .ranks import COLLECTIVE_TIMEOUT
from .report import number

PORT = 29511


def add_options(parser: argparse.ArgumentParser, speeds: Iterable[str], *, rounds: int) -> None:
    """What every such benchmark is told, and what it tells its ranks."""
    speeds = list(speeds)
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help="turns of each variant"
    )
    parser.add_argument("--speeds", nargs="+", default=speeds, choices=speeds)
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    parser.add_argument("--only-table", action="store_true", help="of the results that are there")
    parser.add_argument("--write-docs", action="store_true", help="put it into the docs")
    # Of ranks.
    parser.add_argument("--host", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--master", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)


def can_run(module: str) -> bool:
    """Whether there can be hosts here; if not, says why."""
    if reason := why_not():
        print(f"{module} cannot limit a link here: {reason}", file=sys.stderr)
    return not reason


def run(
    module: str, options: argparse.Namespace, *more: str, num_hosts: int, ranks_per_host: int
) -> dict[str, Any]:
    """Starts the ranks of ``module`` on hosts of their own; returns the answer."""
    with hosts(num_hosts) as made:
        return run_on(made, module, options, *more, ranks_per_host=ranks_per_host)


def run_on(
    made: Sequence[Host],
    module: str,
    options: argparse.Namespace,
    *more: str,
    ranks_per_host: int,
    prefixes: Sequence[Sequence[str]] = (),
) -> dict[str, Any]:
    """Starts the ranks of ``module`` on these hosts, told ``more`` too; returns the answer.

    Args:
        prefixes: of each host, a command that is to run the ranks' command (``taskset``, say).
    """
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        answer = Path(folder) / "answer.json"
        common = ["--answer", str(answer), "--rounds", str(options.rounds)]
        common += ["--master", made[0].address, "--speeds", *options.speeds, *more]
        processes = []
        for rank in range(len(made) * ranks_per_host):
            on = rank // ranks_per_host
            host, prefix = made[on], prefixes[on] if prefixes else ()
            mine = ["--rank", str(rank), "--host", host.name, host.address]
            # As torchrun says it: what "hybrid" takes for a node.
            environment = host.environment(LOCAL_WORLD_SIZE=str(ranks_per_host))
            command = host.command(*prefix, sys.executable, "-m", module, *mine, *common)
            processes.append(subprocess.Popen(command, cwd=machine.REPOSITORY, env=environment))
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(answer.read_text())


def begin_rank(options: argparse.Namespace, num_ranks: int) -> Host:
    """In a rank: makes the default group; returns the rank's host."""
    torch.set_num_threads(1)
    store = dist.TCPStore(options.master, PORT, is_master=options.rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT
    )
    return Host(*options.host)


def end_rank(options: argparse.Namespace, answer: Any) -> None:
    """In a rank: that of rank 0 is the answer of all."""
    if options.rank == 0:
        options.answer.write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def sent_bytes() -> int:
    """What this host has sent, as the kernel counts."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def ratios(seconds: list[float], base: list[float]) -> list[float]:
    """Round by round."""
    return [mine / theirs for mine, theirs in zip(seconds, base, strict=True)]


def time_cell(seconds: list[float], base: list[float] | None, *, spread: bool = True) -> str:
    """Milliseconds, and the ratio to ``base``; with its range if ``spread``."""
    cell = number(1e3 * statistics.median(seconds))
    if base is not None:
        found = ratios(seconds, base)
        cell += f", {statistics.median(found):.2f}"
        if spread:
            cell += f" ({min(found):.2f} to {max(found):.2f})"
    return cell
