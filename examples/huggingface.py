"""Train a model from the Hugging Face Hub, and write a folder that `from_pretrained` reads.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py SOURCE OUTPUT [STEPS]

SOURCE is a folder with config.json and safetensors files, as `hf download` creates it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, materialize
from fsdp2.checkpoint import load_model, save_model

source, output = Path(sys.argv[1]), Path(sys.argv[2])
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 10

use_cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if use_cuda else "gloo")
device = torch.device("cuda", dist.get_node_local_rank()) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(device)
rank = dist.get_rank()

# Shapes only. float32 is the dtype of the shards and of the optimizer's state.
config = AutoConfig.from_pretrained(source)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
model.config.use_cache = False

bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=bf16)
fully_shard(model, mp_policy=bf16)

# materialize computes buffers that no file has, such as the frequencies of rotary embeddings. Then
# each rank reads the bytes of its own shards. cast=True, because the files may hold bfloat16.
materialize(model, parameters=False)
load_model(model, source, cast=True)


def batch_of(step: int) -> torch.Tensor:
    """Token ids of shape (batch, length). Replace this with your data: different on each rank."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
    start = torch.randint(config.vocab_size, (4, 1), generator=generator)
    return (start + torch.arange(16)) % config.vocab_size


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(1, steps + 1):
    tokens = batch_of(step).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.3f}", flush=True)

# Every rank writes its own bytes to ordinary safetensors files. Rank 0 adds the small files.
save_model(model, output)
if rank == 0:
    config.save_pretrained(output)
    for path in (*source.glob("*token*"), *source.glob("generation_config.json")):
        (output / path.name).write_bytes(path.read_bytes())
dist.barrier()
dist.destroy_process_group()
