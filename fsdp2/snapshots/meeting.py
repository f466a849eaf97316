"""The ranks of a session learn of each other: who is where, and what is there already."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checkpoint.agreement import said_by_first, told_by_all
from ..checkpoint.errors import CheckpointError
from ..common.host import address_of_interface, boot_id
from .assembly import Origins
from .choice import Choice, Generation
from .folder import Folder, remove_stale
from .neighbours import SnapshotPlace, neighbours
from .transfer import Address, Server


@dataclass(frozen=True)
class Member:
    """What a rank announces to the others.

    Attributes:
        host: what fails together with it.
        machine: on which it runs.
        folder: which it sees; equal on ranks that see the same one.
        address, port: of its server.
        session: the highest number of one that it knows of; ``progress``: session and step that
            a rank of this host had come to.
    """

    host: str
    machine: str
    folder: str
    address: str
    port: int
    session: int
    progress: tuple[int, int]


class Session:
    """One start of all processes, until they end.

    Args:
        run, directory, host, address, stale_s: as for `MemorySnapshots`.

    Attributes:
        members: by rank.
        here: the folder that this rank sees, as named in `Member`.
        number, nonce: of the session.
        last_step: which the sessions before have come to; None: unknown.
        neighbours: for each rank the one that holds its copies; None: there is no other place.

    Raises:
        CheckpointError: on all ranks, if any cannot take part.
    """

    def __init__(
        self,
        run: str,
        directory: Path,
        host: str | None,
        address: str | None,
        stale_s: float,
        rank: int,
        ranks: tuple[int, ...],
    ) -> None:
        self.rank, self.ranks = rank, ranks
        names = f"{secrets.token_hex(16)} {secrets.token_hex(4)}"
        self.secret, self.nonce = said_by_first(
            "the name of the session of snapshots", names, ranks
        ).split()
        self.folder: Folder | None = None
        self.server: Server | None = None
        error = ""
        told = ""
        try:
            told = json.dumps(asdict(self._enter(run, directory, host, address, stale_s)))
        except (OSError, CheckpointError) as caught:
            error = str(caught)
        answers = [json.loads(each) for each in told_by_all(
            "begin a session of snapshots", json.dumps({"error": error, "member": told}), ranks
        )]  # fmt: skip
        try:
            raise_first(ranks, [each["error"] for each in answers])
            members = [json.loads(each["member"]) for each in answers]
            self.members = [
                Member(**{**each, "progress": tuple(each["progress"])}) for each in members
            ]
            self._check_places()
        except BaseException:
            self.close()
            raise
        self.here = self.members[ranks.index(rank)].folder
        self._servers: dict[str, dict[int, Address]] = {}
        for of, member in zip(ranks, self.members, strict=True):
            self._servers.setdefault(member.folder, {})[of] = member.address, member.port
        self.number = 1 + max(max(m.session, m.progress[0]) for m in self.members)
        progress = max(m.progress for m in self.members)
        self.last_step = progress[1] if progress[0] else None
        self.neighbours = neighbours([SnapshotPlace(m.host, m.folder) for m in self.members])

    def _enter(
        self, run: str, directory: Path, host: str | None, address: str | None, stale_s: float
    ) -> Member:
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a folder")
        folder = Folder(directory, run)
        folder.lock(self.rank)
        self.folder = folder
        # No rank of this session writes before all have met, and earlier sessions' ranks are gone.
        folder.remove_unfinished()
        remove_stale(directory, folder.path, stale_s)
        self.server = Server(folder, address or own_address(), self.secret)
        sessions = [part.generation.session for part in folder.parts()]
        return Member(
            host=host or boot_id(),
            machine=boot_id(),
            folder=f"{boot_id()}/{folder.identity}",
            address=self.server.address,
            port=self.server.port,
            session=max(sessions, default=0),
            progress=folder.progress(),
        )

    def _check_places(self) -> None:
        hosts: dict[str, set[str]] = {}
        for member in self.members:
            hosts.setdefault(member.folder, set()).add(member.host)
        shared = [names for names in hosts.values() if len(names) > 1]
        if shared:
            raise CheckpointError(
                f"The hosts {sorted(shared[0])} keep their snapshots in the same folder: pass "
                "directory=, another one on each host"
            )
        if len({m.machine for m in self.members}) > 1:
            lost = [i for i, m in enumerate(self.members) if m.address.startswith("127.")]
            if lost:
                raise CheckpointError(
                    f"Rank {lost[0]} can be reached from its own host only, at "
                    f"{self.members[lost[0]].address}: pass address=, or set GLOO_SOCKET_IFNAME to "
                    "the interface by which hosts reach each other"
                )

    def close(self) -> None:
        """Stop the server, and let other processes use the folder."""
        if self.server is not None:
            self.server.close()
        if self.folder is not None:
            self.folder.unlock()

    # -- who is where -----------------------------------------------------------------------

    def generation(self, step: int) -> Generation:
        return Generation(self.number, step, self.nonce)

    def is_own(self, generation: Generation) -> bool:
        """Whether it was made in this session."""
        return (generation.session, generation.nonce) == (self.number, self.nonce)

    def at(self, folder: str) -> list[int]:
        """The ranks that see ``folder``; the first of them cleans it up."""
        return list(self._servers[folder])

    @property
    def cleans(self) -> bool:
        return self.at(self.here)[0] == self.rank

    def address_of(self, rank: int) -> Address:
        member = self.members[self.ranks.index(rank)]
        return member.address, member.port

    def origins(self, choice: Choice) -> Origins:
        """Ranks begin with different parts and servers: else all would ask one host at a time."""
        parts = list(choice.holders.items())
        return {
            part: [] if self.here in at else [a for folder in at for a in self._servers_of(folder)]
            for part, at in parts[self.rank :] + parts[: self.rank]
        }

    def _servers_of(self, folder: str) -> list[Address]:
        addresses = list(self._servers[folder].values())
        first = self.rank % len(addresses)
        return addresses[first:] + addresses[:first]


def raise_first(ranks: Sequence[int], errors: Sequence[str]) -> None:
    """Raise the same on all ranks, if any of them told an error.

    Raises:
        CheckpointError: naming the rank.
    """
    for rank, error in zip(ranks, errors, strict=True):
        if error:
            raise CheckpointError(f"Rank {rank}: {error}")


def own_address() -> str:
    """The address by which the other ranks reach this host."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        with suppress(OSError):
            return address_of_interface(name)
    master = os.environ.get("MASTER_ADDR")
    if master:
        # By which way a packet to the first rank's host would leave; nothing is sent.
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((master, 9))
            return str(sock.getsockname()[0])
    return "127.0.0.1"
