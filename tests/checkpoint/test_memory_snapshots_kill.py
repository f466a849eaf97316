"""Processes are killed, and hosts lost, at random moments: the run ends as if nothing had been."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import socket
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpoint_cases import adamw, build, train, whole_state
from checkpoint_crash import memory_folder
from fsdp2.checkpoint import MemorySnapshots
from harness import cpu_only, ours_only

pytestmark = [ours_only("snapshots in memory"), cpu_only("processes are killed")]

STEPS = 12
CONTEXT = multiprocessing.get_context("forkserver")
RANKS = 4


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run(root: Path, rank: int, port: int) -> None:
    """One rank, from its start to the end of training; two ranks on each host."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    host = f"host{rank // 2}"
    (root / host).mkdir(exist_ok=True)
    model = build("1d")
    optimizer = adamw(model)
    shots = MemorySnapshots("kill", every=2, directory=root / host, host=host)
    found = shots.restore(model=model, optimizer=optimizer)
    with open(root / "log", "a") as log:
        log.write(f"{rank} {found.step if found else -1} {found.lost_steps if found else 0}\n")
    for step in range(found.step + 1 if found else 0, STEPS):
        train(model, optimizer, range(step, step + 1))
        shots.after_step(step, model=model, optimizer=optimizer)
        time.sleep(0.005)
    state = whole_state(model, optimizer)
    shots.close()
    if rank == 0:
        torch.save(state, root / "end.tmp")
        (root / "end.tmp").rename(root / "end")
    dist.barrier()
    dist.destroy_process_group()


def begin(root: Path) -> list[BaseProcess]:
    port = free_port()
    # Not forks of this process, in which autograd may have threads.
    made = [CONTEXT.Process(target=run, args=(root, rank, port)) for rank in range(RANKS)]
    for process in made:
        process.start()
    return made


def exits(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    exits(processes)


@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_kills_at_random_moments(kills: int) -> None:
    source = random.Random(kills)
    with memory_folder() as undisturbed:
        began = time.monotonic()
        assert exits(begin(undisturbed)) == [0] * RANKS
        took_s = time.monotonic() - began
        expected = torch.load(undisturbed / "end")
        assert not list(undisturbed.glob("host*/*"))
    while kills:
        with memory_folder() as root:
            lost: list[str] = []
            while True:
                ranks = begin(root)
                if not kills:
                    break
                time.sleep(source.uniform(0.1, 1.1) * took_s)
                if (root / "end").exists():
                    break
                kills -= 1
                kill(ranks)
                # Only one: were both copies lost, training would begin anew, which ends alike.
                if source.random() < 0.4:
                    lost.append(source.choice(["host0", "host1"]))
                    shutil.rmtree(root / lost[-1], ignore_errors=True)
            assert exits(ranks) == [0] * RANKS
            state = torch.load(root / "end")
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(state[name], value), (name, lost, (root / "log").read_text())
            assert not list(root.glob("host*/*"))
