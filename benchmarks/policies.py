"""What fewer bytes on the wire gain, by the speed of the link: for docs/communication.md.

Two hosts (network namespaces, `benchmarks.hosts`) have one rank each; the kernel limits the rate at
which each sends (``tc``, a token bucket). So what is limited are the bytes that gloo
really sends, TCP's included. All variants live in the same two processes and take turns; a ratio
is taken within a round. Beside the times it has the bytes that `explain` says a rank sends, and
those that the interface has counted. Writes benchmarks/results/policies.json and prints a table;
the page has a shorter one.

    python -m benchmarks.policies [--only-table] [--write-docs]

Needs Linux, root, ``ip`` and ``tc`` (iproute2). Nothing outside of the namespaces is changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fsdp2
from fsdp2 import CommPolicy, MixedPrecisionPolicy

from . import host_ranks, machine
from .choosing import describe
from .hosts import Host
from .models import LM, Block, LMConfig
from .ranks import progress
from .report import row, write_readme

# 4.3M parameters: a step sends about 26 MB per rank in full.
MODEL = LMConfig(vocab=2048, width=256, hidden=704, num_blocks=4, num_heads=4)
BATCH, TOKENS = 4, 64
# In megabits per second, as ``tc`` counts; None: as fast as the host copies.
SPEEDS: dict[str, int | None] = {
    "no limit": None, "3 Gbit/s": 3000, "1 Gbit/s": 1000, "300 Mbit/s": 300, "100 Mbit/s": 100,
}  # fmt: skip
PAGE_SPEEDS = ("1 Gbit/s", "300 Mbit/s", "100 Mbit/s")
BF16, INT8, FLOAT8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
FULL = "in full"
VARIANTS: dict[str, CommPolicy | None] = {
    FULL: None,
    "bf16": CommPolicy(gather=BF16, reduce=BF16),
    "int8 gather": CommPolicy(gather=INT8),
    "int8 reduce": CommPolicy(reduce=INT8),
    "int8": CommPolicy(gather=INT8, reduce=INT8),
    "int8, error feedback": CommPolicy(gather=INT8, reduce=INT8, error_feedback=True),
    "float8 gather, int8 reduce": CommPolicy(gather=FLOAT8, reduce=INT8),
}
COMPUTE_BF16 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
PRECISIONS = {"fp32": MixedPrecisionPolicy(), "bf16 compute": COMPUTE_BF16}
WARM_UP_STEPS = 2


class Trainee:
    """One model with its optimizer."""

    def __init__(self, policy: CommPolicy | None, precision: MixedPrecisionPolicy) -> None:
        torch.manual_seed(0)
        self.model = fsdp2.shard_model(
            LM(MODEL), wrap=[Block], mp_policy=precision, comm_policy=policy
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.num_steps = 0
        self.losses: list[float] = []

    def step(self) -> float:
        """Seconds of a step."""
        data = torch.Generator().manual_seed(2 * self.num_steps + dist.get_rank())
        tokens = torch.randint(MODEL.vocab // 8, (BATCH, TOKENS + 1), generator=data)
        self.num_steps += 1
        dist.barrier()
        start = time.perf_counter()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        mean = loss.detach()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        return seconds.item()


# -- ranks -----------------------------------------------------------------------------------------


def measure(host: Host, precision: str, speeds: dict[str, int | None], rounds: int) -> Any:
    """Times all variants at all speeds, on this rank."""
    variants = VARIANTS
    if precision != "fp32":  # weights are gathered in bfloat16 anyway
        variants = {name: policy for name, policy in VARIANTS.items() if name != "bf16"}
    trainees = {name: Trainee(policy, PRECISIONS[precision]) for name, policy in variants.items()}
    order = list(trainees)
    result: dict[str, Any] = {}
    host.limit(None)
    for name, trainee in trainees.items():
        for _ in range(WARM_UP_STEPS):
            trainee.step()
        before = host_ranks.sent_bytes()
        trainee.step()
        told = fsdp2.explain(trainee.model).totals.sent_bytes
        result[name] = {"told": told, "counted": host_ranks.sent_bytes() - before, "seconds": {}}
    for speed, megabits in speeds.items():
        progress(f"{precision}: {speed}")
        host.limit(megabits)
        for name in order:
            result[name]["seconds"][speed] = []
        for i in range(rounds):
            turn = i % len(order)  # each round begins with another one
            gc.collect()
            for name in order[turn:] + order[:turn]:
                result[name]["seconds"][speed].append(trainees[name].step())
    host.limit(None)
    for name, trainee in trainees.items():
        result[name]["loss"] = statistics.mean(trainee.losses[-5:])
        result[name]["num_steps"] = trainee.num_steps
    return result


def rank_main(options: argparse.Namespace) -> None:
    """The main function of a rank, on its host."""
    host = host_ranks.begin_rank(options, 2)
    speeds = {name: limit for name, limit in SPEEDS.items() if name in options.speeds}
    answer = {
        precision: measure(host, precision, speeds, options.rounds)
        for precision in options.precisions
    }
    host_ranks.end_rank(options, answer)


# -- report ----------------------------------------------------------------------------------------


def ratios(runs: dict[str, Any], name: str, speed: str) -> list[float]:
    """Of a variant to all bytes, round by round."""
    return host_ranks.ratios(runs[name]["seconds"][speed], runs[FULL]["seconds"][speed])


def begins_to_pay(runs: dict[str, Any], name: str, speeds: list[str]) -> str:
    """The fastest link on which, as on all slower ones, every round was faster than in full."""
    found = "none of these"
    for speed in reversed(speeds):  # slowest first
        if max(ratios(runs, name, speed)) >= 1:
            break
        found = speed
    return found


def table(results: dict[str, Any], speeds: list[str]) -> str:
    """Markdown: milliseconds of a step, and the ratio to that in full."""
    header = ["computes in", "policy", "MB sent per step, told", "counted", *speeds, "pays up to",
              "loss"]  # fmt: skip
    lines = [row(header), row(["---"] * len(header))]
    for precision, runs in results.items():
        for name, made in runs.items():
            cells = [precision, name, f"{made['told'] / 1e6:.2f}", f"{made['counted'] / 1e6:.2f}"]
            for speed in speeds:
                base = None if name == FULL else runs[FULL]["seconds"][speed]
                cells.append(host_ranks.time_cell(made["seconds"][speed], base))
            cells.append("-" if name == FULL else begins_to_pay(runs, name, speeds))
            lines.append(row([*cells, f"{made['loss']:.3f}"]))
    return "\n".join(lines)


def page_table(results: dict[str, Any]) -> str:
    """The table of the page: what is sent, times on slow links, and up to where a policy pays."""
    speeds = [s for s in PAGE_SPEEDS if s in next(iter(results.values()))[FULL]["seconds"]]
    header = ["computes in, policy", "MB sent", *speeds, "pays up to"]
    lines = [row(header), row(["---"] * len(header))]
    for precision, runs in results.items():
        for name, made in runs.items():
            base = None if name == FULL else runs[FULL]["seconds"]
            cells = [
                f"{precision.split()[0]}, {'no policy' if base is None else name}",
                f"{made['told'] / 1e6:.2f}",
            ]
            for speed in speeds:
                other = None if base is None else base[speed]
                cells.append(host_ranks.time_cell(made["seconds"][speed], other, spread=False))
            pays = "-" if base is None else begins_to_pay(runs, name, list(base))
            lines.append(row([*cells, pays]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies")
    host_ranks.add_options(parser, SPEEDS, rounds=5)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options)
        return 0
    path = options.output / "policies.json"
    if not options.only_table:
        if not host_ranks.can_run("benchmarks.policies"):
            return 2
        about = machine.describe()
        precisions = ("--precisions", *options.precisions)
        results = host_ranks.run(
            "benchmarks.policies", options, *precisions, num_hosts=2, ranks_per_host=1
        )
        record = {"name": "policies", **about, "num_ranks": 2, "results": results}
        options.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(path.read_text())
    results = record["results"]
    speeds = list(next(iter(results.values()))[FULL]["seconds"])
    print(f"{describe(record)}\n\n{table(results, speeds)}")
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "communication.md"
        text = f"{describe(record)}\n\n{page_table(results)}"
        write_readme(page, text, "<!-- policies:begin -->", "<!-- policies:end -->")
    return 0


if __name__ == "__main__":
    sys.exit(main())
