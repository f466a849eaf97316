"""How a rank of an example starts, and what it does with what an earlier run left."""

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
    """Join the process group; the launcher has set this rank's variables. Returns its device.

    Args:
        timeout_s: of the group, in seconds; None: torch's, half an hour.
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
    # With kernels that add in a varying order, --resume would not be exact.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # gloo besides NCCL: with --offload, clipping reduces the norm of gradients on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return device


def set_earlier_run_aside(out: str) -> None:
    """Before a new run starts in `out`, move an earlier run to `out`-2, -3, ...: nothing is lost.

    Only what a run writes is moved: `out` may be a folder that has other files, too.
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
        print(f"note         the run before is in {aside} now", flush=True)
    dist.barrier()
