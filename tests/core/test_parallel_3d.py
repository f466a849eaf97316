"""Meshes of three dims: replicas x shards x tensor parallelism, and the sequence cut in parts.

Eight ranks, 2 x 2 x 2, run in the long tests; on four, one of the dims has one rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import llama
from fsdp2 import DataParallelMeshDims, FSDPModule, fully_shard
from harness import cached_mesh, distributed, ours_only
from llama import EVEN, ODD, Llama, Sizes, loss_of, losses_in_parallel, shard_units, token_batch
from reference import assert_all_same, assert_same, average_gradients, gathering, whole

NAMES = ("replicate", "shard", "tensor")


# DTensors over three mesh dims are slow to work out, once for each shape.
SMALL, SMALL_ODD = replace(EVEN, num_layers=1), replace(ODD, num_layers=1)


def meshes() -> list[DeviceMesh]:
    shapes = {4: [(2, 1, 2), (1, 2, 2)], 8: [(2, 2, 2)]}
    return [cached_mesh(*shape, names=NAMES) for shape in shapes[dist.get_world_size()]]


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks with different batches, in the order of `data_rank`."""
    return mesh["replicate", "shard"]._flatten("data").get_group()


def data_rank(mesh: DeviceMesh) -> int:
    return mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")


def named(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor | None]:
    values = [(n, p.grad if gradients else p) for n, p in model.named_parameters()]
    return {name: None if value is None else whole(value) for name, value in values}


def sgd(*models: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in models]


def step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------- replicas x shards x tensor


def check_three_dims(mesh: DeviceMesh, sizes: Sizes, *, accumulate: bool = False) -> None:
    torch.manual_seed(0)
    plain = Llama(sizes).double()
    model = copy.deepcopy(plain)
    llama.tensor_parallel(model, mesh["tensor"], local_hidden=sizes is SMALL)
    shard_units(fully_shard, model, mesh=mesh["replicate", "shard"], **gathering())
    assert isinstance(model, FSDPModule)
    strided = (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    weight = model.get_parameter("layers.0.feed_forward.w1.weight")
    assert isinstance(weight, DTensor)
    assert weight.placements == strided
    assert weight.device_mesh.mesh_dim_names == NAMES
    optimizers = sgd(model, plain)
    for i in range(5):
        reduces = not accumulate or i % 2 == 1
        model.set_requires_all_reduce(reduces)
        batch = token_batch(i, data_rank(mesh), sizes)
        expected = loss_of(plain, batch)
        expected.backward()
        with losses_in_parallel(True):
            loss = loss_of(model, batch)
            loss.backward()
        assert_same(whole(loss), expected, f"loss of step {i}")
        if reduces:
            average_gradients(plain, group=data_group(mesh))
            assert_all_same(named(model, gradients=True), named(plain, gradients=True), "gradient")
            step(*optimizers)
    assert_all_same(named(model), named(plain), "parameter")


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SMALL, marks=pytest.mark.long), SMALL_ODD],
    ids=["even", "odd"],
)
@ours_only("torch refuses dims that do not divide")
@distributed(4, long=(8,))
def test_hybrid_sharding_with_tensor_parallelism(sizes: Sizes) -> None:
    for mesh in meshes():
        check_three_dims(mesh, sizes)


@distributed(long=(4, 8))
def test_accumulation_without_all_reduce() -> None:
    """Partial sums over tensor-parallel ranks, of micro-batches that were reduce-scattered only."""
    for mesh in meshes():
        check_three_dims(mesh, SMALL, accumulate=True)


# ------------------------------------------------------------------------- the whole mesh named


class Layer(nn.Module):
    """Two matrices, which compute on DTensors of the whole mesh."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(self.w1(x).tanh())


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Over the last mesh dim by columns and rows; replicated over the others."""
    for name, parameter in list(model.named_parameters()):
        over_tensor: Placement = Replicate()
        if name.endswith("w1.weight"):
            over_tensor = Shard(0)
        elif name.endswith("w2.weight"):
            over_tensor = Shard(1)
        placements = [*[Replicate()] * (mesh.ndim - 1), over_tensor]
        owner, _, attribute = name.rpartition(".")
        value = distribute_tensor(parameter.detach(), mesh, placements)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(value))


@distributed(4, long=(8,), timeout_s=300.0)  # torch takes long to work out how to lay them out
def test_all_dims_of_the_mesh_named() -> None:
    """The batch is sharded over the data-parallel dims of the same mesh; one loss for all ranks."""
    if dist.get_world_size() == 4:
        mesh, dims = cached_mesh(2, 2, names=NAMES[1:]), DataParallelMeshDims(shard="shard")
    else:
        (mesh,) = meshes()
        dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(8, 12), Layer(8, 12)).double()
    model = copy.deepcopy(plain)
    distribute(model, mesh)
    for layer in model:
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims, **gathering())
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, **gathering())
    optimizers = sgd(model, plain)
    for i in range(5):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(4, 8, generator=generator, dtype=torch.float64)
        given = distribute_tensor(x, mesh, [*[Shard(0)] * (mesh.ndim - 1), Replicate()])
        loss, expected = model(given).square().sum(), plain(x).square().sum()
        assert_same(whole(loss), expected, f"loss of step {i}")
        loss.backward()
        # Gradients are means over data-parallel ranks, of sums over parts of the batch.
        (expected / (mesh.size() // 2)).backward()
        assert_all_same(named(model, gradients=True), named(plain, gradients=True), "gradient")
        step(*optimizers)
    assert_all_same(named(model), named(plain), "parameter")


# ------------------------------------------------------------------------------ context parallel


@contextmanager
def sequence_over(mesh: DeviceMesh, *buffers: Tensor) -> Iterator[None]:
    """torch's `context_parallel`: cuts dim 1 of `buffers` in place, head and tail of the sequence
    to the same rank, and attention goes around a ring; in the kernel that the CPU has."""
    from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options

    from ring_attention import RingAttention

    def attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        assert is_causal
        return RingAttention.apply(mesh.get_group(), q, k, v)  # type: ignore[no-any-return]

    in_float32, _cp_options.convert_to_f32 = _cp_options.convert_to_f32, False
    try:
        with context_parallel(mesh, buffers=[*buffers], buffer_seq_dims=[1] * len(buffers)):
            patched, F.scaled_dot_product_attention = F.scaled_dot_product_attention, attention
            yield
            F.scaled_dot_product_attention = patched
    finally:
        _cp_options.convert_to_f32 = in_float32


def check_context_parallel(mesh: DeviceMesh, recompute: bool, **options: Any) -> None:
    """Sharded over data and sequence parts together; mesh: data x sequence x tensor."""
    torch.manual_seed(0)
    plain = Llama().double()
    model = copy.deepcopy(plain)
    tensor_parallel = mesh["tensor"].size() > 1
    if tensor_parallel:
        llama.tensor_parallel(model, mesh["tensor"])
    if recompute:
        llama.recompute_activations(model)
    shards = mesh["data", "sequence"]._flatten("data_sequence")
    shard_units(fully_shard, model, mesh=shards, **{**gathering(), **options})
    optimizers = sgd(model, plain)
    for i in range(5):
        tokens, targets = token_batch(i, mesh.get_local_rank("data"))
        expected = loss_of(plain, torch.stack((tokens, targets)))
        expected.backward()
        average_gradients(plain, group=mesh.get_group("data"))
        parts = tokens.clone(), targets.clone()
        with sequence_over(mesh["sequence"], *parts), losses_in_parallel(tensor_parallel):
            assert parts[0].shape[1] == tokens.shape[1] // mesh["sequence"].size()
            loss = loss_of(model, torch.stack(parts))
            loss.backward()
        total = whole(loss)
        dist.all_reduce(total, group=mesh.get_group("sequence"))
        assert_same(total / mesh["sequence"].size(), expected, f"loss of step {i}")
        actual = {
            name.replace("_checkpoint_wrapped_module.", ""): value
            for name, value in named(model, gradients=True).items()
        }
        assert_all_same(actual, named(plain, gradients=True), "gradient")
        step(*optimizers)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"])
@distributed(4, long=(2,))
def test_context_parallel(recompute: bool) -> None:
    """Every rank has a part of each sequence, and a part of the parameters."""
    shape = (dist.get_world_size() // 2, 2, 1)
    mesh = cached_mesh(*shape, names=("data", "sequence", "tensor"))
    check_context_parallel(mesh, recompute, reshard_after_forward=True)


@distributed(4, long=(8,))
def test_context_and_tensor_parallel() -> None:
    shape = (dist.get_world_size() // 4, 2, 2)
    check_context_parallel(cached_mesh(*shape, names=("data", "sequence", "tensor")), False)
