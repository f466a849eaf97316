"""What a program may put in the place of a sharded parameter: ties made or cut after sharding,
parameters of other units, new ones. All train as the plain model in which the same was done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import Case, token_batch
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    gathering,
    run_both,
    whole,
)

DTYPE = torch.float64


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Model(nn.Module):
    """A language model whose embedding and head may be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 6)
        self.layers = nn.ModuleList(Layer(6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 29, bias=False)
        self.recomputes = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def loss_in_full(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


CASE = Case("later", Model, lambda model: [], token_batch, loss_in_full)

Units = Callable[[Any], list[Any]]
UNITS: dict[str, Units] = {
    "embedding and norm": lambda m: [*m.layers, [m.embed, m.norm]],
    "embedding": lambda m: [*m.layers, m.embed],
    "norm and head": lambda m: [*m.layers, [m.norm, m.head]],
    "each": lambda m: [*m.layers, m.embed, [m.norm, m.head]],
    "head": lambda m: [*m.layers, m.embed, m.norm, m.head],
    "layers": lambda m: [*m.layers],
}


def tie_head(model: Any) -> None:
    model.head.weight = model.embed.weight


def tie_embedding(model: Any) -> None:
    setattr(model.embed, "weight", model.head.weight)  # noqa: B010


TIES = {"head": tie_head, "embedding": tie_embedding}


def sharded(plain: nn.Module, units: str, **options: Any) -> Any:
    model = copy.deepcopy(plain)
    for unit in UNITS[units](model):
        fully_shard(unit, **gathering(), **options)
    return fully_shard(model, **gathering(), **options)


def plain_model() -> Any:
    torch.manual_seed(0)
    return Model().to(DTYPE)


def train(model: Any, plain: Any, steps: int = 3) -> None:
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, plain)]
    for step in range(steps):
        run_both(CASE, model, plain, step)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("units", UNITS)
@distributed(2, 3)
def test_a_tie_made_after_sharding(units: str, tie: str) -> None:
    plain = plain_model()
    model = sharded(plain, units)
    for each in (plain, model):
        TIES[tie](each)
    train(model, plain)
    assert model.head.weight is model.embed.weight


def load_whole(model: Any, state: dict[str, Tensor]) -> None:
    model.load_state_dict(state, strict=False)


def load_assigned(model: Any, state: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    cut = {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
        for name, value in state.items()
    }
    model.load_state_dict(cut, strict=False, assign=True)


def load_by_setattr(model: Any, state: dict[str, Tensor]) -> None:
    own = dict(model.named_parameters())
    for name, value in state.items():
        parent, _, last = name.rpartition(".")
        cut = distribute_tensor(value, own[name].device_mesh, own[name].placements)
        setattr(model.get_submodule(parent), last, nn.Parameter(cut))


def load_from_rank_0(model: Any, state: dict[str, Tensor]) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)


LOADS = {
    "whole": load_whole,
    "assigned": load_assigned,
    "setattr": load_by_setattr,
    "rank 0": load_from_rank_0,
}


@pytest.mark.parametrize("first", ["tie", "load", "tie, load, tie"])
@pytest.mark.parametrize("is_meta", [True, False])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@distributed(2)
def test_a_tie_and_a_load(units: str, load: str, is_meta: bool, first: str) -> None:
    """In either order, of a state that has the embedding only."""
    if first == "tie" and load in ("assigned", "setattr"):
        return  # which cut the tie, in a plain model too
    plain = plain_model()
    state = {name: value for name, value in plain.state_dict().items() if name != "head.weight"}
    with torch.device("meta" if is_meta else "cpu"):
        model = sharded(Model().to(DTYPE), units)
    if is_meta and load not in ("assigned", "setattr"):
        if first != "load":
            tie_head(model)
        model.to_empty(device="cpu")
    if first != "load":
        tie_head(model)
    LOADS[load](model, state)
    if first != "tie":
        tie_head(model)
    tie_head(plain)
    assert model.head.weight is model.embed.weight
    train(model, plain)


@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@pytest.mark.parametrize("reshard", [True, False, 1])
@distributed(2)
def test_a_tie_with_accumulation_and_checkpoints(units: str, reshard: bool | int) -> None:
    plain = plain_model()
    model = sharded(plain, units, reshard_after_forward=reshard)
    for each in (plain, model):
        tie_head(each)
        each.recomputes = True
    for step in range(0, 4, 2):
        model.set_requires_gradient_sync(False)
        run_both(CASE, model, plain, step, average=False)
        model.set_requires_gradient_sync(True)
        run_both(CASE, model, plain, step + 1)
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@distributed(4)
def test_a_tie_on_replicas(units: str) -> None:
    plain = plain_model()
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model = sharded(plain, units, mesh=mesh)
    for each in (plain, model):
        tie_head(each)
    train(model, plain)


@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@distributed(2)
def test_a_tie_in_bfloat16(units: str) -> None:
    """Beside a model that was tied before it was sharded, in one unit with the same precision."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plain = plain_model().float()
    model = sharded(plain, units, mp_policy=precision)
    tie_head(model)
    tie_head(plain)
    before = sharded(plain, "layers", mp_policy=precision)
    for each in (model, before):
        for step in range(2):
            loss_of(each, *CASE.batch(step, dist.get_rank(), torch.float32)).backward()
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(whole(one.grad), whole(other.grad), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@distributed(2)
def test_a_frozen_tie(units: str) -> None:
    plain = plain_model()
    plain.embed.requires_grad_(False)
    model = sharded(plain, units)
    for each in (plain, model):
        tie_head(each)
    train(model, plain)


@pytest.mark.parametrize("units", UNITS)
@distributed(2)
def test_a_tie_that_is_cut_after_sharding(units: str) -> None:
    plain = plain_model()
    tie_head(plain)
    model = sharded(plain, units)
    for each in (plain, model):
        each.head.weight = nn.Parameter(each.embed.weight.detach().clone())
    train(model, plain)
    assert model.head.weight is not model.embed.weight


@pytest.mark.parametrize("units", UNITS)
@distributed(2)
def test_parameters_that_change_places(units: str) -> None:
    plain = plain_model()
    model = sharded(plain, units)
    for each in (plain, model):
        each.embed.weight, each.head.weight = each.head.weight, each.embed.weight
    train(model, plain)


@pytest.mark.parametrize("units", ["embedding and norm", "each", "layers"])
@distributed(2)
def test_a_tie_between_layers(units: str) -> None:
    """Of weights and biases, in both directions."""
    plain = plain_model()
    model = sharded(plain, units)
    for each in (plain, model):
        one, two = (layer.linear for layer in each.layers)
        two.weight = one.weight
        one.bias = two.bias
    train(model, plain)


@pytest.mark.parametrize("units", ["embedding and norm", "each"])
@distributed(2)
def test_new_parameters_over_dtensors_laid_out_alike(units: str) -> None:
    plain = plain_model()
    model = sharded(plain, units)
    for each in (plain, model):
        for module in list(each.modules()):
            for name, param in list(module._parameters.items()):
                if param is not None:
                    setattr(module, name, nn.Parameter(param.detach() * 0.5))
    train(model, plain)


# -- after the first forward -----------------------------------------------------------------------


def cut(model: Any) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def renew(model: Any) -> None:
    for layer in model.layers:
        layer.linear.weight = nn.Parameter(layer.linear.weight.detach() * 0.5)


def swap(model: Any) -> None:
    one, two = (layer.linear for layer in model.layers)
    one.weight, two.weight = two.weight, one.weight


CHANGES = {
    "head": tie_head,
    "embedding": tie_embedding,
    "cut": lambda model: (tie_head(model), cut(model)),
    "new": renew,
    "swap": swap,
}


@ours_only("torch keeps computing with what was there")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("units", ["embedding and norm", "each", "layers"])
@distributed(2)
def test_changes_between_steps(units: str, change: str) -> None:
    plain = plain_model()
    model = sharded(plain, units)
    train(model, plain, 1)
    for each in (plain, model):
        CHANGES[change](each)
    train(model, plain, 2)
    for each in (plain, model):
        cut(each)
    train(model, plain, 2)


@ours_only("torch keeps computing with what was there")
@pytest.mark.parametrize("change", CHANGES)
@distributed(2)
def test_changes_between_micro_batches(change: str) -> None:
    """Gradients that wait for the last micro-batch go with their parameters."""
    plain = plain_model()
    model = sharded(plain, "each")
    for each in (plain, model):
        tie_head(each)
    model.set_requires_gradient_sync(False)
    run_both(CASE, model, plain, 0, average=False)
    for each in (plain, model):
        CHANGES[change](each)
    model.set_requires_gradient_sync(True)
    run_both(CASE, model, plain, 1)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("is_used", [True, False])
@distributed(2, 3)
def test_one_name_of_a_tied_parameter_is_loaded(is_used: bool, name: str) -> None:
    """By ``load_state_dict(assign=True)``, which keeps the tie and its Parameter: optimizers have
    it. (The plain model would be left with two parameters.)"""
    plain = plain_model()
    tie_head(plain)
    model = sharded(plain, "layers")
    if is_used:
        train(model, plain, 1)
    tied = model.embed.weight
    value = torch.randn(29, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain.embed.weight.copy_(value)
    load_assigned(model, {name: value})
    assert model.head.weight is model.embed.weight is tied
    assert torch.equal(whole(tied), value)
    train(model, plain)


class Mtp(nn.Module):
    """Predicts a later token, with the head of the model."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.proj(x))


class SharedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7)
        self.mtp = Mtp(self.head)

    def forward(self, x: Tensor, use: str) -> Tensor:
        x = self.block(x)
        outputs = {"main": lambda: self.head(self.norm(x)), "mtp": lambda: self.mtp(x)}
        return outputs[use]() if use in outputs else sum(each() for each in outputs.values())


@ours_only("torch raises a TypeError unless the list comes first")
@pytest.mark.parametrize("order", ["norm+head, mtp", "mtp, norm+head", "mtp", "head, mtp"])
@pytest.mark.parametrize("meta", [False, True])
@distributed(2)
def test_a_module_that_units_share_is_gathered_by_whichever_is_called(
    order: str, meta: bool
) -> None:
    torch.manual_seed(0)
    plain = SharedHead()
    with torch.device("meta" if meta else "cpu"):
        model = SharedHead()
    fully_shard(model.block)
    for names in order.split(", "):
        units = [getattr(model, name) for name in names.split("+")]
        fully_shard(units if len(units) > 1 else units[0])
    fully_shard(model)
    if meta:
        model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step, use in enumerate(("mtp", "both", "main", "mtp")):
        x = torch.arange(8.0).view(2, 4) / 8 + step + dist.get_rank()
        losses = [each(x, use).square().sum() for each in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        average_gradients(plain)
        assert_same_gradients(model, plain, bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
