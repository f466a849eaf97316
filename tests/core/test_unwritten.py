"""Memory that nothing wrote is named at the first forward; `materialize` leaves none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, fully_shard, materialize
from fsdp2.checkpoint import load_model, save_model
from harness import distributed, ours_only, shared_folder
from models import BY_NAME
from reference import assert_same_parameters, shard_case

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched

pytestmark = ours_only("memory that nothing wrote")
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="builds a Llama of transformers"
)
ROTARY = ("model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq")


def llama(meta: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=16,
        intermediate_size=24,
        max_position_embeddings=32,
    )
    with torch.device("meta" if meta else "cpu"):
        model = LlamaForCausalLM(config).eval()
    if meta:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def load_after_materialize(model: Any, path: str, _: Any) -> None:
    materialize(model, parameters=False)
    load_model(model, path)


def load_over_values(model: Any, path: str, _: Any) -> None:
    materialize(model)
    load_model(model, path, keep_on_error=False)


def load_after_init_weights(model: Any, path: str, _: Any) -> None:
    model.to_empty(device="cpu")
    model.init_weights()
    load_model(model, path, keep_on_error=False)


def assign_state(model: Any, _: str, plain: Any) -> None:
    materialize(model, parameters=False)
    model.load_state_dict(plain.state_dict(), assign=True)


RECIPES = [load_after_materialize, load_over_values, load_after_init_weights, assign_state]


def said_by(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``call`` returns, and its warnings about memory."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in said if "to_empty() allocated" in str(w.message)]


@needs_transformers
@distributed(2)
def test_a_llama_made_on_the_meta_device_and_loaded_has_the_logits_of_the_unsharded_one() -> None:
    plain, tokens = llama(meta=False), torch.arange(20)[None]
    expected = plain(tokens).logits
    with shared_folder() as root:
        save_model(plain, f"{root}/weights")
        for recipe in RECIPES:
            model = llama(meta=True)
            recipe(model, f"{root}/weights", plain)
            output, said = said_by(lambda model=model: model(tokens))
            assert torch.equal(output.logits, expected), recipe.__name__
            assert said == []
        # Rotary buffers are in no file.
        model = llama(meta=True)
        model.to_empty(device="cpu")
        load_model(model, f"{root}/weights", keep_on_error=False)
        _, [text] = said_by(lambda: model(tokens))
        assert f"{', '.join(ROTARY)}. Checkpoints" in text
        assert said_by(lambda: model(tokens))[1] == []
        model = llama(meta=True)
        model.load_state_dict(plain.state_dict(), assign=True)
        with pytest.raises(RuntimeError, match=r"meta device.*inv_freq.*fsdp2.materialize"):
            model(tokens)


def write_values(model: nn.Module, plain: nn.Module) -> None:
    model.load_state_dict(plain.state_dict())


def write_through_data(model: nn.Module, plain: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(1)


def write_through_numpy(model: nn.Module, plain: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.detach().numpy()[...] = 1


def write_by_reset(model: nn.Module, plain: nn.Module) -> None:
    for tensor in model.parameters():
        nn.init.zeros_(tensor)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn", "nested", "lora"])
@distributed(2)
def test_whatever_writes_values_is_seen(name: str) -> None:
    case = BY_NAME[name]
    plain = case.build()
    inputs = case.batch(0, dist.get_rank(), torch.float32)
    for write in (write_values, write_through_data, write_through_numpy, write_by_reset):
        with torch.device("meta"):
            model = case.build()
        shard_case(case, model)
        model.to_empty(device="cpu")
        write(model, plain)
        _, said = said_by(lambda model=model: case.loss(model, *inputs))
        assert said == [], write.__name__


class Counted(nn.Module):
    """A saved integer buffer, one that is not saved, and a low-precision parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        self.gain = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.register_buffer("order", torch.arange(6))
        self.register_buffer("table", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, self.order.clamp(0, 5)] * self.gain * self.table


def counted(**options: Any) -> Any:
    with torch.device("meta"):
        model = Counted()
    fully_shard(model.inner, **options)
    return fully_shard(model, **options)


@distributed(1, 2)
def test_what_nothing_wrote_is_named_once() -> None:
    model = counted().eval()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in ("gain", "order", "table", "inner.0.weight", "inner.1.running_var"):
                tensor.zero_()
    model.set_is_last_backward(True)  # makes the tree of units, and is no first forward
    with torch.no_grad():
        model.order.copy_(torch.arange(6))
    _, [text] = said_by(lambda: model(torch.ones(2, 4)))
    assert "arbitrary values: gain, inner.0.weight, inner.1.running_var, table. C" in text
    assert said_by(lambda: model(torch.ones(2, 4)))[1] == []
    # Only what is made anew is looked at again.
    model.inner.to_empty(device="cpu")
    with torch.no_grad():
        model.inner[0].bias.zero_()
    _, [text] = said_by(lambda: model(torch.ones(2, 4)))
    for name in ("inner.0.weight", "inner.1.weight", "inner.1.running_mean"):
        assert name in text
    assert "inner.0.bias" not in text
    assert "gain" not in text


def init_counted(model: Any) -> None:
    model.inner[0].reset_parameters()
    model.inner[1].reset_parameters()
    with torch.no_grad():
        model.gain.fill_(1)
        model.order.copy_(torch.arange(6))
        model.table.fill_(1)


@distributed(1, 2)
def test_materialize_gives_the_weights_of_one_process() -> None:
    model, plain = counted(), Counted()
    assert materialize(model, init=init_counted, seed=3) is model
    torch.manual_seed(3)
    init_counted(plain)
    assert_same_parameters(model, plain, bitwise=True)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert said_by(lambda: model(torch.ones(2, 4)))[1] == []


@distributed(2)
def test_materialize_leaves_what_has_values_and_names_what_gets_none() -> None:
    model = counted()
    with pytest.raises(RuntimeError, match=r"Nothing gave values to table: .* No checkpoint holds"):
        materialize(model, parameters=False, init=lambda model: model.order.fill_(3))
    model = counted()
    model.table = torch.full((6,), 2.0)
    materialize(model, parameters=False, init=lambda model: model.order.fill_(3))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.table.tolist() == [2.0] * 6
    assert model.order.tolist() == [3] * 6
    materialize(model, init=init_counted)
    assert not any(parameter.is_meta for parameter in model.parameters())


@distributed(2)
def test_materialize_makes_shards_where_their_policy_wants_them() -> None:
    model = counted(offload_policy=CPUOffloadPolicy())
    materialize(model, init=init_counted)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    assert said_by(lambda: model(torch.ones(2, 4)))[1] == []


class Scaled(nn.Module):
    """A projection that can be reset, and two parameters that nothing resets."""

    def __init__(self, bias: int = 8) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, 8))
        self.bias = nn.Parameter(torch.zeros(bias))
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) @ self.scale + self.bias.sum() + self.steps.sum()


def on_meta(build: Callable[[], nn.Module], wrap: str) -> Any:
    """Sharded as a whole, only the projection inside, or not at all."""
    with torch.device("meta"):
        model = build()
    if wrap == "all":
        fully_shard(model)
    elif wrap == "inner":
        fully_shard(model.proj)
    return model


@pytest.mark.parametrize("wrap", ["all", "inner", "none"])
@distributed(1, 2)
def test_materialize_names_parameters_that_no_init_fills_and_keeps_the_rest(wrap: str) -> None:
    """Training over arbitrary memory would go on without a word."""
    model = on_meta(Scaled, wrap)
    with pytest.raises(RuntimeError, match=r"gave values to bias, scale, steps: their memory"):
        materialize(model, seed=5)
    plain = Scaled()
    torch.manual_seed(5)
    plain.proj.reset_parameters()
    # What is left is enough, by hand or by an ``init`` of all.
    with torch.no_grad():
        model.scale.fill_(1)
        model.bias.zero_()
        model.steps.zero_()
    assert_same_parameters(model, plain, bitwise=True)
    output, said = said_by(lambda: model(torch.ones(2, 8)))
    assert said == []
    assert torch.equal(output, plain(torch.ones(2, 8)))


@pytest.mark.parametrize("wrap", ["all", "inner", "none"])
@distributed(2)
def test_memory_to_be_filled_later_comes_from_to_empty(wrap: str) -> None:
    """As in torch: an initialization of one's own, or a load, may follow."""
    model = on_meta(Scaled, wrap)
    model.to_empty(device="cpu")
    model.load_state_dict({
        name: DTensor.from_local(torch.ones_like(t.to_local()), t.device_mesh, t.placements)
        if isinstance(t, DTensor)
        else torch.ones_like(t)
        for name, t in model.state_dict().items()
    })  # fmt: skip
    assert said_by(lambda: model(torch.ones(2, 8)))[1] == []


@distributed(3)
def test_what_some_ranks_cannot_see_raises_on_none_of_them() -> None:
    """Two elements on three ranks: the last has nothing that could show it."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(9, 9)
            self.gate = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.proj(x) * self.gate.sum()

    model = on_meta(Gated, "all")
    materialize(model)
    _, said = said_by(lambda: model(torch.ones(2, 9)))
    assert ["gate" in text for text in said] == [True] * (dist.get_rank() < 2)


@pytest.mark.parametrize("wrap", ["all", "none"])
@distributed(1)
def test_a_head_that_nothing_resets_is_told_how_to_go_on(wrap: str) -> None:
    model = on_meta(lambda: nn.Sequential(Scaled()), wrap)
    with pytest.raises(RuntimeError, match=r"0\.scale.*Write them now, or pass init=.*load_model"):
        materialize(model)

    def init(model: nn.Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            nn.init.ones_(tensor)

    model = on_meta(lambda: nn.Sequential(Scaled()), wrap)
    assert materialize(model, init=init) is model
