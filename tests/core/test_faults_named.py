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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from fsdp2.guards.rank_agreement.store_exchange import name_ranks
from harness import cpu_only, fork_context, ours_only

pytestmark = [ours_only("names its own units"), cpu_only("processes and sockets")]

AFTER_S = 2.0
LIMIT_S = 120.0  # of the whole: such a machine would be very slow
CLONE_NEWNET = 0x40000000
FAULT_STEP = 2
# What a rank that has vanished is said to be, and one that is known to have ended.
VANISHED = "No sign of {ranks}: gone, stopped, or cut off; last {place}"
ENDED = "{ranks}: .*{place}, ended by {error}"


@dataclass(frozen=True)
class Scene:
    """What one process is told.

    Attributes:
        fault, moment: what happens to the victims, and where: "forward", "backward", "outside",
            "save".
        folder: in which ranks leave what they report.
        host: the name of the network namespace that is its host; "": that of the tests.
        port: of the store; 0: rank 0 has it, and writes its port into the folder.
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
        others = set(range(scene.world_size)) - set(scene.victims)
        told = [scene.folder / f"{rank}-remembers" for rank in others if not scene.port]
        while not all(path.exists() for path in told):  # they can ask nobody afterwards
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
    store = store_of(scene)
    dist.init_process_group("gloo", store=store, rank=scene.rank, world_size=scene.world_size)
    victim = Victim(scene)
    model: Any = nn.Sequential(*(Layer(victim) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)

    def tell(report: HangReport) -> None:
        if victim.step < FAULT_STEP:
            return  # a machine that is slow to start
        if not scene.port and report.store_silent_s is None:
            return  # one that is so slow that the others wait before the fault
        path = scene.folder / f"{scene.rank}-report"
        path.with_suffix(".part").write_text(str(report))
        path.with_suffix(".part").rename(path)
        time.sleep(LIMIT_S)  # or the others would lose this one

    on_hang = tell if scene.on_hang == "tell" else scene.on_hang
    try:
        with watch_hangs(model, after_s=AFTER_S, on_hang=on_hang), remembering(scene):
            train(scene, model, victim)
    finally:
        time.sleep(LIMIT_S * (scene.rank in scene.victims))  # others wait, no connection breaks


@contextmanager
def remembering(scene: Scene) -> Iterator[None]:
    """Leaves a file as soon as this rank keeps where all victims are."""
    remember = watch_hangs._remember

    def and_tell(self: Any) -> None:
        remember(self)
        places = [self._at_store.get(rank) for rank in scene.victims]
        if all(place is not None and "fault_here" in place.at for place in places):
            (scene.folder / f"{scene.rank}-remembers").touch()

    with mock.patch.object(watch_hangs, "_remember", and_tell):
        yield


def store_of(scene: Scene) -> Any:
    """The group's store; in the process of rank 0, if no other has it, as with ``env://``."""
    if scene.port:
        return dist.TCPStore(scene.address, scene.port, is_master=False)
    path, part = scene.folder / "port", scene.folder / "port.part"
    if scene.rank == 0:
        server = dist.TCPStore(scene.address, 0, is_master=True, wait_for_workers=False)
        part.write_text(str(server.port))
        part.rename(path)
        return server
    (port,) = until_there(scene.folder, ["port"], [])
    return dist.TCPStore(scene.address, int(port), is_master=False)


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
    on: list[Host] | None = None, has_store: bool = False, **more: Any,
) -> Iterator[list[Any]]:  # fmt: skip
    """The ranks of a scene, and the store as the last process: on a host of its own.

    Args:
        has_store: rank 0 has the store, and the last process does nothing.
    """
    fork = fork_context()
    mine, its = fork.Pipe()
    place = on[0 if has_store else -1].name if on else ""
    address = on[0 if has_store else -1].address if on else "127.0.0.1"
    server = fork.Process(target=serve, args=(its, place, address))
    processes = [server]
    server.start()
    try:
        port = 0 if has_store else mine.recv()
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


def among(rank: int) -> str:
    """A pattern for ranks that are named, this one among them: each may be at a line of its own."""
    return rf"ranks? ([0-9]+, )*{rank}(, [0-9]+)*"


def check(text: str, victims: tuple[int, ...], moment: str, error: str = "") -> None:
    """That a report names the victims, and where they were."""
    place = rf"{PLACES[moment]}, at test_faults_named.py:\d+ in fault_here"
    for victim in victims:
        expected = VANISHED.format(ranks=among(victim), place=place)
        if error:
            expected = ENDED.format(ranks=f"Rank {victim}", place=place, error=error)
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


# Where a rank was last whose store ended while it trained.
TRAINED = r"(in \w+ of unit '[^']+'|outside of the model), step \d+, at test_faults_named.py:\d+ in"


def rank_of_agent(folder: Path) -> None:
    """A rank that torchrun has started: trains until it is told that the agent is dead."""
    dist.init_process_group("gloo")
    rank, victim = dist.get_rank(), int(os.environ["VICTIM"])
    model: Any = nn.Sequential(*(Layer(lambda moment: None) for _ in range(3)))
    for module in (*model, model):
        fully_shard(module)

    def tell(report: HangReport) -> None:
        if (folder / "go-on").exists():
            path = folder / f"{rank}-report"
            path.with_suffix(".part").write_text(str(report))
            path.with_suffix(".part").rename(path)

    def stop_here() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with watch_hangs(model, after_s=AFTER_S, on_hang=tell) as hangs:
        while True:
            model(torch.ones(2, 8)).sum().backward()
            if 0 in hangs._at_store:  # what it knows of the ranks on the store's host
                (folder / f"{rank}-knows").write_text(str(os.getpid()))
            if rank == victim and (folder / "go-on").exists():
                stop_here()


def check_store(text: str, victims: tuple[int, ...], moment: str, with_: tuple[int, ...]) -> None:
    """That a report names those that are lost with the store, and where they were."""
    assert re.match(rf"Rank \d has (waited|lost) .*({WAITS[moment]})", text), text
    silent = r"The store of the process group has not answered for \d+ s "
    there = f"{name_ranks(with_)}"
    assert re.search(rf"{silent}\([0-9.]+:\d+ on host \S+, with {there}\)", text), text
    place = rf"{PLACES[moment]}, at test_faults_named.py:\d+ in fault_here"
    for victim in victims:
        before = rf"Before that, {among(victim)} on the store's host: {place}"
        assert re.search(before, text), f"{before!r} is not in {text!r}"


def test_rank_0_dies_and_with_it_the_store(tmp_path: Path) -> None:
    """Nobody can be asked any more: what rank 0 wrote last is kept by the others."""
    with stage(tmp_path, "killed", "backward", 2, (0,), has_store=True) as processes:
        for text in reports(tmp_path, 2, (0,), processes):
            check_store(text, (0,), "backward", (0, 1))


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("ends", ["processes", "power"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_host_of_rank_0_dies_and_with_it_the_store(
    tmp_path: Path, moment: str, ends: str
) -> None:
    """Two ranks on each of two hosts. Where the power fails, no connection is closed either."""
    with (
        hosts(2) as (first, second),
        stage(
            *(tmp_path, "store dies", moment, 4, (0, 1), [first, first, second, second]),
            has_store=True,
        ) as processes,
    ):
        until_there(tmp_path, ["0-there", "1-there"], processes)
        if ends == "power":
            first.cut()
        for process in processes[:2]:
            process.kill()
        for text in reports(tmp_path, 4, (0, 1), processes):
            check_store(text, (0, 1), moment, (0, 1))
            assert "its host is gone, or this one is cut off" in text


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("victim", [0, 1])
def test_the_agent_of_a_host_dies(tmp_path: Path, victim: int) -> None:
    """torchrun on each of two hosts, SIGKILL of one: its rank trains on, and then is stopped.

    The agent of host 0 has the group's store. With the other one only the rank is missing.
    """
    with hosts(2) as on, ExitStack() as stack:
        agents = []
        for number, host in enumerate(on):
            options = f"--nnodes=2 --nproc-per-node=1 --node-rank={number} --master-port=29511"
            command = [*options.split(), f"--master-addr={on[0].address}", __file__, str(tmp_path)]
            environment = host.environment(VICTIM=str(victim), PATH=os.environ["PATH"])
            stack.callback(host.kill)
            log = stack.enter_context((tmp_path / f"{number}-printed").open("w"))
            agents.append(
                subprocess.Popen(
                    host.python("-m", "torch.distributed.run", *command),
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
        pids = until_there(tmp_path, ["0-knows", "1-knows"], [])
        agents[victim].kill()  # (`ip netns exec` has become torchrun: the same process)
        agents[victim].wait()
        os.kill(int(pids[victim]), 0)  # its rank lives on
        (tmp_path / "go-on").touch()
        (text,) = until_there(tmp_path, [f"{1 - victim}-report"], [])
        if victim == 0:
            assert re.search(r"The store .* has not answered for \d+ s \(\S+:29511 on host ", text)
            last = rf"with rank 0\).*\nBefore that, rank 0 on the store's host: {TRAINED}"
        else:
            last = f"No sign of rank 1: gone, stopped, or cut off; last {TRAINED}"
        assert re.search(last, text), text


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


if __name__ == "__main__":
    rank_of_agent(Path(sys.argv[1]))
