"""What an asynchronous checkpoint costs training on a GPU: `python -m benchmarks.gpu_saves`.

One rank trains blocks of Llama 3 8B's sizes with AdamW. A save begins after a step; then training
goes on until the files are there. In turns with that of torch (`dcp.async_save` of the same model
and optimizer):

- how long the call blocks, for the first save, which makes host memory, and for later ones, and
  the bytes per second that this comes to;
- steps while files are written, in times of a step without a save: median and largest;
- when the files are complete.

What was saved is loaded and compared. `--small`, or no GPU: a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer

from . import machine, report
from .gpu import LLAMA_3_8B, TINY_LLAMA, device_description, synchronize
from .models import Stack, StackConfig
from .ranks import progress, run_ranks
from .staging import tensors

OURS, TORCHS = "fsdp2", "dcp.async_save"


class Training:
    """A model and its optimizer, and steps of them that are timed."""

    def __init__(self, config: StackConfig, tokens: int, device: torch.device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Stack(config)
            self.x = torch.randn(1, tokens, config.width)
        for unit in (*self.model.blocks, self.model):
            fully_shard(unit)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)

    def step(self) -> float:
        """Seconds of one step, the device idle before and after."""
        synchronize(self.device)
        began = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
        return time.perf_counter() - began

    def tensors(self) -> list[torch.Tensor]:
        return tensors(self.model, self.optimizer)


def measure(config: dict[str, Any], tokens: int, device: str, saves: int, steps: int) -> Any:
    """All of it, on the one rank of the default group."""
    training = Training(StackConfig(**config), tokens, torch.device(device))
    for _ in range(2):
        training.step()
    alone_s = statistics.median(training.step() for _ in range(steps))
    num_bytes = sum(tensor.nbytes for tensor in training.tensors())
    found: dict[str, Any] = {"bytes": num_bytes, "step_s": alone_s, "saves": {}}
    with tempfile.TemporaryDirectory(prefix="bench_saves_") as name, Checkpointer(name) as ours:
        folder = Path(name)

        def save_ours(number: int) -> Callable[[], bool]:
            handle = ours.save(
                number, model=training.model, optimizer=training.optimizer, blocking=False
            )
            return handle.committed

        def save_torchs(number: int) -> Callable[[], bool]:
            model, optimizer = get_state_dict(training.model, training.optimizer)
            state = {"model": model, "optimizer": optimizer}
            future: Any = dcp.async_save(state, checkpoint_id=folder / f"dcp-{number}")
            return future.done

        for number in range(saves):
            for way, save in ((OURS, save_ours), (TORCHS, save_torchs)):
                kept = [tensor.clone() for tensor in training.tensors()] if way == OURS else []
                one = _one_save(partial(save, number), training, alone_s)
                one["bytes_per_s"] = num_bytes / one["blocked_s"]
                found["saves"].setdefault(way, []).append(one)
                progress(f"{way}, save {number}: {one}")
                if kept:
                    _check(ours, number, training, kept)
                for old in folder.glob(f"*{number}"):
                    shutil.rmtree(old)
    return found


def _one_save(
    save: Callable[[], Callable[[], bool]], training: Training, alone_s: float
) -> dict[str, Any]:
    """One save, and training until its files are there."""
    synchronize(training.device)
    began = time.perf_counter()
    is_over = save()
    blocked_s = time.perf_counter() - began
    steps = [training.step()]
    while not is_over():
        steps.append(training.step())
    return {
        "blocked_s": blocked_s,
        "complete_s": time.perf_counter() - began,
        "steps": len(steps),
        "median_step_ratio": statistics.median(steps) / alone_s,
        "largest_step_ratio": max(steps) / alone_s,
    }


def _check(ours: Checkpointer, number: int, training: Training, kept: list[torch.Tensor]) -> None:
    """What training has changed since comes back as it was saved, and goes on from there."""
    ours.wait()
    ours.load(number, model=training.model, optimizer=training.optimizer)
    if not all(map(torch.equal, training.tensors(), kept)):
        raise RuntimeError("what was loaded is not what was saved")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes `gpu-saves.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_saves")
    parser.add_argument("--small", action="store_true", help="in small on the CPU")
    parser.add_argument("--blocks", type=int, default=2, help="2.6 GB of state each (default 2)")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=machine.REPOSITORY / "benchmarks" / "results", metavar="DIR"
    )
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and not options.small else "cpu"
    sizes = LLAMA_3_8B if device == "cuda" else TINY_LLAMA
    settings = {
        "config": vars(sizes) | {"num_blocks": options.blocks},
        "tokens": 2048 if device == "cuda" else 16,
        "device": device,
        "saves": options.saves,
        "steps": 5,
    }
    found = run_ranks(measure, 1, settings, device=device)
    name = "gpu-saves" if device == "cuda" else "gpu-saves-small"
    about = {"name": name, **machine.describe(), "gpu": device_description(torch.device(device))}
    record = {**about, "config": {"settings": settings}, **found}
    progress(f"written to {report.write_record(record, options.output)}")
    lines = [report.row([name, "save", "blocks, ms", "GB/s", "steps beside it", "complete, s"])]
    lines.append(report.row(["---"] * 6))
    for way, saves in found["saves"].items():
        for number, one in enumerate(saves):
            cells = [way, str(number), f"{1e3 * one['blocked_s']:.1f}"]
            cells.append(f"{one['bytes_per_s'] / 1e9:.2f}")
            cells.append(f"{one['median_step_ratio']:.2f}, {one['largest_step_ratio']:.2f} at most")
            lines.append(report.row([*cells, f"{one['complete_s']:.2f}"]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
