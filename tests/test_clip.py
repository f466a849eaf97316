"""torch.nn.utils.clip_grad_norm_ on sharded gradients equals clipping of the whole ones."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import fully_shard
from harness import cached_mesh, distributed
from models import BY_NAME, LORA, MLP
from reference import (
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    gradients,
    pair,
    run_both,
)


def full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# torch's largest norm of several tensors does not take empty ones, which ranks of `mlp` have.
MODELS_AND_NORMS = [
    *((name, norm) for name in ("mlp", "transformer", "conditional") for norm in (1.0, 2.0, 3.5)),
    ("transformer", math.inf),
    ("even_mlp", math.inf),
]


@pytest.mark.parametrize(("name", "norm_type"), MODELS_AND_NORMS)
@distributed(3, long=(1, 2))
def test_norm_and_clipped_gradients(name: str, norm_type: float) -> None:
    case = BY_NAME[name]
    model, plain = pair(case)
    for step, limit in enumerate([1e-3, 1e3]):
        run_both(case, model, plain, step)
        norms = [
            torch.nn.utils.clip_grad_norm_(network.parameters(), limit, norm_type)
            for network in (model, plain)
        ]
        assert_same(full(norms[0]), norms[1], "norm")
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("foreach", [True, False])
@distributed(2, 4)
def test_hybrid_sharding(foreach: bool) -> None:
    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    model, plain = pair(MLP, mesh=cached_mesh(*shape, names=("replicate", "shard")))
    run_both(MLP, model, plain, 0)
    norms = [
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3, foreach=foreach)
        for network in (model, plain)
    ]
    assert_same(full(norms[0]), norms[1], "norm")
    assert_same_gradients(model, plain)


@distributed(1, 2, 3)
def test_training_with_clipping() -> None:
    for case in (MLP, LORA):
        model, plain = pair(case)
        optimizers = {
            network: torch.optim.AdamW([p for p in network.parameters() if p.requires_grad])
            for network in (model, plain)
        }
        for step in range(4):
            run_both(case, model, plain, step)
            for network, optimizer in optimizers.items():
                torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name)
            assert isinstance(parameter, DTensor)
            # AdamW divides by the root of a running square: fp64 keeps 8 digits at least.
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-8, atol=1e-8)


@distributed(2)
def test_a_gradient_that_is_not_finite_is_noticed() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    weight = model.get_parameter("0.weight")
    assert isinstance(weight.grad, DTensor)
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@distributed(4)
def test_tensor_parallel_gradients() -> None:
    """All parameters are sharded over both mesh dims."""
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)
    plain = nn.Sequential(up, nn.Tanh(), down).double()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    inputs = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    for network in (plain, model):
        network(inputs).square().mean().backward()
    average_gradients(plain, group=mesh.get_group("data"))
    norms = [
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3) for network in (model, plain)
    ]
    assert_same(full(norms[0]), norms[1], "norm")
    assert_all_same(gradients(model), gradients(plain), "gradient")


@distributed(1, 2, 3)
def test_clipping_by_value() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    for network in (model, plain):
        torch.nn.utils.clip_grad_value_(network.parameters(), 1e-3)
    assert_same_gradients(model, plain)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(model, plain)
