"""Which rank holds whose copy: pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SnapshotPlace:
    """Where a rank keeps its snapshots.

    Attributes:
        host: what fails together: a machine, or several that share a power supply.
        folder: which folder; ranks with the same one see each other's files.
    """

    host: str
    folder: str


def neighbours(places: Sequence[SnapshotPlace]) -> list[int | None]:
    """For each rank the one that holds its copy: on another host; in another folder where there is
    one host only; None where there is one folder only.

    Hosts hold copies for each other in pairs (of an odd number, the last three in a ring), not
    all in one ring. Both survive the loss of any one host. But there are n (n - 1) / 2 ways to lose
    two hosts at once: n / 2 of these lose both copies of a part with pairs, and n with a ring.
    Gemini (Wang et al., SOSP 2023, section 4) shows that nothing is better than groups.
    """
    several_hosts = len({place.host for place in places}) > 1
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place.host if several_hosts else place, []).append(rank)
    groups = list(ranks_of.values())
    found: list[int | None] = [None] * len(places)
    for here, there in _partners(len(groups)).items():
        for i, rank in enumerate(groups[here]):
            found[rank] = groups[there][i % len(groups[there])]
    return found


def _partners(num: int) -> dict[int, int]:
    if num < 2:
        return {}
    in_pairs = num if num % 2 == 0 else num - 3
    partners = {i: i ^ 1 for i in range(in_pairs)}
    if num % 2:
        last = range(in_pairs, num)
        partners |= {i: last[(k + 1) % 3] for k, i in enumerate(last)}
    return partners
