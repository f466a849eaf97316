"""Models built on the meta device, sharded, and only then given memory and values."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2 import fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, CNN, MLP, TRANSFORMER, Case
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    one_order_only,
    run_both,
    shard_case,
)


def build_on_meta(case: Case, **options: object) -> nn.Module:
    with torch.device("meta"):
        model = case.build()
    return shard_case(case, model.double(), **options)


def reference_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double()


def sharded_values(plain: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """The plain model's state, each parameter laid out as the sharded model has it."""
    states = {}
    for name, value in plain.state_dict().items():
        try:
            target = model.get_parameter(name)
        except AttributeError:  # a buffer
            states[name] = value.clone()
            continue
        assert isinstance(target, DTensor)
        states[name] = distribute_tensor(value, target.device_mesh, target.placements)
    return states


def train_both(case: Case, model: nn.Module, plain: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        run_both(case, model, plain, step)
        assert_sharded(model)
        assert_same_gradients(model, plain, bitwise=step == 0 and one_order_only())
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("name", ["mlp", "transformer", "cnn", "nested", "lora"])
@distributed(1, 2, 3)
def test_to_empty_and_load(name: str) -> None:
    case = BY_NAME[name]
    model, plain = build_on_meta(case), reference_of(case)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.is_meta
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device.type == "cpu"
    model.load_state_dict(sharded_values(plain, model))
    train_both(case, model, plain)


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(1, 2, 3)
def test_load_by_assignment_without_to_empty(name: str) -> None:
    case = BY_NAME[name]
    model, plain = build_on_meta(case), reference_of(case)
    model.load_state_dict(sharded_values(plain, model), assign=True)
    for network in (model, plain):
        network.zero_grad()
    model.requires_grad_(True)
    train_both(case, model, plain)


@ours_only("whole tensors in place of sharded ones")
@distributed(2)
def test_load_whole_tensors_by_assignment_without_to_empty() -> None:
    model, plain = build_on_meta(MLP), reference_of(MLP)
    model.load_state_dict(plain.state_dict(), assign=True)
    model.requires_grad_(True)
    train_both(MLP, model, plain)


@distributed(1, 2, 3)
def test_to_empty_and_init() -> None:
    """An init that does not depend on how a parameter is sharded."""
    model, plain = build_on_meta(TRANSFORMER), reference_of(TRANSFORMER)
    model.to_empty(device="cpu")
    for network in (model, plain):
        with torch.no_grad():
            for index, parameter in enumerate(network.parameters()):
                nn.init.constant_(parameter, 0.01 * (index + 1))
    assert_same_parameters(model, plain, bitwise=True)
    train_both(TRANSFORMER, model, plain)


@distributed(1, 2)
def test_an_optimizer_built_before_to_empty_holds_the_same_objects() -> None:
    model, plain = build_on_meta(MLP), reference_of(MLP)
    before = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    model.load_state_dict(sharded_values(plain, model))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    train_both(MLP, model, plain)


@distributed(2)
def test_ties_survive_to_empty() -> None:
    model = build_on_meta(TRANSFORMER)
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    model.to_empty(device="cpu")
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")


@distributed(2)
def test_units_one_by_one() -> None:
    """Each unit gets its memory and values on its own."""
    model, plain = build_on_meta(MLP), reference_of(MLP)
    for index in (0, 2, 4):
        layer = model[index]
        layer.to_empty(device="cpu")
        layer.load_state_dict(sharded_values(plain[index], layer))
    train_both(MLP, model, plain)


@distributed(4)
def test_hybrid_sharding() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = build_on_meta(MLP, mesh=mesh), reference_of(MLP)
    model.to_empty(device="cpu")
    model.load_state_dict(sharded_values(plain, model))
    train_both(MLP, model, plain)


@distributed(1, 2)
def test_buffers_on_the_meta_device() -> None:
    model, plain = build_on_meta(CNN), reference_of(CNN)
    model.to_empty(device="cpu")
    model.load_state_dict(sharded_values(plain, model))
    for network in (model, plain):
        network.eval()
    (inputs,) = CNN.batch(0, dist.get_rank(), torch.float64)
    with torch.no_grad():
        assert torch.equal(model(inputs), plain(inputs))


class Normed(nn.Module):
    """Its parameter is computed from those of two units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        self.scale = nn.Parameter(torch.empty(3))

    def set_scale(self) -> None:
        with torch.no_grad():
            norms = [torch.linalg.vector_norm(layer.weight, dim=1) for layer in self.layers]
        self.scale = nn.Parameter(norms[0] + norms[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


@distributed(2)
def test_a_parameter_assigned_before_the_first_forward() -> None:
    """The optimizer has the one that was assigned, and that is the one that is trained."""
    torch.manual_seed(0)
    plain = Normed().double()
    with torch.device("meta"):
        model = Normed().double()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for layer, reference in zip(model.layers, plain.layers, strict=True):
        layer.to_empty(device="cpu")
        mesh, placements = layer.weight.device_mesh, layer.weight.placements
        with torch.no_grad():
            layer.weight.copy_(distribute_tensor(reference.weight.detach(), mesh, placements))
    model.set_scale()
    plain.set_scale()
    assigned = model.scale
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(2):
        x = torch.full((2, 3), 0.5 + step, dtype=torch.float64)
        model(x).sum().backward()
        plain(x).sum().backward()
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.scale is assigned
    assert_same_parameters(model, plain)
