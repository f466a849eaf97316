"""Trains with the kernel alone: no file of an optional part is imported.

``python bare_kernel.py FOLDER`` runs two ranks, bit for bit beside the plain model.
"""

from __future__ import annotations

import copy
import sys
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.optim import SGD

NUM_RANKS = 2
PARTS = ("fsdp2.transports", "fsdp2.features", "fsdp2.guards")


def main(rank: int, folder: str) -> None:
    sys.modules["fsdp2.parts"] = ModuleType("fsdp2.parts")  # which imports them all
    import fsdp2
    from models import TRANSFORMER

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    torch.manual_seed(0)
    plain = TRANSFORMER.build().double()
    model = copy.deepcopy(plain)
    for block in TRANSFORMER.units(model):
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    # A power of two: neither a fused multiplication nor another order rounds otherwise.
    optimizers = [SGD(each.parameters(), lr=0.0625) for each in (model, plain)]
    for step in range(3):
        batch = TRANSFORMER.batch(step, rank, torch.float64)
        for each in (model, plain):
            TRANSFORMER.loss(each, *batch).backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= NUM_RANKS
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, ours), right in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, DTensor), name
            assert torch.equal(ours.full_tensor(), right), f"{name} in step {step}"
    known = [name for name in sys.modules if name.startswith(PARTS)]
    assert not known, known
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), NUM_RANKS, start_method="fork")
