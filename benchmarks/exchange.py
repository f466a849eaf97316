"""Ways for gloo groups to move data, side by side: by number of ranks and bytes.

For each collective and size: reads of memory within the host, messages in pairs (both are
parts of `fsdp2.transports.host.exchange`), and gloo's own collective, in turns. ``--write`` keeps
every round in benchmarks/results/exchange.json; `limit_of` says from these how many ranks exchange
data in pairs, and a test that the library's `EXCHANGE_MAX_RANKS` is that.

    python -m benchmarks.exchange [--ranks 2 4 8 16 32] [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.sharding.layout import DIRECT_MIN_BYTES
from fsdp2.transports.host.links import host_links
from fsdp2.transports.host.messages import Messages
from fsdp2.transports.host.reads import HostReads

from . import machine
from .choosing import describe
from .ranks import progress, run_ranks
from .report import row, write_readme, write_record

KIB = 1024
SIZES = (64 * KIB, 1024 * KIB, 12 * 1024 * KIB)  # of the whole, in fp32
NUM_TENSORS = 8  # that it is made of, as a block of the language model; small ones are one pack
WAYS = ("reads", "messages", "gloo")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce")


def measure(rounds: int) -> dict[str, Any]:
    """Times all ways in turns; milliseconds of the slowest rank, of each round."""
    group = dist.group.WORLD
    assert group is not None
    links = host_links(group)
    # The last one stands for gloo's own collectives.
    ways: list[Any] = [*([HostReads(links)] if links else []), Messages(group), None]
    found = {}
    for size in SIZES:
        for collective in COLLECTIVES:
            num = tensors_of(size, group.size())
            numel = size // 4 // num // group.size() // 16 * 16
            calls = [make(collective, numel, num, way, group) for way in ways]
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
            found[f"{size} {collective}"] = times
        progress(f"{group.size()} ranks: {size // KIB} KiB")
    return found


def tensors_of(size: int, num_ranks: int) -> int:
    """Of how many tensors a collective of ``size`` bytes consists in a step."""
    direct = size // NUM_TENSORS // num_ranks >= DIRECT_MIN_BYTES
    return NUM_TENSORS if direct else 1


def make(
    collective: str, numel: int, num: int, way: Any, group: dist.ProcessGroup
) -> Callable[[], None]:
    """One collective over ``num`` tensors of ``numel`` elements per rank; ``way`` None is gloo's
    own."""
    size = group.size()
    wholes = [torch.ones(size * numel) for _ in range(num)]
    shards = [torch.ones(numel) for _ in range(num)]
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
        rows = [[numel] * size] * num
        plan = SimpleNamespace(inputs=shards, outputs=wholes, rows=rows, messages=None)
        return lambda: way.gather(plan, 0)()
    if collective == "reduce-scatter":
        parts = [whole.split(numel) for whole in wholes]
        return lambda: way.scatter(parts, shards, NUM_TENSORS)()
    flat = torch.cat(wholes)
    return lambda: way.all_reduce([flat], 2 * NUM_TENSORS)()


def ratios_of(results: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By way, number of ranks and collective: its time over that of gloo's own (medians)."""
    found: dict[str, dict[str, dict[str, float]]] = {way: {} for way in WAYS[:-1]}
    for ranks, rows in results.items():
        for key, times in rows.items():
            *ways, gloo = times
            # Without reads, where they are not permitted.
            for way, taken in zip(WAYS[-1 - len(ways) : -1], ways, strict=True):
                pairs = [mine / theirs for mine, theirs in zip(taken, gloo, strict=True)]
                found[way].setdefault(ranks, {})[key] = statistics.median(pairs)
    return found


def limit_of(results: dict[str, Any]) -> int:
    """Up to how many ranks exchanges are the better choice: `EXCHANGE_MAX_RANKS`.

    On so many and fewer, reads and messages take less time than gloo's collectives on average
    (geometric mean over the rows). One number for both, and for all sizes: all ranks have to know
    it before they find out whether they may read, and tensors are laid out by it.
    """
    found = ratios_of(results)
    limit = 1
    for ranks in sorted(results, key=int):
        of_ways = [by[ranks].values() for by in found.values() if ranks in by]
        means = list(map(statistics.geometric_mean, of_ways))
        if max(means) >= 1:
            break
        limit = int(ranks)
    return limit


def table(results: dict[str, Any]) -> str:
    """Markdown: for each number of ranks, the times of reads and of messages over gloo's."""
    found = ratios_of(results)
    keys = next(iter(results.values()))
    lines = [
        row(["collective of", *(f"{ranks} ranks" for ranks in results)]),
        row(["---"] + ["---:"] * len(results)),
    ]
    for key in keys:
        size, collective = key.split()
        cells = [
            ", ".join(f"{found[way][ranks][key]:.2f}" for way in found if ranks in found[way])
            for ranks in results
        ]
        lines.append(row([f"{int(size) // KIB:,} KiB, {collective}", *cells]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="keep it, and update the page")
    parser.add_argument("--only-table", action="store_true", help="of the results that are there")
    options = parser.parse_args(arguments)
    folder = machine.REPOSITORY / "benchmarks" / "results"
    record: dict[str, Any]
    if options.only_table:
        record = json.loads((folder / "exchange.json").read_text())
    else:
        record = {"name": "exchange", **machine.describe(), "results": {}}
        for ranks in options.ranks:
            made = run_ranks(measure, ranks, {"rounds": options.rounds})
            record["results"][str(ranks)] = made
    results = record["results"]
    where = describe(record).replace("; 2 ranks of one thread", "; ranks of one thread")
    text = f"{where}\n\n{table(results)}\n\nExchanges up to {limit_of(results)} ranks."
    print(text)
    if options.write:
        write_record(record, folder)
        page = machine.REPOSITORY / "benchmarks" / "README.md"
        write_readme(page, text, "<!-- exchange:begin -->", "<!-- exchange:end -->")
    return 0


if __name__ == "__main__":
    sys.exit(main())
