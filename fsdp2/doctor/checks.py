"""Checks of the facts that the ranks report. Pure functions from facts to findings."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..guards.rank_agreement.store_exchange import name_ranks
from ..render.text import show_bytes, show_seconds
from .facts import Facts
from .links import MeasuredLink
from .speed import SLOW_PART, by_host, host_speeds, speeds_option

ERROR, WARNING = "error", "warning"
CLOCK_S = 1.0  # of logs and time limits that agree between hosts
SLOW = 2.0  # so many times worse than the median of all links
FEW_SHM_BYTES = 64 << 20  # per rank; NCCL takes about 10 MB for each channel and pair


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        level: "error": training will fail or compute wrong results. "warning": it may be slow, or
            stop later.
        about: the subject in one word: "versions", "link".
        text: the problem, and the ranks that have it.
        advice: what to do.
    """

    level: str
    about: str
    text: str
    advice: str


@dataclass(frozen=True)
class FolderFacts:
    """What a rank found in the folder for checkpoints.

    Attributes:
        error: "" or why the rank could not write there.
        seen: ranks whose files it sees.
        free_bytes: free space in bytes.
        bytes_per_s: rate of writing a file, until it is on the disk.
    """

    error: str
    seen: tuple[int, ...]
    free_bytes: int
    bytes_per_s: float


def check(
    facts: Sequence[Facts],
    links: Sequence[MeasuredLink] = (),
    folders: Mapping[int, FolderFacts] | None = None,
    need_bytes: int = 0,
    flops: Mapping[int, float] | None = None,
) -> list[Finding]:
    """Returns all problems, errors first.

    Args:
        facts: of every rank that answered.
        links: the links that were measured.
        folders: by rank, if a folder is checked.
        need_bytes: bytes that must be free in it.
        flops: FLOP/s that each rank reached, by rank.
    """
    found: list[Finding] = []
    for each in (_versions, _settings, _devices, _addresses, _hosts, _limits):
        found += each(facts)
    found += _links(facts, links)
    found += _speeds(facts, flops or {})
    found += _folders(facts, folders or {}, need_bytes)
    return sorted(found, key=lambda finding: finding.level != ERROR)


def by_value(facts: Iterable[Facts], value: Callable[[Facts], str]) -> str:
    """The values of ranks: "2.15.0 on ranks 0, 1, 2.13.0 on rank 2"; "" if all are equal."""
    ranks: dict[str, list[int]] = {}
    for each in facts:
        ranks.setdefault(value(each) or "none", []).append(each.rank)
    if len(ranks) < 2:
        return ""
    # The most frequent first: the rare ones are probably wrong.
    ordered = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{what} on {name_ranks(of)}" for what, of in ordered)


def _versions(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for name in ("torch", "fsdp2", "nccl"):
        differ = by_value(facts, lambda f, name=name: getattr(f, name))  # type: ignore[misc]
        if differ:
            advice = f"Install the same version of {name} on all hosts"
            found.append(Finding(ERROR, "versions", f"{name} {differ}", advice))
    differ = by_value(facts, lambda f: ".".join(f.python.split(".")[:2]))
    if differ:
        text = f"Python {differ}"
        found.append(Finding(WARNING, "versions", text, "Use one image for all hosts"))
    return found


def _settings(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for key in sorted({key for each in facts for key in each.settings}):
        differ = by_value(facts, lambda f, key=key: f.settings.get(key, ""))  # type: ignore[misc]
        if differ:
            advice = f"Export {key} with the same value on all hosts, or on none"
            found.append(Finding(WARNING, "environment", f"{key}: {differ}", advice))
    sizes = by_value(facts, lambda f: str(f.world_size))
    if sizes:
        advice = "Start all hosts with the same --nnodes and --nproc-per-node"
        found.append(Finding(ERROR, "launch", f"WORLD_SIZE {sizes}", advice))
    return found


def _devices(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    short = [f for f in facts if f.num_devices and f.local_rank >= f.num_devices]
    if short:
        text = f"{name_ranks(f.rank for f in short)} have no device: their hosts have too few"
        advice = "Start at most as many processes on a host as it has devices (--nproc-per-node)"
        found.append(Finding(ERROR, "devices", text, advice))
    kinds = by_value(facts, lambda f: f.device or "the CPU")
    if kinds and any(not f.num_devices for f in facts):
        advice = "nvidia-smi fails where the driver is missing; take those hosts out of the job"
        found.append(Finding(ERROR, "devices", f"Ranks compute on {kinds}", advice))
    elif kinds and not short:
        advice = "The slowest device decides the time of every step"
        found.append(Finding(WARNING, "devices", f"Ranks compute on {kinds}", advice))
    users: dict[tuple[str, str], list[int]] = {}
    for each in facts:
        if each.device_id:
            users.setdefault((each.on, each.device_id), []).append(each.rank)
    for ranks in users.values():
        if len(ranks) > 1:
            advice = "Give each rank its own: torch.cuda.set_device(LOCAL_RANK)"
            text = f"{name_ranks(ranks)} share a device, which NCCL refuses"
            found.append(Finding(ERROR, "devices", text, advice))
    for each in facts:
        # A context alone takes half a gigabyte.
        if each.device_bytes and each.device_used > 0.05 * each.device_bytes + (1 << 30):
            text = (
                f"The device of rank {each.rank} on {each.host} has {show_bytes(each.device_used)} "
                f"of {show_bytes(each.device_bytes)} in use"
            )
            advice = "Find the processes that use it with nvidia-smi: a dead job may have left some"
            found.append(Finding(WARNING, "devices", text, advice))
    return found


def _addresses(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    several = len({f.on for f in facts}) > 1
    nowhere = [f for f in facts if not f.address]
    if nowhere:
        text = f"The host names of {name_ranks(f.rank for f in nowhere)} cannot be resolved"
        advice = "Add the host name to /etc/hosts or the name server, or export GLOO_SOCKET_IFNAME"
        found.append(Finding(ERROR if several else WARNING, "address", text, advice))
    alone = [f for f in facts if f.address and ipaddress.ip_address(f.address).is_loopback]
    if several and alone:
        text = (
            f"{name_ranks(f.rank for f in alone)} would give other hosts the address "
            f"{alone[0].address}, which they cannot reach"
        )
        advice = (
            "Export GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) with the interface that the hosts "
            "share, or correct the host's name in /etc/hosts"
        )
        found.append(Finding(ERROR, "address", text, advice))
    return found


def _hosts(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    first: dict[str, Facts] = {}
    for each in facts:
        first.setdefault(each.on, each)
    counts = {on: sum(f.on == on for f in facts) for on in first}
    if len(set(counts.values())) > 1:
        parts = ", ".join(f"{first[on].host}: {count}" for on, count in counts.items())
        advice = "A mesh over hosts needs equally many ranks on each; a host may have lost devices"
        found.append(Finding(WARNING, "hosts", f"Ranks per host differ: {parts}", advice))
    for on, count in counts.items():
        each = first[on]
        if each.threads * count > 2 * each.cores:
            text = (
                f"{count} ranks on {each.host} use {each.threads} threads each, of {each.cores} "
                "cores"
            )
            advice = f"Export OMP_NUM_THREADS={max(1, each.cores // count)}"
            found.append(Finding(WARNING, "threads", text, advice))
        if each.memory_bytes and each.memory_free < 0.1 * each.memory_bytes:
            text = (
                f"{each.host} has {show_bytes(each.memory_free)} of "
                f"{show_bytes(each.memory_bytes)} host memory left"
            )
            advice = "Stop other processes there; loading and staging of checkpoints need memory"
            found.append(Finding(WARNING, "memory", text, advice))
        if each.num_devices and each.shm_bytes < count * FEW_SHM_BYTES:
            text = f"/dev/shm on {each.host} has {show_bytes(each.shm_bytes)} for {count} ranks"
            advice = "Start the container with --shm-size=8g (Kubernetes: an emptyDir of Memory)"
            found.append(Finding(WARNING, "shared memory", text, advice))
    return found


def _limits(facts: Sequence[Facts]) -> list[Finding]:
    found = []
    for each in {f.on: f for f in reversed(facts)}.values():
        # A socket to every rank in each of a few groups, and what else a process opens.
        wanted = 256 + 4 * each.world_size
        if 0 <= each.open_files < wanted:
            text = f"Processes on {each.host} may open {each.open_files} files and sockets"
            found.append(Finding(ERROR, "limits", text, f"ulimit -n {2 * wanted}"))
        if each.nccl and 0 <= each.locked_bytes < 1 << 30:
            text = f"Processes on {each.host} may lock {show_bytes(each.locked_bytes)} of memory"
            advice = "ulimit -l unlimited: InfiniBand and RoCE lock the memory that they send"
            found.append(Finding(WARNING, "limits", text, advice))
    return found


def _links(facts: Sequence[Facts], links: Sequence[MeasuredLink]) -> list[Finding]:
    found: list[Finding] = []
    host = {each.rank: each.host for each in facts}

    def named(link: MeasuredLink) -> str:
        return f"{host[link.rank]} (rank {link.rank}) and {host[link.to]} (rank {link.to})"

    late = [link for link in links if abs(link.clock_s) > CLOCK_S]
    for link in late[:5]:
        text = f"The clocks of {named(link)} are {show_seconds(abs(link.clock_s))} apart"
        advice = "Start chrony or ntpd on all hosts; logs and time limits cannot be compared"
        found.append(Finding(WARNING, "clock", text, advice))
    if len(links) < 3:
        return found  # with two, no one can tell which is the slow one
    usual = statistics.median(link.bytes_per_s for link in links)
    ping = statistics.median(link.latency_s for link in links)
    for link in links:
        if link.bytes_per_s < usual / SLOW:
            text = (
                f"The link between {named(link)} carries {show_bytes(link.bytes_per_s)}/s; the "
                f"median is {show_bytes(usual)}/s"
            )
            advice = "Look at the cable, the switch port and the interface's speed (ethtool)"
            found.append(Finding(WARNING, "link", text, advice))
        elif link.latency_s > SLOW * ping + 1e-3:
            text = (
                f"A message between {named(link)} takes {show_seconds(link.latency_s)}; the median "
                f"is {show_seconds(ping)}"
            )
            advice = "Look for a longer route, or for other processes on these hosts"
            found.append(Finding(WARNING, "link", text, advice))
    return found


def _speeds(facts: Sequence[Facts], flops: Mapping[int, float]) -> list[Finding]:
    hosts, speeds = by_host(facts, flops), host_speeds(facts, flops)
    slow = sorted((speed, on) for on, speed in speeds.items() if speed < SLOW_PART)
    option = speeds_option(facts, flops) if slow else ""
    return [
        Finding(
            WARNING,
            "speed",
            f"{hosts[on][0].host} ({name_ranks(each.rank for each in hosts[on])}) multiplies "
            f"matrices at {speed:.2f} of the speed of the fastest host; every step waits for it",
            "Look for other processes, heat and power limits there (nvidia-smi -q -d "
            "PERFORMANCE). If the host has to stay, fsdp2 plan divides the batch by speed: "
            f"--speeds {option}",
        )
        for speed, on in slow[:5]
    ]


def _folders(
    facts: Sequence[Facts], folders: Mapping[int, FolderFacts], need_bytes: int
) -> list[Finding]:
    found = []
    errors: dict[str, list[int]] = {}
    for rank, folder in folders.items():
        if folder.error:
            errors.setdefault(folder.error, []).append(rank)
    for error, ranks in errors.items():
        text = f"{name_ranks(ranks)} cannot write there: {error}"
        advice = "Mount it, create it, or correct its permissions on these hosts"
        found.append(Finding(ERROR, "folder", text, advice))
    wrote = {rank for rank, folder in folders.items() if not folder.error}
    blind = [rank for rank in sorted(wrote) if not wrote <= set(folders[rank].seen)]
    if blind:
        text = f"{name_ranks(blind)} do not see the files of all other ranks: it is not shared"
        advice = "Checkpoints of several hosts need a folder that all of them see (NFS, Lustre)"
        found.append(Finding(ERROR, "folder", text, advice))
    least = min((folders[rank].free_bytes for rank in wrote), default=need_bytes)
    if least < need_bytes:
        text = f"{show_bytes(least)} are free there, but {show_bytes(need_bytes)} are needed"
        found.append(Finding(ERROR, "folder", text, "Delete old checkpoints, or use another disk"))
    return found
