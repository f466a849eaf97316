"""Step time, exposed communication, memory and host time on one GPU: `make bench-gpu`.

A stack of blocks of Llama 3 8B's sizes trains on one device, as rank 0 of a simulated group
(`fsdp2.testing.SimulatedGroup`): it holds 1/n of the parameters, gathers and reduces as many bytes
as a real rank, and every collective takes the time of a link. Compared are the plain model in
bf16, torch's FSDP2 and fsdp2, both with bf16 compute and fp32 reduction.

- The bandwidth is chosen so that all communication of a step, one after the other, takes `load`
  times the plain model's step: at 0.25 it can hide behind compute, at 2 it cannot.
- A step is forward and backward. There is no optimizer: all sharded variants would run the same
  one on the same shards, and its state is the same bytes for each; without it more blocks fit.
- There is no embedding and no head: a root that encloses them is measured by `memory` and `lm`.
- As many blocks (32 at most) as fit beside each other: the plain model's parameters, gradients and
  activations, measured with one and two blocks, and the shards of the others.
- What is found is written when it is there: a GPU may be lent for less time than all takes.
- Every rank is taken to hold rank 0's rows, and so does the plain model: losses and gradients
  must agree, or the run ends with an error.
- Without CUDA, or with `--small`, the same in small on the CPU: figures without meaning for a GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.testing import SimulatedGroup, simulated_mesh
from fsdp2.testing.link import cycles_per_second
from fsdp2.testing.simulated import tile_rows

from . import machine, report, timeline
from .ledger import Ledger
from .models import Stack, StackConfig
from .ranks import progress
from .steps import DisagreementError
from .suite import timed_figure
from .variants import (
    BASELINE,
    BEST_BASELINE,
    OURS,
    Variant,
    local_part,
    mixed_precision,
    shard_units,
    torch_fsdp,
    use_best_settings,
)

NAMES = ("plain", BASELINE, BEST_BASELINE, OURS)
WARM_UP_STEPS = 3
MAX_BLOCKS = 32
HIDES = 0.5  # up to this load communication can hide
STEP_TARGET = 1.02
# Largest relative difference to the plain model: losses, gradient norms; all compute in bf16.
TOLERANCES = (1e-2, 2e-2)


LLAMA_3_8B = StackConfig(width=4096, hidden=14336, num_blocks=0, num_heads=32, num_kv_heads=8)
TINY_LLAMA = StackConfig(width=256, hidden=896, num_blocks=4, num_heads=8, num_kv_heads=2)


@dataclass(frozen=True)
class Settings:
    """Sizes and repetitions.

    Attributes:
        model: Sizes of the stack; 0 blocks: as many as fit.
        tokens: Of the one sequence.
        world_sizes: Of the simulated groups.
        loads: Time of a step's communication, in times of the plain step.
        latency_s: Of a collective.
        rounds: Rounds in which every variant has its turn.
        iters: Timed steps per turn.
        device: "cuda" or "cpu".
        compiled: Whether every block is compiled, before it is sharded.
        pictures: Whether to draw a step of each variant at each load.
        name: Of the record and the pictures.
    """

    model: StackConfig = LLAMA_3_8B
    tokens: int = 4096
    world_sizes: tuple[int, ...] = (8, 64)
    loads: tuple[float, ...] = (0.25, 2.0)
    latency_s: float = 20e-6
    rounds: int = 7
    iters: int = 5
    device: str = "cuda"
    compiled: bool = False
    pictures: bool = True
    name: str = "gpu"


SMALL = Settings(TINY_LLAMA, tokens=128, rounds=3, iters=2, device="cpu", name="gpu-small")


# ------------------------------------------------------------------------------ the variants


def build(name: str, config: StackConfig, mesh: DeviceMesh, *, compiled: bool = False) -> Variant:
    """Makes one of `NAMES` on the device of `mesh`, never whole on one rank if it is sharded."""
    with torch.device("meta"):
        model = Stack(config)
    for block in model.blocks if compiled else ():
        block.compile()
    if name == "plain":
        model.to(torch.bfloat16)
    elif name == OURS:
        policy = mixed_precision(fsdp2.MixedPrecisionPolicy, True)
        shard_units(fsdp2.fully_shard, model, mesh, policy)
    else:
        policy = mixed_precision(torch_fsdp.MixedPrecisionPolicy, True)
        shard_units(torch_fsdp.fully_shard, model, mesh, policy)
        if name == BEST_BASELINE:
            use_best_settings(model)
    model.to_empty(device=mesh.device_type)
    variant = Variant(name, model, sharded=name != "plain", averages=name != "plain")
    initialize(variant, mesh.size())
    return variant


@torch.no_grad()
def initialize(variant: Variant, world_size: int) -> None:
    """The same weights for all: rank 0's rows, and in the plain model those again and again."""
    for name, p in variant.model.named_parameters():
        device = local_part(p).device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        rows = -(-p.shape[0] // world_size)
        values = torch.randn(rows, *p.shape[1:], generator=generator, device=device).mul_(0.02)
        if p.ndim == 1:
            values += 1
        if variant.sharded:
            local_part(p).copy_(values)
        else:
            values = values.repeat(world_size, *[1] * (p.ndim - 1))
            p.copy_(tile_rows(values[: p.shape[0]], world_size))


def gradient_norm(variant: Variant, world_size: int) -> float:
    """The 2-norm of the gradients of rank 0's rows."""
    gradients = variant.local_gradients()
    if not variant.sharded:
        gradients = [g[: -(-g.shape[0] // world_size)] for g in gradients]
    return torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()


class Run:
    """One variant in training, and what was seen of it."""

    def __init__(self, variant: Variant, settings: Settings) -> None:
        self.variant = variant
        self.device = torch.device(settings.device)
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (1, settings.tokens, settings.model.width)
        x = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        self.x = x.requires_grad_()  # as if an embedding came before
        self.rounds_s: list[list[float]] = []
        self.host_rounds_s: list[list[float]] = []

    def forward_backward(self) -> torch.Tensor:
        """What is timed; returns the loss."""
        loss = self.variant.model(self.x).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and until the host had launched all of it."""
        self.clear()
        synchronize(self.device)
        start = time.perf_counter()
        self.forward_backward()
        host_s = time.perf_counter() - start
        synchronize(self.device)
        return time.perf_counter() - start, host_s

    def clear(self) -> None:
        """Drops all gradients."""
        self.variant.model.zero_grad()
        self.x.grad = None

    def one_round(self, iters: int) -> None:
        """Times some steps."""
        gc.collect()
        steps = [self.step() for _ in range(iters)]
        self.clear()
        self.rounds_s.append([step for step, _ in steps])
        self.host_rounds_s.append([host for _, host in steps])

    def results(self) -> dict[str, Any]:
        """What was timed since the last call, ready for JSON."""
        seen = {"rounds_s": self.rounds_s, "host_rounds_s": self.host_rounds_s}
        self.rounds_s, self.host_rounds_s = [], []
        return seen


def synchronize(device: torch.device) -> None:
    """Waits until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -------------------------------------------------------------------------------- the measures


def peak_bytes(run: Run) -> int:
    """The most memory that a step has, state included; the CPU's by the ledger."""
    run.clear()
    gc.collect()
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
        run.step()
        return torch.cuda.max_memory_allocated(run.device)
    with Ledger() as ledger:
        for p in run.variant.local_parameters():
            p.view(-1)  # makes it known
        run.step()
    return max(ledger.live_bytes)


def reserved_bytes(device: torch.device) -> int | None:
    """The most that the caching allocator had from the device since `peak_bytes` began."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def measure_memory(run: Run, base_bytes: int, world_size: int) -> dict[str, Any]:
    """Warms up; peak above what was there before the variant was made, state, agreement."""
    for _ in range(WARM_UP_STEPS):
        run.step()
    if run.device.type == "cuda":
        run.clear()
        gc.collect()
        torch.cuda.empty_cache()  # what other variants have left is none of this one's
    peak = peak_bytes(run) - base_bytes
    reserved = reserved_bytes(run.device)
    run.clear()
    loss = run.forward_backward().item()
    result = {
        "peak_bytes": peak,
        "reserved_bytes": None if reserved is None else reserved - base_bytes,
        "parameter_bytes": sum(t.nbytes for t in run.variant.local_parameters()),
        "gradient_bytes": sum(t.nbytes for t in run.variant.local_gradients()),
        "loss": loss,
        "gradient_norm": gradient_norm(run.variant, world_size),
    }
    run.clear()
    return result


def check_agreement(results: dict[str, dict[str, Any]]) -> None:
    """Compares losses and gradient norms with the plain model's.

    Raises:
        DisagreementError: One differs by more than bf16 explains.
    """
    for key, tolerance in zip(("loss", "gradient_norm"), TOLERANCES, strict=True):
        expected = results["plain"][key]
        for name, result in results.items():
            if not abs(result[key] - expected) <= tolerance * abs(expected):
                raise DisagreementError(
                    f"{name}: {key} is {result[key]}, the plain model's is {expected}; allowed is "
                    f"a relative difference of {tolerance}"
                )


def allocated_bytes(device: torch.device) -> int:
    """What is allocated now; on the CPU 0, since a ledger begins with nothing known."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fitting_blocks(settings: Settings) -> int:
    """How many blocks fit; see the module's docstring."""
    device = torch.device(settings.device)
    peaks = []
    for num_blocks in (1, 2):
        config = replace(settings.model, num_blocks=num_blocks)
        base = allocated_bytes(device)
        with simulated_mesh(1, device_type=settings.device) as mesh:
            run = Run(build("plain", config, mesh), settings)
            run.step()
            peaks.append(peak_bytes(run) - base)
            del run
    torch.cuda.empty_cache()
    free_bytes = int(0.9 * torch.cuda.mem_get_info(device)[0])
    num = blocks_in(free_bytes, peaks, block_numel(settings.model), min(settings.world_sizes))
    if num < 2:
        raise RuntimeError(f"only {num} blocks fit on {device}; try fewer --tokens")
    return min(num, MAX_BLOCKS)


def blocks_in(free_bytes: int, peaks: Sequence[int], numel: int, world_size: int) -> int:
    """How many blocks fit into so much memory.

    Args:
        free_bytes: The memory.
        peaks: Of the plain model's step with one and with two blocks, in bytes.
        numel: Elements of a block.
        world_size: Smallest number of ranks.
    """
    block_bytes = peaks[1] - peaks[0]
    # In fp32: the shards and sharded gradients of every block for all but the plain variant;
    # and, once, units that are gathered and gradients that are reduced.
    shard_bytes = (len(NAMES) - 1) * 2 * 4 * numel // world_size
    once_bytes = peaks[0] - block_bytes + 6 * 4 * numel
    return (free_bytes - once_bytes) // (block_bytes + shard_bytes)


def measure(
    world_size: int,
    settings: Settings,
    folder: Path | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Everything at one world size: memory once, times at every load, then a picture of each.

    Args:
        folder: For the pictures; None: no pictures.
        keep: Called with all that was found so far, whenever there is more.
    """
    device = torch.device(settings.device)
    runs: dict[str, Run] = {}
    results: dict[str, dict[str, Any]] = {}
    loads: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {"variants": results, "loads": loads}
    with simulated_mesh(
        world_size, latency=settings.latency_s, device_type=settings.device
    ) as mesh:
        group = mesh.get_group()
        assert isinstance(group, SimulatedGroup)
        for name in NAMES:
            progress(f"world size {world_size}: {name}")
            base_bytes = allocated_bytes(device)
            variant = build(name, settings.model, mesh, compiled=settings.compiled)
            runs[name] = Run(variant, settings)
            results[name] = measure_memory(runs[name], base_bytes, world_size)
        check_agreement(results)
        for name, run in runs.items():
            with group.recording() as transfers:
                run.step()
            run.clear()
            results[name]["wire_bytes"] = sum(t.wire_bytes for t in transfers)
            results[name]["collectives"] = len(transfers)
        keep(found)
        plain_s = statistics.median(runs["plain"].step()[0] for _ in range(settings.iters))
        runs["plain"].clear()
        before = num_graphs() if settings.compiled else 0
        for load in settings.loads:
            group.link.bandwidth = results[OURS]["wire_bytes"] / (load * plain_s)
            loads[str(load)] = {
                **measure_load(load, list(runs.values()), settings),
                "bandwidth": group.link.bandwidth,
            }
            if settings.compiled:
                found["graphs"] = {"before": before, "in timed steps": num_graphs() - before}
            keep(found)
        if folder is not None and settings.pictures:
            draw(world_size, settings, loads, runs, group, folder)
    return found


def num_graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def draw(
    world_size: int,
    settings: Settings,
    loads: dict[str, dict[str, Any]],
    runs: dict[str, Run],
    group: SimulatedGroup,
    folder: Path,
) -> None:
    """A picture of a step of each variant, for each load."""
    for load in settings.loads:
        group.link.bandwidth = loads[str(load)]["bandwidth"]
        lines = {name: take_timeline(run, group) for name, run in runs.items()}
        title = f"{world_size} ranks, communication {load:g} x compute"
        path = folder / f"{settings.name}-{world_size}-ranks-load-{load:g}.png"
        timeline.draw(lines, title, path)
        progress(f"written to {path}")


def measure_load(load: float, runs: Sequence[Run], settings: Settings) -> dict[str, Any]:
    """Times all variants in turns."""
    clocks = []
    for run in runs:
        run.step()  # warm
        run.clear()
    for i in range(settings.rounds):
        if settings.device == "cuda":  # it falls as the GPU gets warm
            clocks.append(cycles_per_second(runs[0].x.device, measure=True))
        for run in [*runs[i % len(runs) :], *runs[: i % len(runs)]]:
            run.one_round(settings.iters)
        medians = ", ".join(
            f"{run.variant.name} {statistics.median(run.rounds_s[-1]) * 1e3:.1f}" for run in runs
        )
        progress(f"load {load:g}: round {i + 1} of {settings.rounds}, ms: {medians}")
    return {"runs": {r.variant.name: r.results() for r in runs}, "cycles_per_second": clocks}


def take_timeline(run: Run, group: SimulatedGroup) -> timeline.Timeline:
    """One step under the profiler."""
    run.step()
    lines = timeline.record(run.step, run.device, group)
    run.clear()
    return lines


# ----------------------------------------------------------------------------------- figures


def figures(worlds: dict[str, Any], settings: Settings) -> list[dict[str, Any]]:
    """What the table shows; targets only on a GPU."""
    on_gpu = settings.device == "cuda"
    rows: list[dict[str, Any]] = []
    for world_size, world in worlds.items():
        peaks = {name: float(r["peak_bytes"]) for name, r in world["variants"].items()}
        unit_bytes = 2 * block_numel(settings.model)
        lower = min(peaks[BASELINE], peaks[BEST_BASELINE]) - peaks[OURS]
        figure: dict[str, Any] = {"title": "peak memory", "unit": "MB"}
        figure["values"] = scaled(peaks, 1e-6)
        figure["targets"] = (
            {f"a unit ({unit_bytes / 1e6:.0f} MB) below torch FSDP2": lower >= unit_bytes}
            if on_gpu
            else {}
        )
        rows.append(figure | {"world_size": int(world_size), "load": None, "ratios": {}})
        reserved = {name: r.get("reserved_bytes") for name, r in world["variants"].items()}
        if None not in reserved.values():
            figure = {"title": "peak memory that the allocator reserves", "unit": "MB"}
            figure |= {"values": scaled(reserved, 1e-6), "targets": {}, "ratios": {}}
            rows.append(figure | {"world_size": int(world_size), "load": None})
        for load, seen in world["loads"].items():
            for figure in timed_figures(seen["runs"], hides=on_gpu and float(load) <= HIDES):
                rows.append(figure | {"world_size": int(world_size), "load": float(load)})
    return rows


def timed_figures(runs: dict[str, Any], *, hides: bool) -> list[dict[str, Any]]:
    """Step, exposed communication and host time of one world size and load."""
    steps = {name: [statistics.median(r) for r in run["rounds_s"]] for name, run in runs.items()}
    host = {
        name: [statistics.median(r) for r in run["host_rounds_s"]] for name, run in runs.items()
    }
    step = timed_figure("step", "ms", steps, 1e3)
    over_plain = [o / p for o, p in zip(steps[OURS], steps["plain"], strict=True)]
    step["to_plain"] = statistics.median(over_plain)
    best = min(step["ratios"][BASELINE], step["ratios"][BEST_BASELINE])
    step["targets"] = {}
    if hides:
        step["targets"] = {
            f"at most {STEP_TARGET} x plain": step["to_plain"] <= STEP_TARGET,
            "not above torch FSDP2": step["ratios"][OURS] <= best,
        }
    exposed = {
        name: statistics.median(t - p for t, p in zip(seconds, steps["plain"], strict=True)) * 1e3
        for name, seconds in steps.items()
        if name != "plain"
    }
    return [
        step,
        {"title": "exposed communication", "unit": "ms", "values": exposed, "targets": {}},
        timed_figure("host time of a step", "ms", host, 1e3) | {"targets": {}},
    ]


def scaled(values: dict[str, float], scale: float) -> dict[str, float]:
    """All values times `scale`."""
    return {name: value * scale for name, value in values.items()}


def block_numel(config: StackConfig) -> int:
    """Elements of one block."""
    with torch.device("meta"):
        block = Stack(replace(config, num_blocks=1))
    return sum(p.numel() for p in block.parameters())


def table(record: dict[str, Any]) -> str:
    """The Markdown table of a record."""
    columns = ["ranks", "load", "measure", *NAMES, f"{OURS} / plain", "target"]
    lines = [report.row(columns), report.row(["---"] * len(columns))]
    for figure in record["figures"]:
        values = figure["values"]
        verdicts = [
            f"{what}: {'' if met else 'not '}met" for what, met in figure["targets"].items()
        ]
        cells = [
            str(figure["world_size"]),
            "any" if figure["load"] is None else f"{figure['load']:g}",
            f"{figure['title']}, {figure['unit']}",
            *[report.number(values.get(name)) for name in NAMES],
            f"{figure['to_plain']:.3f}" if "to_plain" in figure else "-",
            "; ".join(verdicts) or "-",
        ]
        lines.append(report.row(cells))
    return "\n".join(lines)


def device_description(device: torch.device) -> dict[str, Any] | None:
    """What a result on a GPU depends on; None on the CPU."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    return {
        "name": about.name,
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "capability": [about.major, about.minor],
        "cuda": torch.version.cuda,
    }


def run(settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Runs the benchmark; returns its record, ready for JSON.

    Args:
        settings: What to run.
        folder: Where the record is written, whenever there is more of it, and the timelines;
            None: nowhere.

    Raises:
        DisagreementError: Variants that should train the same model do not.
    """
    about = machine.describe()
    if not settings.model.num_blocks:
        num_blocks = fitting_blocks(settings)
        settings = replace(settings, model=replace(settings.model, num_blocks=num_blocks))
        progress(f"{num_blocks} blocks fit")
    worlds: dict[str, Any] = {}

    def record() -> dict[str, Any]:
        return {
            "name": settings.name,
            **about,
            "gpu": device_description(torch.device(settings.device)),
            "config": {"settings": asdict(settings)},
            "figures": figures(worlds, settings),
            "worlds": worlds,
        }

    for world_size in settings.world_sizes:

        def keep(found: dict[str, Any], key: str = str(world_size)) -> None:
            worlds[key] = found
            if folder is not None:
                report.write_record(record(), folder)

        measure(world_size, settings, folder, keep)
    return record()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Compares fsdp2, torch's FSDP2 and the plain model on one device, with "
        "simulated communication.",
    )
    parser.add_argument("--small", action="store_true", help="in small on the CPU")
    parser.add_argument("--name", help="of the record (default: gpu, or gpu-small)")
    parser.add_argument("--compile", action="store_true", help="compile every block")
    parser.add_argument(
        "--pictures", action=argparse.BooleanOptionalAction, default=True, help="of a step"
    )
    parser.add_argument("--blocks", type=int, help="number of blocks (default: as many as fit)")
    parser.add_argument("--tokens", type=int, help="tokens of the sequence")
    parser.add_argument("--world-sizes", type=int, nargs="+", metavar="N")
    parser.add_argument("--loads", type=float, nargs="+", metavar="X")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--iters", type=int, help="timed steps per round and variant")
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line says; returns the exit status."""
    options = parse(arguments)
    small = options.small or not torch.cuda.is_available()
    if small and not options.small:
        progress("no CUDA device: in small on the CPU, figures without meaning for a GPU")
    settings = SMALL if small else Settings()
    if options.blocks:
        settings = replace(settings, model=replace(settings.model, num_blocks=options.blocks))
    changes: dict[str, Any] = {"compiled": options.compile, "pictures": options.pictures}
    for key in ("name", "tokens", "world_sizes", "loads", "rounds", "iters"):
        value = getattr(options, key)
        if value is not None:
            changes[key] = tuple(value) if isinstance(value, list) else value
    settings = replace(settings, **changes)
    if small:
        torch.set_num_threads(1)
    try:
        found = run(settings, options.output)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    progress(f"written to {options.output / settings.name}.json")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
