"""How far a step is from what its machine allows: `python -m benchmarks.floors`.

A floor is what is left of a step when the library takes no time at all:

- *lm*, *lm-bf16*: the plain model's step, and the bytes that `explain` says, in as few messages as
  possible: one for each gather of a unit and each peer, one for each reduction, sent and received
  by the process group in memory that exists already, the next unit's started before this one's are
  waited for; then the sums. The two are added: every rank has one core, and gloo's copies need it
  as much as compute does, so nothing can hide. A transport other than gloo's messages may be faster
  than this floor.
- *hooks*: above the plain model's step, the calls of the process group that a unit cannot do
  without, here of a `fake` one: two all-gathers and a reduce-scatter of tensors that exist.
- *memory*: what the plain model needs in forward and backward, and the largest parameter once as a
  whole, with its whole gradient. No library that computes with whole parameters can hold less.

The floor and fsdp2 take turns, as in `lm` and `hooks`; ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

from . import hooks, lm, machine, memory
from .models import LMConfig, StackConfig
from .ranks import run_ranks
from .report import number, row, write_record
from .steps import make_lm
from .suite import above_plain, round_medians
from .variants import OURS, Variant, build

RESULTS = machine.REPOSITORY / "benchmarks" / "results"


class Messages(lm.Run):
    """The messages of a sharded step, and nothing else."""

    def __init__(self, explained: fsdp2.Explanation, config: LMConfig) -> None:
        super().__init__(Variant("messages", nn.Linear(1, 1), True, True), config, 1, 1)
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self.peers = [r for r in range(self.size) if r != self.rank]
        units = [u for u in explained.units if u.num_gathers or u.sent_by_reduction]
        # In bytes of one message to one peer; what is sent is that of a rank with all its rows.
        gathers = [u.sent_by_gathers // max(1, u.num_gathers) // len(self.peers) for u in units]
        reductions = [u.sent_by_reduction // len(self.peers) for u in units]
        self.order: list[tuple[str, int]] = []
        for again in (1, 2):
            # The first gather of all in forward, the second of those that have one in backward.
            self.order += [("gather", i) for i, u in enumerate(units) if u.num_gathers >= again]
        self.order += [("reduce", i) for i in range(len(units))]
        self.whole = {
            "gather": [make_buffers(n, self.size) for n in gathers],
            "reduce": [make_buffers(n, self.size) for n in reductions],
        }
        self.received = [make_buffers(n, self.size) for n in reductions]
        self.sent_bytes = 0  # in the last step

    def forward_backward(self, batch: Tensor) -> float:
        self.sent_bytes = 0
        started: list[tuple[str, int, list[dist.Work]]] = []
        for kind, i in self.order:
            started.append((kind, i, self.start(kind, i)))
            if len(started) > 1:
                self.finish(*started.pop(0))
        self.finish(*started.pop())
        return 0.0

    def start(self, kind: str, i: int) -> list[dist.Work]:
        """Starts the messages of one gather or reduction of unit `i`."""
        whole = self.whole[kind][i]
        into = whole if kind == "gather" else self.received[i]
        tag = 2 * i + (kind == "reduce")
        works = [dist.irecv(into[peer], peer, tag=tag) for peer in self.peers]
        for peer in self.peers:
            mine = whole[self.rank if kind == "gather" else peer]
            works.append(dist.isend(mine, peer, tag=tag))
            self.sent_bytes += mine.nbytes
        return [work for work in works if work is not None]

    def finish(self, kind: str, i: int, works: list[dist.Work]) -> None:
        """Waits for them, and adds up what was received."""
        for work in works:
            work.wait()
        if kind == "reduce":
            mine = self.whole[kind][i][self.rank]
            for peer in self.peers:
                mine.add_(self.received[i][peer])

    def norm(self) -> float:
        return 0.0


def make_buffers(num_bytes: int, size: int) -> list[Tensor]:
    """One buffer per rank, of fp32, all written once: the first touch of memory is slow."""
    return [torch.zeros(num_bytes // 4) for _ in range(size)]


def measure_lm(bf16: bool, config: LMConfig, rounds: int, iters: int) -> dict[str, Any]:
    """Step times of the plain model, the messages alone, and fsdp2, in turns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make_model = partial(make_lm, config)
    runs = [lm.Run(build(name, make_model, mesh, bf16), config, 2, 64) for name in ("plain", OURS)]
    ours = runs[-1]
    ours.step()  # then it is known which units run last, and what they gather
    explained = fsdp2.explain(ours.variant.model)
    messages = Messages(explained, config)
    found = lm.take_turns([*runs, messages], "floor of lm", rounds, iters)
    found["messages"]["sent_bytes"] = messages.sent_bytes
    found[OURS]["sent_bytes"] = explained.totals.sent_bytes
    return found


class Calls(hooks.Run):
    """As many calls of the process group as a sharded step needs, and nothing else."""

    def __init__(self, config: StackConfig) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plain = build("plain", partial(hooks.make_stack, config), mesh, bf16=False)
        super().__init__(Variant("calls", plain.model, False, True), config)
        super().forward_backward()  # gradients, which `one_round` checks
        size = dist.get_world_size()
        numel = sum(p.numel() for p in plain.model.parameters()) // config.num_blocks
        self.num_units = config.num_blocks
        self.whole = torch.zeros(numel // size * size)
        self.shard = torch.zeros(numel // size)

    def step(self) -> tuple[float, ...]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(self.num_units):
            for _ in range(2):
                dist.all_gather_into_tensor(self.whole, self.shard)
            dist.reduce_scatter_tensor(self.shard, self.whole)
        return time.perf_counter() - wall_s, time.process_time() - cpu_s, 0.0


def measure_hooks(width: int, rounds: int, iters: int) -> dict[str, Any]:
    """Step times of the plain stack, of the bare calls, and of fsdp2, in turns."""
    torch.set_flush_denormal(True)
    config = StackConfig(width=width, hidden=2 * width)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs: list[hooks.Run] = [
        hooks.Run(build(name, partial(hooks.make_stack, config), mesh, False), config)
        for name in ("plain", OURS)
    ]
    runs.append(Calls(config))
    for run in runs:
        for _ in range(hooks.WARM_UP_STEPS):
            run.step()
    for i in range(rounds):
        for run in runs[i % 3 :] + runs[: i % 3]:
            run.one_round(iters)
    return {run.variant.name: {"rounds_s": run.rounds_s} for run in runs}


def ratio_row(
    title: str, unit: str, scale: float, ours: list[float], floor: list[float]
) -> dict[str, Any]:
    """One figure; the ratio is the median over rounds, with its range."""
    ratios = [mine / least for mine, least in zip(ours, floor, strict=True)]
    return {
        "title": title,
        "unit": unit,
        "floor": statistics.median(floor) * scale,
        "ours": statistics.median(ours) * scale,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
    }


def table(figures: list[dict[str, Any]]) -> str:
    """The figures in Markdown."""
    lines = [row(["measure", "floor", "fsdp2", "fsdp2 / floor"]), row(["---"] * 4)]
    for figure in figures:
        low, high = figure["range"]
        spread = f" ({low:.2f} to {high:.2f})" if low != high else ""
        lines.append(
            row(
                [
                    f"{figure['title']}, {figure['unit']}",
                    number(figure["floor"]),
                    number(figure["ours"]),
                    f"{figure['ratio']:.2f}{spread}",
                ]
            )
        )
    return "\n".join(lines)


def lm_rows(ranks: int, rounds: int, iters: int) -> list[dict[str, Any]]:
    """The language model in both precisions."""
    rows = []
    for bf16 in (False, True):
        arguments = {"bf16": bf16, "config": LMConfig(), "rounds": rounds, "iters": iters}
        found = run_ranks(measure_lm, ranks, arguments)
        times = {name: round_medians(result["rounds_s"]) for name, result in found.items()}
        floor = [a + b for a, b in zip(times["plain"], times["messages"], strict=True)]
        precision = "bf16 compute, fp32 reduce" if bf16 else "fp32"
        title = f"LM forward+backward, {precision}" + (f", {ranks} ranks" if ranks != 2 else "")
        rows.append(ratio_row(title, "ms", 1e3, times[OURS], floor))
    return rows


def hook_rows(rounds: int, iters: int) -> list[dict[str, Any]]:
    """The stack of tiny units, with two widths."""
    rows = []
    for width in (64, 16):
        arguments = {"width": width, "rounds": rounds, "iters": iters}
        found = run_ranks(measure_hooks, 2, arguments, fake=True)
        times = {name: round_medians(result["rounds_s"]) for name, result in found.items()}
        units = StackConfig().num_blocks
        ours = above_plain(times, units)[OURS]
        floor = [seconds / units for seconds in times["calls"]]
        title = "hook time per unit and step" + (", 16 x 16" if width == 16 else "")
        rows.append(ratio_row(title, "us", 1e6, ours, floor))
    return rows


def memory_rows() -> list[dict[str, Any]]:
    """Peak memory above own state, in both precisions."""
    config = LMConfig()
    largest = config.vocab * config.width
    rows = []
    for bf16 in (False, True):
        names = ["plain", OURS]
        arguments = {"names": names, "config": config, "tokens": 8, "bf16": bf16}
        found = run_ranks(memory.measure, 2, arguments)
        activations = found["plain"]["peak_bytes"]
        if bf16:  # the plain model's casts of its weights are no activations
            activations -= 2 * sum(p.numel() for p in make_lm(config).parameters())
        floor = activations + 2 * largest * (2 if bf16 else 4)
        title = f"peak memory above own state, {'bf16' if bf16 else 'fp32'}"
        rows.append(ratio_row(title, "MB", 1e-6, [found[OURS]["peak_bytes"]], [floor]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("measures", nargs="*", default=["lm", "hooks", "memory"], metavar="MEASURE")
    parser.add_argument("--ranks", type=int, default=2, help="of lm (default 2)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iters", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="benchmarks/results/floors.json")
    options = parser.parse_args()
    about = machine.describe()
    figures = []
    if "lm" in options.measures:
        figures += lm_rows(options.ranks, options.rounds, options.iters)
    if "hooks" in options.measures:
        figures += hook_rows(options.rounds, 3 * options.iters)
    if "memory" in options.measures:
        figures += memory_rows()
    print(table(figures))
    if options.write:
        write_record({"name": "floors", **about, "figures": figures}, RESULTS)


if __name__ == "__main__":
    main()
