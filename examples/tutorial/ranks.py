"""Code of step 2 that later steps import: joining the process group, and the mean loss."""

from __future__ import annotations

import torch
import torch.distributed as dist


def join() -> torch.device:
    """Join the process group that torchrun prepared; returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


def print_mean(step: int, loss: torch.Tensor) -> None:
    """Print the mean of the ranks' losses, on rank 0."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {mean.item() / dist.get_world_size():.5f}", flush=True)
