"""Step 4: mixed precision, gradient accumulation and clipping.

torchrun --standalone --nproc-per-node 2 examples/tutorial/step4.py
"""

import sys

import torch
import torch.distributed as dist

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, materialize
from ranks import join, print_mean
from tiny_lm import TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
MICRO_BATCHES = 2

device = join()
rank, num_ranks = dist.get_rank(), dist.get_world_size()

# Shards and optimizer state stay float32. Parameters are cast before they are gathered, so
# forward and backward compute in bfloat16, and gathers send half the bytes. Gradients are summed
# in float32. The outputs are cast back, so the loss is computed in float32.
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
bf16_model = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

with torch.device("meta"):
    model = TinyLM()
for block in model.blocks:
    fully_shard(block, mp_policy=bf16)
fully_shard(model, mp_policy=bf16_model)
materialize(model, seed=0)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    tokens = batch_of(step).chunk(num_ranks)[rank].to(device)
    loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(tokens.chunk(MICRO_BATCHES)):
        # Gradients accumulate on this rank. The last backward reduces them.
        model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
        part = loss_of(model(micro_batch[:, :-1]), micro_batch) / MICRO_BATCHES
        part.backward()
        loss += part.detach()
    # Clips by the norm of the whole gradient, over all ranks. All ranks must call it.
    clip_grad_norm_(model.parameters(), max_norm=5.0)
    optimizer.step()
    optimizer.zero_grad()
    print_mean(step, loss)

dist.destroy_process_group()
