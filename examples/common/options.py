"""The command line of train_lm.py, and the error handling of all examples' command lines."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# Options that a resumed run may change. The others determine the loss curve or the shards, and come
# from the checkpoint.
FREE_ON_RESUME = {
    *("resume", "out", "steps", "stop_at", "minutes", "save_every", "sample_bytes", "profile"),
    *("graph", "hang_after", "snapshot_every", "snapshot_dir", "snapshot_host"),
}


def fail(message: str) -> NoReturn:
    """End with exit status 2; rank 0 prints the reason in one line."""
    if os.environ.get("RANK", "0") != "0":
        # The launcher ends all ranks as soon as one fails, so rank 0, which prints, must be first.
        time.sleep(10)
        sys.exit(2)
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports errors in one line and prints its help on one rank."""

    def error(self, message: str) -> NoReturn:
        fail(message)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the options; with --resume, options not given come from the checkpoint."""
    parser = _parser()
    options = parser.parse_args(argv)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if options.resume:
        step, saved = saved_run(options.out)
        # The same sequences per step as before, if they divide evenly among these processes.
        sequences = saved["options"]["batch"] * saved["world_size"]
        if sequences % world_size == 0:
            saved["options"]["batch"] = sequences // world_size
        options = as_saved(parser, argv, saved["options"], FREE_ON_RESUME)
        exit_if_finished(options, step)
    _check(options, world_size)
    return options


def as_saved(
    parser: argparse.ArgumentParser, argv: list[str] | None, saved: dict[str, Any], free: set[str]
) -> argparse.Namespace:
    """The options of a resumed run: the checkpoint's, except those given that are in `free`."""
    parser.set_defaults(**saved)
    options = parser.parse_args(argv)
    for name, value in saved.items():
        if name not in free and getattr(options, name) != value:
            flag = "--" + name.replace("_", "-")
            given = "" if isinstance(value, bool) else f" {value}"
            wrong = "without" if value is False else "with"
            fail(f"--resume: the checkpoint was made {wrong} {flag}{given}")
    return options


def exit_if_finished(options: argparse.Namespace, step: int) -> None:
    """End with exit status 0 if no step is left after `step`; rank 0 prints a line about it."""
    last = min(options.steps, options.stop_at or options.steps)
    if step < last:
        return
    if os.environ.get("RANK", "0") == "0":
        flag = "--steps" if last == options.steps else "--stop-at"
        print(
            f"finished     {checkpoint_path(options.out, step)} is of step {step}, and {flag} is "
            f"{last}: nothing to do. A larger {flag} continues the run",
            flush=True,
        )
    sys.exit(0)


def options_to_save(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a checkpoint keeps for --resume."""
    return {k: v for k, v in vars(options).items() if k not in FREE_ON_RESUME or k == "steps"}


def checkpoint_folder(out: str | Path) -> Path:
    """Where a run keeps its checkpoints, one folder per step."""
    return Path(out) / "checkpoints"


def checkpoint_path(out: str | Path, step: int) -> Path:
    """The checkpoint of a step."""
    return checkpoint_folder(out) / f"step-{step:06d}"


def saved_run(out: str) -> tuple[int, dict[str, Any]]:
    """The step of a run's latest checkpoint, and the `extra` saved with it."""
    from fsdp2.checkpoint import CheckpointError, CheckpointNotFound, peek  # imports torch

    try:
        found = peek(checkpoint_folder(out))
        return found.step, found.extra
    except CheckpointNotFound:
        fail(f"--resume: there is no checkpoint in {out}")
    except (OSError, CheckpointError) as error:
        fail(f"--resume: {error}")


def _check(options: argparse.Namespace, world_size: int) -> None:
    """Check options that contradict each other or do not fit the processes or the disk."""
    if options.elastic and options.resume:
        fail("--elastic resumes automatically: leave out --resume")
    if options.elastic and options.accumulate > 1:
        fail("--elastic: --accumulate follows from --global-batch and the number of processes")
    if options.snapshot_every < 0:
        fail(f"--snapshot-every {options.snapshot_every} is not 0 or more")
    if options.graph and options.offload:
        fail("--graph: offloaded parameters need eager steps: leave out --offload")
    if world_size % options.replicate:
        fail(f"--replicate {options.replicate} does not divide the {world_size} processes evenly")
    if options.dim % (2 * options.heads):
        fail(f"--dim {options.dim} is not a multiple of twice --heads {options.heads}")
    if options.data is not None and not Path(options.data).exists():
        fail(f"--data: there is no file or folder {options.data}")
    make_folder(options.out)


def make_folder(out: str) -> None:
    """Create the folder of a run."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out: cannot make the folder {out}: {error.strerror}")


def positive(text: str) -> int:
    """A whole number from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def positive_number(text: str) -> float:
    """Any finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


# argparse names them in "invalid ... value".
positive.__name__, positive_number.__name__ = "whole number", "number"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description="Train a byte-level language model with fully sharded data parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, default: Any, text: str, kind: Any = positive, meta: str = "N") -> None:
        parser.add_argument(flag, type=kind, default=default, metavar=meta, help=text)

    def switch(flag: str, text: str) -> None:
        parser.add_argument(flag, action="store_true", help=text)

    add("--data", None, "file or folder to read; None: Python's standard library", str, "PATH")
    add("--out", "runs/lm", "folder for the log, the curve and the checkpoint", str, "DIR")
    add("--seed", 0, "seed of the weights, the batches and the sample", int)

    add("--steps", 300, "optimizer steps; the learning rate falls until the last")
    add("--stop-at", None, "stop after this step, to continue later with --resume")
    add("--minutes", None, "stop after this many minutes", positive_number, "M")
    add("--save-every", None, "save a checkpoint every N steps, not only at the end")
    add("--profile", None, "profile a step: print a table, and write files to DIR", str, "DIR")
    switch("--resume", "continue from the checkpoint in --out")
    switch("--elastic", "continue from the newest state, if any, on any number of processes")
    add("--snapshot-every", 10, "with --elastic: keep every Nth step in memory; 0: none", int)
    add("--snapshot-dir", "/dev/shm", "folder in each host's memory for snapshots", str, "DIR")
    add("--snapshot-host", None, "failure domain, such as a rack; None: the host", str, "NAME")
    add("--hang-after", 60.0, "seconds after which a wait is a hang", positive_number, "S")

    add("--batch", 4, "sequences per rank and forward")
    add("--length", 128, "bytes per sequence")
    add("--accumulate", 1, "forwards and backwards per optimizer step")
    add("--global-batch", 16, "with --elastic: sequences per step over all ranks")
    add("--lr", 7e-4, "peak learning rate", positive_number, "X")
    add("--warmup", 20, "steps until the learning rate reaches its peak")

    add("--replicate", 1, "shard over 1/N of the ranks and replicate N times (HSDP)")
    switch("--bf16", "compute in bfloat16, reduce gradients in float32")
    switch("--ac", "activation checkpointing: recompute each block in backward")
    switch("--graph", "compile forward and backward as one graph (docs/graph.md)")
    switch("--offload", "keep the sharded parameters, gradients and optimizer on the CPU")

    add("--dim", 512, "width of the model")
    add("--layers", 3, "number of blocks")
    add("--heads", 8, "attention heads per block")
    add("--hidden", 1408, "inner width of the feed-forward layers")

    add("--eval-bytes", 65_536, "held-out bytes to validate on")
    add("--sample-bytes", 200, "bytes of text to generate at the end", int)
    return parser
