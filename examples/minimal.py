"""Train a small model with sharded parameters, save a checkpoint and load it.

    torchrun --standalone --nproc-per-node 2 examples/minimal.py

The processes use one GPU each and NCCL. Without GPUs, they run on the CPU and use gloo.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import clip_grad_norm_, fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointNotFound

# torchrun starts the ranks. Each rank joins the process group and uses its own device.
use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
rank, num_ranks = dist.get_rank(), dist.get_world_size()


def sharded_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank, which keeps its shard of them
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(64, 8)).to(device)
    for block in blocks:
        fully_shard(block)  # a block is gathered just before it runs and freed right after
    return fully_shard(model)  # shards the rest: the last layer


model = sharded_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after sharding: it holds shards
checkpoints = Checkpointer("minimal-checkpoints", keep=2)
try:  # an earlier run may have had any number of ranks
    first = checkpoints.load("latest", model=model, optimizer=optimizer).step
except CheckpointNotFound:  # on all ranks or on none
    first = 0

generator = torch.Generator().manual_seed(rank + first * num_ranks)  # different data on each rank
for step in range(first + 1, first + 21):
    x = torch.randn(128, 64, generator=generator).to(device)
    loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(dim=1))
    loss.backward()  # gradients are averaged over ranks; each rank keeps its shard
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.3f}")

checkpoints.save(step, model=model, optimizer=optimizer)  # each rank writes its own bytes
again = sharded_model()
checkpoints.load(step, model=again)  # each rank reads its own bytes
assert torch.equal(again(x), model(x))
if rank == 0:
    print(f"saved and loaded minimal-checkpoints/step-{step:06d}")
dist.destroy_process_group()
