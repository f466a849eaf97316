"""Initial weights are those of the unsharded model, whatever the world size and the mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from fsdp2 import fully_shard
from harness import cached_mesh, distributed, ours_only
from models import CNN, TRANSFORMER
from reference import assert_same_gradients, assert_same_parameters, run_both, shard_case, whole

pytestmark = ours_only("init_on_whole_tensors")


def reset(model: nn.Module) -> None:
    """As users do it after ``to_empty``."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def random_values(model: nn.Module) -> None:
    """Other functions of torch.nn.init, and drawing like a tensor."""
    functions: list[Callable[[Tensor], Tensor]] = [
        nn.init.xavier_normal_,
        nn.init.trunc_normal_,
        lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
        lambda weight: weight.copy_(torch.randn_like(weight)),
        lambda weight: weight.copy_(torch.rand_like(weight)),
        lambda weight: weight.exponential_(),
    ]
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.ndim == 2):
            functions[i % len(functions)](parameter)


def rows(model: nn.Module) -> None:
    """Writes to parts of parameters, on the dim that is sharded and on others."""
    with torch.no_grad():
        for weight in (param for param in model.parameters() if param.ndim == 2):
            weight[0].zero_()
            weight.data[1:3].normal_()
            weight[-1] = weight[0] + 2
            weight[1:4][0].copy_(weight[2].sum())
            weight[:, 1].fill_(0.5)
            first, second = weight.chunk(2)
            first.mul_(3)
            second.uniform_()


def on_one_process(model: nn.Module, init: Callable[[nn.Module], None]) -> None:
    state = torch.get_rng_state()
    torch.manual_seed(3)
    init(model)
    torch.set_rng_state(state)


@pytest.mark.parametrize("init", [reset, random_values, rows])
@distributed(2, 3, long=(1,))
def test_weights_of_one_process(init: Callable[[nn.Module], None]) -> None:
    """Uneven rows, ties, a model made on the meta device; then it trains."""
    for case in (TRANSFORMER, CNN):
        torch.manual_seed(0)
        plain = case.build().double()
        with torch.device("meta"):
            model = shard_case(case, case.build().double())
        model.to_empty(device="cpu")
        model.load_state_dict(plain.state_dict(), assign=True)
        torch.manual_seed(100 + dist.get_rank())
        before = torch.get_rng_state()
        on_one_process(plain, init)
        with fsdp2.init_on_whole_tensors(seed=3):
            init(model)
        assert torch.equal(torch.get_rng_state(), before)
        expected = {name: value.clone() for name, value in plain.state_dict().items()}
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), expected[name]), name
        run_both(case, model, plain, 0)
        assert_same_gradients(model, plain)


@distributed(4)
def test_replicas_and_tensor_parallelism() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))
    replicated, parallel = copy.deepcopy(plain), copy.deepcopy(plain)
    fully_shard(replicated, mesh=cached_mesh(2, 2, names=("init_replicate", "init_shard")))
    mesh = cached_mesh(2, 2, names=("init_dp", "init_tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(parallel, mesh["init_tp"], plan)
    fully_shard(parallel, mesh=mesh["init_dp"])
    on_one_process(plain, reset)
    for model in (replicated, parallel):
        with fsdp2.init_on_whole_tensors(seed=3):
            reset(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), plain.get_parameter(name)), name
    assert_same_parameters(replicated, plain, bitwise=True)


@distributed(2, 3)
def test_the_row_of_padding_is_zero() -> None:
    with torch.device("meta"):
        model = fully_shard(nn.Embedding(7, 4, padding_idx=1))
    fsdp2.materialize(model, seed=3)
    plain = nn.Embedding(7, 4, padding_idx=1)
    on_one_process(plain, reset)
    assert not plain.weight[1].any()
    assert torch.equal(whole(model.weight), plain.weight)


@distributed(2)
def test_what_is_not_known_is_an_error() -> None:
    model = fully_shard(nn.Linear(4, 4))
    with (
        fsdp2.init_on_whole_tensors(seed=0),
        pytest.raises(NotImplementedError, match="bernoulli on a DTensor"),
    ):
        torch.bernoulli(model.weight.detach().abs().clamp(0, 1))
