"""Saving and loading a sharded training run: one safetensors file per rank, one small JSON.

Every rank writes its own shards (parameters, AdamW's state) and its random number generators'
state into a file of its own, without communication. `checkpoint.json`, written last and renamed
into place, names the folder of those files: a save that is cut short leaves the previous
checkpoint as it was. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def save_checkpoint(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
) -> None:
    """Save the run after `step`; all ranks call it.

    Args:
        out: The run's folder.
        run: What else a resumed run needs to know, JSON-like; the same on every rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = f"step-{step:06d}"
    (out / folder).mkdir(parents=True, exist_ok=True)
    tensors = {name: local.cpu().clone() for name, local in _own_tensors(model, optimizer).items()}
    save_file(tensors | _random_states(), out / folder / _file_name(rank, world_size))
    dist.barrier()  # The checkpoint is complete once every rank's file is.
    if rank == 0:
        index = {"step": step, "world_size": world_size, "folder": folder, **run}
        (out / "checkpoint.json.new").write_text(json.dumps(index, indent=2) + "\n")
        os.replace(out / "checkpoint.json.new", out / "checkpoint.json")
        for old in out.glob("step-*"):
            if old.name != folder:
                shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(
    out: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load this rank's shards into `model` and `optimizer`; returns the JSON's content."""
    index = json.loads((out / "checkpoint.json").read_text())
    name = _file_name(dist.get_rank(), dist.get_world_size())
    tensors = load_file(out / index["folder"] / name)
    for parameter in model.parameters():
        # AdamW makes its state in its first step; here it has to exist before that.
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    for name, local in _own_tensors(model, optimizer).items():
        local.copy_(tensors[name])
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return index


@torch.no_grad()
def _own_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's part of every parameter and of the optimizer's state, by name."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = _local(parameter)
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = _local(value)
    return tensors


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _random_states() -> dict[str, Tensor]:
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.safetensors"
