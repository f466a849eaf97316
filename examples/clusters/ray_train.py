"""Sharded training with Ray Train: run `python examples/clusters/ray_train.py` on the head node.

Ray starts the workers, gives each a GPU and creates the process group. Sharding and checkpoints are
the same as in any other program.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn

from fsdp2 import clip_grad_norm_, shard_model
from fsdp2.checkpoint import Checkpointer, CheckpointNotFound


def train_on_worker(settings: dict[str, Any]) -> None:
    """The function that every worker runs; a worker is a rank."""
    device = ray.train.torch.get_device()
    rank = ray.train.get_context().get_world_rank()

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 8)).to(device)
    shard_model(model, wrap=nn.Sequential)  # not ray.train.torch.prepare_model, which is for DDP
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # On a file system that all nodes share. After a failure, Ray restarts all workers, and they
    # resume from here.
    checkpoints = Checkpointer(settings["checkpoints"], keep=2)
    try:
        done = checkpoints.load("latest", model=model, optimizer=optimizer).step
    except CheckpointNotFound:  # on all ranks or on none
        done = 0

    for step in range(done + 1, settings["steps"] + 1):
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        x = torch.randn(32, 64, generator=generator).to(device)
        loss = F.cross_entropy(model(x), x[:, :8].argmax(dim=1))
        loss.backward()
        clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            checkpoints.save(step, model=model, optimizer=optimizer, blocking=False)
            ray.train.report({"step": step, "loss": loss.item()})  # all workers report
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    checkpoints.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8, help="ranks on all nodes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cpu", action="store_true", help="run on the CPU")
    parser.add_argument("--shared", default="/shared", help="folder that all nodes share")
    options = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train_on_worker,
        train_loop_config={
            "steps": options.steps,
            "checkpoints": f"{options.shared}/fsdp2-checkpoints",
        },
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(
            name="fsdp2",
            storage_path=f"{options.shared}/ray",
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()  # raises if the workers failed more often than that


if __name__ == "__main__":
    main()
