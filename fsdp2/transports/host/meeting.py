"""How the ranks of a group find out who is on whose host, and connect there.

In one all-gather of a few hundred bytes, each rank sends all others its host, its process, the
address of a secret and the name of a socket. A rank that can read the secrets of all others of its
host may read their memory. `host_links` posts and acknowledges on the sockets. After each step all
ranks report whether it worked, so that all get connections or none does.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...sharding.process_groups import timeout_of
from .cross_memory import host_id, read
from .topology import Places

# In the environment of a rank.
SWITCH = "FSDP2_CROSS_MEMORY"  # 0: its memory is not read, others send it messages instead
ORDER = "FSDP2_SUM_ORDER"  # "rank": its groups add in rank order, on however many hosts they are

_RECORD = 256  # bytes that ranks exchange to meet
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Met:
    """What the ranks of a group have found out.

    Attributes:
        hosts: the ranks of each host in order, hosts by their first rank; those that may not read
            the memory of others count as hosts of one rank.
        machines: by rank a number, the same for ranks of one host.
        in_rank_order: whether sums over several hosts are to be in rank order.
        pids, sockets: of the ranks of this host (sockets: of the others), by rank of the group.
    """

    hosts: Sequence[Sequence[int]]
    machines: Sequence[int]
    in_rank_order: bool
    pids: dict[int, int]
    sockets: dict[int, socket.socket]


def meet(group: dist.ProcessGroup) -> Met | Places:
    """Connect the ranks of each host; only where they are, if no two of them may read each other.

    Collective over the ranks of ``group``.
    """
    token = os.urandom(16)
    # At an address that others read once, to see whether they may.
    proof = ctypes.create_string_buffer(token, len(token))
    listener = None
    try:
        listener = _listen(token.hex(), group.size())
        may_read = os.environ.get(SWITCH, "1") != "0" and listener is not None
        order = os.environ.get(ORDER, "")
        mine = [host_id(), str(os.getpid()), str(ctypes.addressof(proof)), token.hex(), order]
        mine.append("reads" if may_read else "")
        everyone = [text.split("\n") for text in _all(group, "\n".join(mine))]
        machines = _numbers([each[0] for each in everyone])
        alone = tuple((rank,) for rank in range(group.size()))
        apart = Places(alone, group.rank(), machines=machines)
        hosts = _hosts([each[0] if each[5] else "" for each in everyone])
        if len(hosts) == group.size():
            return apart
        # Only of this host: elsewhere, other processes have the same numbers.
        members = next(host for host in hosts if group.rank() in host)
        pids = {rank: int(everyone[rank][1]) for rank in members}
        sockets: dict[int, socket.socket] = {}
        works = "yes"
        try:
            for rank in members:
                if rank != group.rank():
                    _prove(pids[rank], int(everyone[rank][2]), bytes.fromhex(everyone[rank][3]))
        except (OSError, ValueError):
            works = "no"
        if set(_all(group, works)) != {"yes"}:
            return apart
        for step in (_call, _answer):
            try:
                if listener is not None:
                    step(group, listener, pids, [each[3] for each in everyone], sockets)
            except OSError:
                works = "no"
            if set(_all(group, works)) != {"yes"}:
                for connection in sockets.values():
                    connection.close()
                return apart
        in_rank_order = any(each[4] == "rank" for each in everyone)
        return Met(hosts, machines, in_rank_order, pids, sockets)
    finally:
        if listener is not None:
            listener.close()


def _hosts(names: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, by the names of their hosts; each "" is a separate host."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name or f"rank {rank}", []).append(rank)
    return list(found.values())


def _numbers(names: Sequence[str]) -> tuple[int, ...]:
    """A number for each rank, the same for ranks of one host."""
    hosts = _hosts(names)
    return tuple(
        next(n for n, host in enumerate(hosts) if rank in host) for rank in range(len(names))
    )


def _prove(pid: int, address: int, expected: bytes) -> None:
    found = ctypes.create_string_buffer(len(expected))
    read(pid, [ctypes.addressof(found), len(expected)], [address, len(expected)])
    if found.raw != expected:
        raise ValueError("another process")


def _address(name: str) -> str:
    # In no file system: nothing is left behind, whatever happens.
    return f"\0fsdp2-{name}"


def _listen(name: str, num: int) -> socket.socket | None:
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(_address(name))
        listener.listen(num)
        return listener
    except (AttributeError, OSError):
        if listener is not None:
            listener.close()
        return None


def _call(
    group: dist.ProcessGroup,
    listener: socket.socket,
    pids: dict[int, int],
    names: Sequence[str],
    sockets: dict[int, socket.socket],
) -> None:
    """Connect to this host's lower ranks, which have listened since before they told their names.

    That they accept is not waited for: where one rank fails, the others hear of it before they
    wait for its call.
    """
    for peer in pids:
        if peer >= group.rank():
            continue
        connection = sockets[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout_of(group, _CPU).total_seconds())
        connection.connect(_address(names[peer]))


def _answer(
    group: dist.ProcessGroup,
    listener: socket.socket,
    pids: dict[int, int],
    names: Sequence[str],
    sockets: dict[int, socket.socket],
) -> None:
    """Accept the calls of all higher ranks of this host."""
    ranks = {pid: rank for rank, pid in pids.items() if rank > group.rank()}
    listener.settimeout(timeout_of(group, _CPU).total_seconds())
    while len(sockets) < len(pids) - 1:
        connection, _ = listener.accept()
        # Every process of the host can find the listener; only the ranks are let in.
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        pid, _, _ = struct.unpack("3i", credentials)
        if pid not in ranks or ranks[pid] in sockets:
            connection.close()
        else:
            sockets[ranks[pid]] = connection


def _all(group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks."""
    mine = torch.zeros(_RECORD, dtype=torch.uint8, device="cpu")
    encoded = text.encode()
    mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    everyone = [torch.zeros_like(mine) for _ in range(group.size())]
    group.allgather([everyone], [mine]).wait()
    return [bytes(each.tolist()).rstrip(b"\0").decode() for each in everyone]
