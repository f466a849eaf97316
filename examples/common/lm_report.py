"""A progress bar and a loss log for the examples, and the figures at the end of train_lm.py."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.options import checkpoint_path
from common.text_data import Text, ngram_bits_per_byte, validation_starts
from fsdp2 import explain
from fsdp2.profiling import Profile

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


class Numbers:
    """Shares a few numbers of every rank with all ranks: losses, sizes, requests to stop.

    The numbers use a separate gloo group, so on GPUs they do not delay gradients. On the CPU, the
    end of this group ends its threads. The threads of a group in a device mesh live on in torch's
    caches, and a thread that still holds tensors when Python ends would abort the process.
    """

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo")

    def of_all_ranks(self, *values: float) -> Tensor:
        """(ranks, values) in float64; every rank must call it."""
        mine = torch.tensor(values, dtype=torch.float64)
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine, group=self.group)
        return torch.stack(ranks)


class Progress:
    """A progress bar on rank 0, or a line every ten seconds if tqdm is not installed."""

    def __init__(
        self, *, first_step: int, last_step: int, units_per_step: int, unit: str = "tokens"
    ) -> None:
        self.shown = dist.get_rank() == 0
        self.last_step, self.units_per_step, self.unit = last_step, units_per_step, unit
        self.bar = None
        self._step_began, self._step_s = time.perf_counter(), 0.0
        self._printed_at = 0.0
        if not self.shown:
            return
        if tqdm is None:
            print("no progress bar: tqdm is not installed", flush=True)
            return
        # A log file does not need ten updates a second.
        self.bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )

    def update(self, step: int, *, loss: float, memory_bytes: float) -> None:
        """Show the state after `step`; `memory_bytes`: the maximum over ranks."""
        now = time.perf_counter()
        step_s, self._step_began = now - self._step_began, now
        # A running mean, because single step times vary too much to read.
        self._step_s = step_s if not self._step_s else 0.9 * self._step_s + 0.1 * step_s
        if not self.shown:
            return
        rate = f"{self.units_per_step / self._step_s:,.0f} {self.unit}/s"
        memory = f"{memory_bytes / 1e6:,.0f} MB per rank"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.3f}, {rate}, {memory}", refresh=False)
            self.bar.update()
        elif now - self._printed_at > 10 or step == self.last_step:
            self._printed_at = now
            print(f"step {step}/{self.last_step}: loss {loss:.3f}, {rate}, {memory}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Rows:
    """A file with a JSON object in each line. Rows that do not fit on a full disk are retried.

    Args:
        keep: whether an existing row stays. The file is truncated at the first row that does not
            stay or is incomplete, because a process was killed while it wrote.
        unwritten: rows that an earlier start could not write.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: Callable[[dict[str, Any]], bool] = lambda row: True,
        unwritten: Sequence[str] = (),
    ) -> None:
        self.path = path
        kept: list[str] = []
        if path.exists():
            for line in path.read_text().splitlines(keepends=True):
                if not line.endswith("\n") or not keep(json.loads(line)):
                    break
                kept.append(line.rstrip("\n"))
            # In place: this needs no room, and is done either completely or not at all.
            os.truncate(path, sum(len(line) + 1 for line in kept))
        self.unwritten = [line for line in unwritten if line not in kept]
        self._file: Any = None
        self._begun = 0  # number of bytes of the first one that are written
        self._told = False

    def add(self, **row: Any) -> None:
        """Write a row, after earlier rows that could not be written."""
        self.unwritten.append(json.dumps(row))
        self.flush()

    def flush(self) -> None:
        """Retry the rows that are not written."""
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            while self.unwritten:
                line = self.unwritten[0].encode() + b"\n"
                while self._begun < len(line):
                    self._begun += self._file.write(line[self._begun :])
                del self.unwritten[0]
                self._begun, self._told = 0, False
        except OSError as error:
            if not self._told:
                print(f"{self.path}: {error.strerror}; will try again later", flush=True)
            self._told = True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class LossLog:
    """losses.jsonl: one line per step, with all digits, written by rank 0.

    The run resumes after ``first_step`` and repeats later steps, so their lines are removed.
    """

    def __init__(self, out: Path, *, first_step: int, unwritten: Sequence[str] = ()) -> None:
        self._rows: Rows | None = None
        if dist.get_rank() == 0:
            out.mkdir(parents=True, exist_ok=True)
            self._rows = Rows(
                out / "losses.jsonl",
                keep=lambda row: bool(row["step"] <= first_step),
                unwritten=unwritten,
            )
            self._rows.flush()

    @property
    def unwritten(self) -> list[str]:
        """The rows that could not be written yet."""
        return [] if self._rows is None else list(self._rows.unwritten)

    def write(self, step: int, **values: float) -> None:
        """Add a step."""
        if self._rows is not None:
            self._rows.add(step=step, **values)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


def read_losses(path: Path) -> list[dict[str, Any]]:
    """The rows of a loss log; none if there is no log.

    An incomplete line is left out: a process was killed while it wrote the line.
    """
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def memory_in_use(device: torch.device) -> float:
    """Bytes of this process: its peak on the GPU, or its resident memory on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    except OSError:  # not Linux
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)


def sent_bytes(model: nn.Module, micro_batches: int, *, reductions: int) -> dict[str, int]:
    """Bytes that one rank sends to others in one step, according to `fsdp2.explain`.

    `explain` counts a step of one micro-batch. Call it after a forward, when the order of the units
    is known: the last unit stays gathered for its backward. Parameters are gathered for every
    micro-batch. Gradients are reduced after the last one only; a graph reduces them after each.
    """
    totals = explain(model).totals
    return {
        "all_gather": micro_batches * totals.sent_by_gathers,
        "reduce_scatter": reductions * totals.sent_by_reduction,
        "all_reduce": reductions * totals.sent_by_all_reduction,
    }


def shard_sizes(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Numbers
) -> dict[str, Any]:
    """Parameters and bytes of the whole model and of every rank, from the tensors themselves."""

    def count(local: bool) -> list[int]:
        numel = num_bytes = state_bytes = 0
        for parameter in model.parameters():
            own = _part(parameter, local)
            numel += own.numel()
            num_bytes += own.numel() * own.element_size()
            for value in optimizer.state[parameter].values():
                if value.shape == parameter.shape:  # the moments, not the step counter
                    state_bytes += _part(value, local).numel() * value.element_size()
        return [numel, num_bytes, state_bytes]

    ranks = numbers.of_all_ranks(*count(local=True)).long().tolist()
    keys = ("parameters", "parameter_bytes", "optimizer_bytes")
    return {
        "unsharded": dict(zip(keys, count(local=False), strict=True)),
        "ranks": [dict(zip(keys, rank, strict=True)) for rank in ranks],
    }


def _part(tensor: Tensor, local: bool) -> Tensor:
    return tensor.to_local() if local and isinstance(tensor, DTensor) else tensor


def draw_curve(losses: list[dict[str, Any]], levels: dict[str, float], path: Path) -> str:
    """Draw the training loss and horizontal `levels`, in bits per byte; returns what to print."""
    try:
        import matplotlib
    except ImportError:
        return "skipped: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([r["step"] for r in losses], [r["bits_per_byte"] for r in losses], label="training")
    for color, (name, level) in enumerate(levels.items(), start=1):
        axes.axhline(level, color=f"C{color}", linestyle="--", label=f"{name}: {level:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)


def print_start(
    out: Path, model: nn.Module, text: Text, *, first_step: int, device: torch.device
) -> None:
    """Print the model, the text, and the step from which the run resumes."""
    if dist.get_rank() != 0:
        return
    numel = sum(p.numel() for p in model.parameters())
    kind = "GPUs, NCCL" if device.type == "cuda" else "CPU processes, gloo"
    print(f"model        {numel:,} parameters on {dist.get_world_size()} ranks ({kind})")
    print(
        f"text         {text.source}: {text.train.numel():,} bytes, "
        f"{text.held_out.numel():,} more held out"
    )
    if first_step:
        print(f"resumed      after step {first_step}")
    sys.stdout.flush()


def report(
    out: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: Text,
    options: argparse.Namespace,
    numbers: Numbers,
    *,
    step: int,
    sent: dict[str, int],
    bits: float,
    sample: str,
) -> None:
    """Print the figures of a finished run and write them to summary.json; all ranks call it.

    Args:
        step: the last step.
        sent: the result of `sent_bytes` after training.
        bits: bits per byte on held-out text.
    """
    sizes = shard_sizes(model, optimizer, numbers)
    if dist.get_rank() != 0:
        return
    # The n-gram models predict the same bytes as the model.
    starts = torch.tensor(validation_starts(text.held_out, options.length, options.eval_bytes))
    targets = (starts[:, None] + torch.arange(1, options.length + 1)).flatten()
    baselines = {
        "bigram": ngram_bits_per_byte(text, 2, targets),
        "trigram": ngram_bits_per_byte(text, 3, targets),
    }
    curve = draw_curve(read_losses(out / "losses.jsonl"), baselines, out / "loss.png")
    summary = {
        "held_out_bits_per_byte": {"model": bits, **baselines},
        "sent_bytes_per_rank_and_step": sent,
        "sizes": sizes,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")

    print(
        f"held out     {bits:.3f} bits per byte on {targets.numel():,} bytes; a bigram model: "
        f"{baselines['bigram']:.3f}, a trigram model: {baselines['trigram']:.3f}"
    )
    for name, size in [("unsharded", sizes["unsharded"])] + [
        (f"rank {i}", size) for i, size in enumerate(sizes["ranks"])
    ]:
        print(
            f"{name:<12} {size['parameters']:,} parameters, {size['parameter_bytes'] / 1e6:.1f} "
            f"MB; AdamW's moments {size['optimizer_bytes'] / 1e6:.1f} MB"
        )
    parts = ", ".join(f"{k} {v / 1e6:.1f} MB" for k, v in sent.items() if v)
    print(f"sent         per rank and step: {parts or 'nothing'}")
    print(f"loss curve   {curve}")
    path = checkpoint_path(options.out, step)
    print(f"checkpoint   {path} (to continue: --resume with a larger --steps)")
    print(f"sample\n{sample}", flush=True)


def show_profile(profiled: Profile, folder: Path) -> None:
    """Show the recorded step: rank 0 prints the table, every rank writes its own files."""
    rank = dist.get_rank()
    if rank == 0:
        print(profiled.table(), flush=True)
    profiled.export_chrome_trace(folder / f"rank{rank}.json")
    profiled.save_json(folder / f"measures{rank}.json")  # for fsdp2 compare
    try:
        profiled.save_picture(folder / f"rank{rank}.png")
    except ImportError as error:
        print(f"no picture: {error}", flush=True)
    if rank == 0:
        print(f"profile      {folder} (traces are for https://ui.perfetto.dev)", flush=True)
