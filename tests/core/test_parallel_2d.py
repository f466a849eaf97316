"""Tensor parallelism as torchtitan applies it to a Llama, sharded over the other mesh dims.

The reference is the plain model on every rank, with the batch of that rank's data-parallel
coordinate and gradients averaged over the data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy
from harness import RUNS_ON_TORCH, cached_mesh, distributed, ours_only, shared_folder
from llama import (
    EVEN,
    ODD,
    Llama,
    Sizes,
    loss_of,
    losses_in_parallel,
    recompute_activations,
    shard_units,
    tensor_parallel,
    token_batch,
)
from reference import (
    assert_all_same,
    assert_same,
    assert_sharded,
    average_gradients,
    gathering,
    whole,
)

if not RUNS_ON_TORCH:
    from fsdp2.features import partial_gradients as deferred

WRAPPER = "_checkpoint_wrapped_module."


def meshes() -> list[DeviceMesh]:
    """Data x tensor."""
    shapes = {2: [(1, 2), (2, 1)], 4: [(2, 2)], 6: [(3, 2), (2, 3)]}
    return [cached_mesh(*s, names=("data", "tensor")) for s in shapes[dist.get_world_size()]]


def batch_for(mesh: DeviceMesh, step: int, sizes: Sizes) -> Tensor:
    """The same on all ranks that share tensors."""
    return token_batch(step, mesh.get_local_rank("data"), sizes)


def build(
    mesh: DeviceMesh,
    sizes: Sizes = EVEN,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    recompute: bool = False,
    library: Any = fsdp2,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """The model, tensor parallel and sharded, and the plain one with the same weights."""
    torch.manual_seed(seed)
    plain = Llama(sizes).to(dtype)
    model = copy.deepcopy(plain)
    tensor_parallel(model, mesh["tensor"], **(plan or {}))
    if recompute:
        recompute_activations(model)
    if library is fsdp2:
        options = {**gathering(), **options}
    shard_units(library.fully_shard, model, mesh=mesh["data"], **options)
    return model, plain


def named(values: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor | None]:
    """Whole tensors by the names that the plain model has."""
    return {name.replace(WRAPPER, ""): whole(value) for name, value in values}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return named((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)


def parameters(model: nn.Module) -> dict[str, Tensor | None]:
    return named((n, p) for n, p in model.named_parameters())


def backward(model: nn.Module, batch: Tensor, *, sharded_logits: bool = True) -> Tensor:
    """Forward, loss and backward, the loss in parallel where the logits are sharded."""
    with losses_in_parallel(sharded_logits):
        loss = loss_of(model, batch)
        loss.backward()
    return whole(loss)


def step_both(
    mesh: DeviceMesh,
    model: nn.Module,
    plain: nn.Module,
    step: int,
    sizes: Sizes = EVEN,
    *,
    average: bool = True,
    **how: Any,
) -> None:
    batch = batch_for(mesh, step, sizes)
    expected = backward(plain, batch, sharded_logits=False)
    if average:
        average_gradients(plain, group=mesh.get_group("data"))
    assert_same(backward(model, batch, **how), expected, f"loss of step {step}")


def train(mesh: DeviceMesh, sizes: Sizes = EVEN, *, steps: int = 5, **options: Any) -> None:
    """Compares losses, whole gradients and, at the end, whole parameters."""
    sharded_logits = (options.get("plan") or {}).get("sharded_logits", True)
    model, plain = build(mesh, sizes, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert_all_same(parameters(model), parameters(plain), "parameter", bitwise=True)
    for step in range(steps):
        step_both(mesh, model, plain, step, sizes, sharded_logits=sharded_logits)
        assert_sharded(model)
        assert_all_same(gradients(model), gradients(plain), "gradient")
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    assert_all_same(parameters(model), parameters(plain), "parameter")


# ------------------------------------------------------------------------------------ training


@distributed(4, long=(2, 6))
def test_torchtitans_llama() -> None:
    for mesh in meshes():
        if EVEN.num_heads % mesh["tensor"].size() == 0:
            train(mesh)


@pytest.mark.parametrize("mode", [False, True])
@distributed(4)
def test_other_plans(mode: bool) -> None:
    """Embedding by features, whole logits, an output that is laid out anew; both reshard modes."""
    plan = {"embedding": "colwise", "sharded_logits": False, "prepare_output": True}
    train(*meshes(), plan=plan, reshard_after_forward=mode)


@ours_only("torch refuses some")
@distributed(4)
def test_dims_that_nobody_divides() -> None:
    """Neither tensor nor data parallelism, at rows, columns, vocabulary and hidden features."""
    train(*meshes(), ODD, plan={"local_hidden": False})


@pytest.mark.parametrize(
    "sizes", [pytest.param(EVEN, marks=pytest.mark.long), ODD], ids=["even", "odd"]
)
@distributed(4)
def test_activation_checkpointing(sizes: Sizes) -> None:
    if sizes is ODD and RUNS_ON_TORCH:
        pytest.skip("torch refuses dims that do not divide")
    train(*meshes(), sizes, recompute=True, plan={"local_hidden": sizes is EVEN})


@ours_only("torch refuses some")
@distributed(4)
def test_placements() -> None:
    """A dim that both shard is cut by tensor parallelism first, then among data-parallel ranks."""
    (mesh,) = meshes()
    data, tensor = mesh.get_local_rank("data"), mesh.get_local_rank("tensor")
    strided, columns = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))
    for sizes in (EVEN, ODD):
        model, plain = build(mesh, sizes, plan={"local_hidden": sizes is EVEN})
        for name, placements in {
            "tok_embeddings.weight": strided,
            "layers.0.attention.wq.weight": strided,
            "layers.0.feed_forward.w1.weight": strided,
            "output.weight": strided,
            "layers.0.attention.wo.weight": columns,
            "layers.0.feed_forward.w2.weight": columns,
            "layers.1.ffn_norm.weight": (Shard(0), Replicate()),
            "norm.weight": (Shard(0), Replicate()),
        }.items():
            parameter = model.get_parameter(name)
            assert isinstance(parameter, DTensor)
            assert parameter.placements == placements, name
            assert parameter.device_mesh.mesh_dim_names == ("data", "tensor")
            mine = plain.get_parameter(name).detach()
            if isinstance(placements[1], Shard):
                mine = torch.tensor_split(mine, cuts(mine, placements[1].dim), placements[1].dim)[
                    tensor
                ]
            mine = torch.tensor_split(mine, cuts(mine, 0))[data]
            assert torch.equal(parameter.to_local(), mine), name


def cuts(tensor: Tensor, dim: int) -> list[int]:
    """Where two ranks cut a dim: the first has one row more of an odd number."""
    return [-(-tensor.shape[dim] // 2)]


# ------------------------------------------------------------------------- accumulation, clipping


@pytest.mark.parametrize("every_time", [True, False])
@distributed(4)
def test_accumulation(every_time: bool) -> None:
    (mesh,) = meshes()
    model, plain = build(mesh)
    assert isinstance(model, FSDPModule)
    for step in range(3):
        reduce = every_time or step == 2
        model.set_requires_gradient_sync(reduce)
        step_both(mesh, model, plain, step, average=reduce)
    assert_all_same(gradients(model), gradients(plain), "gradient")


@pytest.mark.parametrize("sizes", [EVEN, ODD], ids=["even", "odd"])
@ours_only("torch refuses dims that do not divide")
@distributed(4)
def test_clipping(sizes: Sizes) -> None:
    """torch's function counts what tensor parallelism replicates once."""
    (mesh,) = meshes()
    model, plain = build(mesh, sizes, plan={"local_hidden": sizes is EVEN})
    for step, limit in enumerate([1e-3, 1e3]):
        step_both(mesh, model, plain, step, sizes)
        norms = [
            whole(torch.nn.utils.clip_grad_norm_(each.parameters(), limit))
            for each in (model, plain)
        ]
        assert_same(norms[0], norms[1], "norm")
        assert_all_same(gradients(model), gradients(plain), "gradient")


# ------------------------------------------------------------------------------- mixed precision

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@distributed(4)
def test_mixed_precision() -> None:
    """Within rounding of the plain model: sums over tensor-parallel ranks are in bf16."""
    (mesh,) = meshes()
    policy = MixedPrecisionPolicy(**BF16)
    model, plain = build(mesh, dtype=torch.float32, mp_policy=policy)
    for step in range(2):
        batch = batch_for(mesh, step, EVEN)
        backward(plain, batch, sharded_logits=False)
        average_gradients(plain, group=mesh.get_group("data"))
        backward(model, batch)
        for name, gradient in gradients(model).items():
            expected = plain.get_parameter(name).grad
            assert gradient is not None
            assert expected is not None
            assert gradient.dtype == torch.float32
            difference = (gradient - expected).norm() / expected.norm()
            assert difference <= 0.03, f"{name}: {difference:.3f}"
        model.zero_grad()
        plain.zero_grad()


@ours_only("compares with torch's")
@distributed(4)
def test_mixed_precision_beside_torchs() -> None:
    """Two data-parallel ranks have one order of adding: the same bits.

    But for norms, whose gradients torch sums over tensor-parallel ranks in bf16.
    """
    (mesh,) = meshes()
    model, plain = build(mesh, dtype=torch.float32, mp_policy=MixedPrecisionPolicy(**BF16))
    policy = torch_fsdp.MixedPrecisionPolicy(**BF16)
    peer, _ = build(mesh, dtype=torch.float32, library=torch_fsdp, mp_policy=policy)
    errors = torch.zeros(2)
    for step in range(3):
        batch = batch_for(mesh, step, EVEN)
        assert torch.equal(backward(model, batch), backward(peer, batch))
        backward(plain, batch, sharded_logits=False)
        average_gradients(plain, group=mesh.get_group("data"))
        ours, theirs, exact = gradients(model), gradients(peer), gradients(plain)
        for name in [name for name in ours if "norm" in name]:
            pair_of_both = ours.pop(name), theirs.pop(name)
            errors += torch.stack([(value - exact[name]).norm() for value in pair_of_both])  # type: ignore[operator,arg-type]
        assert_all_same(ours, theirs, "gradient", bitwise=True)
        for each in (model, peer, plain):
            each.zero_grad()
    assert errors[0] <= 1.1 * errors[1], errors


# ------------------------------------------------------------------ sums over tensor-parallel ranks


@ours_only("torch sums at once")
@distributed(4)
def test_gradients_of_norms_are_summed_once() -> None:
    """In backward nothing more is summed over tensor-parallel ranks than without sharding."""
    (mesh,) = meshes()
    model, plain = build(mesh)
    tensor_parallel(plain, mesh["tensor"])
    batch = batch_for(mesh, 0, EVEN)
    counts = []
    for each in (plain, model):
        with CommDebugMode() as communication:
            backward(each, batch)
        counts.append(communication.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
        each.zero_grad()
    assert counts[0] == counts[1] > 0
    with noted_sums() as sums:
        backward(model, batch)
    num_norms = sum("norm" in name for name, _ in model.named_parameters())
    assert sums == [num_norms]


@contextlib.contextmanager
def noted_sums() -> Iterator[list[int]]:
    """How many tensors each late sum has."""
    sums: list[int] = []
    original = deferred.sum_together

    def noted(group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        sums.append(len(tensors))
        original(group, tensors)

    deferred.sum_together = noted
    try:
        yield sums
    finally:
        deferred.sum_together = original


@ours_only("a method of ours")
@pytest.mark.parametrize("why", ["hooks", "accumulation", "another backward", "a hook of units"])
@distributed(4)
def test_gradients_that_somebody_looks_at_are_summed_at_once(why: str) -> None:
    (mesh,) = meshes()
    model, plain = build(mesh)
    assert isinstance(model, FSDPModule)
    seen: dict[str, Tensor] = {}
    if why == "hooks":
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.setdefault(name, p.grad.to_local().clone())
            )
    elif why == "accumulation":
        step_both(mesh, model, plain, 1)
    elif why == "another backward":
        model.set_is_last_backward(False)
    else:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda _: None)
    with noted_sums() as sums:
        step_both(mesh, model, plain, 0)
        if why == "another backward":
            model.set_is_last_backward(True)
            step_both(mesh, model, plain, 1)
    assert not sums
    assert_all_same(gradients(model), gradients(plain), "gradient")
    for name, local in seen.items():
        parameter = model.get_parameter(name)
        assert isinstance(parameter.grad, DTensor)
        assert torch.equal(local, parameter.grad.to_local())


class Norm(nn.Module):
    """A norm that is used on parts of the sequence or on the whole: a word of `uses` each."""

    def __init__(self, uses: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.uses = uses.split()

    def forward(self, x: Tensor, mesh: DeviceMesh | None = None) -> Tensor:
        for use in self.uses:
            if mesh is not None:
                placement = Shard(1) if use == "part" else Replicate()
                x = x.redistribute(mesh, [placement])  # type: ignore[attr-defined]
            # A backward of its own for each use, within that of the whole.
            x = checkpoint(self.norm, x, use_reentrant=True) * 1.5
        return x


def norms(mesh: DeviceMesh, uses: str) -> tuple[Norm, Norm]:
    """A norm as a unit in a root, and the plain one; mesh: data dims, tensor."""
    torch.manual_seed(0)
    plain = Norm(uses).double()
    nn.init.normal_(plain.norm.weight)
    model = copy.deepcopy(plain)
    weight = distribute_tensor(model.norm.weight.detach(), mesh["tensor"], [Replicate()])
    model.norm.weight = nn.Parameter(weight)
    data = mesh[mesh.mesh_dim_names[:-1]]  # type: ignore[index]
    fsdp2.fully_shard(model.norm, mesh=data)
    return fsdp2.fully_shard(model, mesh=data), plain


def norm_backward(mesh: DeviceMesh, model: Norm, plain: Norm, step: int, data_rank: int) -> None:
    generator = torch.Generator().manual_seed(2 * step + data_rank)
    x = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    given = distribute_tensor(x, mesh["tensor"], [Replicate()])
    expected = plain(x.requires_grad_()).square().sum()
    expected.backward()
    loss = model(given.requires_grad_(), mesh["tensor"]).square().sum()
    loss.backward()
    assert_same(whole(loss), expected, "loss")


@ours_only("torch sums at once")
@pytest.mark.parametrize("uses", ["part part", "part whole", "whole part"])
@distributed(4)
def test_a_norm_that_is_reduced_twice_in_a_backward(uses: str) -> None:
    (mesh,) = meshes()
    model, plain = norms(mesh, uses)
    for step in range(3):
        norm_backward(mesh, model, plain, step, mesh.get_local_rank("data"))
        average_gradients(plain, group=mesh.get_group("data"))
        assert_all_same(gradients(model), gradients(plain), "gradient")
        model.zero_grad()
        plain.zero_grad()


@ours_only("torch sums at once")
@distributed(4)
def test_a_gradient_beside_one_still_on_its_way() -> None:
    """The first backward is not waited for; what it reduces has been summed at once."""
    (mesh,) = meshes()
    model, plain = norms(mesh, "part")
    assert isinstance(model, FSDPModule)
    for step in range(2):
        model.set_is_last_backward(step == 1)
        norm_backward(mesh, model, plain, step, mesh.get_local_rank("data"))
    average_gradients(plain, group=mesh.get_group("data"))
    assert_all_same(gradients(model), gradients(plain), "gradient")


@ours_only("torch sums at once")
@distributed(4)
def test_a_gradient_that_waits_for_the_all_reduce_of_a_backward_without_one() -> None:
    """Of replicas: reduced over shards only in a backward, and not used in the next."""
    mesh = cached_mesh(2, 1, 2, names=("replicate", "shard", "tensor"))
    model, plain = norms(mesh, "part")
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(False)
    rank = mesh.get_local_rank("replicate")
    norm_backward(mesh, model, plain, 0, rank)
    model.set_requires_all_reduce(True)
    model.uses = plain.uses = []
    norm_backward(mesh, model, plain, 1, rank)
    average_gradients(plain, group=mesh.get_group("replicate"))
    assert_all_same(gradients(model), gradients(plain), "gradient")


@ours_only("recovers by itself")
@distributed(4)
def test_sums_of_a_backward_that_failed_are_forgotten() -> None:
    (mesh,) = meshes()
    model, plain = build(mesh)

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    embedded: list[Any] = []
    handle = model.tok_embeddings.register_forward_hook(
        lambda _module, _args, out: embedded.append(out.register_hook(fail))
    )
    with pytest.raises(ValueError, match="on purpose"):
        backward(model, batch_for(mesh, 0, EVEN))
    handle.remove()
    assert isinstance(model, FSDPModule)
    for step in range(2):  # the first is not waited for, so that its sums are not late
        model.set_is_last_backward(step == 1)
        step_both(mesh, model, plain, step)
    assert_all_same(gradients(model), gradients(plain), "gradient")


@ours_only("torch sums at once")
@pytest.mark.parametrize("where", ["backward", "finalize_backward", "wait"])
@distributed(4)
def test_a_late_sum_that_fails_leaves_no_parts_of_gradients(where: str) -> None:
    (mesh,) = meshes()
    model, plain = build(mesh)
    assert isinstance(model, FSDPModule)
    if where != "backward":
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)

    def train() -> None:
        backward(model, batch_for(mesh, 0, EVEN))
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=where == "wait")
        assert handle is not None
        handle.wait()

    with (
        mock.patch.object(deferred, "sum_together", side_effect=ValueError("on purpose")),
        pytest.raises(ValueError, match="on purpose"),
    ):
        train()
    with torch.no_grad(), losses_in_parallel(True):
        loss_of(model, batch_for(mesh, 0, EVEN))  # resets the tree
    assert all(parameter.grad is None for parameter in model.parameters())
    step_both(mesh, model, plain, 0)
    if where != "backward":
        model.finalize_backward()
    assert_all_same(gradients(model), gradients(plain), "gradient")


# --------------------------------------------------------------------- state dicts, checkpoints


@ours_only("torch refuses dims that do not divide")
@distributed(4)
def test_state_dicts_of_odd_dims() -> None:
    (mesh,) = meshes()
    model, plain = build(mesh, ODD, plan={"local_hidden": False})
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert_all_same(named(iter(saved.items())), parameters(plain), "entry", bitwise=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert_all_same(parameters(model), parameters(plain), "parameter", bitwise=True)
    step_both(mesh, model, plain, 0, ODD)


@distributed(4)
def test_distributed_checkpoint() -> None:
    """Saved by torch's own checkpoint module, loaded into another model."""
    (mesh,) = meshes()
    model, plain = build(mesh)
    other, _ = build(mesh, seed=1)
    with shared_folder() as folder:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        loaded = {"model": other.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
    assert_all_same(parameters(other), parameters(plain), "parameter", bitwise=True)


@ours_only("checkpoints")
@distributed(4)
def test_checkpoint_from_another_mesh() -> None:
    """Model and optimizer of 2 x 2 ranks, with dims that they do not divide, on 4 x 1."""
    from fsdp2.checkpoint import Checkpointer

    mesh, other_mesh = cached_mesh(2, 2, names=("data", "tensor")), cached_mesh(4)
    model, _ = build(mesh, ODD, plan={"local_hidden": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    backward(model, batch_for(mesh, 0, ODD))
    optimizer.step()
    torch.manual_seed(1)
    other = Llama(ODD).double()
    shard_units(fsdp2.fully_shard, other, mesh=other_mesh)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    with shared_folder() as folder:
        Checkpointer(folder).save(1, model=model, optimizer=optimizer)
        Checkpointer(folder).load(model=other, optimizer=other_optimizer)
    assert_all_same(parameters(other), parameters(model), "parameter", bitwise=True)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            saved, loaded = optimizer.state[ours][key], other_optimizer.state[theirs][key]
            assert torch.equal(whole(saved), whole(loaded))
