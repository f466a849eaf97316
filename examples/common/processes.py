"""Starts the ranks of an example, and moves the files of an earlier run."""

from __future__ import annotations

import itertools
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from common.options import checkpoint_folder, fail

FILES_OF_A_RUN = ("losses.jsonl", "sessions.jsonl", "summary.json", "loss.png")


def start_processes(timeout_s: float | None = None) -> torch.device:
    """Join the process group, from the launcher's environment; returns this rank's device.

    Args:
        timeout_s: the group's timeout in seconds; None: torch's default.
    """
    if "RANK" not in os.environ:
        name = Path(sys.argv[0]).name
        fail(f"start it with torchrun: torchrun --standalone --nproc-per-node 2 {name}")
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > num_gpus:
        fail(f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs; there are {num_gpus}")
    # With kernels that add in varying order, --resume would not be exact.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # gloo in addition to NCCL: with --offload, clipping reduces the gradients' norm on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return device


def set_earlier_run_aside(out: str) -> None:
    """Before a new run starts in `out`, move the files of an earlier run to `out`-2, -3, ...

    Other files in `out` are not moved.
    """
    here = Path(os.path.abspath(out))
    if dist.get_rank() == 0 and checkpoint_folder(here).exists():
        names = (here.with_name(f"{here.name}-{number}") for number in itertools.count(2))
        aside = next(path for path in names if not path.exists())
        try:
            aside.mkdir()
            for path in (checkpoint_folder(here), *(here / name for name in FILES_OF_A_RUN)):
                if path.exists():
                    path.rename(aside / path.name)
        except OSError as error:
            fail(f"--out: cannot move the run that is in {here} to {aside}: {error.strerror}")
        print(f"note         the earlier run is in {aside} now", flush=True)
    dist.barrier()
