"""The examination of a job: facts, communicators, links, a folder, and then the problems."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..guards.rank_agreement.store_exchange import name_ranks
from .checks import ERROR, Finding, FolderFacts, check
from .facts import Facts, facts_of
from .links import MeasuredLink, measure, rounds
from .meeting import Meeting, PhaseError
from .speed import measure_flops

# What to do about ranks that do not come out of a phase, or fail in it.
_ADVICE = {
    "arrival": "Look at the launcher's log on their hosts: the process was not started, it died, "
    "or it cannot reach MASTER_ADDR",
    "communicators": "The hosts reach the store, but not each other: look at the address column, "
    "at firewalls between the hosts (communicators use other ports), and at "
    "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    "speed": "A device or a library hangs there: look at the hosts' system logs",
    "links": "The connection stopped in the middle of messages: look at MTU, cables and the hosts' "
    "system logs",
    "folder": "The file system hangs on these hosts: look at its mount",
}
_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class Communicator:
    """A process group over all ranks.

    Attributes:
        setup_s: seconds from its creation to the end of its first collective.
        latency_s: seconds of an all-reduce of eight bytes.
        bytes_per_s: rate at which each rank receives in an all-gather.
    """

    backend: str
    setup_s: float
    latency_s: float
    bytes_per_s: float


@dataclass
class Examination:
    """What was found; ranks other than 0 lack the reports of other ranks."""

    world_size: int
    facts: list[Facts] = field(default_factory=list)
    communicators: list[Communicator] = field(default_factory=list)
    links: list[MeasuredLink] = field(default_factory=list)
    flops: dict[int, float] = field(default_factory=dict)  # FLOP/s by rank
    folders: dict[int, FolderFacts] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def code(self) -> int:
        """1 if there are errors, else 0."""
        return int(any(finding.level == ERROR for finding in self.findings))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "code": self.code}


def examine(
    meeting: Meeting, *, folder: Path | None, need_bytes: int, message_bytes: int
) -> Examination:
    """Examine this process's job; all ranks must call it.

    Args:
        folder: the folder for checkpoints; None: not examined.
        need_bytes: bytes that must be free there.
        message_bytes: size of the messages that measure bandwidth.
    """
    found = Examination(meeting.world_size)
    try:
        _examine(meeting, found, folder, message_bytes)
    except PhaseError as error:
        if error.name == "arrival":
            found.facts = _facts_in(error.values)  # of the ranks that did arrive
        found.findings = _findings_of(error, found.facts)
    if meeting.rank == 0:
        told = check(found.facts, found.links, found.folders, need_bytes, found.flops)
        found.findings = sorted(found.findings + told, key=lambda each: each.level != ERROR)
    return found


def _examine(meeting: Meeting, found: Examination, folder: Path | None, message_bytes: int) -> None:
    mine = facts_of(meeting.rank, meeting.world_size, meeting.local_rank)
    arrived = meeting.phase("arrival", mine.to_dict)
    if arrived is None:
        return
    found.facts = _facts_in(arrived)
    if meeting.world_size > 1:
        # All at once: ranks of one host share its cores, as they will in training.
        speeds = meeting.phase("speed", lambda: measure_flops(meeting.local_rank))
        if speeds is None:
            return
        found.flops = speeds
        members = meeting.phase("hosts", lambda: _leaders(meeting, found.facts))
        if members is None:
            return
        try:
            if not _communicate(meeting, found, members[meeting.rank], message_bytes):
                return
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    if folder is not None:
        _look_at_folder(meeting, found, folder)


def _facts_in(told: Mapping[int, Any]) -> list[Facts]:
    return [Facts.from_dict(each) for each in told.values()]


def _findings_of(error: PhaseError, facts: list[Facts]) -> list[Finding]:
    found = []
    where = {each.rank: each.host for each in facts}
    advice = _ADVICE.get(error.name, "")
    if error.missing:
        hosts = sorted({where[rank] for rank in error.missing if rank in where})
        on = f" (on {', '.join(hosts[:8])})" if hosts else ""
        text = f"No answer from {name_ranks(error.missing)}{on} in time"
        found.append(Finding(ERROR, error.name, text, advice))
    by_message: dict[str, list[int]] = {}
    for rank, message in error.failed.items():
        by_message.setdefault(message, []).append(rank)
    for message, ranks in list(by_message.items())[:5]:
        found.append(Finding(ERROR, error.name, f"{name_ranks(ranks)}: {message}", advice))
    return found


def _leaders(meeting: Meeting, facts: list[Facts]) -> list[int]:
    """The first rank of each host; all ranks if there is only one host.

    Rank 0 has all facts; the other ranks read its result.
    """
    if meeting.rank == 0:
        first: dict[str, int] = {}
        for each in facts:
            first.setdefault(each.on, each.rank)
        leaders = list(first.values()) if len(first) > 1 else [each.rank for each in facts]
        assert meeting.store is not None
        meeting.store.set("leaders", " ".join(map(str, leaders)))
        return leaders
    assert meeting.store is not None
    return list(map(int, meeting.store.get("leaders").decode().split()))


def _communicate(
    meeting: Meeting, found: Examination, leaders: list[int], message_bytes: int
) -> bool:
    """Make communicators and measure links; returns whether all ranks succeeded."""
    assert meeting.store is not None
    store = dist.PrefixStore("groups", meeting.store)
    cuda = torch.cuda.is_available()

    def connect() -> list[dict[str, Any]]:
        start = time.perf_counter()
        if cuda:
            torch.cuda.set_device(meeting.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=store,
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=meeting.timeout_s),
        )
        devices = ["cpu", "cuda"] if cuda else ["cpu"]
        return [asdict(_communicator(device, start, message_bytes)) for device in devices]

    connected = meeting.phase("communicators", connect)
    if connected is None:
        return False
    found.communicators = [Communicator(**each) for each in connected[meeting.rank]]

    def links() -> list[dict[str, Any]]:
        measured = []
        for pairs in rounds(leaders):
            for pair in pairs:
                if meeting.rank in pair:
                    partner = pair[pair[0] == meeting.rank]
                    measured.append(measure(meeting.rank, partner, message_bytes))
        return [asdict(link) for link in measured if link.rank < link.to]

    told = meeting.phase("links", links)
    if told is None:
        return False
    found.links = [MeasuredLink(**each) for links in told.values() for each in links]
    return True


def _communicator(device: str, start: float, message_bytes: int) -> Communicator:
    size = dist.get_world_size()
    ones = torch.ones(1, dtype=torch.float64, device=device)
    dist.all_reduce(ones)
    if ones.item() != size:
        raise RuntimeError(f"an all-reduce of ones over {size} ranks gave {ones.item():g}")
    setup_s = time.perf_counter() - start

    def seconds(work: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    latency = seconds(lambda: dist.all_reduce(ones))
    part = torch.zeros(max(1, message_bytes // size), dtype=torch.uint8, device=device)
    parts = [torch.zeros_like(part) for _ in range(size)]
    gathering = seconds(lambda: dist.all_gather(parts, part))
    backend = "nccl" if device == "cuda" else "gloo"
    received = part.numel() * (size - 1)
    return Communicator(backend, setup_s, latency, received / gathering)


def _look_at_folder(meeting: Meeting, found: Examination, folder: Path) -> None:
    # The folder's name is unique, so that files of an earlier examination do not count.
    token = f".fsdp2-doctor-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{_token(meeting)}"
    own = folder / token
    try:
        wrote = meeting.phase("folder", lambda: asdict(_write(own, meeting.rank)))
        if wrote is None:
            return
        seen = meeting.phase("files", lambda: _seen(own))
        if seen is None:
            return
        for rank, each in wrote.items():
            found.folders[rank] = replace(FolderFacts(**each), seen=tuple(seen.get(rank, ())))
        meeting.phase("clean", lambda: None)  # nobody is looking any more
    finally:
        with suppress(OSError):
            (own / str(meeting.rank)).unlink()
        with suppress(OSError):
            own.rmdir()


def _token(meeting: Meeting) -> str:
    if meeting.store is None:
        return str(os.getpid())
    if meeting.rank == 0:
        meeting.store.set("token", str(os.getpid()))
    return meeting.store.get("token").decode()


def _write(folder: Path, rank: int) -> FolderFacts:
    try:
        folder.mkdir(exist_ok=True)  # not its parents: a missing mount must be an error
        start = time.perf_counter()
        with open(folder / str(rank), "wb") as file:
            file.write(bytes(_FILE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        rate = _FILE_BYTES / (time.perf_counter() - start)
        return FolderFacts("", (), shutil.disk_usage(folder).free, rate)
    except OSError as error:
        return FolderFacts(f"{folder.parent}: {error.strerror}", (), 0, 0.0)


def _seen(folder: Path) -> list[int]:
    with suppress(OSError):
        # NFS shows files of other hosts after a while; listing the parent makes it look again.
        os.listdir(folder.parent)
        return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())
    return []
