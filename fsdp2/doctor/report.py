"""The doctor's report as text."""

from __future__ import annotations

import statistics

from ..guards.rank_agreement.store_exchange import name_ranks
from ..render.text import plain_table, plural, show_bytes, show_seconds
from .checks import ERROR
from .examine import Examination
from .facts import Facts
from .speed import by_host, host_speeds, speeds_option

MAX_HOSTS = 64  # rows of a table
MAX_LINKS = 10


def report(found: Examination) -> str:
    """Tables of hosts, communicators and links, and then the problems."""
    parts = [
        _hosts(found),
        _speeds(found),
        _communicators(found),
        _links(found),
        _folder(found),
        _findings(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _hosts(found: Examination) -> str:
    by_host: dict[str, list[Facts]] = {}
    for each in found.facts:
        by_host.setdefault(each.on, []).append(each)
    rows: list[tuple[str, ...]] = []
    for members in list(by_host.values())[:MAX_HOSTS]:
        one = members[0]
        devices = sorted({each.device for each in members if each.device}) or ["CPU"]
        rows.append((
            one.host,
            name_ranks(each.rank for each in members).partition(" ")[2],
            one.address or "unknown",
            ", ".join(devices),
            str(one.cores),
            f"{show_bytes(one.memory_free)} of {show_bytes(one.memory_bytes)}",
            one.torch,
            one.python,
        ))  # fmt: skip
    if len(by_host) > MAX_HOSTS:
        rows.append((f"and {len(by_host) - MAX_HOSTS} more", *[""] * 7))
    header = ("host", "ranks", "address", "devices", "cores", "memory free", "torch", "Python")
    hosts, ranks = plural(len(by_host), "host"), plural(found.world_size, "rank")
    answered = f"{len(found.facts)} of {ranks} answered, on {hosts}"
    return f"{answered}\n\n{plain_table(header, rows, '4')}" if rows else answered


def _speeds(found: Examination) -> str:
    if not found.flops:
        return ""
    members = by_host(found.facts, found.flops)
    slowest = sorted(host_speeds(found.facts, found.flops).items(), key=lambda item: item[1])
    rows = []
    for on, speed in slowest[:MAX_LINKS]:
        ranks = [each.rank for each in members[on]]
        rate = statistics.median(found.flops[rank] for rank in ranks)
        told = name_ranks(ranks).partition(" ")[2]
        rows.append((members[on][0].host, told, f"{rate / 1e9:,.0f} GFLOP/s", f"{speed:.2f}"))
    header = ("speed of matrix multiplications", "ranks", "each", "of the fastest")
    option = speeds_option(found.facts, found.flops)
    more = f"The slowest {MAX_LINKS} of {len(slowest)} hosts. " if len(slowest) > MAX_LINKS else ""
    return f"{plain_table(header, rows, '23')}\n{more}For fsdp2 plan: --speeds {option}"


def _communicators(found: Examination) -> str:
    header = ("communicator of all ranks", "set-up", "all-reduce of 8 bytes", "all-gather")
    rows = [
        (
            each.backend,
            show_seconds(each.setup_s),
            show_seconds(each.latency_s),
            f"{show_bytes(each.bytes_per_s)}/s",
        )
        for each in found.communicators
    ]
    return plain_table(header, rows, "123") if rows else ""


def _links(found: Examination) -> str:
    if not found.links:
        return ""
    host = {each.rank: each.host for each in found.facts}
    slowest = sorted(found.links, key=lambda link: link.bytes_per_s)[:MAX_LINKS]
    rows = [
        (
            f"{host[link.rank]} (rank {link.rank})",
            f"{host[link.to]} (rank {link.to})",
            f"{show_bytes(link.bytes_per_s)}/s",
            show_seconds(link.latency_s),
            f"{link.clock_s * 1e3:+.1f} ms",
        )
        for link in slowest
    ]
    header = ("link from", "to", "bandwidth", "latency", "clock")
    more = ""
    if len(found.links) > MAX_LINKS:
        more = f"\nThe slowest {MAX_LINKS} of {len(found.links)} links."
    return plain_table(header, rows, "234") + more


def _folder(found: Examination) -> str:
    good = [each for each in found.folders.values() if not each.error]
    if not good:
        return ""
    free, rate = min(each.free_bytes for each in good), min(each.bytes_per_s for each in good)
    return f"Folder: {show_bytes(free)} free; the slowest rank writes {show_bytes(rate)}/s"


def _findings(found: Examination) -> str:
    lines = []
    for finding in found.findings:
        lines.append(f"{finding.level.upper()}  {finding.about}: {finding.text}")
        if finding.advice:
            lines.append(f"    -> {finding.advice}")
    errors = sum(finding.level == ERROR for finding in found.findings)
    warnings = len(found.findings) - errors
    lines.append(f"{plural(errors, 'error')}, {plural(warnings, 'warning')}")
    return "\n".join(lines)
