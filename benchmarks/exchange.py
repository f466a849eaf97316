"""Ways for gloo groups to move data, side by side: by number of ranks and bytes.

For each collective and size: reads of memory within the host, messages in pairs (both are parts of
`fsdp2.comm.exchange`), and gloo's own collective. `EXCHANGE_MAX_RANKS` is chosen from this table.

    python -m benchmarks.exchange [--ranks 2 4 8 16] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.comm.host_links import host_links
from fsdp2.comm.host_reads import HostReads
from fsdp2.comm.messages import Messages

from .ranks import progress, run_ranks
from .report import row

KIB = 1024
SIZES = (64 * KIB, 1024 * KIB, 12 * 1024 * KIB)  # of the whole, in fp32
NUM_TENSORS = 8  # that it is made of, as a block of the language model
WAYS = ("reads", "messages", "gloo")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def measure(rounds: int) -> dict[str, Any]:
    """Times all ways in turns; milliseconds of the slowest rank, medians over rounds."""
    group = dist.group.WORLD
    assert group is not None
    links = host_links(group)
    # The last one stands for gloo's own collectives.
    ways: list[Any] = [*([HostReads(links)] if links else []), Messages(group), None]
    found = {}
    for size in SIZES:
        for collective in COLLECTIVES:
            numel = size // 4 // NUM_TENSORS // group.size() // 16 * 16
            calls = [make(collective, numel, way, group) for way in ways]
            times: list[list[float]] = [[] for _ in calls]
            for i in range(rounds + 1):
                for call, taken in zip(calls, times, strict=True):
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
                    if i:  # the first is a warm-up
                        taken.append(longest.item() * 1e3)
            found[f"{size} {collective}"] = [statistics.median(taken) for taken in times]
        progress(f"{group.size()} ranks: {size // KIB} KiB")
    return found


def make(collective: str, numel: int, way: Any, group: dist.ProcessGroup) -> Callable[[], None]:
    """One collective over tensors of ``numel`` elements per rank; ``way`` None is gloo's own."""
    size = group.size()
    wholes = [torch.ones(size * numel) for _ in range(NUM_TENSORS)]
    shards = [torch.ones(numel) for _ in range(NUM_TENSORS)]
    if way is None:
        if collective == "all-gather":
            call = group.allgather_into_tensor_coalesced
        elif collective == "reduce-scatter":
            call = group.reduce_scatter_tensor_coalesced
        else:
            flat = torch.cat(wholes)
            return lambda: group.allreduce([flat]).wait()
        arguments = (wholes, shards) if collective == "all-gather" else (shards, wholes)
        return lambda: call(*arguments).wait()
    if collective == "all-gather":
        rows = [[numel] * size] * NUM_TENSORS
        plan = SimpleNamespace(inputs=shards, outputs=wholes, rows=rows, messages=None)
        return lambda: way.gather(plan, 0)()
    if collective == "reduce-scatter":
        parts = [whole.split(numel) for whole in wholes]
        return lambda: way.scatter(parts, shards, NUM_TENSORS)()
    flat = torch.cat(wholes)
    return lambda: way.all_reduce([flat], 2 * NUM_TENSORS)()


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    lines = [
        row(["collective of", "ranks", *(f"{way}, ms" for way in WAYS), "messages / gloo's"]),
        row(["---"] + ["---:"] * (len(WAYS) + 2)),
    ]
    for num_ranks in options.ranks:
        for key, times in run_ranks(measure, num_ranks, {"rounds": options.rounds}).items():
            size, collective = key.split()
            shown = ["-"] * (len(WAYS) - len(times)) + [f"{ms:.2f}" for ms in times]
            ratio = f"{times[-2] / times[-1]:.2f}"
            lines.append(
                row([f"{int(size) // KIB:,} KiB, {collective}", str(num_ranks), *shown, ratio])
            )
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
