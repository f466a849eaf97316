"""A user's training program, annotated: `make lint` checks it as ``mypy --strict`` would.

With torch's FSDP2, mypy refuses ``model.parameters()`` and ``model(batch)``: there, an `FSDPModule`
is no `nn.Module`.
"""

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    fully_shard,
)
from fsdp2.checkpoint import Checkpointer


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def shard(model: Net, offload: bool) -> FSDPModule:
    mesh = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("shard",))
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [fully_shard(b, mesh=mesh, mp_policy=bf16, offload_policy=policy) for b in model.blocks]
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
    return fully_shard(model, mesh=mesh, mp_policy=bf16, offload_policy=policy)


def train(model: FSDPModule, batches: list[Tensor], folder: Path) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = Checkpointer(folder)
    total = 0.0
    for step, batch in enumerate(batches):
        last = step == len(batches) - 1
        model.set_requires_gradient_sync(last)
        loss: Tensor = model(batch).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # in torch
        total += loss.item()
    norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    handle = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.reshard()
    checkpoints.save(len(batches), model=model, optimizer=optimizer)
    return total + norm.item()
