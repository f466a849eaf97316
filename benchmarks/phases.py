"""All-reduces by messages: in one exchange of the whole, in two phases, and gloo's own, in turns.

In one exchange every rank sends the whole to every other one, and adds up everything; in two phases
it adds up one part, and sends the sum. One exchange takes half as many steps, and n/2 times the
bytes. Up to which size it is faster depends on the number of ranks, and on the links: measured are
ranks of one host, and hosts of one rank each (network namespaces, see `hosts`) whose links carry 1
Gbit/s. ``--write`` keeps every round in benchmarks/results/phases.json; `limits_of` says from these
up to how many bytes one exchange is used, and a test that `MEASURED_WHOLE_BYTES` of the library is
that.

    python -m benchmarks.phases [--ranks 4 8 16 32] [--hosts 4 8 16] [--rounds N] [--write]

Hosts need Linux, root, ``ip`` and ``tc`` (iproute2); ``--hosts`` without numbers leaves them out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.transports.host.messages import Messages

from . import host_ranks, machine
from .choosing import describe
from .ranks import progress, run_ranks
from .report import row, write_readme, write_record

KIB = 1024
SIZES = tuple(2**n * KIB for n in range(3, 11))  # in fp32
# What one exchange may receive: it needs buffers of that size.
MOST_RECEIVED = 8 * 1024 * KIB
MBITS = 1000
PLACES = ("one host", "hosts")  # where the ranks are: the keys of results


def measure(rounds: int) -> dict[str, Any]:
    """Milliseconds of the slowest rank, of each round: one exchange, two phases, gloo's own."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for size in sizes_of(group.size()):
        flat = torch.ones(size // 4)
        both = Messages(group).in_one, Messages(group).in_two_phases
        times: list[list[float]] = [[], [], []]
        for i in range(rounds + 1):
            for taken, call in zip(times, (*both, None), strict=True):
                dist.barrier()
                start = time.perf_counter()
                if call is None:
                    group.allreduce([flat]).wait()
                else:
                    call([flat], 0)()
                longest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                dist.all_reduce(longest, op=dist.ReduceOp.MAX)
                if i:  # the first is a warm-up
                    taken.append(longest.item() * 1e3)
        found[str(size)] = times
    progress(f"{group.size()} ranks")
    return found


def sizes_of(num_ranks: int) -> list[int]:
    """The bytes of the all-reduces that are measured."""
    return [size for size in SIZES if (num_ranks - 1) * size <= MOST_RECEIVED]


def limits_of(results: dict[str, Any]) -> dict[str, dict[int, int]]:
    """By place and ranks: all-reduces of no more bytes are one exchange (`MEASURED_WHOLE_BYTES`).

    It is the size up to which one exchange gains most over two phases: the product of the ratios
    (medians within rounds) is least. So one size that is measured wrong does not decide.
    """
    found: dict[str, dict[int, int]] = {}
    for place, by_ranks in results.items():
        for ranks, rows in by_ranks.items():
            best, product, limit = 1.0, 1.0, 0
            for size, times in rows.items():  # from small to large
                product *= _ratio(times, 0, 1)
                if product < best:
                    best, limit = product, int(size)
            found.setdefault(place, {})[int(ranks)] = limit
    return found


def _ratio(times: list[list[float]], of: int, to: int) -> float:
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def table(results: dict[str, Any]) -> str:
    """Markdown: times over those of gloo's own, in one exchange and in two phases."""
    columns = [(place, ranks) for place in results for ranks in results[place]]
    header = [f"{ranks} {'ranks, one host' if p == PLACES[0] else 'hosts'}" for p, ranks in columns]
    lines = [row(["all-reduce of", *header]), row(["---"] + ["---:"] * len(columns))]
    for size in SIZES:
        cells = []
        for place, ranks in columns:
            times = results[place][ranks].get(str(size))
            both = [] if times is None else [_ratio(times, way, 2) for way in (0, 1)]
            cells.append(", ".join(f"{ratio:.2f}" for ratio in both))
        lines.append(row([f"{size // KIB:,} KiB", *cells]))
    limits = limits_of(results)
    cells = [f"up to {limits[place][int(ranks)] // KIB:,} KiB" for place, ranks in columns]
    return "\n".join([*lines, row(["one exchange", *cells])])


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.phases", description=__doc__)
    host_ranks.add_options(parser, [str(MBITS)], rounds=15)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--hosts", type=int, nargs="*", default=[4, 8, 16])
    parser.add_argument("--write", action="store_true", help="keep it, and update the page")
    parser.add_argument("--num", type=int, help=argparse.SUPPRESS)  # of ranks, to one of them
    options = parser.parse_args(arguments)
    if options.rank is not None:
        host_ranks.begin_rank(options, options.num).limit(MBITS)
        host_ranks.end_rank(options, measure(options.rounds))
        return 0
    path = machine.REPOSITORY / "benchmarks" / "results" / "phases.json"
    record: dict[str, Any]
    if options.only_table:
        record = json.loads(path.read_text())
    else:
        if options.hosts and not host_ranks.can_run("benchmarks.phases"):
            return 2
        record = {"name": "phases", **machine.describe(), "results": {}}
        here = {str(n): run_ranks(measure, n, {"rounds": options.rounds}) for n in options.ranks}
        between = {str(n): _on_hosts(n, options) for n in options.hosts}
        made = zip(PLACES, (here, between), strict=True)
        record["results"] = {place: by_ranks for place, by_ranks in made if by_ranks}
    where = describe(record).replace("; 2 ranks of one thread", "; ranks of one thread")
    text = f"{where}\n\n{table(record['results'])}"
    print(text)
    if options.write:
        write_record(record, path.parent)
        page = machine.REPOSITORY / "benchmarks" / "README.md"
        write_readme(page, text, "<!-- phases:begin -->", "<!-- phases:end -->")
    return 0


def _on_hosts(num: int, options: argparse.Namespace) -> dict[str, Any]:
    return host_ranks.run(
        "benchmarks.phases", options, "--num", str(num), num_hosts=num, ranks_per_host=1
    )


if __name__ == "__main__":
    sys.exit(main())
