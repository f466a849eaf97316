"""Clipping of sharded gradients equals clipping of whole ones, by torch's functions and ours."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Partial

import fsdp2
from fsdp2 import CPUOffloadPolicy, fully_shard
from harness import cached_mesh, cpu_only, distributed, ours_only
from models import BY_NAME, LORA, MLP, TRANSFORMER
from reference import (
    assert_all_same,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    average_gradients,
    gradients,
    pair,
    run_both,
)


def full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# torch's largest norm of several tensors does not take empty ones, which ranks of `mlp` have.
MODELS_AND_NORMS = [
    *((name, norm) for name in ("mlp", "transformer", "conditional") for norm in (1.0, 2.0, 3.5)),
    ("transformer", math.inf),
    ("even_mlp", math.inf),
]


@pytest.mark.parametrize(("name", "norm_type"), MODELS_AND_NORMS)
@distributed(3, long=(1, 2))
def test_norm_and_clipped_gradients(name: str, norm_type: float) -> None:
    case = BY_NAME[name]
    model, plain = pair(case)
    for step, limit in enumerate([1e-3, 1e3]):
        run_both(case, model, plain, step)
        norms = [
            torch.nn.utils.clip_grad_norm_(network.parameters(), limit, norm_type)
            for network in (model, plain)
        ]
        assert_same(full(norms[0]), norms[1], "norm")
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("foreach", [True, False])
@distributed(2, 4)
def test_hybrid_sharding(foreach: bool) -> None:
    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    model, plain = pair(MLP, mesh=cached_mesh(*shape, names=("replicate", "shard")))
    run_both(MLP, model, plain, 0)
    norms = [
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3, foreach=foreach)
        for network in (model, plain)
    ]
    assert_same(full(norms[0]), norms[1], "norm")
    assert_same_gradients(model, plain)


@distributed(1, 2, 3)
def test_training_with_clipping() -> None:
    for case in (MLP, LORA):
        model, plain = pair(case)
        optimizers = {
            network: torch.optim.AdamW([p for p in network.parameters() if p.requires_grad])
            for network in (model, plain)
        }
        for step in range(4):
            run_both(case, model, plain, step)
            for network, optimizer in optimizers.items():
                torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name)
            assert isinstance(parameter, DTensor)
            # AdamW divides by the root of a running square: fp64 keeps 8 digits at least.
            torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-8, atol=1e-8)


@distributed(2)
def test_a_gradient_that_is_not_finite_is_noticed() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    weight = model.get_parameter("0.weight")
    assert isinstance(weight.grad, DTensor)
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = math.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def tensor_parallel_pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    """After backward, with averaged gradients: the model on data x tensor ranks, the plain one."""
    mesh = cached_mesh(2, 2, names=("data", "tensor"))
    torch.manual_seed(0)
    up, down = nn.Linear(8, 16, **options), nn.Linear(16, 8, **options)
    plain = nn.Sequential(up, nn.Tanh(), down).double()
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    inputs = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    for network in (plain, model):
        network(inputs).square().mean().backward()
    average_gradients(plain, group=mesh.get_group("data"))
    return model, plain


@distributed(4)
def test_tensor_parallel_gradients() -> None:
    """All parameters are sharded over both mesh dims."""
    model, plain = tensor_parallel_pair(bias=False)
    norms = [
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1e-3) for network in (model, plain)
    ]
    assert_same(full(norms[0]), norms[1], "norm")
    assert_all_same(gradients(model), gradients(plain), "gradient")


@distributed(1, 2, 3)
def test_clipping_by_value() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    for network in (model, plain):
        torch.nn.utils.clip_grad_value_(network.parameters(), 1e-3)
    assert_same_gradients(model, plain)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (model, plain)]
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(model, plain)


# ------------------------------------------------------------------------------------- ours

ORDERS = [2.0, 1.0, 3.5, math.inf, -math.inf, 0.0]


def check_clip(
    model: nn.Module, plain: nn.Module, limit: float, order: float, **options: Any
) -> Tensor:
    """Clips both, compares norms and gradients; returns ours, which all ranks agree on."""
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, order)
    norm = fsdp2.clip_grad_norm_(model.parameters(), limit, order, **options)
    assert_same(check_norm(norm), expected, "norm")
    assert_all_same(gradients(model), gradients(plain), "gradient")
    return norm


def check_norm(norm: Tensor) -> Tensor:
    """A plain 0-dim tensor, bitwise the same on all ranks."""
    assert type(norm) is Tensor
    assert norm.ndim == 0
    everywhere = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, norm)
    assert all(torch.equal(each, norm) for each in everywhere)
    return norm


@contextmanager
def counted_all_reduces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many elements each all-reduce in the block has."""
    numels: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numels.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield numels


@ours_only("a norm that is a plain tensor")
@pytest.mark.parametrize("order", ORDERS)
@distributed(2, 3)
def test_every_order_of_the_norm(order: float) -> None:
    """Also with empty shards, and parameters without a gradient."""
    for name in ("mlp", "transformer", "conditional"):
        model, plain = pair(BY_NAME[name])
        for step, limit in enumerate([1e-3, 1e3]):
            run_both(BY_NAME[name], model, plain, step)
            check_clip(model, plain, limit, order, foreach=[None, True][step])


@ours_only("a norm that is a plain tensor")
@distributed(2, 4)
def test_replicas_and_offloaded_gradients() -> None:
    shape = (2, 1) if dist.get_world_size() == 2 else (2, 2)
    mesh = cached_mesh(*shape, names=("replicate", "shard"))
    for options in ({"mesh": mesh}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        for order in (2.0, 0.0, math.inf):
            model, plain = pair(MLP, **options)
            run_both(MLP, model, plain, 0)
            check_clip(model, plain, 1e-3, order, foreach=False)


@ours_only("a norm that is a plain tensor")
@distributed(4)
def test_tensor_parallel_and_other_gradients_together() -> None:
    """A bias is sharded over data ranks only; weights are strided, or cut by columns too."""
    for order in ORDERS:
        model, plain = tensor_parallel_pair()
        check_clip(model, plain, 1e-3, order)


class Spread:
    """Gradients of all kinds on 4 ranks, and the whole tensors that they are parts of."""

    def __init__(self) -> None:
        flat = cached_mesh(4)
        grid = cached_mesh(2, 2, names=("a", "b"))
        self.grid = grid
        generator = torch.Generator().manual_seed(3)
        kinds: list[tuple[DeviceMesh | None, Any]] = [
            (flat, [Shard(0)]),
            (grid["b"], [Shard(0)]),
            (grid, [Shard(0), Shard(1)]),
            (None, None),
            (grid, [Replicate(), Shard(0)]),
            (grid, [Shard(1), Replicate()]),
            (flat, [Replicate()]),
            (grid, [Shard(1), Shard(0)]),
            (flat, [Shard(1)]),
            (grid["a"], [Shard(0)]),
        ]
        self.wholes = [
            torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in (*kinds, 0, 0)
        ]
        self.parts: list[Tensor] = []
        for whole, (mesh, placements) in zip(self.wholes[:-2], kinds, strict=True):
            if mesh is None:
                self.parts.append(whole.clone())
            else:
                part = distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
                self.parts.append(part)
        # Partial sums: whole on one rank of the mesh dim, nothing on the others.
        first = flat.get_local_rank() == 0
        summed = self.wholes[-2] * first
        self.parts.append(DTensor.from_local(summed, flat, [Partial()], run_check=False))
        half = distribute_tensor(self.wholes[-1].clone(), grid["b"], [Shard(1)], src_data_rank=None)
        summed = half.to_local() * (grid.get_local_rank("a") == 0)
        shape = self.wholes[-1].shape
        self.parts.append(
            DTensor.from_local(
                summed, grid, [Partial(), Shard(1)], run_check=False, shape=shape, stride=(5, 1)
            )
        )


@ours_only("several meshes")
@pytest.mark.parametrize("order", ORDERS)
@distributed(4)
def test_any_mix_of_meshes_and_placements(order: float) -> None:
    """In several orders of the tensors; each element counts once."""
    spread = Spread()
    indices = range(len(spread.parts))
    for chosen in (indices, reversed(indices), range(0, 12, 2), range(1, 12, 2), [11], [3], [5, 7]):
        chosen = list(chosen)
        wholes = [spread.wholes[i].clone() for i in chosen]
        expected = torch.nn.utils.get_total_norm(wholes, order)
        norm = fsdp2.optim.get_total_norm([spread.parts[i] for i in chosen], order)
        assert_same(check_norm(norm), expected, f"norm of {chosen}")


@ours_only("messages")
def test_a_module_in_place_of_its_parameters_is_named() -> None:
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        words = rf"Clipping got the module {type(model).__name__}: pass model\.parameters\(\)"
        with pytest.raises(TypeError, match=words):
            fsdp2.clip_grad_norm_(model, 1.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"get_total_norm got the module .*: pass \[p\."):
            fsdp2.optim.get_total_norm(model)  # type: ignore[arg-type]


@ours_only("several meshes")
@distributed(4)
def test_clipping_on_any_mix_of_meshes() -> None:
    spread = Spread()
    params = [nn.Parameter(torch.zeros_like(part)) for part in spread.parts]
    for param, part in zip(params, spread.parts, strict=True):
        param.grad = part
    norm = fsdp2.clip_grad_norm_(params, 1.0)
    expected = torch.nn.utils.get_total_norm(spread.wholes)
    assert_same(norm, expected, "norm")
    for whole, part in zip(spread.wholes, spread.parts, strict=True):
        assert_same(full(part), whole / (expected + 1e-6), "gradient")


@ours_only("pp_mesh")
@pytest.mark.parametrize("order", [2.0, 0.0, math.inf])
@distributed(4)
def test_pipeline_stages(order: float) -> None:
    """Each pair of ranks has a stage of its own; one has no gradients at all."""
    mesh = cached_mesh(2, 2, names=("stage", "data"))
    torch.manual_seed(0)
    stages = [[torch.randn(3, 5).double(), torch.randn(7).double()] for _ in range(2)]
    mine = mesh.get_local_rank("stage")
    for stages_with_gradients in ([0, 1], [1]):
        params = []
        for tensor in stages[mine]:
            part = distribute_tensor(tensor.clone(), mesh["data"], [Shard(0)], src_data_rank=None)
            params.append(nn.Parameter(torch.zeros_like(part)))
            params[-1].grad = part if mine in stages_with_gradients else None
        given = [t for i in stages_with_gradients for t in stages[i]]
        expected = torch.nn.utils.get_total_norm(given, order)
        for pp_mesh in (mesh["stage"], mesh.get_group("stage")):
            norm = fsdp2.clip_grad_norm_(params, 1e3, order, pp_mesh=pp_mesh)
            assert_same(check_norm(norm).double(), expected, "norm")
    with pytest.raises(ValueError, match="one dim"):
        fsdp2.clip_grad_norm_(params, 1.0, pp_mesh=mesh)
    with pytest.raises(TypeError, match="pp_mesh must be"):
        fsdp2.clip_grad_norm_(params, 1.0, pp_mesh="stage")  # type: ignore[arg-type]


@ours_only("one all-reduce")
@distributed(4)
def test_the_number_of_all_reduces_does_not_depend_on_that_of_tensors() -> None:
    monkeypatch = pytest.MonkeyPatch()
    model, plain = pair(TRANSFORMER)
    run_both(TRANSFORMER, model, plain, 0)
    with counted_all_reduces(monkeypatch) as numels:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    assert numels == [1]
    model, _ = tensor_parallel_pair()
    with counted_all_reduces(monkeypatch) as numels:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    assert sorted(numels) == [1, 2]  # over tensor ranks what they share, over data ranks all
    shape = (2, 2)
    model, plain = pair(MLP, mesh=cached_mesh(*shape, names=("replicate", "shard")))
    run_both(MLP, model, plain, 0)
    with counted_all_reduces(monkeypatch) as numels:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    assert numels == [1]


@ours_only("gradients that only some ranks have")
@distributed(3)
def test_ranks_without_gradients_take_part() -> None:
    model, _ = pair(MLP)
    for order in (2.0, 0.0, math.inf):
        assert check_norm(fsdp2.clip_grad_norm_(model.parameters(), 1.0, order)) == 0
        for parameter in model.parameters():
            if dist.get_rank() == 1:
                parameter.grad = torch.ones_like(parameter)
        norm = check_norm(fsdp2.clip_grad_norm_(model.parameters(), 1e3, order).double())
        numels = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
        mine = torch.tensor(float(sum(numels)) if dist.get_rank() == 1 else 0.0)
        num_tensors = torch.tensor(float(sum(map(bool, numels)) if dist.get_rank() == 1 else 0.0))
        dist.all_reduce(mine)
        dist.all_reduce(num_tensors)
        expected = {2.0: mine.sqrt(), 0.0: num_tensors, math.inf: torch.tensor(1.0)}[order]
        assert_same(norm.float(), expected, "norm")
        model.zero_grad()
    assert fsdp2.optim.get_total_norm([]) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        assert fsdp2.clip_grad_norm_((p for p in ()), 1.0) == 0


@ours_only("the norm of infinite order finds what is not a number")
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("order", [2.0, math.inf])
@distributed(2)
def test_gradients_that_are_not_finite(order: float, value: float) -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    weight = model.get_parameter("0.weight")
    assert isinstance(weight.grad, DTensor)
    before = weight.grad.to_local().clone()
    if dist.get_rank() == 1:
        weight.grad.to_local()[0, 0] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        fsdp2.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
    assert torch.equal(weight.grad.to_local()[1:], before[1:])
    norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0, order)
    assert norm.isnan() if math.isnan(value) else norm.isinf()


@ours_only("norms in float32 at least")
@distributed(2)
def test_dtypes_are_mixed() -> None:
    """Low precision is measured in float32; double precision is kept."""
    mesh = cached_mesh(2)
    torch.manual_seed(0)
    wholes = [torch.randn(40, 300).to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    wholes += [torch.randn(5, 3), torch.randn(4, 2, dtype=torch.complex64), torch.zeros(0, 3)]
    for chosen, dtype in (
        (wholes, torch.float32),
        ([*wholes, torch.ones(2).double()], torch.float64),
    ):
        parts = [distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in chosen]
        together = torch.cat([t.abs().double().flatten() for t in chosen])
        for order in (2.0, 1.0, math.inf):
            for foreach in (None, True, False):
                norm = fsdp2.optim.get_total_norm(parts, order, foreach=foreach)
                expected = torch.linalg.vector_norm(together, order)
                torch.testing.assert_close(norm, expected.to(dtype), rtol=1e-6, atol=0)


@ours_only("accurate sums")
@cpu_only("its kernels of norms are those that are not accurate")
@distributed(2)
def test_large_gradients_are_measured_accurately() -> None:
    """torch's own norm of these is wrong in the fifth digit."""
    mesh = cached_mesh(2)
    torch.manual_seed(0)
    for scale in (1.0, 1e-15, 1e15):
        whole = torch.randn(3_000_001) * scale
        part = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        expected = torch.linalg.vector_norm(whole.double())
        norm = fsdp2.optim.get_total_norm([part])
        assert abs(norm.item() / expected.item() - 1) < 3e-7


@ours_only("plain tensors beside DTensors")
@cpu_only("the device of threads has no sparse tensors")
@distributed(2)
def test_plain_sparse_and_repeated_parameters() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(15.0).view(5, 3))
    dense = nn.Parameter(torch.ones(4))
    (embedding(torch.tensor([1, 1, 3])).sum() + dense.sum()).backward()
    assert embedding.weight.grad is not None
    assert dense.grad is not None
    expected = math.sqrt(3 * 4 + 3 + 4)
    norm = fsdp2.clip_grad_norm_([embedding.weight, dense, dense], 1.0)
    assert_same(norm, torch.tensor(expected), "norm")
    assert_same(dense.grad, torch.ones(4) / (expected + 1e-6), "gradient")
    assert_same(embedding.weight.grad.to_dense()[3], torch.ones(3) / (expected + 1e-6), "gradient")
    assert_same(fsdp2.clip_grad_norm_(dense, 1e3), dense.grad.norm(), "norm of one")


@ours_only("the two halves of clipping")
@distributed(2)
def test_norm_first_and_clipping_later() -> None:
    model, plain = pair(MLP)
    run_both(MLP, model, plain, 0)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    total = fsdp2.optim.get_total_norm(g for g in grads)
    fsdp2.optim.clip_grads_with_norm_(model.parameters(), 1e-3, total)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    assert_all_same(gradients(model), gradients(plain), "gradient")
