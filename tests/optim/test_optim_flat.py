"""Optimizer steps on flat tensors: bit for bit those on each parameter; DTensors outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import adam, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fsdp2
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.optim import Muon, flat_plan, flat_runs, flat_step, local_step
from fsdp2.runtime.unit import unit_of
from fsdp2.sharding.gathered import resize
from harness import cached_mesh, cpu_only, distributed, shared_folder
from optimizers import Lion, OwnOptimizer

Make = Callable[..., torch.optim.Optimizer]
ADAM = {"lr": 0.01, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adam amsgrad": (torch.optim.Adam, {**ADAM, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, ADAM),
    "adamw foreach": (torch.optim.AdamW, {**ADAM, "foreach": True}),
    "adamw fused": (torch.optim.AdamW, {**ADAM, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad fused": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
}


class KeepsGradients(Lion):
    """Its state has the gradient itself."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        update = super().update(p, grad, group, state)
        state["last"] = grad
        return update


class DecaysMatrices(OwnOptimizer):
    """Elementwise, but not the same for vectors and matrices."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad + (0.1 * p if p.ndim > 1 else 0)


class Lamb(OwnOptimizer):
    """Scales by norms."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad * (p.norm() / grad.norm())


class Net(nn.Module):
    """Blocks with even and uneven rows, a 0-dim parameter, one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seldom = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, *, seldom: bool = True) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.scale * x + (self.seldom if seldom else 0)


def make_net(**options: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def backward(model: nn.Module, step: int, **kwargs: Any) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    loss = model(torch.randn(4, 6, generator=generator), **kwargs).square().mean()
    loss.backward()
    return loss


def in_place_and_copied(body: Callable[..., None]) -> Callable[..., None]:
    """Run a test on the memory of the blocks, and with small blocks copied together."""

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        for nbytes in (0, 4096):
            with mock.patch.object(flat_runs, "SMALL_BYTES", nbytes):
                body(*args, **kwargs)

    return run


def step_both(
    nets: tuple[nn.Module, ...],
    optimizers: Iterable[torch.optim.Optimizer],
    step: int,
    **kwargs: Any,
) -> None:
    for net, optimizer in zip(nets, optimizers, strict=True):
        backward(net, step, **kwargs)
        optimizer.step()
        optimizer.zero_grad()


def num_shown(optimizer: torch.optim.Optimizer) -> int:
    """How many tensors the last step saw in runs."""
    return sum(len(plan.runs) for plan in vars(optimizer)["_local_view"]._plans.values())


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Parameters and state are equal bit for bit, and DTensors.

    A fused kernel of torch for the CPU rounds the last elements of a tensor, which do not fill a
    vector, in other places than the rest: it may differ in the last bit.
    """
    equal: Callable[..., bool] = torch.equal
    if ours.defaults.get("fused"):
        equal = partial(torch.allclose, rtol=1e-4, atol=1e-6)
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(mine["params"], other["params"], strict=True):
            assert equal(p.to_local(), q.to_local())
            state, wanted = ours.state.get(p) or {}, theirs.state.get(q) or {}
            assert list(state) == list(wanted)
            for key, value in wanted.items():
                found = state[key]
                assert type(found) is type(value), key
                if isinstance(value, DTensor):
                    assert found.placements == value.placements
                    assert found.shape == value.shape
                    assert found.to_local().dtype == value.to_local().dtype
                    assert equal(found.to_local(), value.to_local()), key
                elif isinstance(value, Tensor):
                    assert found.shape == value.shape
                    assert torch.equal(found, value), key
                else:
                    assert found == value


def both(make: Make, options: dict[str, Any], **kwargs: Any) -> tuple[Any, Any]:
    """Two equal models, and a flat and a local optimizer over them."""
    nets = make_net(**kwargs), make_net(**kwargs)
    ours, theirs = (make(net.parameters(), **options) for net in nets)
    return nets, (flat_step(ours), local_step(theirs))


FUSED_ADAGRAD = pytest.param(
    "adagrad fused", marks=cpu_only("on the test device it takes no float64, which probes have")
)


@pytest.mark.parametrize(
    "name", [FUSED_ADAGRAD if name == "adagrad fused" else name for name in [*OPTIMIZERS, "own"]]
)
@distributed(2, 3)
@in_place_and_copied
def test_bit_for_bit_the_step_on_each_parameter(name: str) -> None:
    nets, optimizers = both(*OPTIMIZERS.get(name, (KeepsGradients, {"lr": 0.01})))
    for step in range(5):
        step_both(nets, optimizers, step)
        if step in (0, 1, 4):
            assert_same(*optimizers)
    num_params = len(list(nets[0].parameters()))
    assert 0 < num_shown(optimizers[0]) <= num_params // 2


@distributed(2)
@in_place_and_copied
def test_a_unit_whose_shards_have_no_padding_is_one_tensor() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    optimizer = flat_step(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert num_shown(optimizer) == 1


@distributed(2, 3)
@in_place_and_copied
def test_missing_gradients() -> None:
    for kwargs in ({}, {"set_to_none": False}):
        nets, optimizers = both(torch.optim.AdamW, ADAM)
        for step in range(6):
            for net, optimizer in zip(nets, optimizers, strict=True):
                backward(net, step, seldom=step not in (0, 3))
                optimizer.step()
                optimizer.zero_grad(**kwargs)
            assert_same(*optimizers)


@distributed(2)
@in_place_and_copied
def test_groups_schedulers_and_frozen_parameters() -> None:
    nets = make_net(), make_net()
    optimizers = []
    for net in nets:
        net.blocks[1][0].weight.requires_grad_(False)
        params = list(net.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.03},
        ]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01))
    flat_step(optimizers[0])
    local_step(optimizers[1])
    schedulers = [lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    for step in range(4):
        step_both(nets, optimizers, step)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(*optimizers)


@distributed(2)
@in_place_and_copied
def test_closures() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    for step in range(4):
        losses = []
        for net, optimizer in zip(nets, optimizers, strict=True):

            def closure(net: Any = net, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                assert all(isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"])
                return backward(net, step)

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
        assert_same(*optimizers)


@pytest.mark.parametrize("fused", [False, True])
@distributed(2)
@in_place_and_copied
def test_gradient_scalers_skip_and_step(fused: bool) -> None:
    nets, optimizers = both(torch.optim.AdamW, {**ADAM, "fused": fused})
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in nets]
    for step in range(4):
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            scaler.scale(net(x).sum()).backward()
            if step == 1:
                for p in net.parameters():
                    p.grad.to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        # A fused step writes the gradients: without their scale. The parameters that they are of
        # may differ in the last bit (see `assert_same`).
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.allclose(p.grad.to_local(), q.grad.to_local(), rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert_same(*optimizers)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0


@distributed(2)
def test_state_goes_to_and_from_optimizers_without_flat_tensors() -> None:
    nets, optimizers = both(torch.optim.NAdam, {"lr": 0.01})
    for step in range(3):
        step_both(nets, optimizers, step)
    for wrap in (flat_step, local_step, lambda optimizer: optimizer):
        again = tuple(wrap(torch.optim.NAdam(net.parameters(), lr=0.01)) for net in nets)
        for new, old in zip(again, reversed(optimizers), strict=True):
            new.load_state_dict(copy.deepcopy(old.state_dict()))
        for step in range(3, 5):
            for net in nets:
                backward(net, step)
            for optimizer in (*again,):
                optimizer.step()
                optimizer.zero_grad()
        assert_same(*again)
        for optimizer in optimizers:  # of which the state is as before: bring it up to date
            optimizer.load_state_dict(copy.deepcopy(again[0].state_dict()))


@distributed(2)
@in_place_and_copied
def test_state_that_users_write_counts() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    for step in range(5):
        step_both(nets, optimizers, step)
        for net, optimizer in zip(nets, optimizers, strict=True):
            first = optimizer.state[net.blocks[0][0].weight]
            if step == 1:
                first["exp_avg"].mul_(0.5)
            elif step == 2:
                first["step"].fill_(7.0)
            elif step == 3:
                first["exp_avg_sq"] = first["exp_avg_sq"] * 2
    assert_same(*optimizers)
    state = optimizers[0].state
    assert state[nets[0].blocks[0][0].weight]["step"].item() == 9.0
    assert state[nets[0].blocks[0][0].bias]["step"].item() == 5.0


@distributed(2, 3)
def test_checkpoints() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    for step in range(3):
        step_both(nets, optimizers, step)
    again, others = both(torch.optim.AdamW, ADAM)
    with shared_folder() as folder:
        checkpointer = fsdp2.checkpoint.Checkpointer(folder)
        checkpointer.save(1, model=nets[0], optimizer=optimizers[0])
        for net, optimizer in zip(again, others, strict=True):
            checkpointer.load(1, model=net, optimizer=optimizer)
    for step in range(3, 5):
        step_both(again, others, step)
        step_both(nets, optimizers, step)
    assert_same(*others)
    assert_same(others[0], optimizers[1])


@distributed(2)
@in_place_and_copied
def test_gradients_of_a_users_own_and_kept_gradients() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    kept = []
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net, step)
            if step == 1:
                net.blocks[0][0].weight.grad = net.blocks[0][0].weight.grad * 2
            if step == 2:
                kept.append((net.blocks[0][2].weight.grad, net.blocks[0][2].weight.grad.clone()))
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*optimizers)
    for grad, value in kept:
        assert torch.equal(grad.to_local(), value.to_local())


def one(param: Any, value: float) -> DTensor:
    """A gradient of a user's own."""
    local = torch.full_like(param.to_local(), value)
    return DTensor.from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def put(net: Any) -> None:
    net.blocks[0][0].weight.grad = one(net.blocks[0][0].weight, 0.5)


def put_beside(net: Any) -> None:
    """The memory is that of other gradients: of the same parameters in the block before."""
    for mine, other in zip(net.blocks[1].parameters(), net.blocks[0].parameters(), strict=True):
        mine.grad = other.grad


def trade(net: Any) -> None:
    """Two parameters of a unit have each other's: all that backward left is still referred to."""
    norm = net.blocks[1][1]
    norm.weight.grad, norm.bias.grad = norm.bias.grad, norm.weight.grad


def take(net: Any) -> None:
    net.blocks[1][1].weight.grad = None


def take_a_units(net: Any) -> None:
    for p in net.blocks[2].parameters():
        p.grad = None


def write(net: Any) -> None:
    net.blocks[0][2].weight.grad.mul_(3.0)
    net.blocks[1][2].weight.grad.to_local().fill_(0.25)


def take_and_put_back(net: Any) -> None:
    kept = [(p, p.grad) for p in net.parameters()]
    net.zero_grad()
    for p, grad in kept:
        p.grad = grad


CHANGES: list[Callable[[Any], None]]
CHANGES = [put, put_beside, trade, take, take_a_units, write, take_and_put_back]


@pytest.mark.parametrize(
    "make", [pytest.param(torch.optim.SGD, marks=pytest.mark.long), torch.optim.AdamW]
)
@distributed(2)
@in_place_and_copied
def test_what_users_do_to_gradients_between_backward_and_step_counts(make: Make) -> None:
    nets, optimizers = both(make, {"lr": 0.1})
    step = 0
    for change in (*CHANGES, *CHANGES):
        for again in range(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                backward(net, step)
                if again == 1:
                    change(net)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        assert_same(*optimizers)


@distributed(2)
@in_place_and_copied
def test_what_users_do_to_groups_and_parameters_between_steps_counts() -> None:
    nets = make_net(), make_net()
    optimizers = tuple(
        wrap(torch.optim.AdamW([{"params": [*net.blocks.parameters()]}], **ADAM))
        for wrap, net in zip((flat_step, local_step), nets, strict=True)
    )

    def freeze(net: Any, optimizer: Any) -> None:
        net.blocks[0][0].weight.requires_grad_(False)

    def thaw(net: Any, optimizer: Any) -> None:
        net.blocks[0][0].weight.requires_grad_(True)

    def add(net: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [net.seldom, net.scale], "lr": 0.3})

    def move(net: Any, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        second["params"] += [first["params"].pop(3), first["params"].pop()]

    def swap(net: Any, optimizer: Any) -> None:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]

    def drop_state(net: Any, optimizer: Any) -> None:
        del optimizer.state[net.blocks[1][0].weight]

    def load(net: Any, optimizer: Any) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["exp_avg"] *= 0.5
        optimizer.load_state_dict(state)

    def load_model(net: Any, optimizer: Any) -> None:
        values = {key: value.clone() * 0.9 for key, value in net.state_dict().items()}
        net.load_state_dict(values, assign=True)

    step = 0
    for change in (freeze, thaw, add, move, swap, drop_state, load, load_model):
        for net, optimizer in zip(nets, optimizers, strict=True):
            change(net, optimizer)
        for _ in range(3):
            step_both(nets, optimizers, step)
            step += 1
        assert_same(*optimizers)


@distributed(2)
@in_place_and_copied
def test_units_that_take_turns_are_not_planned_anew_in_each_step() -> None:
    """As experts do: an expert without a token has no gradients."""
    for make in (torch.optim.SGD, torch.optim.AdamW):
        nets, optimizers = both(make, {"lr": 0.1})
        with mock.patch.object(flat_plan, "find_runs", wraps=flat_plan.find_runs) as find:
            for step in range(40):
                for net, optimizer in zip(nets, optimizers, strict=True):
                    backward(net, step)
                    for p in net.blocks[step % 3].parameters():
                        p.grad = None
                    optimizer.step()
                    optimizer.zero_grad()
                if step in (3, 20, 39):
                    assert_same(*optimizers)
        assert find.call_count < 20
        assert num_shown(optimizers[0]) >= 2


@distributed(2)
@in_place_and_copied
def test_gradients_that_are_never_a_units_own_are_found_without_new_plans() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    kept = []
    with mock.patch.object(flat_plan, "find_runs", wraps=flat_plan.find_runs) as find:
        for step in range(40):
            for net, optimizer in zip(nets, optimizers, strict=True):
                backward(net, step)
                kept.append([p.grad for p in net.parameters()])  # the next ones lie elsewhere
                optimizer.step()
                optimizer.zero_grad()
            if step in (3, 39):
                assert_same(*optimizers)
    assert find.call_count < 12


@distributed(2)
@in_place_and_copied
def test_gradients_whose_memory_moves_are_followed() -> None:
    nets = make_net(), make_net()
    with torch.no_grad():  # now their units have memory of their own
        for net in nets:
            net(torch.ones(4, 6))
    optimizers = tuple(
        wrap(torch.optim.AdamW(net.parameters(), **ADAM))
        for wrap, net in zip((flat_step, local_step), nets, strict=True)
    )
    addresses, in_the_way = set(), []
    for step in range(5):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net, step)
            addresses.add((id(net), net.blocks[0][0].weight.grad.to_local().data_ptr()))
            optimizer.step()
            optimizer.zero_grad()
            for bucket in (b for module in (net, *net.blocks) for b in unit_of(module).buckets):
                if step == 2:
                    resize(bucket.grads.storage, 0)
                    in_the_way.append(torch.empty_like(bucket.shards))
        assert_same(*optimizers)
    assert len(addresses) > 2


@distributed(2)
@in_place_and_copied
def test_no_memory_of_gradients_is_held_between_steps() -> None:
    nets, optimizers = both(torch.optim.AdamW, ADAM)
    addresses = set()
    for step in range(4):
        backward(nets[0], step)
        addresses.add(id(nets[0].seldom.grad))
        optimizers[0].step()
        optimizers[0].zero_grad()
    assert len(addresses) == 1, "the store of gradients was left to us, and made anew"


@distributed(2)
@in_place_and_copied
def test_steps_count_as_writes_to_the_shards() -> None:
    nets, optimizers = both(torch.optim.SGD, {"lr": 0.1})
    for step in range(3):
        before = [p.to_local()._version for p in nets[0].parameters()]
        step_both(nets, optimizers, step)
        after = [p.to_local()._version for p in nets[0].parameters()]
        assert all(new > old for new, old in zip(after, before, strict=True))


@distributed(2)
def test_step_hooks_are_called_outside_of_flat_tensors() -> None:
    """With the arguments of a plain step; what they write counts in that step."""
    nets = make_net(), make_net()
    optimizers = tuple(
        wrap(torch.optim.AdamW(net.parameters(), **ADAM))
        for wrap, net in zip((flat_step, local_step), nets, strict=True)
    )
    seen: list[list[Any]] = [[], []]

    def look(where: str, i: int, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is not optimizers[i]:
            return  # hooks for all optimizers
        params: list[Any] = list(nets[i].parameters())
        shown = optimizer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(shown, params, strict=True))
        for p in params:
            assert isinstance(p.grad, DTensor)
            for value in optimizer.state.get(p, {}).values():
                assert isinstance(value, DTensor) or value.ndim == 0
            assert len(optimizer.state.get(p, {})) in (0, 3)
        assert args[0] is optimizer
        seen[i].append((where, len(optimizer.state), len(args), list(kwargs)))
        if where == "pre":
            params[0].grad.mul_(2.0)
            if optimizer.state:
                optimizer.state[params[1]]["exp_avg"].mul_(0.5)

    handles = [
        register(partial(look, where, i))
        for i, optimizer in enumerate(optimizers)
        for where, register in (
            ("pre of all", register_optimizer_step_pre_hook),
            ("post of all", register_optimizer_step_post_hook),
            ("pre", optimizer.register_step_pre_hook),
            ("post", optimizer.register_step_post_hook),
        )
    ]
    try:
        for step in range(3):
            step_both(nets, optimizers, step)
    finally:
        for handle in handles:
            handle.remove()
    assert_same(*optimizers)
    assert {call[0] for call in seen[0]} == {"pre of all", "pre", "post", "post of all"}
    assert len(seen[0]) == 12
    assert seen[0] == seen[1]


@cpu_only("mocks the devices that torch names")
@distributed(2)
@in_place_and_copied
def test_capturable_steps() -> None:
    """torch captures on accelerators only: elsewhere its own error is given."""
    net = make_net()
    backward(net, 0)
    with pytest.raises(TypeError, match="capturable=True, params and state_steps must be on"):
        flat_step(torch.optim.AdamW(net.parameters(), capturable=True)).step()
    # The arithmetic is the same on any device: the number of steps stays in a tensor.
    with mock.patch.object(adam, "_get_capturable_supported_devices", return_value=["cpu"]):
        foreach: dict[str, Any] = {"foreach": True}
        for more in ({}, foreach, {**foreach, "lr": torch.tensor(0.01)}):
            nets, optimizers = both(torch.optim.AdamW, {**ADAM, **more, "capturable": True})
            for step in range(4):
                step_both(nets, optimizers, step)
            assert_same(*optimizers)
            assert num_shown(optimizers[0]) > 0


@cpu_only("what the compiler does with a step does not depend on the device")
@distributed(2)
def test_a_compiled_step_runs_as_it_is() -> None:
    for wrap in (flat_step, local_step):
        nets = make_net(), make_net()
        ours, theirs = (wrap(torch.optim.AdamW(net.parameters(), **ADAM)) for net in nets)
        runs = torch.compile(ours.step, backend="eager"), theirs.step
        for step in range(3):
            for net, optimizer, run in zip(nets, (ours, theirs), runs, strict=True):
                backward(net, step)
                run()
                optimizer.zero_grad()
        assert_same(ours, theirs)
        assert wrap is local_step or num_shown(ours) > 0


@distributed(2, 4)
@in_place_and_copied
def test_meshes_and_offloading() -> None:
    cases: list[dict[str, Any]] = [{"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
    if dist.get_world_size() == 4:
        cases.append({"mesh": cached_mesh(2, 2, names=("replicate", "shard"))})
    for options in cases:
        nets, optimizers = both(torch.optim.AdamW, ADAM, **options)
        for step in range(4):
            step_both(nets, optimizers, step)
        assert_same(*optimizers)
        assert num_shown(optimizers[0]) > 0


@distributed(4)
def test_tensor_parallel_parameters() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    optimizers, nets = [], []
    for wrap in (flat_step, local_step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
        nets.append(model)
        optimizers.append(wrap(torch.optim.AdamW(model.parameters(), **ADAM)))
    for step in range(4):
        for model, optimizer in zip(nets, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*optimizers)


@distributed(2)
def test_plain_parameters_step_beside() -> None:
    nets = make_net(), make_net()
    plain = [nn.Parameter(torch.ones(3)) for _ in nets]
    optimizers = [
        wrap(torch.optim.AdamW([p, *net.parameters()], **ADAM))
        for wrap, p, net in zip((flat_step, local_step), plain, nets, strict=True)
    ]
    for step in range(3):
        for p in plain:
            p.grad = torch.full_like(p, 0.5 + step)
        step_both(nets, optimizers, step)
    assert torch.equal(*plain)
    for net, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(net.to_local(), other.to_local())


@distributed(2)
def test_what_is_not_elementwise_is_refused_with_what_serves_it() -> None:
    params = list(make_net().parameters())
    matrices = [p for p in params if p.ndim == 2]
    for optimizer, serves in (
        (Lamb(params, lr=0.1), "whole_step"),
        (torch.optim.Adafactor(params), "whole_step"),
        (torch.optim.Muon(matrices, lr=0.1), "whole_step"),
        (DecaysMatrices(params, lr=0.1), "local_step"),
    ):
        kind = type(optimizer)
        with pytest.raises(TypeError, match=rf"fsdp2\.optim\.{serves}"):
            flat_step(optimizer)
        assert type(optimizer) is kind
    with pytest.raises(TypeError, match=r"requires a closure.*flat_step"):
        flat_step(torch.optim.LBFGS(params))
    assert local_step(DecaysMatrices(params, lr=0.1)) is not None
    with pytest.raises(TypeError):
        flat_step(Muon(matrices, lr=0.1))
