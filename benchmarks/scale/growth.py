"""What single calls of the library cost by the number of ranks or of parameters.

Counted where that can be: requests to the store and their bytes, and instructions of Python's
virtual machine, which are the same on every machine. Each curve is a function of n that returns its
counts, with default points; the slope of a curve on logarithmic axes is the power of n with which
it grows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2 import clip_grad_norm_, fully_shard
from fsdp2.describe import hangs
from fsdp2.describe.whereabouts import Whereabouts
from fsdp2.guards.rank_agreement.store_exchange import StoreExchange
from fsdp2.planning import Cluster, Workload, plan
from fsdp2.snapshots import meeting
from fsdp2.snapshots.choice import Generation, PartName, choose
from fsdp2.snapshots.memory_snapshots import _parsed

from .curves import Counted

RANKS_PER_HOST = 8


def instructions(call: Callable[[], object]) -> int:
    """How many of Python's instructions it takes, without those of C that they call."""
    num = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num
        frame.f_trace_opcodes = True
        num += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return num


class CountingStore:
    """A store in this process that counts what its clients ask for; keys and values are bytes."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.requests = self.bytes = self.most_keys = 0

    def _asked(self, keys: Sequence[str], *values: bytes) -> None:
        self.requests += 1
        self.most_keys = max(self.most_keys, len(keys))
        self.bytes += sum(map(len, keys)) + sum(map(len, values))

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()
        self._asked([key], self.held[key])

    def append(self, key: str, value: str) -> None:
        self.held[key] = self.held.get(key, b"") + value.encode()
        self._asked([key], value.encode())

    def add(self, key: str, num: int) -> int:
        self.held[key] = str(int(self.held.get(key, b"0")) + num).encode()
        self._asked([key], self.held[key])
        return int(self.held[key])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self.held[key] for key in keys]
        self._asked(keys, *found)
        return found

    def check(self, keys: Sequence[str]) -> bool:
        self._asked(keys)
        return all(key in self.held for key in keys)

    def wait(self, keys: Sequence[str], timeout: object) -> None:
        if not self.check(keys):
            raise RuntimeError("timeout")

    def delete_key(self, key: str) -> bool:
        self._asked([key])
        return self.held.pop(key, None) is not None


def counted(store: CountingStore, call: Callable[[], object]) -> tuple[int, int]:
    """Requests and bytes of a call."""
    before = store.requests, store.bytes
    call()
    return store.requests - before[0], store.bytes - before[1]


def first_forward(n: int) -> Counted:
    """All ranks compare their models before the first forward; the last that comes judges."""
    clients = exchanges(CountingStore(), n)
    topics = {"": {"units": "''"}, "values 0 of mesh dim 0": {"a": "b"}, "initial ": {"a": "b"}}
    store = clients[0]._store
    asked = [counted(store, lambda c=c: c.say(topics, "run")) for c in clients]  # type: ignore[misc]
    last = asked[-1]
    for i, client in enumerate(clients):
        requests, num_bytes = counted(store, client.hear)
        asked[i] = asked[i][0] + requests, asked[i][1] + num_bytes
    return {
        "requests of a rank": asked[0][0],
        "bytes of a rank": asked[0][1],
        "requests of the last": last[0],
        "bytes of the last": last[1],
        "keys of the longest request": store.most_keys,
        "requests": store.requests,
        "bytes": store.bytes,
    }


def late_rank(n: int) -> Counted:
    """One rank names those that do not come to the first forward, here one of all."""
    clients = exchanges(CountingStore(), n)
    for client in clients[:-1]:
        client.say({"": {}}, "run")
    requests, num_bytes = counted(clients[0]._store, clients[0]._missing)
    return {"requests": requests, "bytes": num_bytes}


def exchanges(store: CountingStore, n: int) -> list[Any]:
    """The ranks of a meeting, in this process."""
    ranks, made = tuple(range(n)), []
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(dist.distributed_c10d, "_get_default_group", return_value=store),
        mock.patch.object(dist, "get_rank", return_value=0),
    ):
        for rank in ranks:
            made.append(StoreExchange("first", ranks, 1.0))
            made[-1]._me, made[-1]._counts = rank, Counter()
    return made


def watched_hangs(n: int) -> Counted:
    """Each rank of `watch_hangs` tells where it is; after that one of them reads all, to report."""
    store = CountingStore()
    place = Whereabouts(
        12, "backward", 7, "layers.20.mlp", "the reduction of unit 'layers.20.mlp'",
        "train.py:128 in step",
    )  # fmt: skip
    watches: list[Any] = []
    for rank in range(n):
        watch: Any = hangs.watch_hangs.__new__(hangs.watch_hangs)
        watch._rank, watch._size, watch._beat, watch._store = rank, n, 0, store
        watches.append(watch)
    with mock.patch.object(hangs, "_server", return_value=("host", 1)):
        for watch in watches:
            watch._write(place)
            if watch._rank < RANKS_PER_HOST:
                watch._tell_at_store()
        watch = watches[-1]
        beat = counted(store, lambda: (watch._write(place), watch._remember()))
    report = counted(store, watch._read)
    # Its connection broke, and nobody says why for as long as it looks.
    watch._interval_s, watch._ended = hangs._LONGEST_S, "RuntimeError: connection closed"
    with mock.patch.object(hangs, "time", _QuickTime()):
        lost = counted(store, watch._find_lost)
    return {
        "requests of a beat": beat[0],
        "bytes of a beat": beat[1],
        "requests of a rank to read all": report[0],
        "bytes of a rank to read all": report[1],
        "requests of a rank that lost others": lost[0],
        "bytes of a rank that lost others": lost[1],
    }


class _QuickTime:
    """The module `time`, where nobody waits."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


def snapshot_choice(n: int) -> Counted:
    """A rank of `MemorySnapshots` begins a session, and finds which parts to fetch from where."""
    # Two snapshots of each rank, with a copy on the host beside its own.
    own = [rank // RANKS_PER_HOST for rank in range(n)]
    told: dict[str, list[tuple[str, str]]] = {}
    for rank, host in enumerate(own):
        for step in (10, 20):
            part = PartName(Generation(1, step, "00000000"), rank, n)
            for at in (host, host ^ 1):
                told.setdefault(f"host {at}", []).append((part.generation.name, part.name))

    def find(session: meeting.Session) -> None:
        choice = choose({folder: _parsed(found) for folder, found in told.items()})
        assert choice is not None
        assert len(session.origins(choice)) == n

    counts: Counted = {}
    with tempfile.TemporaryDirectory() as folder:
        made = []
        counts["instructions to meet"] = instructions(lambda: made.append(_session(folder, own)))
        counts["instructions to choose"] = instructions(lambda: find(made[0]))
        made[0].close()
    return counts


def _session(folder: str, hosts: list[int]) -> meeting.Session:
    """As rank 0 begins it, where all others tell what it tells, but for their host."""

    def told_by_all(about: str, value: str, ranks: tuple[int, ...]) -> list[str]:
        mine = json.loads(json.loads(value)["member"])
        shared = ("host", "machine", "folder")
        members = [
            mine | {"address": "10.0.0.1"} | dict.fromkeys(shared, f"host {host}") for host in hosts
        ]
        return [json.dumps({"error": "", "member": json.dumps(each)}) for each in members]

    with (
        mock.patch.object(meeting, "told_by_all", told_by_all),
        mock.patch.object(meeting, "said_by_first", lambda about, value, ranks: value),
    ):
        ranks = tuple(range(len(hosts)))
        return meeting.Session("growth", Path(folder), None, "127.0.0.1", 60.0, 0, ranks)


@contextmanager
def rank_of(world: int) -> Iterator[DeviceMesh]:
    """As rank 0 of so many, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def parameters(n: int, mesh: DeviceMesh, shard: Callable[..., object]) -> nn.Module:
    """A model of n parameters, in units of 100, and the root."""
    layers = [
        nn.Sequential(*(nn.ParameterList(torch.zeros(10, 8, 2).unbind()) for _ in range(10)))
        for _ in range(n // 100)
    ]
    for layer in layers:
        shard(layer, mesh=mesh)
    model = nn.Sequential(*layers)
    shard(model, mesh=mesh)
    return model


def sharding(n: int) -> Counted:
    """`fully_shard` of n parameters, in units of 100."""
    with rank_of(8) as mesh:
        parameters(100, mesh, fully_shard)
        return {"instructions": instructions(lambda: parameters(n, mesh, fully_shard))}


def sharding_in_worlds(world: int) -> Counted:
    """`fully_shard` of ten units of 100 parameters, as a rank of so many."""
    with rank_of(world) as mesh:
        parameters(100, mesh, fully_shard)
        return {"instructions": instructions(lambda: parameters(1000, mesh, fully_shard))}


def state_and_norm(n: int) -> Counted:
    """What a step and a save do with n parameters beside collectives."""
    with rank_of(8) as mesh:
        plain = parameters(n, mesh, lambda module, mesh: module)
        model = parameters(n, mesh, fully_shard)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        clip_grad_norm_(model.parameters(), 1.0)
        return {
            "plain state_dict instructions": instructions(plain.state_dict),
            "state_dict instructions": instructions(model.state_dict),
            "clip_grad_norm_ instructions": instructions(
                lambda: clip_grad_norm_(model.parameters(), 1.0)
            ),
        }


def planning(world: int) -> Counted:
    """`plan` of eight blocks for so many ranks: there are more meshes to choose from."""
    with torch.device("meta"):
        blocks = [
            nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(8)
        ]
        workload = Workload(nn.Sequential(*blocks), torch.empty(64, 1024))
    before = time.process_time()
    found = plan(workload, Cluster("h100", world))
    return {"candidates": len(found.outcomes), "cpu s": time.process_time() - before}


CURVES: dict[str, Callable[[int], Counted]] = {
    "snapshot choice": snapshot_choice,
    "first forward": first_forward,
    "late rank": late_rank,
    "watched hangs": watched_hangs,
    "sharding": sharding,
    "sharding in worlds": sharding_in_worlds,
    "state and norm": state_and_norm,
    "planning": planning,
}
POINTS: dict[str, tuple[int, ...]] = {
    "snapshot choice": (64, 256, 1024, 4096),
    "first forward": (16, 64, 256, 1024, 4096),
    "late rank": (16, 64, 256, 1024, 4096),
    "watched hangs": (16, 64, 256, 1024, 4096),
    "sharding": (100, 300, 1000, 3000),
    "sharding in worlds": (8, 64, 512, 4096),
    "state and norm": (100, 1000, 3000, 10_000),
    "planning": (8, 512, 4096, 16384),
}
