"""Parameters that spmd_types annotates: plain tensors that are parts of tensor-parallel ones."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from harness import cached_mesh, distributed, ours_only

pytestmark = [
    ours_only("torch before 2.15 does not read them"),
    pytest.mark.skipif(find_spec("spmd_types") is None, reason="spmd_types is not installed"),
]


class Whole(nn.Module):
    """What one process computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(12, 6))
        self.down = nn.Parameter(torch.randn(6, 12))
        self.gain = nn.Parameter(torch.rand(6))  # works on a part of the rows
        self.scale = nn.Parameter(torch.rand(6))  # works on all of them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        return (torch.relu(x @ self.up.T) @ self.down.T) * self.scale


class Sum(torch.autograd.Function):
    """Over tensor-parallel ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, in_forward: bool) -> torch.Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        x = x.clone()
        if in_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        if not ctx.in_forward:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Parallel(Whole):
    """The same by hand, on this rank's parts: matrices split as Megatron does, rows of ``gain``."""

    def __init__(self, whole: Whole, mesh: DeviceMesh) -> None:
        import spmd_types as spmd

        super().__init__()
        self.group = mesh.get_group("tp")
        self.rank, self.size = self.group.rank(), self.group.size()
        tp = spmd.MeshAxis.of(self.group)
        types = {"up": spmd.S(0), "down": spmd.S(1), "gain": spmd.R, "scale": spmd.I}
        for name, its_type in types.items():
            part = getattr(whole, name).detach()
            if isinstance(its_type, spmd.S):
                part = part.chunk(self.size, its_type.dim)[self.rank].contiguous()
            setattr(self, name, nn.Parameter(part.clone()))
            spmd.assert_type(getattr(self, name), {tp: its_type})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = torch.zeros_like(x)
        rows = slice(self.rank, None, self.size)
        mine[rows] = x[rows]
        x = Sum.apply(mine * self.gain, self.group, True)  # everybody has all rows from here on
        x = Sum.apply(x, self.group, False)
        x = Sum.apply(torch.relu(x @ self.up.T) @ self.down.T, self.group, True)
        return x * self.scale


def train(model: Any, rank: int, ranks: int, accumulate: int) -> None:
    """On every ``ranks``-th row of batches that all have."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for micro in range(accumulate):
            batch = torch.randn(8, 6, generator=generator)
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == accumulate - 1)
            model(batch[rank::ranks]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def mesh_of(*shape: int) -> tuple[DeviceMesh, DataParallelMeshDims]:
    if len(shape) == 2:
        return cached_mesh(*shape, names=("dp", "tp")), DataParallelMeshDims(shard="dp")
    names = ("replicas", "dp", "tp")
    dims = DataParallelMeshDims(shard="dp", replicate="replicas")
    return cached_mesh(*shape, names=names), dims


@distributed(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 1, 2)], ids=str)
def test_training_is_that_of_one_process(shape: tuple[int, ...], accumulate: int) -> None:
    torch.manual_seed(0)
    whole = Whole()
    mesh, dims = mesh_of(*shape)
    model: Any = Parallel(whole, mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    ranks = mesh.size() // shape[-1]
    train(model, dist.get_rank() // shape[-1], ranks, accumulate)
    train(whole, 0, 1, accumulate)
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        torch.testing.assert_close(param.full_tensor(), getattr(whole, name).detach())


@distributed(4)
def test_layout() -> None:
    """The sharded parameter is a DTensor on all dims, what computes is plain, and annotated."""
    import spmd_types as spmd

    mesh, dims = mesh_of(2, 2)
    model: Any = Parallel(Whole(), mesh)
    tp = spmd.MeshAxis.of(mesh.get_group("tp"))
    before = {name: spmd.get_local_type(p) for name, p in model.named_parameters()}
    fully_shard(
        model,
        mesh=mesh,
        dp_mesh_dims=dims,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        reshard_after_forward=False,
    )
    placements = {name: tuple(p.placements) for name, p in model.named_parameters()}
    assert placements == {
        "up": (_StridedShard(0, split_factor=2), Shard(0)),
        "down": (Shard(0), Shard(1)),
        "gain": (Shard(0), Replicate()),
        "scale": (Shard(0), Replicate()),
    }
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {"up": (12, 6), "down": (6, 12), "gain": (6,), "scale": (6,)}
    assert not any(map(spmd.get_local_type, model.parameters()))
    model.unshard()
    for name in shapes:
        param = getattr(model, name)
        assert not isinstance(param, DTensor)
        assert spmd.get_local_type(param)[tp] is before[name][tp]
        assert spmd.get_partition_spec(param) is None or name in ("up", "down")


@distributed(4)
def test_annotations_that_do_not_fit_are_refused() -> None:
    import spmd_types as spmd

    mesh, dims = mesh_of(2, 2)

    def refuse(change: Any, match: str, **options: Any) -> None:
        model: Any = Parallel(Whole(), mesh)
        change(model)
        with pytest.raises(ValueError, match=match):
            fully_shard(model, **{"mesh": mesh, "dp_mesh_dims": dims, **options})

    def annotate(name: str, types: Any) -> Any:
        def change(model: Any) -> None:
            new = nn.Parameter(getattr(model, name).detach())
            setattr(model, name, new)
            spmd.assert_type(new, types)

        return change

    dp = spmd.MeshAxis.of(mesh.get_group("dp"))
    refuse(
        annotate("gain", {dp: spmd.V}), "Expected spmd.R on FSDP DP axis .* for parameter 'gain'"
    )
    refuse(annotate("gain", {dp: spmd.R}), "'gain' has incomplete spmd_types")
    tp = spmd.MeshAxis.of(mesh.get_group("tp"))
    refuse(
        annotate("gain", {tp: spmd.V}),
        "'gain': Cannot convert plain Varying to a DTensor placement",
    )
    refuse(
        lambda model: None, "dp_mesh_dims=DataParallelMeshDims", mesh=mesh["dp"], dp_mesh_dims=None
    )


@distributed(2)
def test_types_are_checked_while_it_trains() -> None:
    """What hooks do is not checked; what modules compute is, with the types of their parameters."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = cached_mesh(2, names=("dp",))
    dp = spmd.MeshAxis.of(mesh.get_group("dp"))

    def results(check: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        for param in model.parameters():
            spmd.assert_type(param, {dp: spmd.R})
        for part in (model[0], model[2], model):
            fully_shard(part, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        for step in range(2):
            x = torch.full((3, 4), float(dist.get_rank() + step))
            with spmd.set_current_mesh(mesh), typecheck() if check else nullcontext():
                if check:
                    spmd.assert_type(x, {dp: spmd.V})
                loss = model(x).square().sum()
                if check:
                    assert spmd.get_local_type(loss)[dp] is spmd.V
                    loss = spmd.reinterpret(loss, mesh.get_group("dp"), src=spmd.V, dst=spmd.P)
                loss.backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    for checked, expected in zip(results(True), results(False), strict=True):
        assert torch.equal(checked, expected)


class Sums(nn.Module):
    """Its outputs are partial sums over the ranks, beside values of each rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        rows = x @ self.weight
        loss = rows.sum()
        return {"one": loss, "view": loss.view(1), "dict": {"loss": loss, "rows": rows}}[self.kind]


@pytest.mark.parametrize("strict", ["strict", "permissive"])
@distributed(2)
def test_units_may_return_partial_sums(strict: str) -> None:
    """What hooks do with outputs is not checked, and the output of a cast has its types."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    mesh = cached_mesh(2, names=("dp",))
    dp = spmd.MeshAxis.of(mesh.get_group("dp"))
    bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    options: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    for kind in ("one", "view", "dict"):
        for policy in (MixedPrecisionPolicy(), bf16):
            for nested in (False, True):
                model: nn.Module = Sums(kind)
                spmd.assert_type(model.weight, {dp: spmd.R})
                fully_shard(model, mp_policy=policy, **options)
                if nested:
                    model = fully_shard(nn.Sequential(model), mp_policy=policy, **options)
                x = torch.full((3, 4), 1.0 + dist.get_rank(), requires_grad=nested)
                with (
                    spmd.set_current_mesh(mesh),
                    typecheck(strict_mode=strict, local=False),
                ):
                    of_rows = spmd.PartitionSpec(dp, None)
                    spmd.assert_type(x, {dp: spmd.V}, partition_spec=of_rows)
                    output = model(x)
                    loss = output["loss"] if kind == "dict" else output
                    assert spmd.get_local_type(loss)[dp] is spmd.P
                loss.sum().backward()
                (weight,) = model.parameters()
                # Each rank's gradient is 3 times its input; they are averaged.
                assert torch.equal(weight.grad.full_tensor(), torch.full((4, 4), 4.5))  # type: ignore[union-attr]
