"""One optimizer over parameters on two meshes: vectors over all ranks, matrices on a mesh of
replicas and shards, as dense layers and experts are; clipped by one norm over both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import fsdp2
from fsdp2 import ShardPlacementResult
from harness import cached_mesh, distributed, ours_only
from models import MLP
from optimizers import assert_same_training, feed
from reference import assert_same, pair, run_both

pytestmark = ours_only("local steps, clipping over several meshes")

LR = {"lr": 0.03}
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {**LR, "weight_decay": 0.1}),
    "sgd": (SGD, {**LR, "momentum": 0.9}),
    "adagrad": (Adagrad, LR),
}
WAYS = {"foreach": {"foreach": True}, "for_loop": {"foreach": False}, "fused": {"fused": True}}
# DTensors have no rule for these; on local tensors they run.
NO_RULE = {("sgd", "fused"), ("adagrad", "fused")}


def pair_on_two_meshes() -> tuple[nn.Module, nn.Module]:
    size = dist.get_world_size()
    flat = cached_mesh(size)
    replicas = cached_mesh(2, size // 2, names=("replicate", "shard"))
    model, plain = pair(
        MLP,
        mesh=flat,
        shard_placement_fn=lambda p: ShardPlacementResult(None, replicas) if p.ndim > 1 else None,
    )
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    assert meshes.count(flat) == meshes.count(replicas) == 3
    return model, plain


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(4, long=(2,))
def test_five_steps_are_those_of_one_process(name: str, way: str, local: bool) -> None:
    """The state too, and every step clips."""
    make, options = OPTIMIZERS[name]
    model, plain = pair_on_two_meshes()
    optimizer = make(model.parameters(), **options, **WAYS[way])
    reference = make(plain.parameters(), **options, foreach=False)
    optimizer = (fsdp2.optim.local_step if local else fsdp2.optim.dtensor_step)(optimizer)
    for step in range(5):
        run_both(MLP, model, plain, step)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert_same(fsdp2.clip_grad_norm_(model.parameters(), 0.05), expected, "norm")
        feed(model, plain)
        if not local and (name, way) in NO_RULE:
            with pytest.raises(NotImplementedError, match="sharding strategy"):
                optimizer.step()
            return
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    assert_same_training(model, plain, optimizer, reference)


@distributed(4)
def test_torchs_clipping_raises_over_two_meshes() -> None:
    model, plain = pair_on_two_meshes()
    run_both(MLP, model, plain, 0)
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
