"""What the comparison of ranks before the first forward takes.

    python -m benchmarks.first_forward

For 2, 4 and 8 ranks on this machine, and a model of 32 blocks with 9 parameters each: the time that
`FirstForward.compare` takes on rank 0, from a barrier on, for a new root each time. The parts: what
the rank does alone (describing the model, samples of values), and the meeting in the store, which
waits for the slowest rank. Then the requests to the store in the first forward and in later ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.guards.rank_agreement import first_forward
from fsdp2.guards.rank_agreement.store_exchange import StoreExchange
from fsdp2.runtime.unit import units_in

from .ranks import run_ranks

NUM_BLOCKS = 32


def make_model(width: int = 32) -> nn.Module:
    """A sharded model of small blocks, the same on all ranks."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(*(nn.Linear(width, width) for _ in range(4)), nn.RMSNorm(width))
        for _ in range(NUM_BLOCKS)
    ]
    for block in blocks:
        fully_shard(block)
    return fully_shard(nn.Sequential(*blocks))


def measure(rounds: int) -> dict[str, Any]:
    """Medians of seconds, and how often ranks met."""
    meetings: list[int] = []
    alone: list[float] = []
    say, topics = StoreExchange.say, first_forward._topics

    def timed_topics(*args: Any) -> Any:
        start = time.perf_counter()
        found = topics(*args)
        alone.append(time.perf_counter() - start)
        return found

    def counted_say(self: StoreExchange, *args: Any) -> None:
        meetings.append(1)
        say(self, *args)

    first_forward._topics, StoreExchange.say = timed_topics, counted_say  # type: ignore[method-assign]
    whole: list[float] = []
    later = 0
    for _ in range(rounds):
        model: Any = make_model()
        model(torch.ones(1, 32))  # compares once, and makes what later forwards need
        due = first_forward.FirstForward(model, units_in(model))
        dist.barrier()
        start = time.perf_counter()
        due.compare()
        whole.append(time.perf_counter() - start)
        before = len(meetings)
        for _ in range(3):
            model(torch.ones(1, 32)).sum().backward()
        later += len(meetings) - before
    return {
        "whole_s": statistics.median(whole),
        "alone_s": statistics.median(alone),
        "later": later,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints a table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_forward")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    print(f"{NUM_BLOCKS + 1} units, {9 * NUM_BLOCKS} parameters; medians of {options.rounds} roots")
    print("| ranks | whole, ms | of it this rank alone, ms | meetings in later steps |")
    print("|---|---|---|---|")
    for num_ranks in options.ranks:
        found = run_ranks(measure, num_ranks, {"rounds": options.rounds})
        whole, alone = 1000 * found["whole_s"], 1000 * found["alone_s"]
        print(f"| {num_ranks} | {whole:.2f} | {alone:.2f} | {found['later']} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
