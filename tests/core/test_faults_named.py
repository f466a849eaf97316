"""A rank that never arrives is named on the others, for each fault that takes one away.

Every rank is a process of its own here, as they are killed, stopped, or cut off. The last ones are
the victims: in the middle of a step each waits until it has written where it is, and then has its
fault. The others must tell its number, its phase and unit, and this place.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.hosts import Host, hosts, why_not
from fsdp2 import HangReport, fully_shard, watch_hangs
from fsdp2.checkpoint import Checkpointer
from fsdp2.checkpoint.saving.job import SaveJob
from harness import cpu_only, fork_context, ours_only

pytestmark = [ours_only("names its own units"), cpu_only("processes and sockets")]

AFTER_S = 2.0
LIMIT_S = 120.0  # of the whole: such a machine would be very slow
CLONE_NEWNET = 0x40000000
FAULT_STEP = 2
# What a rank that has vanished is said to be, and one that is known to have ended.
VANISHED = "Nothing is heard of {ranks}: gone, stopped, or cut off; last {place}"
ENDED = "{ranks}: .*{place}, ended by {error}"


@dataclass(frozen=True)
class Scene:
    """What one process is told.

    Attributes:
        fault, moment: what happens to the victims, and where: "forward", "backward", "outside",
            "save".
        folder: in which ranks leave what they report.
        host: the name of the network namespace that is its host; "": that of the tests.
        on_hang: as of `watch_hangs`; "tell": a function that writes the report down.
    """

    fault: str
    moment: str
    rank: int
    world_size: int
    victims: tuple[int, ...]
    address: str
    port: int
    folder: Path
    host: str = ""
    on_hang: str = "tell"


class Spot(torch.autograd.Function):
    """Identity that calls something in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moment: str, call: Callable[[str], None]) -> Any:
        ctx.call = call
        call("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call("backward")
        return grad, None, None


class Layer(nn.Module):
    def __init__(self, call: Callable[[str], None]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(8, 8), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spot.apply(self.linear(x).relu(), "", self.call)


class Victim:
    """The fault of this rank, at its moment."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.step = scene, 0

    def __call__(self, moment: str) -> None:
        scene = self.scene
        if scene.rank in scene.victims and self.step == FAULT_STEP and moment == scene.moment:
            self.fault_here()

    def fault_here(self) -> None:
        scene, store = self.scene, dist.distributed_c10d._get_default_store()
        key = f"fsdp2/hangs/{scene.rank}"
        while "fault_here" not in json.loads(store.get(key))[1]["at"]:
            time.sleep(0.01)
        (scene.folder / f"{scene.rank}-there").touch()
        if scene.fault in ("killed", "host dies"):
            # All processes of a host at once: none before the others are there, too.
            while not all((scene.folder / f"{r}-there").exists() for r in scene.victims):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        elif scene.fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif scene.fault == "no memory":
            torch.empty(2**60)
        elif scene.fault == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(LIMIT_S)  # the tests cut its link, or kill the store


def take_part(scene: Scene) -> None:
    """A process of its own: trains until somebody has a fault."""
    with (scene.folder / f"{scene.rank}-printed").open("w") as file:
        os.dup2(file.fileno(), 2)
    if scene.host:
        with open(f"/run/netns/{scene.host}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.TCPStore(scene.address, scene.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=scene.rank, world_size=scene.world_size)
    victim = Victim(scene)
    model: Any = nn.Sequential(*(Layer(victim) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)

    def tell(report: HangReport) -> None:
        if victim.step < FAULT_STEP:
            return  # a machine that is slow to start
        path = scene.folder / f"{scene.rank}-report"
        path.with_suffix(".part").write_text(str(report))
        path.with_suffix(".part").rename(path)
        time.sleep(LIMIT_S)  # or the others would lose this one

    on_hang = tell if scene.on_hang == "tell" else scene.on_hang
    try:
        with watch_hangs(model, after_s=AFTER_S, on_hang=on_hang):
            train(scene, model, victim)
    finally:
        time.sleep(LIMIT_S * (scene.rank in scene.victims))  # others wait, no connection breaks


def train(scene: Scene, model: Any, victim: Victim) -> None:
    checkpoints = Checkpointer(scene.folder) if scene.moment == "save" else None
    write = SaveJob.write

    def write_or_fault(self: Any, read: Any = None) -> None:
        victim("save")
        write(self, read)

    for step in (1, FAULT_STEP):
        victim.step = step
        victim("outside")
        model(torch.ones(2, 8)).sum().backward()
        if checkpoints is not None:
            with mock.patch.object(SaveJob, "write", write_or_fault):
                is_victim = scene.rank in scene.victims  # it writes in the thread that is watched
                checkpoints.save(step, model=model, blocking=is_victim)
                checkpoints.close()
    dist.barrier()


@contextmanager
def stage(
    tmp_path: Path, fault: str, moment: str, world_size: int, victims: tuple[int, ...],
    on: list[Host] | None = None, **more: Any,
) -> Iterator[list[Any]]:  # fmt: skip
    """The ranks of a scene, and the store as the last process: on a host of its own."""
    fork = fork_context()
    mine, its = fork.Pipe()
    place = on[-1].name if on else ""
    address = on[-1].address if on else "127.0.0.1"
    server = fork.Process(target=serve, args=(its, place, address))
    processes = [server]
    server.start()
    try:
        port = mine.recv()
        for rank in range(world_size):
            host = on[rank].name if on else ""
            scene = Scene(
                fault, moment, rank, world_size, victims, address, port, tmp_path, host, **more
            )
            processes.append(fork.Process(target=take_part, args=(scene,)))
            processes[-1].start()
        yield [*processes[1:], server]
    finally:
        for process in processes:
            process.kill()
            process.join()


def serve(port: Any, host: str, address: str) -> None:
    if host:
        with open(f"/run/netns/{host}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
    server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port.send(server.port)
    time.sleep(2 * LIMIT_S)


def until_there(tmp_path: Path, names: list[str], processes: list[Any]) -> list[str]:
    """What was written into these files, as soon as all are there."""
    end = time.monotonic() + LIMIT_S
    while not all((tmp_path / name).exists() for name in names):
        if time.monotonic() > end:
            said = {path.name: path.read_text() for path in tmp_path.glob("*-printed")}
            pytest.fail(f"not all of {names}: {said}, {[p.exitcode for p in processes]}")
        time.sleep(0.02)
    return [(tmp_path / name).read_text() for name in names]


def reports(tmp_path: Path, world_size: int, victims: tuple[int, ...], now: list[Any]) -> list[str]:
    others = [r for r in range(world_size) if r not in victims]
    return until_there(tmp_path, [f"{rank}-report" for rank in others], now)


def check(text: str, victims: tuple[int, ...], moment: str, error: str = "") -> None:
    """That a report names the victims, and where they were."""
    ranks = f"rank {victims[0]}" if len(victims) == 1 else f"ranks {', '.join(map(str, victims))}"
    place = rf"{PLACES[moment]}, at test_faults_named.py:\d+ in fault_here"
    expected = VANISHED.format(ranks=ranks, place=place)
    if error:
        expected = ENDED.format(ranks=ranks.capitalize(), place=place, error=error)
    assert re.search(expected, text), f"{expected!r} is not in {text!r}"
    assert re.match(rf"Rank \d has (waited|lost) .*({WAITS[moment]})", text), text


# In which unit the victims are, and what the others wait for.
PLACES = {
    "forward": f"in forward of unit '0', step {FAULT_STEP}",
    "backward": f"in backward of unit '2', step {FAULT_STEP}",
    "outside": f"outside of the model, step {FAULT_STEP}",
    "save": f"outside of the model, step {FAULT_STEP + 1}",
}
WAITS = {
    "forward": r"the all-gather of unit '\d'",
    "backward": r"the (all-gather|reduction) of unit '\d'",
    "outside": r"the all-gather of unit '(\d|\(root\))'",
    "save": "all ranks to do their part of a checkpoint",
}
MOMENTS = tuple(PLACES)


def vanish(tmp_path: Path, fault: str, moment: str, world_size: int, victims: Any) -> None:
    with stage(tmp_path, fault, moment, world_size, victims) as processes:
        for text in reports(tmp_path, world_size, victims, processes):
            check(text, victims, moment)


def test_ranks_of_a_host_that_dies_in_backward(tmp_path: Path) -> None:
    vanish(tmp_path, "host dies", "backward", 4, (2, 3))


def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    """The others wait in `Checkpointer.close`, which by itself would take ten minutes."""
    vanish(tmp_path, "killed", "save", 2, (1,))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["host dies", "stopped"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_that_vanish(tmp_path: Path, fault: str, moment: str) -> None:
    vanish(tmp_path, fault, moment, 4, (2, 3) if fault == "host dies" else (3,))


ERRORS = {
    "no memory": "RuntimeError: .*allocate",
    "disk full": "OSError: .*No space left on device",
}


def end(tmp_path: Path, fault: str, moment: str) -> None:
    with stage(tmp_path, fault, moment, 2, (1,)) as processes:
        (text,) = reports(tmp_path, 2, (1,), processes)
        check(text, (1,), moment, ERRORS[fault])


def test_a_rank_that_has_no_memory_in_forward(tmp_path: Path) -> None:
    """It says so; that its process lives on leaves the others waiting."""
    end(tmp_path, "no memory", "forward")


@pytest.mark.long
@pytest.mark.parametrize("fault", list(ERRORS))
@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_that_end_by_an_error(tmp_path: Path, fault: str, moment: str) -> None:
    end(tmp_path, fault, moment)


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_store_dies_while_a_rank_is_waited_for(tmp_path: Path, moment: str) -> None:
    with stage(tmp_path, "store dies", moment, 2, (1,)) as processes:
        until_there(tmp_path, ["1-there"], processes)
        processes[-1].kill()
        (text,) = reports(tmp_path, 2, (1,), processes)
        assert re.match(rf"Rank 0 has (waited|lost) .*({WAITS[moment]})", text), text
        assert re.search(r"The store of the process group has not answered for \d+ s \(127", text)


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_link_that_is_cut(tmp_path: Path, moment: str) -> None:
    """That of the host with the last rank; the store is on a third one."""
    with (
        hosts(3) as on,
        stage(tmp_path, "link cut", moment, 2, (1,), on) as processes,
    ):
        until_there(tmp_path, ["1-there"], processes)
        on[1].cut()
        (text,) = reports(tmp_path, 2, (1,), processes)
        check(text, (1,), moment)


@pytest.mark.long
def test_who_reports_first_and_ends_is_not_to_blame(tmp_path: Path) -> None:
    """With "exit" the first of those that wait breaks the connections of the others."""
    with stage(tmp_path, "stopped", "forward", 4, (3,), on_hang="exit") as processes:
        for process in processes[:3]:
            process.join(LIMIT_S)
        assert not any(process.is_alive() for process in processes[:3])
        for rank in range(3):
            text = (tmp_path / f"{rank}-printed").read_text()
            text = text[text.index(f"Rank {rank} has") :]
            check(text, (3,), "forward")
