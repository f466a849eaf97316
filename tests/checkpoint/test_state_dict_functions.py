"""`torch.distributed.checkpoint.state_dict`: get and set states of model and optimizer, with every
option, at awkward times and places. The rest of state dicts is in `test_state_dict.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp2 import CPUOffloadPolicy, fully_shard
from harness import RUNS_ON_TORCH, cached_mesh, distributed, ours_only
from models import BY_NAME, LORA, MLP, TRANSFORMER, Case
from reference import (
    assert_same_gradients,
    assert_same_parameters,
    pair,
    run_both,
    shard_case,
    whole,
)

if not RUNS_ON_TORCH:
    from fsdp2.optim import flat_step, local_step, whole_step

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def other_weights(case: Case) -> nn.Module:
    torch.manual_seed(99)
    return case.build().double()


def train(case: Case, model: nn.Module, plain: nn.Module, optimizers: Any, steps: range) -> None:
    for step in steps:
        run_both(case, model, plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain)


def momentum(network: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in network.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("name", ["transformer", "lora"])
@distributed(2, long=(3,))
def test_whole_states_of_model_and_optimizer(name: str) -> None:
    """On rank 0 only, on the CPU; then broadcast into another model and optimizer, which go on
    exactly; ties, frozen parameters."""
    case = BY_NAME[name]
    model, plain = pair(case)
    optimizers = [momentum(model), momentum(plain)]
    train(case, model, plain, optimizers, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizers[0], options=FULL)
    if dist.get_rank() == 0:
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(model_state[key], value, rtol=1e-10, atol=1e-12)
        assert len(optimizer_state["state"]) == sum(p.requires_grad for p in plain.parameters())
    else:
        assert not model_state
        assert not optimizer_state
    fresh = shard_case(case, other_weights(case))
    optimizer = momentum(fresh)
    # (set_state_dict hangs: it takes no model state on a rank for "optimizer only".)
    set_model_state_dict(fresh, model_state, options=FROM_RANK_0)
    set_optimizer_state_dict(fresh, optimizer, optimizer_state, options=FROM_RANK_0)
    train(case, fresh, plain, [optimizer, optimizers[1]], range(2, 4))


@distributed(2)
def test_without_frozen_parameters() -> None:
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    model, plain = pair(LORA)
    states = get_model_state_dict(model, options=options)
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    assert list(states) == trained
    other = shard_case(LORA, other_weights(LORA))
    set_model_state_dict(other, states, options=options)
    frozen = other_weights(LORA)
    for name, parameter in other.named_parameters():
        expected = plain if name in trained else frozen
        assert torch.equal(whole(parameter), expected.get_parameter(name)), name


@distributed(2)
def test_missing_and_unexpected_names() -> None:
    model, plain = pair(MLP)
    states = dict(get_model_state_dict(model))
    states["more"] = states.pop("2.weight")
    with pytest.raises(RuntimeError, match="more"):
        set_model_state_dict(model, states)
    result = set_model_state_dict(model, states, options=StateDictOptions(strict=False))
    assert (result.missing_keys, result.unexpected_keys) == (["2.weight"], ["more"])
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("mode", [None, True, False])
@distributed(2)
def test_between_forward_and_backward_and_gathered_by_hand(mode: bool | None) -> None:
    """Getting disturbs nothing; what was set is what the next forward computes with."""
    model, plain = pair(TRANSFORMER, reshard_after_forward=mode)
    optimizers = [momentum(model), momentum(plain)]
    train(TRANSFORMER, model, plain, optimizers, range(1))
    batch = TRANSFORMER.batch(1, dist.get_rank(), torch.float64)
    loss = TRANSFORMER.loss(model, *batch)
    states = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in states.values())
    full = get_model_state_dict(model, options=FULL)
    assert (len(full) == 0) == (dist.get_rank() == 1)
    loss.backward()
    model.zero_grad()
    train(TRANSFORMER, model, plain, optimizers, range(1, 2))
    other = other_weights(TRANSFORMER)
    model.blocks[0].unshard()
    model.unshard()
    given = other.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=FROM_RANK_0)
    run_both(TRANSFORMER, model, other, 2)
    assert_same_gradients(model, other)


@ours_only("offload without an accelerator")
@distributed(2)
def test_offloaded_states() -> None:
    model, plain = pair(MLP, offload_policy=CPUOffloadPolicy())
    optimizers = [momentum(model), momentum(plain)]
    train(MLP, model, plain, optimizers, range(2))
    states = get_state_dict(model, optimizers[0])
    fresh = shard_case(MLP, other_weights(MLP), offload_policy=CPUOffloadPolicy())
    optimizer = momentum(fresh)
    set_state_dict(fresh, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    train(MLP, fresh, plain, [optimizer, optimizers[1]], range(2, 4))


@distributed(2)
def test_whole_states_into_a_model_on_the_meta_device() -> None:
    """Which `set_model_state_dict` materializes, by assignment."""
    with torch.device("meta"):
        model = shard_case(MLP, MLP.build().double())
    model.to_empty(device="cpu")
    plain = other_weights(MLP)
    given = plain.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, given, options=FROM_RANK_0)
    run_both(MLP, model, plain, 0)
    assert_same_gradients(model, plain)


@distributed(2)
def test_one_unit_and_its_optimizer() -> None:
    """Of a submodule alone."""
    model, plain = pair(TRANSFORMER)
    optimizers = [momentum(network.blocks[1]) for network in (model, plain)]
    train(TRANSFORMER, model, plain, optimizers, range(1))
    states = get_optimizer_state_dict(model.blocks[1], optimizers[0], options=FULL)
    if dist.get_rank() == 0:
        assert {name.split(".")[0] for name in states["state"]} == {
            "norm1", "norm2", "qkv", "out", "mlp",
        }  # fmt: skip
    restored = momentum(model.blocks[1])
    set_optimizer_state_dict(model.blocks[1], restored, states, options=FROM_RANK_0)
    train(TRANSFORMER, model, plain, [restored, optimizers[1]], range(1, 3))


@distributed(4)
def test_replicas_and_tensor_parallelism() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2).add_(1)
    replicated, parallel = copy.deepcopy(plain), copy.deepcopy(plain)
    fully_shard(replicated, mesh=cached_mesh(2, 2, names=("states_replicate", "states_shard")))
    mesh = cached_mesh(2, 2, names=("states_dp", "states_tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(parallel, mesh["states_tp"], plan)
    fully_shard(parallel, mesh=mesh["states_dp"])
    for model in (replicated, parallel):
        full = get_model_state_dict(model, options=FULL)
        if dist.get_rank() == 0:
            for name, value in plain.state_dict().items():
                assert torch.equal(full[name], value), name
        given = other.state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(model, given, options=FROM_RANK_0)
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), other.get_parameter(name)), name


@ours_only("load_state_dict takes whole tensors")
@distributed(4)
def test_load_state_dict_takes_whole_tensors() -> None:
    """Without ``assign``: uneven, strided, replicated, of another dtype, between two forwards."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    parallel, replicated, uneven = (copy.deepcopy(plain) for _ in range(3))
    mesh = cached_mesh(2, 2, names=("whole_dp", "whole_tp"))
    parallelize_module(parallel, mesh["whole_tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["whole_dp"])
    fully_shard(replicated, mesh=cached_mesh(2, 2, names=("whole_replicate", "whole_shard")))
    fully_shard(uneven)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_((2 * parameter + 1).float())
    states = {name: value.float() for name, value in plain.state_dict().items()}
    for model in (parallel, replicated, uneven):
        model(torch.ones(2, 6, dtype=torch.float64))
        model.load_state_dict(states)
        assert not any(isinstance(value, DTensor) for value in states.values())
        for name, parameter in model.named_parameters():
            assert torch.equal(whole(parameter), plain.get_parameter(name)), name
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**states, "0.weight": torch.ones(3, 3)})


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "asgd": torch.optim.ASGD,
    "local step": lambda p: _if_sharded(local_step, torch.optim.AdamW(p)),
    "flat step": lambda p: _if_sharded(flat_step, torch.optim.AdamW(p)),
    "whole step": lambda p: _if_sharded(whole_step, torch.optim.Adafactor(p)),
}


def _if_sharded(wrap: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    sharded = isinstance(optimizer.param_groups[0]["params"][0], DTensor)
    return wrap(optimizer) if sharded else optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
@ours_only("optimizers take whole state")
@distributed(2, 3)
def test_optimizers_take_the_state_of_a_plain_models_optimizer(name: str) -> None:
    case = MLP
    model, plain = pair(case)
    reference, optimizer = (OPTIMIZERS[name](m.parameters()) for m in (plain, model))
    for step in range(4):
        if step == 2:  # the state of two steps is there, and then that of none again
            optimizer = OPTIMIZERS[name](model.parameters())
        state = copy.deepcopy(reference.state_dict())
        optimizer.load_state_dict(state)
        for number, values in reference.state_dict()["state"].items():
            for key, value in values.items():  # what was given is as it was
                assert torch.equal(state["state"][number][key], value), key
        run_both(case, model, plain, step)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        assert_same_parameters(model, plain)


@ours_only("optimizers take whole state")
@distributed(4)
def test_optimizers_take_whole_state_on_any_mesh() -> None:
    """Tensor-parallel, replicated, in host memory; a parameter of no dims, beside a plain one."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    plain.register_parameter("scale", nn.Parameter(torch.tensor(2.0).double()))
    plain.register_parameter("outside", nn.Parameter(torch.ones(3).double()))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    parallel, replicated, offloaded = (copy.deepcopy(plain) for _ in range(3))
    mesh = cached_mesh(2, 2, names=("state_dp", "state_tp"))
    parallelize_module(parallel, mesh["state_tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["state_dp"], ignored_params={parallel.outside})  # type: ignore[arg-type]
    fully_shard(replicated, mesh=cached_mesh(2, 2, names=("state_replicate", "state_shard")))
    fully_shard(offloaded, offload_policy=CPUOffloadPolicy())
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1) for m in (parallel, replicated, offloaded)
    ]
    for parameter in plain.parameters():
        parameter.grad = torch.rand_like(parameter)
    reference.step()
    for optimizer in optimizers:
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        for values, (param, has) in zip(
            reference.state.values(), optimizer.state.items(), strict=True
        ):
            assert not isinstance(has["step"], DTensor)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(whole(has[key]), values[key])
                assert isinstance(has[key], DTensor) == isinstance(param, DTensor)
                assert getattr(has[key], "placements", ()) == getattr(param, "placements", ())


@ours_only("optimizers take whole state")
@distributed(2)
def test_optimizers_that_keep_whole_tensors_load_them() -> None:
    class Whole(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state["sum"] = state.get("sum", 0) + param.grad.full_tensor()

    model, plain = pair(MLP)
    optimizer = Whole(model.parameters(), {})
    run_both(MLP, model, plain, 0)
    optimizer.step()
    sums = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(sums)
    optimizer.step()
    for param, state in optimizer.state.items():
        assert torch.equal(state["sum"], 2 * whole(param.grad))
