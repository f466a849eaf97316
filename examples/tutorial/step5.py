"""Step 5: checkpoints, and resuming on a different number of ranks.

torchrun --standalone --nproc-per-node 2 examples/tutorial/step5.py 10
torchrun --standalone --nproc-per-node 3 examples/tutorial/step5.py 20
"""

import sys

import torch
import torch.distributed as dist

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, materialize
from fsdp2.checkpoint import Checkpointer, CheckpointNotFound
from ranks import join, print_mean
from tiny_lm import TinyLM, batch_of, loss_of

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20
MICRO_BATCHES = 2

device = join()
rank, num_ranks = dist.get_rank(), dist.get_world_size()

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
bf16_model = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
with torch.device("meta"):
    model = TinyLM()
for block in model.blocks:
    fully_shard(block, mp_policy=bf16)
fully_shard(model, mp_policy=bf16_model)
materialize(model, seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.9, total_iters=100)

# A folder that all ranks see. The newest two checkpoints are kept.
checkpoints = Checkpointer("tutorial-checkpoints", keep=2)
try:
    loaded = checkpoints.load("latest", model=model, optimizer=optimizer, scheduler=scheduler)
    done = loaded.step
    if rank == 0:
        print(f"resumed after step {done}", flush=True)
except CheckpointNotFound:  # on all ranks or on none
    done = 0

for step in range(done + 1, STEPS + 1):
    tokens = batch_of(step).chunk(num_ranks)[rank].to(device)
    loss = torch.zeros((), device=device)
    for i, micro_batch in enumerate(tokens.chunk(MICRO_BATCHES)):
        model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
        part = loss_of(model(micro_batch[:, :-1]), micro_batch) / MICRO_BATCHES
        part.backward()
        loss += part.detach()
    clip_grad_norm_(model.parameters(), max_norm=5.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print_mean(step, loss)
    if step % 5 == 0 or step == STEPS:
        # Returns when the bytes are copied; a thread writes them while training continues.
        checkpoints.save(
            step, model=model, optimizer=optimizer, scheduler=scheduler, blocking=False
        )

checkpoints.close()  # waits for the last save
dist.destroy_process_group()
