"""Step 6: replicas of a sharded model (HSDP), and tools to inspect a run.

torchrun --standalone --nproc-per-node 4 examples/tutorial/step6.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, explain, materialize, profile, shard_model
from ranks import join, print_mean
from tiny_lm import Block, TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20

device = join()
rank, num_ranks = dist.get_rank(), dist.get_world_size()

# Shard within groups of two ranks (on a cluster: within a node), and replicate across groups.
# Gathers and reduce-scatters stay inside a group; only an all-reduce of shards leaves it.
mesh = init_device_mesh(device.type, (num_ranks // 2, 2), mesh_dim_names=("replicate", "shard"))

with torch.device("meta"):
    model = TinyLM()
# One call instead of a fully_shard for each block and one for the model.
bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
shard_model(model, mesh, strategy="hybrid", wrap=Block, mp_policy=bf16)
materialize(model, seed=0)
if rank == 0:
    print(explain(model), flush=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(step: int) -> None:
    tokens = batch_of(step).chunk(num_ranks)[rank].to(device)
    loss = loss_of(model(tokens[:, :-1]).float(), tokens)
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm=5.0)
    optimizer.step()
    optimizer.zero_grad()
    print_mean(step, loss)


for step in range(1, STEPS):
    train_step(step)
with profile(model) as recorded:  # a late step: the first ones differ from the others
    train_step(STEPS)
if rank == 0:
    print(recorded.table(), flush=True)

dist.destroy_process_group()
