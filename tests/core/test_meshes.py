"""Parameters on meshes of their own, and named dims of a mesh that has other dims too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsdp2 import DataParallelMeshDims, ShardPlacementResult, fully_shard
from harness import cached_mesh, distributed, ours_only
from models import MLP
from reference import (
    Training,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    check_training,
    gathering,
    pair,
    run_both,
    whole,
)

# ----------------------------------------------------------------- a mesh of a parameter's own


class Experts(nn.Module):
    """A dense layer for all ranks, and experts: these data ranks share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.experts = nn.Parameter(torch.randn(5, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return torch.einsum("bi,eij->bj", x, self.experts)


def average(tensor: Tensor, group: Any) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


@ours_only("torch's result type is private")
@pytest.mark.parametrize("mode", [True, False, 2])
@distributed(4)
def test_a_parameter_on_another_mesh(mode: bool | int) -> None:
    """It is sharded and its gradient averaged over that mesh only; the others over all ranks."""
    mesh = cached_mesh(4, names=("dp",))
    small = cached_mesh(2, 2, names=("ep", "edp"))["edp"]
    torch.manual_seed(0)
    plain = Experts().double()
    model = copy.deepcopy(plain)
    experts = model.experts

    def place(param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(Shard(1), small) if param is experts else None

    fully_shard(
        model, mesh=mesh, shard_placement_fn=place, reshard_after_forward=mode, **gathering()
    )
    assert model.experts.device_mesh == small
    assert model.experts.placements == (Shard(1),)
    assert model.dense.weight.device_mesh == mesh
    for step in range(3):
        x = torch.full((3, 6), 0.1 * step + dist.get_rank(), dtype=torch.float64).sin()
        loss, expected = model(x).square().sum(), plain(x).square().sum()
        assert_same(loss, expected, "loss")
        loss.backward()
        expected.backward()
        grads = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            group = small.get_group() if name == "experts" else mesh.get_group()
            grad = grads[name].grad
            assert grad is not None
            assert_same(whole(parameter.grad), average(grad, group), name)
        model.zero_grad()
        plain.zero_grad()


@ours_only("torch's result type is private")
@distributed(4)
def test_a_replicated_mesh_for_one_parameter() -> None:
    """Sharded over two ranks and replicated over two, beside others sharded over four."""
    mesh = cached_mesh(4, names=("dp",))
    hybrid = cached_mesh(2, 2, names=("replicate", "shard"))
    model, plain = pair(
        MLP,
        mesh=mesh,
        shard_placement_fn=lambda p: ShardPlacementResult(None, hybrid) if p.ndim > 1 else None,
    )
    for step in range(2):
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert model[0].bias.placements == (Shard(0),)


@ours_only("torch's result type is private")
@distributed(4)
def test_results_that_hold_torchs_description_of_a_mesh() -> None:
    """`ShardPlacementResult` with ``mesh_info``, torch's own and ours."""
    mesh = cached_mesh(4, names=("dp",))
    small = cached_mesh(2, 2, names=("ep", "edp"))["edp"]
    info = FSDPMeshInfo(small, shard_mesh_dim=0)
    results: list[Any] = [
        ShardPlacementResult(placement=Shard(1), mesh_info=info),
        ShardPlacementResult(Shard(1), info),
    ]
    if hasattr(torch_common, "ShardPlacementResult"):  # torch 2.12
        results.append(torch_common.ShardPlacementResult(placement=Shard(1), mesh_info=info))
    for result in results:
        model = nn.Linear(4, 4)
        fully_shard(
            model, mesh=mesh, shard_placement_fn=lambda p, r=result: r if p.ndim > 1 else None
        )
        assert model.weight.device_mesh == small
        assert model.weight.placements == (Shard(1),)
        assert model.bias.device_mesh == mesh
        model(torch.ones(1, 4)).sum().backward()
        assert whole(model.weight.grad).eq(1).all()


@ours_only("torch's result type is private")
@distributed(4)
def test_what_is_ambiguous_with_several_meshes_is_refused() -> None:
    small = cached_mesh(2, 2, names=("ep", "edp"))["edp"]
    model = fully_shard(
        nn.Linear(4, 4),
        mesh=cached_mesh(4, names=("dp",)),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), small) if p.ndim > 1 else None,
    )
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
        with pytest.raises(ValueError, match=f"{method} is not supported"):
            getattr(model, method)(lambda *_: None)


@distributed(2)
def test_placements_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="shard_placement_fn"):
        fully_shard(nn.Linear(4, 4), shard_placement_fn=lambda _: 0)  # type: ignore[arg-type,return-value]


# --------------------------------------------------------------------------- named mesh dims


@distributed(4)
def test_named_dims_of_a_larger_mesh() -> None:
    """Data parallel over two ranks of four; the other two have other data in this test."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    model = nn.Linear(6, 5).double()
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert model.weight.device_mesh == mesh["dp"]
    model(torch.full((1, 6), 1.0 + dist.get_rank(), dtype=torch.float64)).sum().backward()
    ranks = [r for r in range(4) if r % 2 == dist.get_rank() % 2]
    mean = sum(1.0 + r for r in ranks) / 2
    assert torch.equal(whole(model.weight.grad), torch.full((5, 6), mean, dtype=torch.float64))


test_named_dims_of_a_larger_mesh = ours_only("torch wants DTensors there")(
    test_named_dims_of_a_larger_mesh
)


@distributed(4)
def test_all_dims_named() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    check_training(MLP, Training(steps=2), mesh=mesh, dp_mesh_dims=dims)
    dims = DataParallelMeshDims(shard=("replicate", "shard"))
    model, _ = check_training(MLP, Training(steps=2), mesh=mesh, dp_mesh_dims=dims)
    assert model[0].weight.device_mesh.shape == (4,)  # type: ignore[union-attr]


test_all_dims_named = ours_only("torch wants DTensors there")(test_all_dims_named)


class Parallel(nn.Module):
    """A column-wise and a row-wise layer of DTensors on the whole mesh."""

    def __init__(self, mesh: Any, plain: nn.ModuleList) -> None:
        super().__init__()
        self.mesh = mesh
        placements = [(Replicate(), Shard(0)), (Replicate(), Shard(1))]
        for i, (layer, placement) in enumerate(zip(plain, placements, strict=True)):
            weight = distribute_tensor(layer.weight.detach(), mesh, placement)  # type: ignore[arg-type,union-attr]
            setattr(self, f"weight{i}", nn.Parameter(weight))

    def forward(self, x: DTensor) -> DTensor:
        return torch.tanh(x @ self.weight0.t()) @ self.weight1.t()


@pytest.mark.parametrize("gradient", ["partial", "replicated"])
@distributed(4)
def test_parameters_that_are_dtensors_on_the_whole_mesh(gradient: str) -> None:
    """They compute as DTensors on the whole mesh, with inputs on it, sharded over the batch."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2)).double()
    model = Parallel(mesh, plain)
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    assert isinstance(model.weight0, DTensor)
    assert model.weight0.device_mesh.size() == 4
    assert_same(whole(model.weight0), plain[0].weight.detach(), "weight")
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()
    split = Shard(0) if gradient == "partial" else Replicate()
    given = distribute_tensor(x, mesh, [split, Replicate()])
    loss = model(given).square().sum()
    loss.backward()
    expected = (torch.tanh(x @ plain[0].weight.t()) @ plain[1].weight.t()).square().sum()
    expected.backward()
    assert_same(loss.full_tensor(), expected, "loss")  # type: ignore[attr-defined]
    # The mean over data ranks: of halves of the sum, or of the whole twice.
    factor = 0.5 if gradient == "partial" else 1.0
    for i in range(2):
        grad = getattr(model, f"weight{i}").grad
        assert_same(whole(grad), plain[i].weight.grad * factor, f"gradient {i}")  # type: ignore[operator]


@distributed(4)
def test_dtensors_that_are_not_replicated_over_data_ranks() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)] * 2))
    with pytest.raises(ValueError, match="Replicate"):
        fully_shard(layer, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


@distributed(2)
def test_names_that_are_not_there() -> None:
    mesh = cached_mesh(2, names=("dp",))
    with pytest.raises(ValueError, match="'shards' not found"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shards"))
    with pytest.raises(ValueError, match="At least one of shard or replicate"):
        DataParallelMeshDims()


@distributed(4)
def test_replicated_only() -> None:
    """No dim to shard over: plain data parallelism, with whole parameters on every rank."""
    mesh = cached_mesh(4, names=("dp",))
    model, plain = pair(MLP, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"))
    for step in range(2):
        run_both(MLP, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    assert_same_parameters(model, plain)
    assert all(p.to_local().shape == p.shape for p in model.parameters())


test_replicated_only = ours_only("torch wants DTensors there")(test_replicated_only)
