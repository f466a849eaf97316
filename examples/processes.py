"""How a rank of an example starts, and what it does with what an earlier run left."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from options import checkpoint_folder, fail


def start_processes() -> torch.device:
    """Join the process group that torchrun has prepared; returns this rank's device."""
    if "RANK" not in os.environ:
        name = Path(sys.argv[0]).name
        fail(f"start it with torchrun: torchrun --standalone --nproc-per-node 2 {name}")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > num_gpus:
        fail(f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs; there are {num_gpus}")
    # Kernels that add in an order of their own would keep --resume from being exact.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    # gloo beside NCCL: with --offload the gradients whose norm is taken are on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def set_earlier_run_aside(out: str) -> None:
    """A run that starts anew has checkpoints of its own; those of the run before are kept."""
    folder = checkpoint_folder(out)
    if dist.get_rank() == 0 and folder.exists():
        numbers = itertools.count(1)
        aside = next(
            f for n in numbers if not (f := folder.with_name(f"{folder.name}-{n}")).exists()
        )
        folder.rename(aside)
        print(f"note         checkpoints of the run before are in {aside} now", flush=True)
    dist.barrier()
