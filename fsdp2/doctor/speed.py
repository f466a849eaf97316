"""How fast each rank computes while all of them do; a slow host delays every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from .facts import Facts

_BURSTS, _SECONDS = 7, 0.2  # the median of several, so that a momentary disturbance does not count
SLOW_PART = 0.8  # of the fastest host's speed; other processes or heat usually cost less
_WARM_UP = 3


def measure_flops(local_rank: int) -> float:
    """FLOP/s of matrix multiplications on this rank's device, over a second or two.

    In bfloat16 on a GPU, in float32 on the CPU, with as many threads as the job has.
    """
    cuda = torch.cuda.is_available()
    size, dtype = (4096, torch.bfloat16) if cuda else (256, torch.float32)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    c = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=c)
        if cuda:
            torch.cuda.synchronize(device)

    def burst() -> float:
        count, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < _SECONDS:
            multiply(4)
            count += 4
        return count * 2 * size**3 / passed

    multiply(_WARM_UP)
    return statistics.median(burst() for _ in range(_BURSTS))


def by_host(facts: Sequence[Facts], flops: Mapping[int, float]) -> dict[str, list[Facts]]:
    """The ranks whose speed was measured, by host, in the order of ranks."""
    found: dict[str, list[Facts]] = {}
    for each in sorted(facts, key=lambda each: each.rank):
        if each.rank in flops:
            found.setdefault(each.on, []).append(each)
    return found


def host_speeds(facts: Sequence[Facts], flops: Mapping[int, float]) -> dict[str, float]:
    """The median speed of each host's ranks, relative to the fastest host."""
    medians = {
        on: statistics.median(flops[each.rank] for each in members)
        for on, members in by_host(facts, flops).items()
    }
    best = max(medians.values(), default=1.0)
    return {on: median / best for on, median in medians.items()}


def speeds_option(facts: Sequence[Facts], flops: Mapping[int, float]) -> str:
    """The value for ``fsdp2 plan --speeds``: speeds of hosts, if ranks are numbered host by host.

    For example, "1x2,0.5" means two hosts of full speed and one of half the speed.
    """
    hosts = by_host(facts, flops)
    order = [each.rank for members in hosts.values() for each in members]
    if order == sorted(order) and len({len(members) for members in hosts.values()}) == 1:
        speeds = [round(speed, 2) for speed in host_speeds(facts, flops).values()]
    else:
        best = max(flops.values())
        speeds = [round(flops[rank] / best, 2) for rank in sorted(flops)]
    runs: list[list[float]] = []
    for speed in speeds:
        if runs and runs[-1][0] == speed:
            runs[-1][1] += 1
        else:
            runs.append([speed, 1])
    return ",".join(f"{speed:g}" + (f"x{times}" if times > 1 else "") for speed, times in runs)
