"""What a few minutes on a GPU must show first of several ranks: short bodies, the telling ones.

One GPU is enough, where ranks share it (``FSDP2_TEST_RANKS_PER_GPU=4``, `--device cuda`): NCCL
takes grouped calls of all dtypes, and training is that of torch's FSDP2 in each way that data
travels. `test_peer` and the suites have more of each.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from test_peer import BF16, Script, compare
from torch import nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

import fsdp2
import harness
from fsdp2.checkpoint import Checkpointer
from fsdp2.comm.transports import separate_group
from fsdp2.sharding.process_groups import own_group
from harness import distributed, ours_only, shared_folder
from models import BY_NAME

pytestmark = ours_only("its collectives, beside torch's library")

MLP = BY_NAME["mlp"]
NUMELS = (16, 4096, 1 << 18)  # of the entries of one call
GATHERED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# ------------------------------------------------------------------------------- collectives


def either(group: Any, new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renames coalesced calls; 2.11 has the former names only."""
    return getattr(group, new, None) or getattr(group, old)


def finish(work: Any) -> None:
    """NCCL gives no work for calls on the current stream."""
    if work is not None:
        work.wait()


@pytest.mark.parametrize("dtype", GATHERED, ids=str)
@distributed(2, 4)
def test_one_call_gathers_entries_of_all_sizes(dtype: torch.dtype) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    options = AllgatherOptions()
    options.asyncOp = harness.DEVICE == "cpu"
    gather = either(
        dist.group.WORLD, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
    )
    outs = [torch.zeros(size * numel, dtype=dtype) for numel in NUMELS]
    finish(gather(outs, [torch.full((k,), rank + 1, dtype=dtype) for k in NUMELS], options))
    for out in outs:
        rows = out.view(size, -1)
        assert rows[:, 0].tolist() == [i + 1 for i in range(size)]
        assert torch.equal(rows, rows[:, :1].expand_as(rows).contiguous())


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@distributed(2, 4)
def test_one_call_reduces_entries_of_all_sizes(dtype: torch.dtype) -> None:
    """Means too: a group of one rank never asks for them."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reduce = either(
        dist.group.WORLD, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
    )
    total = size * (size + 1) / 2
    for operation, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size)):
        options = ReduceScatterOptions()
        options.asyncOp, options.reduceOp = harness.DEVICE == "cpu", operation
        outs = [torch.zeros(numel, dtype=dtype) for numel in NUMELS]
        ins = [torch.full((size * numel,), rank + 1, dtype=dtype) for numel in NUMELS]
        finish(reduce(outs, ins, options))
        for out in outs:
            assert torch.equal(out, torch.full_like(out, expected)), operation


@distributed(2, 4)
def test_groups_beside_the_default_one_serve_the_device() -> None:
    world, device = dist.group.WORLD, torch.empty(0).device
    assert world is not None
    for group in (own_group(world, device, "beside"), separate_group(world, device, True)):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [dist.get_world_size()] * 3


# ------------------------------------------------------------- training, beside torch's FSDP2


ALIKE = {
    "fp32": Script("mlp", micro_batches=1),
    "bf16": Script("mlp", micro_batches=1, precision=BF16),
    "reduced in bf16": Script("mlp", micro_batches=1, precision=(torch.bfloat16, None)),
    "all direct": Script("transformer", micro_batches=1, direct_min_bytes=0),
    "all packed": Script("transformer", micro_batches=1, direct_min_bytes=1 << 30),
    "accumulated": Script("mlp", accumulate="local"),
    "kept": Script("mlp", micro_batches=1, reshard_after_forward=False),
    "offloaded": Script("mlp", micro_batches=1, offload=True),
    "replicated": Script("mlp", micro_batches=2, mesh=(2, 1)),
}
ON_FOUR = {
    "hybrid": Script("mlp", accumulate="reduce-scatter", mesh=(2, 2)),
    "kept on two": Script("mlp", micro_batches=1, reshard_after_forward=2),
}


@pytest.mark.parametrize("name", ALIKE)
@distributed(2, 4)
def test_training_is_that_of_torch(name: str) -> None:
    script = ALIKE[name]
    if script.mesh is not None and dist.get_world_size() == 4:
        pytest.skip("hybrid sharding, below")
    if script.mesh is not None and harness.DEVICE == "testdev":
        pytest.skip("torch's gradients of replicas alone are NaN there: memory freed too early")
    compare(script)


@pytest.mark.parametrize("name", ON_FOUR)
@distributed(4)
def test_training_on_parts_of_the_ranks_is_that_of_torch(name: str) -> None:
    compare(ON_FOUR[name])


def losses_of(library: ModuleType, *, clip: bool = False, **options: Any) -> list[float]:
    """Three steps of AdamW."""
    torch.manual_seed(0)
    model = MLP.build()
    for unit in (*MLP.units(model), model):
        library.fully_shard(unit, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = MLP.loss(model, *MLP.batch(step, dist.get_rank(), torch.float32))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if harness.DEVICE == "testdev":
            torch.get_device_module(harness.DEVICE).synchronize()  # see `test_peer.run`
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(2, 4)
def test_clipped_gradients_and_adamw_train_as_with_torch() -> None:
    ours, theirs = (losses_of(library, clip=True) for library in (fsdp2, torch_fsdp))
    assert ours == pytest.approx(theirs, rel=1e-6)


@distributed(2, 4)
def test_bytes_of_8_bits_train_nearly_as_well() -> None:
    policy = fsdp2.CommPolicy(gather=torch.int8, reduce=torch.int8)
    assert losses_of(fsdp2, comm_policy=policy) == pytest.approx(losses_of(fsdp2), rel=0.05)


@distributed(2, 4)
def test_a_checkpoint_brings_back_model_and_optimizer() -> None:
    def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = MLP.build()
        for unit in (*MLP.units(model), model):
            fsdp2.fully_shard(unit)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, steps)
        return model, optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> float:
        for number in range(num):
            loss = MLP.loss(model, *MLP.batch(number, dist.get_rank(), torch.float32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    with shared_folder() as folder, Checkpointer(folder) as checkpoints:
        model, optimizer = trained(0, 2)
        checkpoints.save(1, model=model, optimizer=optimizer, blocking=False).wait_committed()
        again, its_optimizer = trained(1, 1)
        checkpoints.load(1, model=again, optimizer=its_optimizer)
        assert step(again, its_optimizer, 3) == step(model, optimizer, 3)
