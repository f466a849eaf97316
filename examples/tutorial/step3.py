"""Step 3: a model that is never whole on any rank.

torchrun --standalone --nproc-per-node 2 examples/tutorial/step3.py
"""

import sys

import torch
import torch.distributed as dist

from fsdp2 import fully_shard, materialize
from ranks import join, print_mean
from tiny_lm import TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

device = join()
rank, num_ranks = dist.get_rank(), dist.get_world_size()

# On the meta device, a tensor has a shape but no memory.
with torch.device("meta"):
    model = TinyLM()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
# Now each rank allocates memory for its shards, and model.init_weights() fills them. With a seed,
# the weights are bit-for-bit identical to those from step 1, on any number of ranks.
materialize(model, seed=0)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    tokens = batch_of(step).chunk(num_ranks)[rank].to(device)
    loss = loss_of(model(tokens[:, :-1]), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print_mean(step, loss)

dist.destroy_process_group()
