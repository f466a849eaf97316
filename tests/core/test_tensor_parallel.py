"""Parameters that tensor parallelism has sharded already, on the other dim of a 2-D mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed
from reference import (
    assert_all_same,
    assert_same,
    assert_sharded,
    average_gradients,
    gathering,
    gradients,
    parameters,
)

SHAPES = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(1, 3), (3, 1)], 4: [(2, 2), (4, 1), (1, 4)]}


class Mlp(nn.Module):
    """Column-wise, then row-wise; the biases too."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(dim))
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    """Two tensor-parallel blocks between layers that are not tensor-parallel."""

    def __init__(self, dim: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Mlp(dim, hidden) for _ in range(2))
        self.last = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PLAN: dict[str, Any] = {
    "norm": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
    "norm.0": SequenceParallel(sequence_dim=1),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
}


def build_pair(
    mesh: DeviceMesh,
    *,
    plan: dict[str, Any] | None = None,
    dim: int = 12,
    hidden: int = 24,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """The sharded model on a mesh of data x tensor, and the plain one with the same weights."""
    torch.manual_seed(0)
    plain = Model(dim, hidden).double()
    model = copy.deepcopy(plain)
    data, tensor = mesh["data"], mesh["tensor"]
    options = {**gathering(), **options}
    for block in model.blocks:
        parallelize_module(block, tensor, plan or PLAN)
        fully_shard(block, mesh=data, **options)
    fully_shard(model, mesh=data, **options)
    return model, plain


def batch_of(mesh: DeviceMesh, step: int) -> Tensor:
    """The same on all ranks that share tensors."""
    seed = 100 * step + mesh.get_local_rank("data")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 12, 5, generator=generator, dtype=torch.float64)


def step_both(
    mesh: DeviceMesh, model: nn.Module, plain: nn.Module, step: int, average: bool = True
) -> None:
    inputs = batch_of(mesh, step)
    expected = plain(inputs).square().mean()
    expected.backward()
    if average:
        average_gradients(plain, group=mesh.get_group("data"))
    loss = model(inputs).square().mean()
    assert_same(loss, expected, f"loss of step {step}")
    loss.backward()


def meshes() -> list[DeviceMesh]:
    names = ("data", "tensor")
    return [cached_mesh(*shape, names=names) for shape in SHAPES[dist.get_world_size()]]


def train(mesh: DeviceMesh, **options: Any) -> None:
    model, plain = build_pair(mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    assert_all_same(parameters(model), parameters(plain), "parameter", bitwise=True)
    for step in range(3):
        step_both(mesh, model, plain, step)
        assert_sharded(model)
        assert_all_same(gradients(model), gradients(plain), "gradient")
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_all_same(parameters(model), parameters(plain), "parameter")


@pytest.mark.parametrize("mode", [None, False])
@distributed(4, long=(1, 2, 3))
def test_colwise_and_rowwise(mode: bool | None) -> None:
    for mesh in meshes():
        train(mesh, reshard_after_forward=mode)


@pytest.mark.long
@distributed(8)
def test_resharding_to_fewer_data_ranks() -> None:
    """Between forward and backward two of four data-parallel ranks keep all; torch refuses it."""
    train(cached_mesh(4, 2, names=("data", "tensor")), reshard_after_forward=2)


@distributed(2, 4)
def test_sequence_parallel_norms() -> None:
    """Their gradients are partial sums over the tensor dim."""
    for mesh in meshes():
        train(mesh, plan=SEQUENCE_PLAN)


@distributed(4)
def test_dims_that_data_parallelism_does_not_divide() -> None:
    """Tensor parallelism leaves 5 rows, or 7 rows of 5, to two data-parallel ranks."""
    train(cached_mesh(2, 2, names=("data", "tensor")), dim=7, hidden=10)


@distributed(4)
def test_layout() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    model, plain = build_pair(mesh)
    up = model.get_parameter("blocks.0.up.weight")
    down = model.get_parameter("blocks.0.down.weight")
    first = model.get_parameter("first.weight")
    for parameter in (up, down, first):
        assert isinstance(parameter, DTensor)
    assert isinstance(up, DTensor)
    assert up.device_mesh.ndim == 2
    assert isinstance(down, DTensor)
    assert down.placements == (Shard(0), Shard(1))
    assert isinstance(first, DTensor)
    assert first.placements == (Shard(0),)
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    # Column-wise shards the rows first over tensor, then over data.
    rows = plain.get_parameter("blocks.0.up.weight").chunk(2)[tensor].chunk(2)[data]
    assert torch.equal(up.to_local(), rows)
    part = plain.get_parameter("blocks.0.down.weight").chunk(2, 1)[tensor].chunk(2, 0)[data]
    assert torch.equal(down.to_local(), part)


@pytest.mark.parametrize("every_time", [True, False])
@distributed(4)
def test_accumulation(every_time: bool) -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    model, plain = build_pair(mesh, plan=SEQUENCE_PLAN)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        reduce = every_time or step == 2
        model.set_requires_gradient_sync(reduce)
        step_both(mesh, model, plain, step, average=reduce)
    assert_all_same(gradients(model), gradients(plain), "gradient")


@distributed(4)
def test_unshard_by_hand_gives_tensor_parallel_parameters() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    model, plain = build_pair(mesh)
    block = model.get_submodule("blocks.0")
    assert isinstance(block, FSDPModule)
    block.unshard()
    up = block.get_parameter("up.weight")
    assert isinstance(up, DTensor)
    assert up.device_mesh.ndim == 1
    assert up.placements == (Shard(0),)
    assert torch.equal(up.full_tensor(), plain.get_parameter("blocks.0.up.weight"))
    block.reshard()
    up = block.get_parameter("up.weight")
    assert isinstance(up, DTensor)
    assert up.device_mesh.ndim == 2


@distributed(4)
def test_state_dict_round_trip() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    model, plain = build_pair(mesh)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = plain(batch_of(mesh, 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert_same(model(batch_of(mesh, 0)), expected, "output after loading")


@distributed(4)
def test_hybrid_sharding_with_tensor_parallelism() -> None:
    """Replicate x shard x tensor: of four ranks, one of the dims has one rank."""
    for shape in [(2, 1, 2), (1, 2, 2)]:
        mesh = cached_mesh(*shape, names=("replicate", "shard", "tensor"))
        torch.manual_seed(0)
        plain = Model().double()
        model = copy.deepcopy(plain)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], PLAN)
            fully_shard(block, mesh=mesh["replicate", "shard"])
        fully_shard(model, mesh=mesh["replicate", "shard"])
        rank = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("shard")
        generator = torch.Generator().manual_seed(rank)
        inputs = torch.randn(4, 12, 5, generator=generator, dtype=torch.float64)
        for network in (plain, model):
            network(inputs).square().mean().backward()
        # Over all ranks: those that share tensors have the same batch, and count twice alike.
        average_gradients(plain)
        assert_all_same(gradients(model), gradients(plain), "gradient")


@distributed(4)
def test_mixed_precision() -> None:
    """Within bf16 rounding of the plain model: partial sums over the tensor dim are in bf16."""
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, plain = build_pair(mesh, mp_policy=policy)
    inputs = batch_of(mesh, 0)
    output = model(inputs)
    assert output.dtype == torch.bfloat16
    output.double().square().mean().backward()
    plain(inputs).square().mean().backward()
    average_gradients(plain, group=mesh.get_group("data"))
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert isinstance(parameter.grad, DTensor)
        assert expected is not None
        assert parameter.grad.dtype == torch.float64
        difference = (parameter.grad.full_tensor() - expected).abs().max()
        assert difference <= 0.05 * expected.abs().max(), name


class Chain(nn.Module):
    """Takes and returns DTensors, sharded by sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


@distributed(4)
def test_inputs_and_outputs_that_are_dtensors() -> None:
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    plain = Chain().double()
    model = copy.deepcopy(plain)
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    inputs = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    expected = plain(inputs)
    expected.square().mean().backward()
    average_gradients(plain, group=mesh.get_group("data"))
    mine = inputs.chunk(2, 1)[mesh.get_local_rank("tensor")]
    output = model(DTensor.from_local(mine, mesh["tensor"], [Shard(1)]))
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(1),)
    assert_same(output, expected, "output")
    output.full_tensor().square().mean().backward()
    assert_all_same(gradients(model), gradients(plain), "gradient")
