"""Step 2: the same loop on several ranks, with sharded parameters.

torchrun --standalone --nproc-per-node 2 examples/tutorial/step2.py
"""

import sys

import torch
import torch.distributed as dist

from fsdp2 import fully_shard
from tiny_lm import TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

# Every process that torchrun starts runs this file. Here they join the process group.
use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
rank, num_ranks = dist.get_rank(), dist.get_world_size()

model = TinyLM().to(device)
torch.manual_seed(0)  # the same weights on every rank, which keeps its part of them
model.init_weights()

# Bottom-up: each block becomes a unit, and the model becomes a unit with the rest.
for block in model.blocks:
    fully_shard(block)
fully_shard(model)

# After sharding, so that the optimizer holds only this rank's shards and their state.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    # Each rank takes its own part of the batch.
    tokens = batch_of(step).chunk(num_ranks)[rank].to(device)
    loss = loss_of(model(tokens[:, :-1]), tokens)
    loss.backward()  # averages gradients over ranks
    optimizer.step()
    optimizer.zero_grad()
    # This is the loss of this rank's sequences. The mean over ranks is the loss of the whole batch.
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"step {step}: loss {mean.item() / num_ranks:.5f}")

dist.destroy_process_group()
