"""The parameters of a sharded model: names, objects, layouts, and unusual ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER, Case, children, no_units, normal_batch
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    check_training,
    gathering,
    pair,
    parameters,
    run_both,
    shard_case,
    whole,
)

every_model = pytest.mark.parametrize("name", list(BY_NAME))


@every_model
@distributed(3, long=(1, 2, 4))
def test_names_and_layout(name: str) -> None:
    """Each rank holds the rows that torch.chunk would give it."""
    model, plain = pair(BY_NAME[name])
    world_size, rank = dist.get_world_size(), dist.get_rank()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    for path, parameter in model.named_parameters():
        full = plain.get_parameter(path)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),), path
        assert parameter.device_mesh.size() == world_size
        assert parameter.shape == full.shape
        assert parameter.dtype == full.dtype
        assert parameter.requires_grad == full.requires_grad
        assert parameter.is_leaf
        rows = full.chunk(world_size)
        mine = rows[rank] if rank < len(rows) else full[:0]
        assert torch.equal(parameter.to_local(), mine), path


@distributed(1, 2)
def test_classes_of_sharded_modules() -> None:
    model, _ = pair(TRANSFORMER)
    block = model.get_submodule("blocks.0")
    assert isinstance(model, FSDPModule)
    assert isinstance(model, type(TRANSFORMER.build()))
    assert isinstance(block, FSDPModule)
    assert not isinstance(block.get_submodule("qkv"), FSDPModule)
    assert "qkv" in repr(model)


@distributed(1, 2)
def test_fully_shard_returns_what_it_got() -> None:
    model = MLP.build()
    layer = model[0]
    assert fully_shard(layer) is layer
    assert fully_shard(model) is model
    assert model[0] is layer


@distributed(1, 2, 3)
def test_parameter_objects_stay_the_same_over_steps() -> None:
    model, plain = pair(MLP)
    before = list(model.parameters())
    for step in range(2):
        run_both(MLP, model, plain, step)
        after = list(model.parameters())
        assert all(a is b for a, b in zip(before, after, strict=True))


@distributed(2)
def test_the_mesh_that_was_asked_for() -> None:
    mesh = cached_mesh(2, names=("data",))
    model, _ = pair(MLP, mesh=mesh)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh is mesh or parameter.device_mesh == mesh


@distributed(4)
def test_a_mesh_of_a_part_of_the_world() -> None:
    """Two separate trainings, of two ranks each."""
    mesh = cached_mesh(2, 2, names=("copy", "data"))["data"]
    model, plain = pair(MLP, mesh=mesh)
    for step in range(2):
        batch = MLP.batch(step, dist.get_rank(), torch.float64)
        for network in (plain, model):
            MLP.loss(network, *batch).backward()
        average_gradients(plain, group=mesh.get_group())
        assert_same_gradients(model, plain, bitwise=True)
        model.zero_grad()
        plain.zero_grad()


class Odd(nn.Module):
    """Parameters given from outside, all of them used in a product with the input."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        for name, tensor in tensors.items():
            trained = tensor.is_floating_point() or tensor.is_complex()
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=trained))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        for name, parameter in self.named_parameters(recurse=False):
            y = y * (1 + parameter.to(x.dtype).sin().sum()) if name != "unused" else y
        return y


def check_odd(build: Callable[[], nn.Module]) -> None:
    """Trains without changing the dtypes that `build` gave."""
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    fully_shard(model, **gathering())
    trained = [p for p in model.parameters() if p.requires_grad]
    plain_trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, foreach=False)
    plain_optimizer = torch.optim.SGD(plain_trained, lr=0.05, foreach=False)
    case = Case("odd", build, no_units, normal_batch(4, 3))
    for step in range(3):
        run_both(case, model, plain, step, dtype=torch.float64)
        for name, parameter in plain.named_parameters():
            mine = model.get_parameter(name).grad
            assert (mine is None) == (parameter.grad is None), name
            if mine is not None and parameter.grad is not None:
                mine = whole(mine)
                assert mine.dtype == parameter.grad.dtype
                assert mine.shape == parameter.shape
                # Later, low-precision parameters may have been rounded differently.
                tolerance = 1e-10 if step == 0 and mine.dtype == torch.float64 else 2e-2
                torch.testing.assert_close(mine, parameter.grad, rtol=tolerance, atol=tolerance)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    for name, value in parameters(model).items():
        expected = plain.get_parameter(name)
        assert value.dtype == expected.dtype
        torch.testing.assert_close(value, expected.detach(), rtol=2e-2, atol=2e-2)


def build_scalar() -> nn.Module:
    return Odd(scalar=torch.tensor(0.5), other=torch.randn(4)).double()


def build_integer() -> nn.Module:
    table = torch.arange(5)
    return Odd(table=table, mask=torch.tensor([True, False, True])).double()


def build_mixed_dtypes() -> nn.Module:
    model = Odd(
        low1=torch.randn(5, 3, dtype=torch.bfloat16),
        single=torch.randn(7, dtype=torch.float32),
        wide=torch.randn(2, 2, dtype=torch.float64),
        low2=torch.randn(3, dtype=torch.float16),
    )
    model.linear.double()
    return model


def build_short() -> nn.Module:
    """Dim 0 is 1 or 2: some ranks hold no row."""
    return Odd(one=torch.randn(1, 5), two=torch.randn(2), row=torch.randn(1)).double()


def build_empty() -> nn.Module:
    return Odd(nothing=torch.randn(0, 3), other=torch.randn(3)).double()


def build_high_dims() -> nn.Module:
    return Odd(cube=torch.randn(3, 2, 4, 1, 2), deep=torch.randn(1, 1, 6)).double()


@ours_only("scalar parameters")
@distributed(1, 2, 3)
def test_scalar_parameters() -> None:
    check_odd(build_scalar)


@distributed(1, 2, 3)
def test_integer_and_bool_parameters() -> None:
    check_odd(build_integer)


@ours_only("several dtypes in one unit")
@distributed(1, 2, 3, 4)
def test_several_dtypes_in_one_unit() -> None:
    check_odd(build_mixed_dtypes)


@distributed(1, 2, 3, 4)
def test_fewer_rows_than_ranks() -> None:
    check_odd(build_short)


@distributed(1, 2, 3)
def test_parameters_of_many_dims() -> None:
    check_odd(build_high_dims)


@ours_only("parameters without elements")
@distributed(1, 2, 3)
def test_parameters_without_elements() -> None:
    check_odd(build_empty)


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


@ours_only("parameters without elements")
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 1}, {"direct_min_bytes": 0}])
@distributed(1, 2)
def test_units_without_elements(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), Nothing(), nn.Linear(3, 2))

    check_training(Case("nothing", build, children, normal_batch(4, 3)), **options)


@distributed(2)
def test_integer_parameters_are_not_cast_to_low_precision() -> None:
    seen: list[torch.dtype] = []

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ids = nn.Parameter(torch.tensor([1000001, 3]), requires_grad=False)
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            seen.extend([self.ids.dtype, self.weight.dtype])
            assert self.ids.tolist() == [1000001, 3]
            return x * self.weight

    model = fully_shard(Table(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.randn(2, 4)).sum().backward()
    assert seen == [torch.int64, torch.bfloat16]


@distributed(1, 2, 3)
def test_ignored_parameters_are_left_alone() -> None:
    torch.manual_seed(0)
    plain = MLP.build().double()
    model = copy.deepcopy(plain)
    ignored = {model[2].weight, model[0].bias}
    for unit in MLP.units(model):
        fully_shard(unit, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    assert {p for p in model.parameters() if not isinstance(p, DTensor)} == ignored
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    for network in (plain, model):
        MLP.loss(network, *batch).backward()
    local = {name: p.grad for name, p in plain.named_parameters()}
    for name in ("2.weight", "0.bias"):  # nobody reduces them
        mine, expected = model.get_parameter(name).grad, local[name]
        assert mine is not None
        assert expected is not None
        assert torch.equal(mine, expected)
    average_gradients(plain)
    for name in ("0.weight", "2.bias", "4.weight", "4.bias"):
        mine, expected = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert mine is not None
        assert expected is not None
        assert_same(mine, expected, name)


def second_dim(parameter: nn.Parameter) -> Shard | None:
    """Matrices are sharded by columns, everything else by default."""
    return Shard(1) if parameter.ndim == 2 else None


@distributed(1, 2, 3, 4)
def test_placements_chosen_by_a_function() -> None:
    model, _ = check_training(EVEN_MLP, Training(steps=3), shard_placement_fn=second_dim)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(1) if "weight" in name else Shard(0),)


@ours_only("one row of shards, and another dim than the first")
@distributed(1, 2, 4)
def test_placements_on_other_dims_of_replicas_only() -> None:
    """Each rank has whole parameters: nothing is cut."""
    mesh = cached_mesh(dist.get_world_size(), 1, names=("replicate", "shard"))
    for nbytes in (0, None):
        options: dict[str, Any] = {"mesh": mesh, "direct_min_bytes": nbytes}
        check_training(MLP, Training(steps=3), shard_placement_fn=second_dim, **options)


@ours_only("another dim than the first that the ranks do not divide")
@distributed(2, 3)
def test_placements_on_dims_that_the_ranks_do_not_divide() -> None:
    check_training(MLP, Training(steps=3), shard_placement_fn=second_dim)


@distributed(1, 2, 3)
def test_modules_without_parameters() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Identity())

    case = Case("all", build, lambda model: list(model.children()), normal_batch(4, 3))
    check_training(case, Training(steps=2))


@distributed(1, 2, 3)
def test_all_parameters_belong_to_units_below_the_root() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    check_training(Case("below", build, children, normal_batch(4, 3)), Training(steps=2))


@distributed(1, 2, 3)
def test_a_single_unit_without_submodules() -> None:
    check_training(Case("linear", lambda: nn.Linear(5, 3), no_units, normal_batch(4, 5)))


@distributed(2)
def test_hooks_of_the_user_run_with_gathered_parameters() -> None:
    """Registered before and after sharding; around the forward of a unit."""
    model = MLP.build()
    shapes: list[torch.Size] = []

    def note(module: nn.Module, *_: object) -> None:
        weight = module.get_parameter("weight")
        assert not isinstance(weight, DTensor)
        shapes.append(weight.shape)

    model[0].register_forward_hook(note)
    shard_case(MLP, model)
    model[2].register_forward_pre_hook(note)
    model(torch.randn(2, 7)).sum().backward()
    assert shapes == [torch.Size([13, 7]), torch.Size([5, 13])]
    assert_sharded(model)


@distributed(2, 3)
def test_gradient_divide_factor_of_one_unit_stays_with_it() -> None:
    """The others still divide by the number of ranks."""
    factor = 4.0 if dist.get_world_size() == 2 else 1.5
    model, plain = pair(MLP)
    layer = model[2]
    assert isinstance(layer, FSDPModule)
    layer.set_gradient_divide_factor(factor)
    run_both(MLP, model, plain, 0)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        if name.startswith("2."):
            parameter.grad *= dist.get_world_size() / factor
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
@distributed(2, 3, 4)
def test_gradient_divide_factor(factor: float) -> None:
    check_divide_factor(factor)


@ours_only("torch divides by nothing at world size 1")
@distributed(1)
def test_gradient_divide_factor_of_one_rank() -> None:
    check_divide_factor(3.0)


def check_divide_factor(factor: float) -> None:
    model, plain = pair(MLP)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    run_both(MLP, model, plain, 0, average=False)
    average_gradients(plain, divide_by=factor)
    assert_same_gradients(model, plain)


@distributed(4)
def test_gradient_divide_factor_with_replicas() -> None:
    model, plain = pair(MLP, mesh=cached_mesh(2, 2, names=("replicate", "shard")))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
    run_both(MLP, model, plain, 0, average=False)
    average_gradients(plain, divide_by=3.0)
    assert_same_gradients(model, plain)
