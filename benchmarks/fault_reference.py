"""What an undisturbed run gives that trains on the same numbers of ranks, step for step."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .fault_cluster import EXAMPLES, RANKS_PER_HOST, read_rows
from .hosts import Host

CLONE_NEWNET = 0x40000000
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "fsdp2.checkpoint", "fsdp2"])


@dataclass(frozen=True)
class Segment:
    """Steps ``first`` to ``last`` on ``world_size`` ranks."""

    first: int
    last: int
    world_size: int


def segments(sessions: Sequence[dict[str, Any]], last_step: int) -> list[Segment]:
    """Which steps count of those that each start has made. Pure.

    Args:
        sessions: rows of sessions.jsonl. What a start has done after the step from which a later
            one goes on is lost.

    Example:
        >>> rows = [(0, 4), (10, 2), (10, 4), (15, 2)]
        >>> segments([{"resumed_after": s, "world_size": w} for s, w in rows], 20)
        [Segment(first=1, last=15, world_size=4), Segment(first=16, last=20, world_size=2)]
    """
    kept: list[tuple[int, int]] = []
    for session in sessions:
        step = session["resumed_after"]
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, session["world_size"]))
    ends = [step for step, _ in kept[1:]] + [last_step]
    found: list[Segment] = []
    for (step, world_size), end in zip(kept, ends, strict=True):
        # A start on as many ranks as before must not be seen in the numbers.
        if found and end > step and found[-1].world_size == world_size:
            found[-1] = replace(found[-1], last=end)
        elif end > step:
            found.append(Segment(step + 1, end, world_size))
    return found


def train(out: Path, options: Sequence[str], parts: Sequence[Segment], on: Sequence[Host]) -> None:
    """Run `train_lm.py --elastic` on each of these numbers of ranks in turn.

    Args:
        on: hosts, for `RANKS_PER_HOST` each: sums between hosts are formed in another order than
            within one.

    Raises:
        RuntimeError: if a rank fails.
    """
    out.mkdir(parents=True)
    for part in parts:
        port = 20000 + part.first % 10000
        given = [*options, "--out", str(out), "--stop-at", str(part.last)]
        given += ["--snapshot-every", "0"]
        args = (part.world_size, port, on, given, out / "printed.txt")
        ranks = [
            _CONTEXT.Process(target=_rank, args=(rank, *args)) for rank in range(part.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(600)
        if any(process.exitcode for process in ranks):
            raise RuntimeError((out / "printed.txt").read_text()[-3000:])


def _rank(
    rank: int, world_size: int, port: int, on: Sequence[Host], options: list[str], printed: Path
) -> None:
    with open(f"/run/netns/{on[rank // RANKS_PER_HOST].name}") as namespace:
        if ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET):
            raise RuntimeError("cannot go to the network namespace")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % RANKS_PER_HOST),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
        "MASTER_ADDR": on[0].address,
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch.set_num_threads(1)
    sys.argv = [str(EXAMPLES / "train_lm.py"), *options]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")


def differences(out: Path, reference: Path, step: int) -> list[str]:
    """Where two runs differ: losses and norms with every digit, and the bytes of the weights."""
    from safetensors.torch import load_file

    found = []
    ours, theirs = (
        {row["step"]: row for row in read_rows(each / "losses.jsonl") if row["step"] <= step}
        for each in (out, reference)
    )
    differ = sorted(s for s in ours.keys() | theirs.keys() if ours.get(s) != theirs.get(s))
    if differ:
        first = differ[0]
        found.append(
            f"{len(differ)} of {len(theirs)} steps, the first: {json.dumps(ours.get(first))} "
            f"instead of {json.dumps(theirs.get(first))}"
        )
    for name in ("model.safetensors", "optim.safetensors"):
        files = [each / "checkpoints" / f"step-{step:06d}" / name for each in (out, reference)]
        missing = [str(file) for file in files if not file.exists()]
        if missing:
            found.append(f"missing: {', '.join(missing)}")
            continue
        a, b = (load_file(file) for file in files)
        wrong = [key for key in b if key not in a or not a[key].equal(b[key])]
        if wrong:
            found.append(f"{name}: {len(wrong)} of {len(b)} tensors, the first: {wrong[0]}")
    return found
