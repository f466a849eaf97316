"""Models of Hugging Face's transformers, as they are, with our `fully_shard` per layer and root."""

from __future__ import annotations

import copy
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, full_state_dict, fully_shard, register_fsdp_forward_method
from harness import distributed, ours_only, shared_folder
from reference import assert_same, assert_same_gradients, assert_same_parameters, average_gradients

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="trains models of transformers"
)

SIZES = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4}


def build(kind: str) -> Any:
    """A small model with random weights, without dropout."""
    torch.manual_seed(0)
    if kind == "bert":
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            **SIZES,
            hidden_size=16,
            intermediate_size=24,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForMaskedLM(config).double()
    if kind == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"bos_token_id": 0, "eos_token_id": 60}
        config = GPT2Config(**SIZES, n_embd=16, n_positions=32, **dropouts, **tokens)
        return GPT2LMHeadModel(config).double()
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SIZES,
        hidden_size=16,
        intermediate_size=24,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=kind == "llama-tied",
    )
    return LlamaForCausalLM(config).double()


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The first list of modules in it."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def shard(model: Any) -> Any:
    for layer in layers_of(model):
        fully_shard(layer)
    return fully_shard(model)


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 61, (2, 8), generator=generator)


def train_both(model: Any, plain: Any, num_steps: int) -> None:
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
    for step in range(num_steps):
        tokens = tokens_of(step)
        expected = plain(input_ids=tokens, labels=tokens).loss
        expected.backward()
        average_gradients(plain)
        loss = model(input_ids=tokens, labels=tokens).loss
        assert_same(loss, expected, f"loss of step {step}")
        loss.backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("llama-tied", True),
        long("llama", False),
        long("llama", True),
        long("llama-tied", False),
        long("gpt2", False),
        long("gpt2", True),
        long("bert", False),
        long("bert", True),
    ],
)
@distributed(2)
def test_training(kind: str, recompute: bool) -> None:
    """Five steps like on one process; activations recomputed by the switch of the model."""
    plain = build(kind)
    model = shard(copy.deepcopy(plain))
    if recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable()
        assert model.is_gradient_checkpointing
    train_both(model, plain, 5)


@pytest.mark.parametrize("kind", ["llama-tied", long("gpt2")])
@distributed(2)
def test_generate(kind: str) -> None:
    """It works as it is, for it computes by calling the model; registered it gathers the root once.
    Training goes on after it."""
    plain = build(kind)
    model = shard(copy.deepcopy(plain))
    train_both(model, plain, 1)
    prompt = torch.arange(5)[None]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(prompt, **options)
    assert torch.equal(model.eval().generate(prompt, **options), expected)
    register_fsdp_forward_method(model, "generate")
    assert torch.equal(model.generate(prompt, **options), expected)
    train_both(model.train(), plain.train(), 2)


def assert_same_files(actual: str, expected: str) -> None:
    names = sorted(path.name for path in Path(expected).iterdir())
    assert sorted(path.name for path in Path(actual).iterdir()) == names
    for name in names:
        assert Path(actual, name).read_bytes() == Path(expected, name).read_bytes(), name


@ours_only("torch's leaves files without weights, and raises on rank 0")
@pytest.mark.parametrize("kind", ["llama-tied", long("llama"), long("gpt2")])
@distributed(2)
def test_save_pretrained(kind: str) -> None:
    """All ranks call it, or rank 0 with whole tensors: the files of a plain model, in two parts."""
    plain = build(kind)
    model = shard(copy.deepcopy(plain))
    train_both(model, plain, 1)
    state = full_state_dict(model, ranks=range(2))
    plain.load_state_dict(state)
    with shared_folder() as ours, shared_folder() as given, shared_folder() as expected:
        model.save_pretrained(ours, max_shard_size="10KB")
        if dist.get_rank() == 0:
            assert len([*Path(ours).glob("model-*.safetensors")]) > 1
            model.save_pretrained(given, state_dict=state, max_shard_size="10KB")
            plain.save_pretrained(expected, max_shard_size="10KB")
            assert_same_files(given, expected)
            assert_same_files(ours, expected)
        read = type(plain).from_pretrained(ours, dtype=torch.float64)
    for name, value in read.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    train_both(model, plain, 1)


@distributed(2)
def test_a_model_that_transformers_shards() -> None:
    """Its own ways to save, load and generate are untouched: they gather, or use torch's DCP."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import (
        DistributedConfig,
        fsdp,
        load_optimizer_distributed,
        save_optimizer_distributed,
    )

    plain = build("llama")

    def load(folder: str) -> Any:
        config = DistributedConfig(fsdp_size=2)
        return LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float64, distributed_config=config
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "fully_shard", fully_shard)
        with shared_folder() as source, shared_folder() as whole, shared_folder() as parts:
            if dist.get_rank() == 0:
                plain.save_pretrained(source)
            dist.barrier()
            model = load(source)
            assert isinstance(model, FSDPModule)
            train_both(model.train(), plain, 1)
            plain.load_state_dict(full_state_dict(model, ranks=range(2)))
            model.save_pretrained(whole)
            model.save_pretrained(parts, distributed_checkpoint=True)
            assert len([*Path(parts).glob("shard-*.safetensors")]) == 2
            if dist.get_rank() == 0:
                plain.save_pretrained(source)
                assert_same_files(whole, source)
            prompt = torch.arange(5)[None]
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
            expected = plain.eval().generate(prompt, **options)
            for again in (load(whole), load(parts)):
                assert_same_parameters(again, plain)
                assert torch.equal(again.eval().generate(prompt, **options), expected)
            optimizer = torch.optim.AdamW(model.parameters())
            model(input_ids=prompt, labels=prompt).loss.backward()
            optimizer.step()
            kept = {p: s["exp_avg"].to_local().clone() for p, s in optimizer.state.items()}
            save_optimizer_distributed(model, optimizer, f"{parts}/optimizer")
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
            load_optimizer_distributed(model, optimizer, f"{parts}/optimizer")
            for param, value in kept.items():
                assert torch.equal(optimizer.state[param]["exp_avg"].to_local(), value)
