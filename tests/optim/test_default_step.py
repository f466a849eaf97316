"""torch's elementwise optimizers step on local shards by default, bit for bit as over DTensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import fully_shard
from fsdp2.api import default_step
from fsdp2.api.default_step import ELEMENTWISE
from fsdp2.optim import dtensor_step, flat_step, local_step, whole_step
from harness import cached_mesh, distributed, ours_only

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{}, {"maximize": True, "weight_decay": 0.1}],
    "Adadelta": [{}, {"weight_decay": 0.1}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.1}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}, {"lr": 0.1, "eps": 1e-3}],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}],
    "Rprop": [{}, {"maximize": True}],
    "SGD": [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
}
FUSED = ("AdamW", "Adam")  # for which DTensors have a rule on the CPU


class Net(nn.Module):
    """Even and uneven rows, tails of vector registers, a 0-dim parameter, one seldom used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 23), nn.LayerNorm(23), nn.Linear(23, 12)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor, seldom: bool = True) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.scale * x + (self.seldom if seldom else 0)


def make_net(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    net = Net().to(dtype)
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def backward(net: nn.Module, step: int) -> Tensor:
    p = next(net.parameters())
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 12, generator=generator).to(p.dtype)
    loss = net(x, seldom=step % 2 == 0).square().mean()
    loss.backward()
    return loss


class Dispatched(TorchDispatchMode):
    """Counts operators, and those of them that see a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.of_dtensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.all += 1
        self.of_dtensors += any(issubclass(kind, DTensor) for kind in types)
        return func(*args, **(kwargs or {}))


def steps_on_shards(optimizer: Optimizer) -> bool:
    """Whether a step runs operators, and none of them over DTensors."""
    with Dispatched() as counted:
        optimizer.step()
    assert counted.all > 0
    return counted.of_dtensors == 0


def assert_equal(ours: Optimizer, theirs: Optimizer) -> None:
    """Bit for bit, the state and its layout too."""
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], other["params"], strict=True):
            assert torch.equal(p.to_local(), q.to_local())
            state, wanted = ours.state.get(p) or {}, theirs.state.get(q) or {}
            assert list(state) == list(wanted)
            for key, value in wanted.items():
                assert type(state[key]) is type(value), key
                if isinstance(value, DTensor):
                    assert state[key].placements == value.placements
                    assert torch.equal(state[key].to_local(), value.to_local()), key
                else:
                    assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
@ours_only("torch's steps are over DTensors")
@distributed(2, 3)
def test_a_step_on_shards_is_the_one_over_dtensors(name: str, dtype: torch.dtype) -> None:
    ways: list[dict[str, Any]] = [{}, {"foreach": True}]
    if name in FUSED:
        ways.append({"fused": True})
    for options in OPTIONS[name]:
        for way in ways:
            nets = make_net(dtype), make_net(dtype)
            kind = getattr(torch.optim, name)
            ours, theirs = (kind(net.parameters(), **options, **way) for net in nets)
            # Over DTensors, Rprop raises with foreach, and under a dispatch mode.
            (local_step if name == "Rprop" else dtensor_step)(theirs)
            for step in range(3):
                for net in nets:
                    backward(net, step)
                assert steps_on_shards(ours)
                assert steps_on_shards(theirs) == (name == "Rprop")
                for each in (ours, theirs):
                    each.zero_grad()
                assert_equal(ours, theirs)


@ours_only("torch's steps are over DTensors")
@distributed(4)
def test_shards_with_replicas_step_on_shards() -> None:
    meshes = cached_mesh(2, 2, names=("replicate", "shard"))
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(fully_shard(nn.Linear(12, 12), mesh=meshes))
    ours, theirs = (torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets)
    dtensor_step(theirs)
    for _ in range(3):
        for net in nets:
            net(torch.ones(2, 12)).square().sum().backward()
        assert steps_on_shards(ours)
        theirs.step()
        assert_equal(ours, theirs)


class Own(torch.optim.AdamW):
    """A user's."""


@ours_only("torch's steps are over DTensors")
@distributed(2)
def test_what_is_not_known_to_be_the_same_is_left_alone() -> None:
    net, plain = make_net(), nn.Parameter(torch.ones(3))
    backward(net, 0)
    plain.grad = torch.ones(3)
    params = list(net.parameters())
    assert steps_on_shards(torch.optim.AdamW(params))
    assert not steps_on_shards(Own(params))
    assert not steps_on_shards(torch.optim.AdamW([*params, plain], foreach=False))
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert steps_on_shards(optimizer)
    optimizer.add_param_group({"params": [plain]})  # no longer all
    assert not steps_on_shards(optimizer)
    assert steps_on_shards(torch.optim.AdamW([plain]))  # which runs no code of this package
    assert not steps_on_shards(dtensor_step(dtensor_step(torch.optim.AdamW(params))))
    with pytest.raises(ValueError, match="already been replaced by dtensor_step"):
        flat_step(dtensor_step(torch.optim.AdamW(params)))


@distributed(2)
def test_everything_outside_of_a_step_is_a_dtensor() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen: list[bool] = []

    def look(*_: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
        seen.append(all(isinstance(each, DTensor) for each in (*params, *states)))

    def closure() -> Tensor:
        optimizer.zero_grad()
        look()
        return backward(net, 0)

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    losses = [optimizer.step(closure) for _ in range(3)]  # type: ignore[arg-type]
    scheduler.step()
    assert losses[2] < losses[0]
    assert seen == [True] * 9
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 0.05
    again = pickle.loads(pickle.dumps(copy.deepcopy(optimizer.state_dict())))
    assert again["state"][0]["exp_avg"].to_local().abs().sum() > 0


@distributed(2)
def test_a_step_that_raises_leaves_dtensors() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    backward(net, 0)
    with (
        mock.patch("torch.optim.adam.adam", side_effect=ValueError("in the step")),
        pytest.raises(ValueError, match="in the step"),
    ):
        optimizer.step()
    assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
    optimizer.step()
    assert len(optimizer.state) == len(list(net.parameters()))


@ours_only("torch's steps are over DTensors")
@distributed(2)
def test_options_may_change_between_steps() -> None:
    nets = make_net(), make_net()
    ours, theirs = (torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets)
    dtensor_step(theirs)
    for step, way in enumerate(({}, {"fused": True}, {"fused": None, "foreach": True}, {})):
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            optimizer.param_groups[0].update(way)
            backward(net, step)
        assert steps_on_shards(ours)
        theirs.step()
        assert_equal(ours, theirs)


@ours_only("torch's steps are over DTensors")
@distributed(2)
def test_parameters_may_be_cast_between_steps() -> None:
    """Kernels of 16 bits round by position: after the cast, flat tensors would give other bits."""
    nets = make_net(), make_net()
    ours, theirs = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets)
    dtensor_step(theirs)
    for step in range(4):
        for net, optimizer in zip(nets, (ours, theirs), strict=True):
            if step == 2:
                net.to(torch.bfloat16)
                optimizer.state.clear()
            backward(net, step)
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(ours, theirs)


def test_hooks_of_optimizers_that_are_there_already_stay() -> None:
    class Old(torch.optim.SGD):
        pass

    optimizer = Old([nn.Parameter(torch.ones(2))], lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    Old.step = default_step._step_of(Old, Old.step)  # type: ignore[method-assign]
    optimizer.step()
    Old([nn.Parameter(torch.ones(2))], lr=0.1)  # asks for hooks again
    optimizer.step()
    assert calls == ["before", "after"] * 2


HOW: dict[str, Any] = {
    "default": lambda optimizer: optimizer,
    "local_step": local_step,
    "flat_step": flat_step,
    "dtensor_step": dtensor_step,
    "whole_step": whole_step,
}


@pytest.mark.parametrize("how", HOW)
@distributed(2)
def test_a_fused_step_counts_as_a_write_to_what_stays_gathered(how: str) -> None:
    """A forward with a graph, whose backward never comes, leaves its last unit gathered."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])

    plain, net = make(), make()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    x = torch.ones(2, 6)
    for model in (plain, net):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        if model is net:
            optimizer = HOW[how](optimizer)
        for _ in range(2):
            model(x).sum().backward()
            model(x)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x))
