"""Which strategy on slow links: two hosts of two ranks each, for docs/choosing.md.

Hosts are network namespaces, whose links the kernel limits (see `hosts`). All variants live in the
same four processes and take turns; a ratio is taken within a round. Bytes are those that a host's
interface has counted in a step, TCP's headers and acknowledgements included. Peaks are what
`fsdp2.estimate` says of a rank. Writes benchmarks/results/links.json and prints a table; the page
has a shorter one.

    python -m benchmarks.links [--only-table] [--write-docs]

Needs Linux, root, ``ip`` and ``tc`` (iproute2). Nothing outside of the namespaces is changed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import CommPolicy
from fsdp2.transports.host.meeting import SWITCH

from . import host_ranks, machine
from .choosing import describe
from .hosts import Host
from .models import LM, Block, LMConfig
from .ranks import progress
from .report import row, write_readme

# 4.3M parameters.
MODEL = LMConfig(vocab=2048, width=256, hidden=704, num_blocks=4, num_heads=4)
BATCH, TOKENS = 4, 64
HOSTS, RANKS_PER_HOST = 2, 2
SPEEDS: dict[str, int | None] = {"no limit": None, "1 Gbit/s": 1000, "100 Mbit/s": 100}  # of `tc`
BF16, INT8 = torch.bfloat16, torch.int8
TORCH, BASE = "torch FSDP2", "full"
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Attributes:
        options: of `shard_model`.
        micro_batches: of a step; gradients are reduced after the last.
        reads: whether ranks of a host may read each other's memory.
    """

    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    reads: bool = True


NARROW = {"comm_policy": CommPolicy(gather=BF16, reduce=BF16)}
SMALL = {"comm_policy": CommPolicy(gather=INT8, reduce=INT8)}
HOPS = {"comm_policy": CommPolicy(gather=INT8, reduce=INT8, ranks_per_node=RANKS_PER_HOST)}
VARIANTS: dict[str, Variant] = {
    TORCH: Variant(),
    BASE: Variant(),
    "full, messages between all ranks": Variant(reads=False),
    "grad": Variant({"strategy": "grad"}),
    "hybrid": Variant({"strategy": "hybrid"}),
    "none": Variant({"strategy": "none"}),
    "full, bf16 on the wire": Variant(NARROW),
    "full, int8 on the wire": Variant(SMALL),
    "full, int8, two hops": Variant(HOPS),
    "hybrid, int8 on the wire": Variant({"strategy": "hybrid", **SMALL}),
    "full, 4 micro-batches": Variant(micro_batches=4),
    "optimizer, 4 micro-batches": Variant({"strategy": "optimizer"}, 4),
    "hybrid, 4 micro-batches": Variant({"strategy": "hybrid"}, 4),
}


class Trainee:
    """One model with its optimizer."""

    def __init__(self, name: str, variant: Variant) -> None:
        torch.manual_seed(0)
        model = LM(MODEL)
        self.variant = variant
        self.model: Any = _torch_sharded(model) if name == TORCH else _sharded(model, variant)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.num_steps = 0
        self.losses: list[float] = []

    def step(self) -> float:
        """Seconds of a micro-batch, of a whole step, optimizer too."""
        count = self.variant.micro_batches
        data = torch.Generator().manual_seed(1000 * self.num_steps + dist.get_rank())
        tokens = torch.randint(MODEL.vocab // 8, (count, BATCH, TOKENS + 1), generator=data)
        self.num_steps += 1
        dist.barrier()
        start = time.perf_counter()
        for i, batch in enumerate(tokens):
            if count > 1:
                self.model.set_requires_gradient_sync(i == count - 1)
            logits = self.model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            (loss / count).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        mean = loss.detach()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())
        return seconds.item() / count


def _torch_sharded(model: LM) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Block):
            torch_fsdp.fully_shard(module)
    return torch_fsdp.fully_shard(model)


def _sharded(model: LM, variant: Variant) -> nn.Module:
    options = {"wrap": [Block], **variant.options}
    if not variant.reads:  # on a group of its own: what a group does is found out once
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        options["mesh"] = DeviceMesh.from_group(group, "cpu")
    return fsdp2.shard_model(model, **options)


# -- ranks -----------------------------------------------------------------------------------------


def measure(host: Host, speeds: dict[str, int | None], rounds: int) -> dict[str, Any]:
    """Times all variants at all speeds, on this rank."""
    first_of_host = dist.get_rank() % RANKS_PER_HOST == 0

    def limit(megabits: int | None) -> None:
        dist.barrier()
        if first_of_host:
            host.limit(megabits)
        dist.barrier()

    result: dict[str, Any] = {}
    trainees = {}
    limit(None)
    for name, variant in VARIANTS.items():
        os.environ[SWITCH] = str(int(variant.reads))
        trainees[name] = Trainee(name, variant)
        for _ in range(WARM_UP_STEPS):
            trainees[name].step()
        os.environ[SWITCH] = "1"
        before = host_ranks.sent_bytes()
        trainees[name].step()
        counted = torch.tensor([host_ranks.sent_bytes() - before])
        dist.all_reduce(counted, op=dist.ReduceOp.MAX)
        nbytes = counted.item() // variant.micro_batches
        result[name] = {"sent": nbytes, "seconds": {}}
    order = list(trainees)
    for speed, megabits in speeds.items():
        progress(speed)
        limit(megabits)
        for name in order:
            result[name]["seconds"][speed] = []
        for i in range(rounds):
            turn = i % len(order)  # each round begins with another one
            gc.collect()
            for name in order[turn:] + order[:turn]:
                result[name]["seconds"][speed].append(trainees[name].step())
    limit(None)
    for name, trainee in trainees.items():
        result[name]["loss"] = statistics.mean(trainee.losses[-3:])
    return result


def _peak(name: str, variant: Variant) -> int | None:
    """Bytes that a rank holds at most in a step, as estimated."""
    if name == TORCH:
        return None
    shape = (HOSTS, RANKS_PER_HOST)
    hybrid = variant.options.get("strategy") == "hybrid"
    tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    estimated = fsdp2.estimate(
        fsdp2.planning.Workload(LM(MODEL), tokens, micro_batches=variant.micro_batches),
        fsdp2.planning.Sharding(wrap=[Block], **variant.options),
        shape if hybrid else HOSTS * RANKS_PER_HOST,
        device_type="cpu",
        ranks_per_node=RANKS_PER_HOST,
    )
    return max(rank.peak.total for rank in estimated.ranks)


def rank_main(options: argparse.Namespace) -> None:
    """The main function of a rank, on its host."""
    host = host_ranks.begin_rank(options, HOSTS * RANKS_PER_HOST)
    speeds = {name: limit for name, limit in SPEEDS.items() if name in options.speeds}
    host_ranks.end_rank(options, measure(host, speeds, options.rounds))


# -- report ----------------------------------------------------------------------------------------


def table(results: dict[str, Any], speeds: list[str], *, brief: bool = False) -> str:
    """Markdown: milliseconds per micro-batch, and the ratio to `BASE`.

    Args:
        brief: as on the page, without losses and the ranges of ratios.
    """
    header = ["strategy", "MB sent by a host", "peak of a rank, MB", *speeds]
    header += [] if brief else ["loss"]
    lines = [row(header), row(["---"] * len(header))]
    for name, made in results.items():
        peak = "-" if made["peak"] is None else f"{made['peak'] / 1e6:.1f}"
        cells = [name, f"{made['sent'] / 1e6:.2f}", peak]
        for speed in speeds:
            base = None if name == BASE else results[BASE]["seconds"][speed]
            cells.append(host_ranks.time_cell(made["seconds"][speed], base, spread=not brief))
        lines.append(row(cells if brief else [*cells, f"{made['loss']:.3f}"]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links")
    host_ranks.add_options(parser, SPEEDS, rounds=3)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options)
        return 0
    path = options.output / "links.json"
    if not options.only_table:
        if not host_ranks.can_run("benchmarks.links"):
            return 2
        about = machine.describe()
        record = {"name": "links", **about, "num_ranks": HOSTS * RANKS_PER_HOST}
        record["results"] = host_ranks.run(
            "benchmarks.links", options, num_hosts=HOSTS, ranks_per_host=RANKS_PER_HOST
        )
        for name, made in record["results"].items():
            made["peak"] = _peak(name, VARIANTS[name])
        options.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(path.read_text())
    speeds = list(record["results"][BASE]["seconds"])
    about_it = describe(record).replace("2 ranks", f"{HOSTS} hosts of {RANKS_PER_HOST} ranks")
    print(f"{about_it}\n\n{table(record['results'], speeds)}")
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "choosing.md"
        text = f"{about_it}\n\n{table(record['results'], speeds, brief=True)}"
        write_readme(page, text, "<!-- links:begin -->", "<!-- links:end -->")
    return 0


if __name__ == "__main__":
    sys.exit(main())
