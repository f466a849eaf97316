"""Rank 0 raises while a thread of its exchange waits for messages, which end as its Python does.

Run as `python exit_while_exchanging.py FOLDER`: it imports once, and forks the three ranks of each
way, which end as a script of their own would. `FOLDER/WAY/exit-RANK` has the exit code of each,
`FOLDER/WAY/stderr-RANK` what it said.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.transport import pretended_hosts
from fsdp2.transports.host.exchange import Exchange
from fsdp2.transports.host.messages import Messages, RowGather
from fsdp2.transports.host.relays import HostRelays

WAYS = ["messages", "relay", "sum"]
NUM_RANKS = 3
CANNOT_READ = 77  # the exit code where processes may not read each other's memory


class Last:
    """Ends late: while it does, Python has no other threads any more."""

    def __init__(self, file: Path) -> None:
        # As globals are gone by then.
        self._calls = [lambda: open(file, "w").close(), lambda sleep=time.sleep: sleep(2.0)]

    def __del__(self) -> None:
        for call in self._calls:
            call()


def begin(way: str) -> object:
    """The collective part; then rank 0 begins what the others never do."""
    group = dist.group.WORLD
    assert group is not None
    ways: Messages | HostRelays = Messages(group)
    if way != "messages":
        with pretended_hosts([0, 0, 1]):
            found = Exchange(group, reads=True)._way
        if not isinstance(found, HostRelays):
            sys.exit(CANNOT_READ)
        ways = found
    dist.barrier()
    finish = None
    if way == "relay" and dist.get_rank() == 0:
        finish = ways.gather(RowGather(torch.zeros(3, 100), torch.ones(100)), 0)
    elif dist.get_rank() <= (way == "sum"):  # the sum of a host takes all of its ranks
        finish = ways.all_reduce([torch.ones(1 << 20)], 0)
    return ways, finish  # connections end with the first


def main(way: str, rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    kept: Any = SimpleNamespace(begun=begin(way))
    finalizing = folder / "finalizing"
    if rank == 0:
        sys.modules["kept"] = kept
        kept.last = Last(finalizing)
        time.sleep(1.0)  # until the host's sum is there, and the thread waits for the other one
        raise ValueError("planned")
    while not finalizing.exists():
        time.sleep(0.02)
    os._exit(0)  # which closes connections


def fork_ranks(folder: Path) -> tuple[str, int] | None:
    """Way and rank in a process that is forked; None in the first one, after all have ended."""
    started: dict[int, tuple[str, int]] = {}
    for way in WAYS:
        (folder / way).mkdir()
        for rank in range(NUM_RANKS):
            process = os.fork()
            if not process:
                return way, rank
            started[process] = way, rank
    while started:
        process, status = os.wait()
        way, rank = started.pop(process)
        (folder / way / f"exit-{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
    return None


if __name__ == "__main__":
    chosen = fork_ranks(Path(sys.argv[1]))
    if chosen is not None:
        own_folder = Path(sys.argv[1], chosen[0])
        with open(own_folder / f"stderr-{chosen[1]}", "w") as said:
            os.dup2(said.fileno(), 2)
        main(*chosen, own_folder)
