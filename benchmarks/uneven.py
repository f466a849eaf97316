"""Two hosts, one slowed down: what its batch by speed gains, for docs/planning/hardware.md.

As a user would go about it: `fsdp2 doctor` runs on both hosts, its figures become a hardware file,
`fsdp2 plan` reads that and divides the batch. Then a language model is trained on both hosts, with
equal batches and with the plan's, in the same processes, which take turns; a ratio is taken within
a round. The slow host is slow for real: another process computes on its core all the time. With
that process stopped, equal batches show what the slow host costs. Before it is timed, a step's
gradients are compared with those that one process computes of the whole batch.

Hosts are network namespaces (see `hosts`), each with one rank and one core. Writes
benchmarks/results/uneven.json and prints a table.

    python -m benchmarks.uneven [--write-docs]

Needs Linux, root, ``ip``, ``tc`` (iproute2), ``taskset`` and two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import fsdp2

from . import host_ranks, machine
from .hosts import Host, hosts
from .models import LM, Block, LMConfig
from .ranks import progress
from .report import row, write_readme

# 4.3M parameters.
MODEL = LMConfig(vocab=2048, width=256, hidden=704, num_blocks=4, num_heads=4)
TOKENS = 64
SAMPLES = 12  # of each of two ranks, were they equal
HOSTS, SLOW = 2, 1
EVEN, BY_SPEED, UNDISTURBED = "equal batches", "batches by speed", "equal batches, no slow host"
WARM_UP_STEPS = 2
DOCTOR_PORT = 29512
BEGIN, END = "<!-- uneven:begin -->", "<!-- uneven:end -->"


def model() -> LM:
    """What is trained; `fsdp2 plan` calls it, too."""
    torch.manual_seed(0)
    return LM(MODEL)


def batch() -> torch.Tensor:
    """One rank's part of the batch, were they equal."""
    return torch.zeros(SAMPLES, TOKENS, dtype=torch.int64)


def next_token_loss(logits: torch.Tensor) -> torch.Tensor:
    """A loss of the right size, for `fsdp2 plan`."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return loss_of(logits, targets)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainee:
    """The model sharded over both hosts, with its optimizer; ranks take ``sizes`` samples."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.model: Any = fsdp2.shard_model(model(), wrap=[Block])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.num_steps = 0

    def backward(self, tokens: torch.Tensor) -> None:
        """Gradients of the mean loss over all ``tokens``, of which this rank has its part."""
        rank = dist.get_rank()
        mine = tokens.split(self.sizes)[rank]
        loss = loss_of(self.model(mine[:, :-1]), mine[:, 1:])
        (loss * (self.sizes[rank] * len(self.sizes) / sum(self.sizes))).backward()

    def step(self) -> float:
        """Seconds of a whole step, optimizer too, of the rank that took longest."""
        tokens = batch_of_all(self.num_steps)
        self.num_steps += 1
        dist.barrier()
        start = time.perf_counter()
        self.backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def gradient_error(self) -> float:
        """The largest difference to one process's gradients, relative to the largest of each."""
        tokens = batch_of_all(-1)
        self.backward(tokens)
        alone = model()
        loss_of(alone(tokens[:, :-1]), tokens[:, 1:]).backward()
        worst = 0.0
        for (name, mine), theirs in zip(
            self.model.named_parameters(), alone.parameters(), strict=True
        ):
            assert isinstance(mine.grad, DTensor), name
            expected = theirs.grad
            error = (mine.grad.full_tensor() - expected).abs().max() / expected.abs().max()
            worst = max(worst, error.item())
        self.optimizer.zero_grad()
        return worst


def batch_of_all(step: int) -> torch.Tensor:
    """Tokens of all ranks, the same however they are divided."""
    data = torch.Generator().manual_seed(1000 + step)
    return torch.randint(MODEL.vocab // 8, (HOSTS * SAMPLES, TOKENS + 1), generator=data)


# -- ranks -----------------------------------------------------------------------------------------


def measure(sizes: Sequence[int], neighbour: int, rounds: int) -> dict[str, Any]:
    """Times all variants in turns, on this rank; ``neighbour`` is what makes a host slow."""
    variants = {
        EVEN: Trainee([SAMPLES] * HOSTS),
        BY_SPEED: Trainee(sizes),
        UNDISTURBED: Trainee([SAMPLES] * HOSTS),
    }

    def disturb(on: bool) -> None:
        dist.barrier()
        if dist.get_rank() == SLOW:
            os.kill(neighbour, signal.SIGCONT if on else signal.SIGSTOP)
        dist.barrier()

    result: dict[str, Any] = {}
    for name, trainee in variants.items():
        result[name] = {
            "sizes": trainee.sizes,
            "gradient_error": trainee.gradient_error(),
            "seconds": [],
        }
        for _ in range(WARM_UP_STEPS):
            trainee.step()
    order = list(variants)
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}")
        turn = i % len(order)  # each round begins with another one
        gc.collect()
        for name in order[turn:] + order[:turn]:
            disturb(name != UNDISTURBED)
            result[name]["seconds"].append(variants[name].step())
    disturb(True)
    return result


def rank_main(options: argparse.Namespace) -> None:
    """The main function of a rank, on its host."""
    host_ranks.begin_rank(options, HOSTS)
    host_ranks.end_rank(options, measure(options.sizes, options.neighbour, options.rounds))


# -- hosts -----------------------------------------------------------------------------------------


def _pinned(host: Host, core: int, *arguments: str) -> list[str]:
    return host.command("taskset", "--cpu-list", str(core), sys.executable, *arguments)


@contextmanager
def _neighbour(core: int) -> Iterator[int]:
    """The id of a process that computes on ``core`` all the time."""
    command = ["taskset", "--cpu-list", str(core), sys.executable, "-c", "while True: pass"]
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _doctor(made: Sequence[Host], cores: Sequence[int]) -> dict[str, Any]:
    """What `fsdp2 doctor` says about both hosts."""
    processes = []
    for rank, (host, core) in enumerate(zip(made, cores, strict=True)):
        environment = host.environment(
            RANK=str(rank),
            WORLD_SIZE=str(len(made)),
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=made[0].address,
            MASTER_PORT=str(DOCTOR_PORT),
        )
        command = _pinned(host, core, "-m", "fsdp2", "doctor", "--json")
        processes.append(
            subprocess.Popen(
                command, cwd=machine.REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE
            )
        )
    told = [process.communicate()[0] for process in processes]
    return json.loads(told[0])


def hardware_of(examined: dict[str, Any]) -> dict[str, Any]:
    """A hardware file of what `fsdp2 doctor` has measured.

    What it does not measure, and a CPU has little of (attention kernels, latency of launches), is
    set so that it makes no difference between equal and divided batches.
    """
    flops = [examined["flops"][str(rank)] for rank in range(HOSTS)]
    fastest = max(flops)
    network = min(link["bytes_per_s"] for link in examined["links"])
    return {
        "name": "two hosts",
        "memory_bytes": 8 * 2**30,
        "matmul_flops": {"float32": fastest},
        "matmul_efficiency": 1.0,
        "attention_flops": fastest,
        "memory_bandwidth": 1e10,
        "node_bandwidth": network,
        "network_bandwidth": network,
        "network_efficiency": 1.0,
        "ranks_per_node": 1,
        "speeds": [round(each / fastest, 2) for each in flops],
    }


def _plan(hardware: Path) -> dict[str, Any]:
    """What `fsdp2 plan` chooses on that hardware."""
    here = "benchmarks.uneven"
    command = [sys.executable, "-m", "fsdp2", "plan", f"{here}:model", "--input", f"{here}:batch"]
    command += ["--loss", f"{here}:next_token_loss", "--world-size", str(HOSTS)]
    command += ["--hardware", str(hardware), "--checkpointing", "none", "--json"]
    done = subprocess.run(
        command, cwd=machine.REPOSITORY, text=True, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, on hosts made for it."""
    cores = sorted(os.sched_getaffinity(0))[:HOSTS]
    with (
        hosts(HOSTS) as made,
        _neighbour(cores[SLOW]) as neighbour,
        tempfile.TemporaryDirectory(prefix="bench_") as folder,
    ):
        progress("fsdp2 doctor")
        hardware = hardware_of(_doctor(made, cores))
        file = Path(folder) / "hardware.json"
        file.write_text(json.dumps(hardware))
        progress("fsdp2 plan")
        plan = _plan(file)
        if plan["split"] is None:
            raise RuntimeError(f"the plan divides nothing: {plan['reasons']}")
        sizes = plan["split"]["sizes"]
        progress(f"speeds {hardware['speeds']}, samples {sizes}")
        more = ["--neighbour", str(neighbour), "--sizes", *map(str, sizes)]
        result = host_ranks.run_on(
            made,
            "benchmarks.uneven",
            options,
            *more,
            ranks_per_host=1,
            prefixes=[("taskset", "--cpu-list", str(core)) for core in cores],
        )
        return {
            "hardware": hardware,
            "predicted": plan["step_s"] / plan["split"]["even_s"],
            "results": result,
        }


# -- report ----------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """Markdown: a row for each variant, and a sentence on what the plan predicted."""
    header = ["batches", "samples", "ms per step", "largest gradient error"]
    lines = [row(header), row(["---"] * len(header))]
    results = record["results"]
    for name, made in results.items():
        base = None if name == EVEN else results[EVEN]["seconds"]
        sizes = " + ".join(map(str, made["sizes"]))
        cell = host_ranks.time_cell(made["seconds"], base)
        lines.append(row([name, sizes, cell, f"{made['gradient_error']:.0e}"]))
    found = host_ranks.ratios(results[BY_SPEED]["seconds"], results[EVEN]["seconds"])
    speeds = " and ".join(f"{speed:g}" for speed in record["hardware"]["speeds"])
    return (
        "\n".join(lines)
        + f"\n\n`fsdp2 doctor` measured speeds of {speeds}. Sizing batches by speed shortens "
        f"the step by {100 * (1 - statistics.median(found)):.0f} %; the plan predicted "
        f"{100 * (1 - record['predicted']):.0f} %."
    )


def text_of(record: dict[str, Any]) -> str:
    """What the page has: where from, and the table."""
    where, torch_version = record["machine"], record["versions"]["torch"]
    about = f"{where['cpu']}; two hosts of one rank and one core over gloo; torch {torch_version}."
    return f"{about}\n\n{table(record)}"


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven")
    host_ranks.add_options(parser, ["no limit"], rounds=15)
    parser.add_argument("--sizes", nargs="+", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        rank_main(options)
        return 0
    path = options.output / "uneven.json"
    if not options.only_table:
        if not host_ranks.can_run("benchmarks.uneven"):
            return 2
        if shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < HOSTS:
            print("benchmarks.uneven needs taskset (util-linux) and two cores", file=sys.stderr)
            return 2
        record = {"name": "uneven", **machine.describe(), "num_ranks": HOSTS, **run(options)}
        options.output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(path.read_text())
    text = text_of(record)
    print(text)
    if options.write_docs:
        page = machine.REPOSITORY / "docs" / "planning" / "hardware.md"
        write_readme(page, text, BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
