"""What a result depends on besides the code: versions, machine, commit, load."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fsdp2

REPOSITORY = Path(__file__).resolve().parent.parent
# Where the code was copied to without its history, whoever runs it says which commit it is.
COMMIT = "FSDP2_COMMIT"
# Paths, for git, of what a result depends on. Results and their table are none of it.
CODE = ("fsdp2", "benchmarks", *(f":(exclude)benchmarks/{p}" for p in ("results", "README.md")))


def describe() -> dict[str, Any]:
    """Date, commit, versions and machine of this run, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get(COMMIT) or git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(git("status", "--porcelain", "--", *CODE)),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fsdp2": fsdp2_version(),
            # Whose function it is: shows at once if something else goes by the name of fsdp2.
            "fully_shard_from": fsdp2.fully_shard.__module__,
            "system": f"{platform.system()} {platform.release()}",
        },
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "threads_per_rank": 1,
            "load_average_before": os.getloadavg()[0],
        },
    }


def git(*arguments: str) -> str | None:
    """The output of a git command in this repository; None where there is no answer."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def fsdp2_version() -> str | None:
    """The version of the installed package; None when it runs from a checkout."""
    try:
        return importlib.metadata.version("fsdp2")
    except importlib.metadata.PackageNotFoundError:
        return getattr(fsdp2, "__version__", None)


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
