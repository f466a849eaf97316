"""Adapters of peft in sharded models, beside one process."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import full_state_dict, fully_shard
from harness import distributed, ours_only, shared_folder
from reference import (
    assert_same,
    assert_same_gradients,
    average_gradients,
    gathering,
)

pytestmark = [
    pytest.mark.long,  # every rank imports peft: 8 s
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    ours_only("torch's loses what is merged into shards"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.table = nn.Embedding(5, 6)
        self.last = nn.Linear(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.table(ids))))


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(5, (3,), generator=generator)


def build(**options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["first", "last"], init_lora_weights=False, **options)
    return get_peft_model(Net(), config).double()


def adapted(in_units: bool, **options: Any) -> tuple[Any, Any]:
    """A sharded model, its adapted layers units of their own or not, and a plain one."""
    plain = build(**options)
    model = copy.deepcopy(plain)
    inner = model.base_model.model
    for layer in (inner.first, inner.last) if in_units else ():
        fully_shard(layer, **gathering())
    return fully_shard(model, **gathering()), plain


def check_outputs(model: Any, plain: Any, what: str) -> None:
    with torch.no_grad():
        assert_same(model(batch()), plain(batch()), what)


@pytest.mark.parametrize("in_units", [False, True])
@distributed(2, long=(3,))
def test_adapters_are_merged_and_unmerged_while_sharded(in_units: bool) -> None:
    """Of plain LoRA and DoRA; after a backward, and after a forward alone, which keeps the root
    gathered."""
    for options in ({}, {"use_dora": True}, {"use_rslora": True, "lora_bias": True}):
        for safe in (False, True):
            model, plain = adapted(in_units, **options)
            shards = dict(model.named_parameters())
            for each in (model, plain):
                each(batch()).square().mean().backward()
            average_gradients(plain)
            assert_same_gradients(model, plain)
            model(batch())
            before = {name: p.detach().clone() for name, p in plain.named_parameters()}
            for each in (model, plain):
                each.merge_adapter(safe_merge=safe)
            check_outputs(model, plain, f"{options} merged, safe={safe}")
            assert all(p is shards[name] for name, p in model.named_parameters())
            merged = model.get_parameter("base_model.model.first.base_layer.weight")
            reference = plain.get_parameter("base_model.model.first.base_layer.weight")
            assert isinstance(merged, DTensor)
            assert_same(merged, reference, "merged weight")
            model(batch())
            for each in (model, plain):
                each.unmerge_adapter()
            check_outputs(model, plain, f"{options} unmerged, safe={safe}")
            for name, param in model.named_parameters():
                assert_same(param, plain.get_parameter(name), name)
                torch.testing.assert_close(plain.get_parameter(name), before[name])
            copied = copy.deepcopy(model)
            copied.merge_adapter()
            check_outputs(model, plain, "the original of a copy that was merged")
            plain.merge_adapter()
            check_outputs(copied, plain, "a copy that was merged")


@distributed(2)
def test_unloading_and_saving() -> None:
    from peft import PeftModel

    for options in ({}, {"use_dora": True}):
        model, plain = adapted(in_units=False, **options)
        check_outputs(model, plain, "adapted")
        state = full_state_dict(model)
        with shared_folder() as folder, shared_folder() as given:
            for safe in (False, True):
                # On all ranks. peft writes its README on each that does not say otherwise.
                main = dist.get_rank() == 0
                model.save_pretrained(folder, safe_serialization=safe, is_main_process=main)
                if dist.get_rank() == 0:
                    model.save_pretrained(given, state_dict=state, safe_serialization=safe)
            for name in ("adapter_model.safetensors", "adapter_config.json", "README.md"):
                if dist.get_rank() == 0:
                    assert Path(folder, name).read_bytes() == Path(given, name).read_bytes(), name
            values = torch.load(f"{folder}/adapter_model.bin")  # pickled: whole tensors as well
            assert all(type(value) is Tensor for value in values.values())
            torch.manual_seed(0)
            loaded = PeftModel.from_pretrained(Net().double(), folder)
        for name, param in loaded.named_parameters():
            if "lora" in name:
                expected = plain.get_parameter(name)
                assert torch.equal(param.to(expected.dtype), expected), name
        unloaded, expected = model.merge_and_unload(), plain.merge_and_unload()
        check_outputs(model, expected, "through the sharded module")
        for name, param in unloaded.named_parameters():
            assert_same(param, expected.get_parameter(name), name)
