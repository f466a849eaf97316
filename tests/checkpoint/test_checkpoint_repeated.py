"""Saves of a run that changed since the last one: what was kept of that may not be in them.

Each change is made after saves that leave everything to keep, and what is captured and staged then
is compared with what one finds who has kept nothing. Shuffles make most changes follow on others.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from checkpoint_cases import Tied, adamw, assert_equal_bits, build, train, whole_state
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError
from fsdp2.checkpoint.format.tensors import local_of
from fsdp2.checkpoint.saving import repeated
from fsdp2.checkpoint.saving.capture import Captured, capture
from fsdp2.checkpoint.saving.job import plan_of
from fsdp2.checkpoint.saving.repeated import Repeated
from fsdp2.checkpoint.saving.staging import Staging
from fsdp2.checkpoint.saving.writing import plan_save
from fsdp2.common.memory import memory_of
from fsdp2.dtensor.from_local import dtensor_over
from harness import cached_mesh, distributed, ours_only, shared_folder

pytestmark = ours_only("checkpoints")


@dataclass
class Run:
    """What is saved, and by whom."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    ranks: tuple[int, ...] = (0, 1)
    rank: int = 1
    rank_local: Any = None
    extra: Any = 0
    kept: Repeated = field(default_factory=Repeated)
    staging: Staging = field(default_factory=Staging)

    @property
    def states(self) -> list[dict[str, Any]]:
        return [state for o in self.optimizers for state in o.state.values()]

    def arguments(self) -> tuple[Any, ...]:
        return self.model, self.optimizers, self.ranks, self.rank, self.rank_local

    def check(self, of_last: bool | None = None) -> None:
        """Compare with one who has kept nothing.

        Args:
            of_last: whether what was kept of the last save is taken; None: if that is right.
        """
        try:
            fresh = capture(*self.arguments())
        except CheckpointError as error:  # what cannot be saved cannot be saved again
            with pytest.raises(CheckpointError, match=re.escape(str(error))):
                self.kept.capture(*self.arguments())
            assert of_last is None
            return
        with mock.patch.object(repeated, "capture_found", wraps=repeated.capture_found) as made:
            again = self.kept.capture(*self.arguments())
        assert of_last is None or of_last == (not made.called)
        assert again.parts == fresh.parts
        assert again.aliases == fresh.aliases
        assert json.dumps(again.values) == json.dumps(fresh.values)
        for mine, theirs in ((again.locals, fresh.locals), (again.own, fresh.own)):
            assert list(mine) == list(theirs)
            assert_equal_bits(dict(mine), dict(theirs))  # type: ignore[arg-type]
            assert not any(tensor.requires_grad for tensor in mine.values())
        plan = plan_save(fresh.parts, self.rank, self.ranks)
        assert plan_of(again, self.rank, self.ranks) == plan
        self.check_bytes(again, fresh)

    def check_bytes(self, captured: Captured, expected: Captured) -> None:
        """Whether what is staged are the bytes of each tensor."""
        own = {name: tensor.clone() for name, tensor in expected.own.items()}
        read = self.staging.fill(captured)()
        assert_equal_bits(captured.own, own)
        for part in expected.parts:
            tensor = expected.locals.get((part.kind, part.tensor.name))
            if tensor is not None:
                dense = tensor.contiguous()
                whole = memory_of(dense)
                assert bytes(read(part, 0, len(whole))) == bytes(whole), part.tensor.name


class Extra(nn.Module):
    """A module with state of its own beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = 1

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def plain_run() -> Run:
    torch.manual_seed(0)
    model = Tied()
    model.add_module("more", Extra())
    # Of one shape, in one storage, as the shards of a unit are.
    flat = torch.randn(4 * 64)
    model.add_module("flat", nn.ParameterList(flat[i * 64 :][:64].view(8, 8) for i in range(4)))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    run = Run(
        model, [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.bn.parameters())]
    )
    run.optimizers[0].step()
    return run


def flat_of(run: Run) -> nn.ParameterList:
    return run.model.get_submodule("flat")  # type: ignore[return-value]


def others(run: Run) -> list[nn.Parameter]:
    """Parameters that no change replaces."""
    return list(run.model.get_submodule("blocks").parameters())


# -- changes after which the same is saved, of other values ---------------------------------------


def step(run: Run) -> None:
    for p in run.model.parameters():
        p.grad = torch.randn_like(p)
    run.optimizers[0].step()


def load_model(run: Run) -> None:
    state = run.model.state_dict()
    tensors = {n: t for n, t in state.items() if isinstance(t, Tensor) and t.is_floating_point()}
    run.model.load_state_dict({n: torch.randn_like(t) for n, t in tensors.items()}, strict=False)


def load_optimizer(run: Run) -> None:
    run.optimizers[0].load_state_dict(copy.deepcopy(run.optimizers[0].state_dict()))


def freeze(run: Run) -> None:
    for p in others(run)[::2]:
        p.requires_grad_(not p.requires_grad)


def schedule(run: Run) -> None:
    for group in run.optimizers[0].param_groups:
        group["lr"] *= 0.9
        group["initial"] = [group["lr"], "x"]


def swap_parameters(run: Run) -> None:
    """Two names of one shape have each other's tensors."""
    block = run.model.get_submodule("blocks.0.norm")
    block.weight, block.bias = block.bias, block.weight


def swap_state(run: Run) -> None:
    for state in run.states:
        if {"exp_avg", "exp_avg_sq"} <= state.keys():
            old = dict(state)
            state["exp_avg"], state["exp_avg_sq"] = old["exp_avg_sq"], old["exp_avg"]


def new_storage(run: Run) -> None:
    for p in others(run):
        p.data = torch.randn_like(p)


def new_parameters(run: Run) -> None:
    """All of one storage, in another order; the optimizer has no state of them."""
    flat = torch.randn(4 * 64)
    order = [2, 0, 3, 1]
    for i, parameter in enumerate(flat_of(run)):
        parameter.data = flat[order[i] * 64 :][:64].view(8, 8)


def apart(run: Run) -> None:
    """What lay in one storage lies in several, at the same distances or not."""
    for parameter in flat_of(run):
        parameter.data = parameter.data.clone()


def shifted(run: Run) -> None:
    """In one storage, with other gaps."""
    flat = torch.randn(4 * 80)
    for i, parameter in enumerate(flat_of(run)):
        parameter.data = flat[i * 70 :][:64].view(8, 8)


def overlapping(run: Run) -> None:
    flat = torch.randn(4 * 64)
    for i, parameter in enumerate(flat_of(run)):
        parameter.data = flat[i * 16 :][:64].view(8, 8)


def transposed(run: Run) -> None:
    for parameter in flat_of(run):
        parameter.data = parameter.data.t()


def expanded(run: Run) -> None:
    for parameter in list(flat_of(run))[1:3]:
        parameter.data = torch.randn(8).expand(8, 8)


def adjacent(run: Run) -> None:
    """Several storages, one behind the other."""
    memory = bytearray(torch.randn(4 * 64).numpy().tobytes())
    for i, parameter in enumerate(flat_of(run)):
        values = torch.frombuffer(memory, dtype=torch.float32, count=64, offset=256 * i)
        parameter.data = values.view(8, 8)


def extra_state(run: Run) -> None:
    more: Any = run.model.get_submodule("more")
    more.value = [more.value if isinstance(more.value, int) else 1, {"a": 2.5}]


def count(run: Run) -> None:
    run.model.get_submodule("bn").num_batches_tracked += 3


SAME = [
    step, load_model, load_optimizer, freeze, schedule, swap_state, new_storage, new_parameters,
    adjacent, apart, shifted, overlapping, transposed, expanded, extra_state, count,
]  # fmt: skip


# -- changes after which something else is saved --------------------------------------------------


def add_parameter(run: Run) -> None:
    name = f"added_{len(list(run.model.parameters()))}"
    run.model.register_parameter(name, nn.Parameter(torch.randn(3)))
    run.optimizers[0].add_param_group({"params": [getattr(run.model, name)]})


def rename_parameter(run: Run) -> None:
    """The same shapes, dtypes and number, under another name."""
    block = run.model.get_submodule("blocks.1")
    old = "up" if "up" in block._modules else "up2"
    block._modules = {
        (("up2" if old == "up" else "up") if n == old else n): m for n, m in block._modules.items()
    }


def reorder(run: Run) -> None:
    blocks = run.model.get_submodule("blocks")
    blocks._modules = dict(reversed(blocks._modules.items()))


def tie(run: Run) -> None:
    model: Any = run.model
    own = nn.Parameter(torch.randn_like(model.embed.weight))
    tied = model.head.weight is model.embed.weight
    model.head.weight = own if tied else model.embed.weight


def tie_others(run: Run) -> None:
    norms = [run.model.get_submodule(f"blocks.{i}.norm") for i in range(2)]
    tied = norms[0].weight is norms[1].weight
    norms[1].bias = norms[0].bias
    norms[1].weight = nn.Parameter(norms[0].weight.detach().clone()) if tied else norms[0].weight
    run.optimizers[0].param_groups[0]["params"] = list(run.model.parameters())
    alive = {id(p) for p in run.model.parameters()}
    for param in list(run.optimizers[0].state):
        if id(param) not in alive:
            del run.optimizers[0].state[param]


def other_dtype(run: Run) -> None:
    for p in others(run):
        p.data = p.data.to(torch.bfloat16 if p.dtype == torch.float32 else torch.float32)


def other_dtype_of_state(run: Run) -> None:
    for state in run.states[::3]:
        if "exp_avg" in state:
            old = state["exp_avg"]
            state["exp_avg"] = old.to(torch.int32 if old.dtype == torch.float32 else torch.float32)


def reshape(run: Run) -> None:
    """As many bytes in another shape."""
    for parameter in flat_of(run):
        parameter.data = parameter.data.reshape((4, 16) if parameter.shape == (8, 8) else (8, 8))


def buffers(run: Run) -> None:
    bn = run.model.get_submodule("bn")
    bn._non_persistent_buffers_set ^= {"running_mean"}


def buffer_is_parameter(run: Run) -> None:
    """A buffer may differ between ranks, a parameter may not."""
    bn: Any = run.model.get_submodule("bn")
    value = bn.running_var.detach().clone()
    is_buffer = "running_var" in bn._buffers
    del bn.running_var
    if is_buffer:
        bn.register_parameter("running_var", nn.Parameter(value))
    else:
        bn.register_buffer("running_var", value)


def add_state(run: Run) -> None:
    for state in run.states[1::2]:
        if "history" in state:
            del state["history"]
        else:
            state["history"] = torch.randn(5)  # only this rank knows it


def plain_values(run: Run) -> None:
    for number, state in enumerate(run.states[::2]):
        state["ratio"] = [float("nan"), 2, None, "text", True][number % 5]


def in_containers(run: Run) -> None:
    for state in run.states[::4]:
        if state.pop("list", None) is None:
            state["list"] = [torch.randn(2), {"m": torch.randn(3)}]


def keys_that_are_equal(run: Run) -> None:
    """``1 == True``, but their names differ."""
    for state in run.states[1::4]:
        if 1 in state:
            (key,) = (key for key in state if key == 1)
            value = state.pop(key)
            state[1 if key is True else True] = value
        else:
            state[1] = torch.randn(())


def tensor_is_value(run: Run) -> None:
    for state in run.states[::2]:
        if "step" in state:
            old = state["step"]
            state["step"] = float(old) if isinstance(old, Tensor) else torch.tensor(float(old))


def values_elsewhere(run: Run) -> None:
    """As many tensors, of the same shapes, under other names."""
    first, second = (run.optimizers[0].state[p] for p in list(flat_of(run))[:2])
    value = first.get("momentum")
    for state in (first, second):
        state.clear()
    first["momentum"], second["momentum"] = None, torch.randn(8, 8)
    if value is None:
        first["momentum"], second["momentum"] = second["momentum"], None


def share_state(run: Run) -> None:
    """One tensor in two places of the state, or no longer."""
    run.kept.forget()
    run.check()
    for state in run.states:
        if state.get("exp_avg") is not None:
            shared = state["exp_avg"] is state["exp_avg_sq"]
            state["exp_avg"] = state["exp_avg_sq"] * 2 if shared else state["exp_avg_sq"]


def other_alias(run: Run) -> None:
    """A name of one tensor becomes the name of another."""
    later: Any = run.model.get_submodule("bn")
    names = ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    first, second = map(run.model.get_parameter, names)
    later.also = second if getattr(later, "also", None) is first else first


def order_of_state(run: Run) -> None:
    for state in run.states[::2]:
        items = list(state.items())[::-1]
        state.clear()
        state.update(items)
    for optimizer in run.optimizers:
        items = list(optimizer.state.items())[::-1]
        optimizer.state.clear()
        optimizer.state.update(items)


def drop_state(run: Run) -> None:
    state = run.optimizers[0].state
    for param in list(state)[:2]:
        del state[param]


def other_kind(run: Run) -> None:
    """Another class with the same state."""
    old = run.optimizers[0]
    kind = torch.optim.Adam if type(old) is torch.optim.AdamW else torch.optim.AdamW
    params = [p for group in old.param_groups for p in group["params"]]
    run.optimizers[0] = kind(params)
    run.optimizers[0].state.update(old.state)


def second_optimizer(run: Run) -> None:
    """Two that train one parameter, with state under other keys."""
    (param, *_) = run.model.get_submodule("bn").parameters()
    state = run.optimizers[1].state[param]
    if state:
        state.clear()
    else:
        state["momentum_buffer"] = torch.randn_like(param)
        state["count"] = random.randrange(9)


def local_by_name(run: Run) -> None:
    run.rank_local = None if run.rank_local else lambda name: name.startswith("bn")


def other_rank(run: Run) -> None:
    run.rank = 1 - run.rank


def more_ranks(run: Run) -> None:
    run.ranks = (0, 1, 2) if len(run.ranks) == 2 else (0, 1)


def conjugate(run: Run) -> None:
    """Flags of lazy operators: the bytes are not what is read."""
    model: Any = run.model
    if not hasattr(model, "wave"):
        model.register_buffer("wave", torch.randn(6, dtype=torch.complex64))
    elif model.wave.is_conj():
        del model.wave
    else:
        model.wave = model.wave.conj()


def other_order(run: Run) -> None:
    run.optimizers = run.optimizers[::-1]


OTHER = [
    add_parameter, rename_parameter, reorder, tie, tie_others, other_dtype, other_dtype_of_state,
    reshape, buffers, buffer_is_parameter, add_state, plain_values, in_containers,
    keys_that_are_equal, tensor_is_value, order_of_state, drop_state, other_kind, second_optimizer,
    local_by_name, other_rank, more_ranks, conjugate, other_order, share_state,
    values_elsewhere, other_alias,
    swap_parameters,
]  # fmt: skip


@pytest.mark.parametrize("change", SAME)
def test_a_save_of_other_values_takes_what_was_kept(change: Callable[[Run], None]) -> None:
    run = plain_run()
    run.check(of_last=False)
    run.check(of_last=True)
    for _ in range(2):
        change(run)
        run.check(of_last=True)


@pytest.mark.parametrize("change", OTHER)
def test_a_save_of_something_else_does_not(change: Callable[[Run], None]) -> None:
    run = plain_run()
    for _ in range(3):
        run.check()
        change(run)
        run.check()


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_in_any_order(seed: int) -> None:
    run, order = plain_run(), random.Random(seed)
    for change in order.sample(2 * [*SAME, *OTHER], 2 * len(SAME + OTHER)):
        with suppress(RuntimeError, KeyError):  # a step of state that another change made
            change(run)
        run.check()


# -- DTensors -------------------------------------------------------------------------------------


def bag(mesh: Any, placements: list[Any], **tensors: Tensor) -> nn.Module:
    """A module of DTensors whose parts have other values on every rank."""
    model = nn.Module()
    for name, tensor in tensors.items():
        local = distribute_tensor(tensor, mesh, placements)._local_tensor
        made = dtensor_over(
            local.clone(), mesh, placements, tuple(tensor.shape), tuple(tensor.stride())
        )
        model.register_parameter(name, nn.Parameter(made))
    return model


@distributed(4)
def test_other_layouts_of_parts_of_one_shape() -> None:
    """Which part of a tensor lies where follows from placements and meshes, not from shapes."""
    one = cached_mesh(2, 2, names=("a", "b"))
    two = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("a", "b"))
    layouts: list[tuple[Any, list[Any]]] = [
        (one, [Shard(0), Replicate()]),
        (one, [Replicate(), Shard(0)]),
        (two, [Shard(0), Replicate()]),
        (one, [Shard(0), Shard(0)]),
        (one, [_StridedShard(0, split_factor=2), Shard(0)]),
        (two, [Shard(0), Shard(0)]),
        (one, [Shard(0), Shard(1)]),
        (one, [Shard(1), Shard(0)]),
        (one["b"], [Shard(0)]),
        (one["a"], [Shard(0)]),
    ]
    rank = dist.get_rank()
    run = Run(nn.Module(), [], (0, 1, 2, 3), rank)
    for first in layouts:
        for second in layouts:
            for number, (mesh, placements) in enumerate((first, second)):
                torch.manual_seed(number)
                run.model = bag(mesh, placements, x=torch.randn(8, 8), y=torch.randn(4, 8))
                run.optimizers = [torch.optim.Adam(run.model.parameters())]
                for p in run.model.parameters():
                    like = torch.randn_like(p)
                    run.optimizers[0].state[p] = {"exp_avg": like, "step": torch.tensor(1.0)}
                run.check()
        state = run.states[0]
        old = state["exp_avg"]
        state["exp_avg"] = local_of(old)  # of this rank alone
        run.check()
        state["exp_avg"] = old
        run.check()


@distributed(2)
def test_wholes_of_other_shapes_with_parts_of_one_shape() -> None:
    """The first of two ranks holds four rows of seven, and of eight."""
    run = Run(nn.Module(), [], (0, 1), dist.get_rank())
    for rows in (8, 7, 8):
        run.model = bag(cached_mesh(2), [Shard(0)], x=torch.randn(rows, 3))
        run.check(of_last=False)


@distributed(2)
def test_a_loaded_state_has_the_layout_of_the_one_before() -> None:
    """Its DTensors have descriptions of their own."""
    model = build("1d")
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    run = Run(model, [optimizer], (0, 1), dist.get_rank())
    run.check(of_last=False)
    for _ in range(2):
        optimizer.load_state_dict(tree_map_only(Tensor, torch.clone, optimizer.state_dict()))
        run.check(of_last=True)
        train(model, optimizer, range(1))
        run.check(of_last=True)


# -- with a Checkpointer --------------------------------------------------------------------------


def offloaded() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(
        Tied(), mesh=cached_mesh(2), offload_policy=CPUOffloadPolicy(pin_memory=False)
    )


def change_all(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Something that happens to a run between saves."""
    if number == 1:
        for p in model.get_submodule("blocks.0").parameters():
            p.requires_grad_(False)
    elif number == 2:
        model.load_state_dict({n: 2 * t for n, t in model.state_dict().items()})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif number == 3:
        for p in model.get_submodule("blocks.0").parameters():
            p.requires_grad_(True)
        for group in optimizer.param_groups:
            group["lr"] /= 2
    elif number == 4:
        for p in list(optimizer.state)[::3]:
            optimizer.state[p]["max_exp_avg_sq"] = torch.rand_like(p)
    elif number == 5:
        model.double()
        for state in optimizer.state.values():
            for key, value in state.items():
                if value.ndim:
                    state[key] = value.double()


@distributed(2, 4)
def test_each_save_of_a_run_that_changes_has_its_own_values() -> None:
    kinds = {2: ["1d", "offloaded", "columns"], 4: ["hsdp", "tp"]}[dist.get_world_size()]
    for kind in kinds:
        make = offloaded if kind == "offloaded" else partial(build, kind)
        model = make()
        optimizer = adamw(model)
        expected = []
        with shared_folder() as root, Checkpointer(root) as checkpoints:
            for number in range(7):
                train(model, optimizer, range(number, number + 1))
                change_all(model, optimizer, number)
                rates = [group["lr"] for group in optimizer.param_groups]
                handle = checkpoints.save(number, model=model, optimizer=optimizer, blocking=False)
                expected.append((whole_state(model, optimizer), rates))
                with torch.no_grad():  # while it is written
                    for p in model.parameters():
                        p.mul_(0.5)
                handle.wait_committed()
            for number, (state, rates) in enumerate(expected):
                into = make()
                if number >= 5:
                    into.double()
                to = adamw(into)
                checkpoints.load(number, model=into, optimizer=to)
                assert_equal_bits(whole_state(into, to), state)
                assert [group["lr"] for group in to.param_groups] == rates
