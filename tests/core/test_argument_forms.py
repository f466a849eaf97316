"""Every form in which torch's `fully_shard` accepts an argument is accepted, with the same result.

Each form goes to both libraries in one process; the training that follows is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2.runtime.unit import unit_of
from harness import cached_mesh, distributed, ours_only

pytestmark = [ours_only("compares with torch's in one process")]


class OffloadOfTheProgram(theirs.OffloadPolicy):
    """A program may derive its own policy from torch's."""


class HostMemory(theirs.CPUOffloadPolicy):
    pass


class Precision(theirs.MixedPrecisionPolicy):
    pass


def norms_of(model: nn.Module) -> Any:
    return [p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()]


# What is passed, as a function of the model.
FORMS: Mapping[str, Callable[[nn.Module], dict[str, Any]]] = {
    "offload_policy: None": lambda model: {"offload_policy": None},
    "offload_policy: torch's": lambda model: {"offload_policy": theirs.OffloadPolicy()},
    "offload_policy: derived from torch's": lambda model: {"offload_policy": OffloadOfTheProgram()},
    "mp_policy: torch's": lambda model: {
        "mp_policy": theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    },
    "mp_policy: derived from torch's": lambda model: {
        "mp_policy": Precision(torch.bfloat16, output_dtype=torch.float32)
    },
    "mesh: None": lambda model: {"mesh": None},
    "mesh: a slice of a larger one": lambda model: {"mesh": two_dims()["shard"]},
    "mesh: 2-D with names": lambda model: {"mesh": two_dims()},
    "reshard_after_forward: the number of ranks": lambda model: {
        "reshard_after_forward": dist.get_world_size()
    },
    "reshard_after_forward: 1": lambda model: {"reshard_after_forward": 1},
    "ignored_params: None": lambda model: {"ignored_params": None},
    "ignored_params: an empty set": lambda model: {"ignored_params": set()},
    "ignored_params: a frozenset": lambda model: {"ignored_params": frozenset(norms_of(model))},
    "ignored_params: keys of a dict": lambda model: {
        "ignored_params": dict.fromkeys(norms_of(model)).keys()
    },
    "shard_placement_fn: None for some": lambda model: {
        "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None
    },
    "shard_placement_fn: a negative dim": lambda model: {
        "shard_placement_fn": lambda p: Shard(-1) if p.shape[-1] % 2 == 0 else Shard(0)
    },
}
NAMED_DIMS = hasattr(theirs, "DataParallelMeshDims")  # torch 2.11 has not


def two_dims() -> Any:
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("rep", "shard"))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def trained(
    library: Any, form: Callable[[nn.Module], dict[str, Any]]
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and whole parameters after three steps."""
    model = make_model()
    options = form(model)
    for layer in model:
        library.fully_shard(layer, **options)
    library.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return losses, [tensor.detach() for tensor in whole]


@pytest.mark.filterwarnings("ignore:reshard_after_forward=1")
@pytest.mark.parametrize("name", FORMS)
@distributed(2)
def test_a_form_that_torch_accepts(name: str) -> None:
    losses, params = trained(fsdp2, FORMS[name])
    expected_losses, expected = trained(theirs, FORMS[name])
    assert losses == expected_losses
    assert all(map(torch.equal, params, expected))


@pytest.mark.parametrize("policy", [theirs.CPUOffloadPolicy, HostMemory])
@distributed(2)
def test_torchs_policy_of_offloading(policy: type) -> None:
    """torch's own `fully_shard` fails with it where no memory can be page-locked."""
    losses, params = trained(fsdp2, lambda model: {"offload_policy": policy(pin_memory=False)})
    expected_losses, expected = trained(fsdp2, lambda model: {})
    assert losses == expected_losses
    assert all(map(torch.equal, params, expected))
    made = fsdp2.fully_shard(make_model(), offload_policy=policy(pin_memory=False))
    assert unit_of(made).config.offload_policy == fsdp2.CPUOffloadPolicy(pin_memory=False)


@pytest.mark.skipif(not NAMED_DIMS, reason="torch 2.11 has no dp_mesh_dims")
@distributed(2)
def test_torchs_names_of_mesh_dims() -> None:
    def form(model: nn.Module) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        dims = theirs.DataParallelMeshDims(shard="dp")
        return {"mesh": mesh, "dp_mesh_dims": dims}

    model = make_model()
    options = form(model)
    assert fsdp2.fully_shard(model, **options) is model
    assert model[2].weight.to_local().shape == (2 if dist.get_rank() == 0 else 1, 6)


def values(modules: Any) -> Any:
    return dict(enumerate(modules)).values()


@pytest.mark.parametrize("collect", [list, tuple, values])
@distributed(2)
def test_several_modules_in_any_collection(collect: Callable[[Any], Any]) -> None:
    made = []
    for library in (fsdp2, theirs):
        model = make_model()
        layers = collect(list(model)[:2])
        assert library.fully_shard(layers, mesh=cached_mesh(2)) is layers
        library.fully_shard(model, mesh=cached_mesh(2))
        x = torch.ones(2, 6)
        model(x).sum().backward()
        made.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *made))


@pytest.mark.parametrize("call", [fsdp2.fully_shard, fsdp2.replicate, fsdp2.shard_model])
@distributed(2)
def test_another_offload_policy_is_refused_before_anything_changes(call: Any) -> None:
    model = make_model()
    with pytest.raises(
        TypeError, match="offload_policy must be an OffloadPolicy or None, got True"
    ):
        call(model, offload_policy=True)
    assert type(model) is nn.Sequential
    assert not any(hasattr(p, "to_local") for p in model.parameters())
