"""How fast hosts reach each other: every pair once, all hosts busy at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

NUM_PINGS = 20
_PING, _DATA, _CLOCK = 1, 2, 3  # tags


@dataclass(frozen=True)
class MeasuredLink:
    """What was measured between two ranks.

    Attributes:
        latency_s: half of the median round trip of eight bytes.
        bytes_per_s: bandwidth of the slower direction.
        clock_s: seconds by which the clock of ``to`` is ahead of the clock of ``rank``.
    """

    rank: int
    to: int
    latency_s: float
    bytes_per_s: float
    clock_s: float


def rounds(members: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs of members, so that in each round every member has at most one partner.

    All pairs occur once, in as few rounds as possible: the circle method of round-robin
    tournaments.

    Example:
        >>> rounds([0, 1, 2, 3])
        [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    circle: list[int | None] = list(members)
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    found = []
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle[1:] = circle[-1:] + circle[1:-1]
    return found


def measure(rank: int, partner: int, num_bytes: int) -> MeasuredLink:
    """Measure the link to ``partner``, which calls this with the ranks swapped.

    Args:
        num_bytes: size of the message whose time gives the bandwidth.
    """
    first = rank < partner
    ping = torch.zeros(8, dtype=torch.uint8)
    trips = []
    for _ in range(NUM_PINGS):
        start = time.perf_counter()
        if first:
            dist.send(ping, partner, tag=_PING)
            dist.recv(ping, partner, tag=_PING)
        else:
            dist.recv(ping, partner, tag=_PING)
            dist.send(ping, partner, tag=_PING)
        trips.append(time.perf_counter() - start)
    # One direction after the other: on a link that is not duplex, they would share the bandwidth.
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    rates = []
    for sends in (first, not first):
        start = time.perf_counter()
        if sends:
            dist.send(data, partner, tag=_DATA)
            dist.recv(ping, partner, tag=_DATA)  # it has arrived
        else:
            dist.recv(data, partner, tag=_DATA)
            dist.send(ping, partner, tag=_DATA)
        rates.append(num_bytes / (time.perf_counter() - start))
    latency = statistics.median(trips[1:]) / 2  # the first may have set up the connection
    return MeasuredLink(rank, partner, latency, min(rates), _clock(first, partner))


def _clock(first: bool, partner: int) -> float:
    """How far the partner's clock is ahead, as NTP finds it (RFC 5905): half a round trip."""
    best, ahead = float("inf"), 0.0
    theirs = torch.zeros(1, dtype=torch.float64)
    for _ in range(NUM_PINGS):
        if first:
            sent = time.time()
            dist.send(theirs, partner, tag=_CLOCK)
            dist.recv(theirs, partner, tag=_CLOCK)
            back = time.time()
            # The fastest trip has waited the least on either way.
            if back - sent < best:
                best, ahead = back - sent, theirs.item() - (sent + back) / 2
        else:
            dist.recv(theirs, partner, tag=_CLOCK)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), partner, tag=_CLOCK)
    found = torch.tensor([ahead], dtype=torch.float64)
    if first:
        dist.send(found, partner, tag=_CLOCK)
        return ahead
    dist.recv(found, partner, tag=_CLOCK)
    return -found.item()
