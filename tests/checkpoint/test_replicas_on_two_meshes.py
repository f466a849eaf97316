"""Checkpoints of models whose replicas are on meshes of other shapes over the same ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard, replicate
from fsdp2.checkpoint import load_model, save_model
from harness import cached_mesh, distributed, ours_only, shared_folder

pytestmark = ours_only("torch does not replicate units of sharded models")


@distributed(4)
def test_each_part_is_written_once() -> None:
    """Who writes was counted for both meshes together, and ranks counted different bytes."""
    model = nn.Sequential(*(nn.Linear(3, rows) for rows in (3, 3, 3, 1, 3, 5)))
    for number, layer in enumerate(model):
        if number % 2:
            replicate(layer, mesh=cached_mesh(4))
        else:
            fully_shard(layer, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    saved = [param.detach().to_local().clone() for param in model.parameters()]  # type: ignore[attr-defined]
    with shared_folder() as folder:
        save_model(model, f"{folder}/model").wait()
        dist.barrier()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load_model(model, f"{folder}/model")
    for param, value in zip(model.parameters(), saved, strict=True):
        assert torch.equal(param.detach().to_local(), value)  # type: ignore[attr-defined]
