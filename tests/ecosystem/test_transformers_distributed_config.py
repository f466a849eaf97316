"""transformers shards by itself (`distributed_config=...`): the same with our `fully_shard`.

It shards a model on the meta device, loads it by ``setattr`` of new parameters over DTensors, and
ties the embeddings again after that.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp2 import fully_shard
from harness import distributed
from reference import assert_same, assert_same_gradients, average_gradients

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

transformers = pytest.importorskip("transformers")
sharding = pytest.importorskip("transformers.distributed.fsdp")
if not hasattr(sharding, "apply_fully_sharded_data_parallelism"):
    pytest.skip("a version without fsdp_size", allow_module_level=True)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(kind: str, *, tied: bool) -> Any:
    torch.manual_seed(0)
    config, model = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }[kind]
    return model(config(**SIZES, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@distributed(2, 3)
def test_a_model_that_shards_itself(kind: str, tied: bool) -> None:
    """Trained like the plain model that was saved."""
    from transformers.distributed import DistributedConfig

    plain = build(kind, tied=tied).train()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if folder[0] is not None:
        plain.save_pretrained(folder[0])
    dist.broadcast_object_list(folder)
    former, sharding.fully_shard = sharding.fully_shard, fully_shard
    try:
        model = (
            type(plain)
            .from_pretrained(
                folder[0],
                dtype=torch.float32,
                distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
            )
            .train()
        )
    finally:
        sharding.fully_shard = former
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(3, 61, (2, 7), generator=generator)
        losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, plain)]
        assert_same(losses[0].detach(), losses[1].detach(), "loss")
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
