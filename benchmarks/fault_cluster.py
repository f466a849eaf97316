"""Two hosts that train elastically, a third that has the store, and faults to inject into them."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .hosts import Host

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
RANKS_PER_HOST = 2
DISK_MB = 48  # of the file system that holds the checkpoints
MEMORY_MB = 16  # of that of each host which holds the snapshots
Heal = Callable[[], None]

# A model so small that a fault costs little else than the start of processes.
OPTIONS = (
    *("--dim", "32", "--hidden", "64", "--heads", "2", "--layers", "2", "--length", "32"),
    *("--elastic", "--global-batch", "10", "--batch", "2"),
    *("--save-every", "20", "--snapshot-every", "2"),
    *("--eval-bytes", "2048", "--sample-bytes", "4"),
)
HANG_AFTER_S = 5.0


@dataclass
class Cluster:
    """The processes of one run.

    Attributes:
        hosts: those that train, and the one of the store.
        out: the folder of the run.
        logs: one for what the processes print: a full disk is no fault of theirs.
        options: of train_lm.py, which an undisturbed run has, too.
        watching: more of them.
        memory: for each host that trains its folder for snapshots, emptied when it dies.
    """

    hosts: list[Host]
    out: Path
    logs: Path
    options: tuple[str, ...]
    memory: dict[str, Path]
    watching: tuple[str, ...] = ()
    port: int = 29500
    started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def training(self) -> list[Host]:
        return self.hosts[:-1]

    def start_store(self) -> None:
        host = self.hosts[-1]
        script = str(EXAMPLES / "clusters" / "store.py")
        self._start(host, host.python(script, "--port", str(self.port)))

    def start(self, host: Host) -> None:
        """A host as it comes up: the script that every host runs; not if it is up."""
        running = self.started.get(host.name)
        if running is not None and running.poll() is None:
            return
        script = str(EXAMPLES / "clusters" / "elastic.sh")
        folder = str(self.memory[host.name])
        options = (*self.options, *self.watching, "--out", str(self.out))
        snapshots = ("--snapshot-dir", folder, "--snapshot-host", host.name)
        self._start(
            host,
            host.command("bash", script, str(EXAMPLES / "train_lm.py"), *options, *snapshots),
            STORE=self.hosts[-1].address,
            PORT=str(self.port),
            ADDRESS=host.address,
            RANKS=str(RANKS_PER_HOST),
            PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            CUDA_VISIBLE_DEVICES="",
            PYTHONFAULTHANDLER="1",
        )

    def _start(self, host: Host, command: list[str], **variables: str) -> None:
        with (self.logs / f"{host.name}.log").open("ab") as log:
            self.started[host.name] = subprocess.Popen(
                command, env=host.environment(**variables), stdout=log, stderr=log
            )

    def end(self) -> None:
        for host in self.hosts:
            host.kill()
        for process in self.started.values():
            process.wait()

    def show_stacks(self) -> None:
        """Have all ranks write into the log where they are, and end."""
        for host in self.training:
            for pid in self.workers(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
        time.sleep(1)

    def kill(self, host: Host) -> None:
        host.kill()
        self.started[host.name].wait()
        for path in self.memory[host.name].iterdir() if host.name in self.memory else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def workers(self, host: Host) -> list[int]:
        """The ids of the ranks of a host."""
        found = []
        for pid in host.processes():
            with suppress(OSError, IndexError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"python" in command[0] and command[2].endswith(b"train_lm.py"):
                    found.append(pid)
        return found

    def agent(self, host: Host) -> int | None:
        for pid in host.processes():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"torchrun\0" in command and not command.startswith(b"bash"):
                    return pid
        return None

    # -- what it says ---------------------------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        return read_rows(self.out / "sessions.jsonl")

    def losses(self) -> list[dict[str, Any]]:
        return read_rows(self.out / "losses.jsonl")

    def last_step(self) -> int:
        return int((self.losses() or [{"step": 0}])[-1]["step"])

    def commit(self) -> int:
        """The step of the newest checkpoint that is whole; 0 if there is none."""
        from fsdp2.checkpoint import CheckpointError, peek

        with suppress(CheckpointError, OSError):
            return peek(self.out / "checkpoints").step
        return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# -- faults ---------------------------------------------------------------------------------------
# Each is injected, and returns how it is healed; None: by those that train.


def host_dies(cluster: Cluster, chance: random.Random) -> Heal | None:
    """SIGKILL of all processes of a host, its agent too; its replacement comes later."""
    host = chance.choice(cluster.training)
    cluster.kill(host)
    return lambda: cluster.start(host)


def all_hosts_die(cluster: Cluster, chance: random.Random) -> Heal | None:
    """The same of all hosts, as when the power fails: what they had in memory is gone."""
    for host in cluster.training:
        cluster.kill(host)

    def heal() -> None:
        for host in cluster.training:
            cluster.start(host)

    return heal


def worker_dies(cluster: Cluster, chance: random.Random) -> Heal | None:
    """SIGKILL of one rank, as by the kernel when a host has no memory left."""
    send(cluster, chance, signal.SIGKILL)
    return None


def worker_stops(cluster: Cluster, chance: random.Random) -> Heal | None:
    """SIGSTOP of one rank: it breaks no connection."""
    send(cluster, chance, signal.SIGSTOP)
    return None


def agent_dies(cluster: Cluster, chance: random.Random) -> Heal | None:
    """SIGKILL of the torchrun of a host; its ranks live on as orphans."""
    pid = cluster.agent(chance.choice(cluster.training))
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return None


def link_is_cut(cluster: Cluster, chance: random.Random) -> Heal | None:
    """A host that nobody reaches: no connection is closed. Its link comes back later."""
    host = chance.choice(cluster.training)
    host.cut()
    return host.mend


def store_dies(cluster: Cluster, chance: random.Random) -> Heal | None:
    """SIGKILL of the store of the rendezvous, which is started again, empty."""
    cluster.kill(cluster.hosts[-1])
    return cluster.start_store


def disk_fills(cluster: Cluster, chance: random.Random) -> Heal | None:
    """No byte left where checkpoints and the log are written; later there is room again."""
    return fill(cluster.out)


def memory_fills(cluster: Cluster, chance: random.Random) -> Heal | None:
    """No byte left where a host keeps its snapshots; later there is room again."""
    return fill(cluster.memory[chance.choice(cluster.training).name])


def fill(folder: Path) -> Heal:
    """Leave no byte of its file system; returns what makes room again."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(2**16))
    with suppress(OSError), filler.open("ab", buffering=0) as file:
        while True:
            file.write(b"0")
    return lambda: filler.unlink(missing_ok=True)


def memory_ends(cluster: Cluster, chance: random.Random) -> Heal | None:
    """One rank gets no more memory from the system."""
    pid = one_worker(cluster, chance)
    if pid is not None:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, (2**20, 2**20))
    return None


FAULTS: dict[str, Callable[[Cluster, random.Random], Heal | None]] = {
    "host dies": host_dies,
    "all hosts die": all_hosts_die,
    "link cut": link_is_cut,
    "worker dies": worker_dies,
    "worker stops": worker_stops,
    "agent dies": agent_dies,
    "disk full": disk_fills,
    "memory full": memory_fills,
    "no memory": memory_ends,
    "store dies": store_dies,
}


def one_worker(cluster: Cluster, chance: random.Random) -> int | None:
    found = [pid for host in cluster.training for pid in cluster.workers(host)]
    return chance.choice(found) if found else None


def send(cluster: Cluster, chance: random.Random, number: signal.Signals) -> None:
    pid = one_worker(cluster, chance)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
