"""What fits in how many bytes with offload to host memory, at what speed.

    python -m benchmarks.offload [--rounds 5] [--write docs/offload.md]

One process trains a stack of transformer blocks. Bytes are counted on the device: the most that is
allocated in a step beside parameters, gradients and the state of the optimizer (activations), or
the most of that state that is on it (optimizers). Times are medians over interleaved rounds, as
ratios within a round to a step with nothing offloaded. Without a GPU the device is the test device
of tests/support: its bytes are those of any device, its times say nothing about a GPU, and the page
has none of them. State in files is timed beside state in memory for parameters on the CPU, where
nothing is simulated.

Steps in backward are timed on the device as it is, whose kernels take the cores that steps take,
and on one whose kernels also sleep, as if it computed elsewhere: that shows what is hidden.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, fully_shard, offload_activations, offload_optimizer
from fsdp2.optim import local_step, step_in_backward

from . import machine
from .gpu import LLAMA_3_8B
from .models import Stack, StackConfig
from .report import row, write_readme


@dataclass(frozen=True)
class Sizes:
    """Of what is trained on a device.

    Attributes:
        config: for activations and the state of the optimizer, with `shape` (batch, tokens, width).
        limits: MiB of saved tensors that stay on the device.
        large: for steps in backward, with `large_shape`: parameters enough for a step that counts,
            and little to compute.
    """

    config: StackConfig
    shape: tuple[int, int, int]
    limits: tuple[int, ...]
    large: StackConfig
    large_shape: tuple[int, int, int]


SIZES = Sizes(
    StackConfig(width=256, hidden=640, num_blocks=8, num_heads=4),
    (4, 128, 256),
    (0, 4, 8, 16),
    StackConfig(width=768, hidden=1920, num_blocks=8, num_heads=8),
    (1, 4, 768),
)
# Those of Llama 3 8B's blocks, in fp32: enough for copies to reach the speed of the link.
GPU_SIZES = Sizes(
    replace(LLAMA_3_8B, num_blocks=4),
    (1, 2048, 4096),
    (0, 256, 512, 1024),
    StackConfig(width=2048, hidden=5632, num_blocks=8, num_heads=16),
    (1, 1024, 2048),
)
SLEEP_US = 200  # at most; half of it on average
MIB = 1 << 20
BEGIN, END = "<!-- offload:begin -->", "<!-- offload:end -->"


def sizes_for(device: str) -> Sizes:
    return GPU_SIZES if device == "cuda" else SIZES


def start_device() -> str:
    """The device to measure on; its module is ``torch.NAME``."""
    if torch.cuda.is_available():
        return "cuda"
    sys.path.append(str(machine.REPOSITORY / "tests" / "support"))
    import testdev

    testdev.start()
    return testdev.NAME


class Way:
    """One way to train: a model, what forward runs in, and whether blocks are checkpointed."""

    def __init__(self, name: str, device: str, limit: int | None = None) -> None:
        torch.manual_seed(0)
        self.name = name
        sizes = sizes_for(device)
        self.model = Stack(sizes.config).to(device)
        self.x = torch.randn(sizes.shape).to(device)
        self.device = torch.get_device_module(device)
        self.copied = 0
        self.offload: offload_activations | None = None
        if limit is not None:
            self.offload = offload_activations(self.model, max_device_bytes=limit)

    def _context(self) -> AbstractContextManager[Any]:
        if self.offload is not None:
            return self.offload
        if self.name == "save_on_cpu":
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        return nullcontext()

    # As torch.autograd.graph.save_on_cpu without pinned memory, and counted.
    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        self.copied += tensor.nbytes
        return tensor.device, tensor.cpu()

    def _unpack(self, packed: tuple[torch.device, Tensor]) -> Tensor:
        return packed[1].to(packed[0])

    def _forward(self, x: Tensor) -> Tensor:
        if self.name != "checkpoint":
            return self.model(x)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def step(self) -> dict[str, float]:
        """Forward and backward: seconds, the most bytes beside those before, and bytes copied."""
        for parameter in self.model.parameters():  # gradients are no activations
            parameter.grad = torch.zeros_like(parameter)
        copied = self._copied()
        self.device.synchronize()
        self.device.reset_peak_memory_stats()
        before, began = self.device.memory_allocated(), time.perf_counter()
        with self._context():
            loss = self._forward(self.x).square().mean()
        loss.backward()
        self.device.synchronize()
        seconds = time.perf_counter() - began
        return {
            "s": seconds,
            "peak": self.device.max_memory_allocated() - before,
            "copied": self._copied() - copied,
        }

    def _copied(self) -> int:
        return self.copied if self.offload is None else self.offload.bytes.to_host


def activations(device: str, rounds: int) -> list[str]:
    """The rows of the table of activations."""
    ways = [Way(name, device) for name in ("all on the device", "save_on_cpu", "checkpoint")]
    ways += [
        Way(f"offload_activations, {n} MiB", device, n * MIB) for n in sizes_for(device).limits
    ]
    right = [p.grad.cpu() for p in _trained(ways[0]).parameters() if p.grad is not None]
    for way in ways[1:]:
        found = [p.grad.cpu() for p in _trained(way).parameters() if p.grad is not None]
        if not all(map(torch.equal, found, right)):
            raise RuntimeError(f"{way.name} has other gradients")
    results = [[way.step() for way in ways] for _ in range(rounds)]
    lines = [row(["activations", "peak, MiB", "copied to the host, MiB", "time"]), _rule(4)]
    for i, way in enumerate(ways):
        last = results[-1][i]
        ratio = statistics.median(each[i]["s"] / each[0]["s"] for each in results)
        cells = [way.name, f"{last['peak'] / MIB:.1f}", f"{last['copied'] / MIB:.1f}"]
        lines.append(row([*cells, f"{ratio:.2f}"]))
    return lines


def _trained(way: Way) -> nn.Module:
    way.step()
    return way.model


def optimizer_bytes(device: str) -> list[str]:
    """The rows of the table of optimizer state on a device: counted, not timed."""
    lines = [row(["AdamW's state", "peak on the device, MiB", "elsewhere, MiB"]), _rule(3)]
    model = Stack(SIZES.config).to(device)
    state = 2 * sum(p.nbytes for p in model.parameters()) / MIB
    lines.append(row(["on the device", f"{state:.1f}", "0"]))
    with tempfile.TemporaryDirectory() as folder:
        for to, limit in (("cpu", 0), ("cpu", 8), (folder, 0)):
            model = Stack(SIZES.config).to(device)
            adam = torch.optim.AdamW(model.parameters())
            optimizer: Any = offload_optimizer(
                adam, to, max_device_bytes=limit * MIB, chunk_bytes=2 * MIB
            )
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
            counts = vars(optimizer)["_fsdp2_pager"].counts
            name = f"{'host' if to == 'cpu' else 'files'}, limit {limit} MiB, chunks of 2 MiB"
            most = (counts.kept + counts.back_peak) / MIB
            lines.append(row([name, f"{most:.1f}", f"{counts.away / MIB:.1f}"]))
    return lines


def optimizer_times(rounds: int, folder: Path) -> list[str]:
    """The rows of the table of optimizer state of parameters in host memory."""
    params = [[nn.Parameter(torch.randn(1024, 1024)) for _ in range(24)] for _ in range(2)]
    for p in (*params[0], *params[1]):
        p.grad = torch.randn_like(p)
    steps: list[Callable[[], Any]] = [
        local_step(torch.optim.AdamW(params[0], fused=True)).step,
        offload_optimizer(
            torch.optim.AdamW(params[1], fused=True), folder, chunk_bytes=32 * MIB
        ).step,
    ]
    times = [[_time(step) for step in steps] for _ in range(rounds + 1)][1:]
    ratio = statistics.median(files / memory for memory, files in times)
    memory, files = (statistics.median(column) for column in zip(*times, strict=True))
    mib = sum(2 * p.nbytes for p in params[0]) // MIB
    in_files = ["in files, chunks of 32 MiB", "at most 4 chunks"]
    return [
        row(["fused AdamW on the CPU", "state in host memory, MiB", "ms", "ratio"]),
        _rule(4),
        row(["in host memory", str(mib), f"{1000 * memory:.0f}", "1"]),
        row([*in_files, f"{1000 * files:.0f}", f"{ratio:.2f}"]),
    ]


class Steps:
    """Training with shards in host memory, of which steps are timed."""

    def __init__(self, device: str, mesh: DeviceMesh, *, in_backward: bool) -> None:
        torch.manual_seed(0)
        sizes = sizes_for(device)
        self.model = Stack(sizes.large)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(self.model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        self.x = torch.randn(sizes.large_shape).to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), fused=True
        )
        change = step_in_backward if in_backward else local_step
        self.optimizer = change(self.optimizer)

    def step(self) -> tuple[float, float]:
        """Seconds until backward is over, and of ``step()``."""
        began = time.perf_counter()
        self.model(self.x).square().mean().backward()
        middle = time.perf_counter()
        self.optimizer.step()
        ended = time.perf_counter()
        self.optimizer.zero_grad()
        return middle - began, ended - middle


def steps_in_backward(device: str, rounds: int) -> list[str]:
    """The rows of the table of steps beside backward."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(_backend(device), store=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh(device, (1,))
            ways = [Steps(device, mesh, in_backward=mode) for mode in (False, True)]
            lines = [
                row(["fused AdamW in host memory", "forward, backward, ms", "step(), ms", "ratio"]),
                _rule(4),
            ]
            for what, sleep_us in (("", 0), ("; kernels sleep", SLEEP_US)):
                if sleep_us and device == "cuda":
                    break
                _let_kernels_sleep(device, sleep_us)
                for _ in range(3):  # the third is the first with steps in backward
                    _ = [way.step() for way in ways]
                times = [[way.step() for way in ways] for _ in range(rounds)]
                _let_kernels_sleep(device, 0)
                for i, name in enumerate(("after backward", "in backward")):
                    first, second = (statistics.median(t[i][k] for t in times) for k in (0, 1))
                    ratio = statistics.median(sum(t[i]) / sum(t[0]) for t in times)
                    figures = [f"{1000 * first:.0f}", f"{1000 * second:.1f}", f"{ratio:.2f}"]
                    lines.append(row([name + what, *figures]))
            params = [list(way.model.parameters()) for way in ways]
            if not all(torch.equal(_local(a), _local(b)) for a, b in zip(*params, strict=True)):
                raise RuntimeError("Steps in backward have other parameters")
            return lines
        finally:
            dist.destroy_process_group()


def _local(param: Any) -> Tensor:
    return param.to_local()


def _backend(device: str) -> str:
    if device == "cuda":
        return "nccl"
    import testdev

    return testdev.BACKEND


def _let_kernels_sleep(device: str, max_us: int) -> None:
    if device == "cuda":
        return
    import testdev

    testdev.native().set_delays(seed=0, probability=float(max_us > 0), max_us=max_us)


def _time(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _rule(columns: int) -> str:
    return row(["---", *["---:"] * (columns - 1)])


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints; with ``--write``, into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default 5)")
    parser.add_argument("--write", type=Path, help="a page with the markers of the tables")
    parser.add_argument("--folder", type=Path, help="for files of state (default: temporary)")
    options = parser.parse_args(arguments)
    device = start_device()
    if device == "cuda":
        # One result for all ways, which are compared: attention's backward has others.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    else:
        torch.set_num_threads(1)
    facts = machine.describe()
    where = f"{facts['machine']['cpu']}; device: {device}; torch {torch.__version__}"
    about = f"{where}; {facts['date'][:10]}, commit {(facts['commit'] or '?')[:12]}."
    saved, state = activations(device, options.rounds), optimizer_bytes(device)
    steps = steps_in_backward(device, options.rounds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = optimizer_times(options.rounds, Path(folder))
    text = _joined(about, saved, state, steps, files)
    print(text)
    if options.write is not None:
        if device != "cuda":  # times of the test device say nothing about a GPU
            text = _joined(about, _without_last_column(saved), state, files)
        write_readme(options.write, text, BEGIN, END)


def _joined(about: str, *tables: list[str]) -> str:
    return "\n\n".join([about, *("\n".join(table) for table in tables)])


def _without_last_column(table: list[str]) -> list[str]:
    return [f"{line.rsplit(' | ', 1)[0]} |" for line in table]


if __name__ == "__main__":
    main()
