"""Small units lie side by side for `flat_step`: one flat tensor over several of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.features.side_by_side import units as side_by_side
from fsdp2.optim import flat_plan, flat_runs, flat_step, local_step
from fsdp2.runtime.unit import unit_of
from harness import distributed

NUM_BLOCKS = 5


class Net(nn.Module):
    """Blocks whose shards have no padding on two ranks, and a root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16))
            for _ in range(NUM_BLOCKS)
        )
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, without: int = -1) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != without:
                x = x + block(x).float()
        return self.scale * x


def make_net(device: str = "cpu", **options: Any) -> Net:
    torch.manual_seed(0)
    with torch.device(device):
        net = Net()
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def both(**options: Any) -> tuple[Any, Any]:
    """Two equal models, and a flat and a local optimizer over them."""
    nets = make_net(**options), make_net(**options)
    wraps = flat_step, local_step
    pairs = zip(nets, wraps, strict=True)
    return nets, tuple(wrap(torch.optim.AdamW(n.parameters(), lr=0.01)) for n, wrap in pairs)


def backward(net: nn.Module, step: int, **kwargs: Any) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    net(x, **kwargs).square().mean().backward()


def train(nets: Any, optimizers: Any, step: int, **kwargs: Any) -> None:
    for net, optimizer in zip(nets, optimizers, strict=True):
        backward(net, step, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(nets: Any, optimizers: Any) -> None:
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(p.to_local(), q.to_local())
        state, wanted = optimizers[0].state.get(p, {}), optimizers[1].state.get(q, {})
        assert list(state) == list(wanted)
        for key, value in wanted.items():
            assert type(state[key]) is type(value)
            assert torch.equal(local(state[key]), local(value)), key


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shown(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors the last step saw in runs."""
    return sum(len(plan.runs) for plan in vars(optimizer)["_local_view"]._plans.values())


def places(net: Any) -> int:
    """How many units are beside others."""
    return sum(bucket.place is not None for unit in net.blocks for bucket in unit_of(unit).buckets)


@distributed(2)
def test_small_units_are_one_tensor_and_their_steps_those_on_each_parameter() -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({}, {"mp_policy": bf16}, {"reshard_after_forward": False}):
        nets, optimizers = both(**options)
        with mock.patch.object(flat_runs, "SMALL_BYTES", 0):
            for step in range(4):
                train(nets, optimizers, step)
                # That of the blocks; the root's one parameter is no run, or part of it.
                assert num_shown(optimizers[0]) == 1
        assert_same(nets, optimizers)
        assert places(nets[0]) == NUM_BLOCKS
        assert not places(nets[1]), "nobody asked for it"


@distributed(2)
def test_a_block_of_memory_stays_within_a_cache() -> None:
    nets, optimizers = both()
    nbytes = unit_of(nets[0].blocks[0]).buckets[0].shards.nbytes
    with (
        mock.patch.object(flat_runs, "SMALL_BYTES", 0),
        mock.patch.object(side_by_side, "NEIGHBOURS_BYTES", 2 * nbytes + nbytes // 2),
    ):
        for step in range(3):
            train(nets, optimizers, step)
    assert num_shown(optimizers[0]) == 3
    assert_same(nets, optimizers)


@distributed(2)
def test_what_a_user_holds_before_the_first_forward_stays_the_shard() -> None:
    """By any reference: a view, an array, the tensor itself, which is what `to_local` returns
    without gradients."""
    nets, optimizers = both()
    weights = [block[0].weight for block in nets[0].blocks]
    with torch.no_grad():
        itself = weights[1].to_local()
    held = [itself, weights[2].to_local(), weights[3].to_local().detach().flatten()]
    array = weights[4].to_local().detach().numpy()
    for step in range(3):
        train(nets, optimizers, step)
    assert_same(nets, optimizers)
    assert 0 < places(nets[0]) <= 2  # of the tensor itself, new versions of torch give a view
    for weight, tensor in zip(weights[1:4], held, strict=True):
        assert tensor.data_ptr() == weight.to_local().data_ptr()
        assert tensor.untyped_storage().tolist() == weight.to_local().untyped_storage().tolist()
    assert (array == weights[4].to_local().detach().numpy()).all()


@distributed(2)
def test_units_side_by_side_that_take_turns_are_not_planned_anew_in_each_step() -> None:
    nets, optimizers = both()
    with (
        mock.patch.object(flat_runs, "SMALL_BYTES", 0),
        mock.patch.object(flat_plan, "find_runs", wraps=flat_plan.find_runs) as find,
    ):
        for step in range(48):
            train(nets, optimizers, step, without=step % 4)
        assert_same(nets, optimizers)
        assert find.call_count < 24
        before = find.call_count
        for step in range(65, 73):  # none of them a power of two
            train(nets, optimizers, step, without=step % 4)
        assert find.call_count <= before + 1
    assert num_shown(optimizers[0]) >= NUM_BLOCKS - 1, "units have left for good"


def keep(net: Net, kept: list[Any]) -> None:
    grads = [p.grad for p in net.blocks[2].parameters()]
    kept.append((grads, [grad.to_local().clone() for grad in grads]))


def keep_memory(net: Net, kept: list[Any]) -> None:
    views = [p.grad.to_local().flatten() for p in net.blocks[1].parameters()]
    kept.append((views, [view.clone() for view in views]))


def trade(net: Net, kept: list[Any]) -> None:
    first, second = net.blocks[1][0].weight, net.blocks[3][0].weight
    first.grad, second.grad = second.grad, first.grad


def take(net: Net, kept: list[Any]) -> None:
    for p in net.blocks[3].parameters():
        p.grad = None


def scale(net: Net, kept: list[Any]) -> None:
    net.blocks[0][2].weight.grad.to_local().mul_(3.0)


@pytest.mark.parametrize("nbytes", [0, 32 * 1024])
@distributed(2)
def test_what_users_do_to_gradients_of_neighbours_counts(nbytes: int) -> None:
    changes: list[Callable[[Net, list[Any]], None]] = [keep, keep_memory, trade, take, scale]
    nets, optimizers = both()
    kept: list[Any] = []
    with mock.patch.object(flat_runs, "SMALL_BYTES", nbytes):
        for i, change in enumerate(changes * 2):
            for step in range(3 * i, 3 * i + 3):
                for net, optimizer in zip(nets, optimizers, strict=True):
                    backward(net, step)
                    if step % 3 == 1:
                        change(net, kept)
                    optimizer.step()
                    optimizer.zero_grad()
            assert_same(nets, optimizers)
    for tensors, values in kept:
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(local(tensor), value), "a kept gradient was written"


@distributed(2)
def test_accumulation_and_gradients_that_stay() -> None:
    nets, optimizers = both()
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            for i in range(2):
                backward(net, 2 * step + i)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert_same(nets, optimizers)


@distributed(2)
def test_units_made_on_the_meta_device_moved_loaded_and_copied() -> None:
    nets, optimizers = both(device="meta")
    values = {name: p.full_tensor() for name, p in make_net().named_parameters()}
    for net in nets:
        net.to_empty(device="cpu")
        net.load_state_dict(values, strict=False)
        with torch.inference_mode():
            net(torch.ones(2, 16))  # the first forward is an evaluation
    for step in range(3):
        train(nets, optimizers, step)
    assert_same(nets, optimizers)
    assert places(nets[0]) == NUM_BLOCKS
    for net in nets:  # now their shards are memory of their own
        state = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)
    for step in range(3, 6):
        train(nets, optimizers, step)
    assert_same(nets, optimizers)
    copies = tuple(copy.deepcopy(net) for net in nets)
    others = both()[1]
    for other, net, optimizer in zip(others, copies, optimizers, strict=True):
        other.param_groups[0]["params"] = list(net.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(6, 9):
        train(copies, others, step)
    assert_same(copies, others)


@distributed(2)
def test_frozen_units_and_other_dtypes_are_not_moved() -> None:
    nets = make_net(), make_net()
    for net in nets:
        for p in net.blocks[1].parameters():
            p.requires_grad_(False)
        net.blocks[3].double()
        net.blocks[3].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    pairs = zip(nets, (flat_step, local_step), strict=True)
    optimizers = tuple(wrap(torch.optim.AdamW(n.parameters(), lr=0.01)) for n, wrap in pairs)
    for step in range(3):
        train(nets, optimizers, step)
    assert_same(nets, optimizers)
    assert places(nets[0]) == NUM_BLOCKS - 2
