"""One rank of a training with nemo-automodel's sharding, losses and clipping: small models.

    torchrun --nproc-per-node 2 nemo_run.py IMPLEMENTATION FOLDER untied|tied

Each rank writes the loss and the gradient norm of every step, and sums of the parameters.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

import torch
import torch.distributed as dist

from client_programs import change_imports, write

STEPS = 4


def build(kind: str) -> torch.nn.Module:
    import transformers
    from nemo_automodel.components.models.llama.model import LlamaForCausalLM

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "tied",
        attn_implementation="sdpa",
    )
    config.torch_dtype = config.dtype = torch.float32
    return LlamaForCausalLM(config)


def shard(model: torch.nn.Module) -> torch.nn.Module:
    from nemo_automodel.components.distributed import parallelizer
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

    # nemo-automodel 0.7 wraps a method of torch's FSDP2 that torch 2.15 no longer has.
    parallelizer._patch_fsdp_accumulated_grad_guard = lambda: None
    context = MeshContext.build(
        FSDP2Config(enable_fsdp2_prefetch=True),
        ParallelismSizes(),
        activation_checkpointing=True,
    )
    return parallelize_model(model, context)


def main(implementation: str, folder: str, kind: str) -> None:
    change_imports(implementation)
    dist.init_process_group("gloo")
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.training import utils

    model = shard(build(kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = MaskedCrossEntropy()
    records: list[Any] = []
    for step in range(STEPS):
        utils.prepare_for_grad_accumulation([model])
        losses = []
        for micro in range(2):
            if micro == 1:
                utils.prepare_for_final_backward([model])
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(61, (2, 9), generator=generator)
            loss = criterion(model(tokens[:, :-1]).logits, tokens[:, 1:].contiguous())
            (loss / 2).backward()
            utils.prepare_after_first_microbatch()
            losses.append(loss.item())
        norm = utils.scale_grads_and_clip_grad_norm(
            0.5, [model], pp_enabled=False, device_mesh=None, num_label_tokens=None
        )
        optimizer.step()
        optimizer.zero_grad()
        records.append([step, losses, float(norm)])
    for name, value in model.named_parameters():
        records.append([name, value.full_tensor().double().sum().item()])
    write(folder, records, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
