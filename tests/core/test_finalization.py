"""The caller ends an iteration of several backwards: `finalize_backward` (torch 2.15 and later)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_recovery import FRAGILE, PlannedError, set_fault
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    fully_shard,
)
from fsdp2.runtime.reduction import Reduction
from harness import cached_mesh, cpu_only, distributed, ours_only
from models import BY_NAME, MLP, TRANSFORMER, Case
from reference import (
    assert_same_gradients,
    assert_sharded,
    average_gradients,
    pair,
    run_both,
)

pytestmark = [ours_only("torch has it from 2.15 on")]


def manual(model: nn.Module) -> FSDPModule:
    assert isinstance(model, FSDPModule)
    model.set_manual_backward_finalization(True)
    return model


def accumulate(case: Case, model: Any, plain: nn.Module, step: int, num: int = 3) -> None:
    """Micro-batches without communication, and sync turned on again; the reference averages."""
    model.set_requires_gradient_sync(False)
    for micro in range(num):
        run_both(case, model, plain, num * step + micro, average=micro == num - 1)
        assert all(p.grad is None for p in model.parameters() if isinstance(p, DTensor))
    model.set_requires_gradient_sync(True)


def drop(model: nn.Module, plain: nn.Module) -> None:
    for each in (model, plain):
        each.zero_grad()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", ["mlp", "transformer", "nested", "lora"])
@distributed(2, 3, long=(1, 4))
def test_micro_batches_without_sync(name: str, kept: bool) -> None:
    """With parameters kept gathered between micro-batches, and without."""
    case = BY_NAME[name]
    sharded, plain = pair(case)
    model = manual(sharded)
    for step in range(2):
        model.set_reshard_after_backward(not kept)
        accumulate(case, model, plain, step)
        model.set_reshard_after_backward(True)
        model.finalize_backward()
        assert_sharded(sharded)
        assert_same_gradients(sharded, plain)
        drop(sharded, plain)
    # The other mode again.
    model.set_manual_backward_finalization(False)
    run_both(case, sharded, plain, 9)
    assert_same_gradients(sharded, plain)


@pytest.mark.parametrize("mode", [False, 2])
@distributed(4)
def test_reshard_modes(mode: bool | int) -> None:
    sharded, plain = pair(TRANSFORMER, reshard_after_forward=mode)
    accumulate(TRANSFORMER, manual(sharded), plain, 0)
    manual(sharded).finalize_backward()
    assert_same_gradients(sharded, plain)


@pytest.mark.parametrize("offload", [False, True])
@distributed(4)
def test_replicas_of_shards(offload: bool) -> None:
    policy = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    sharded, plain = pair(MLP, mesh=mesh, **policy)
    for step in range(2):
        accumulate(MLP, manual(sharded), plain, step)
        handle = manual(sharded).finalize_backward(async_op=True)
        assert handle is not None
        handle.wait()
        assert_same_gradients(sharded, plain)
        drop(sharded, plain)


@distributed(2, 3)
def test_backwards_that_reduce() -> None:
    """Blocks are reduced in every backward; what is left then waits for the finalization."""
    sharded, plain = pair(TRANSFORMER)
    model = manual(sharded)
    for step in range(2):
        for micro in range(3):
            run_both(TRANSFORMER, sharded, plain, 3 * step + micro, average=False)
        model.finalize_backward()
        average_gradients(plain)
        assert_same_gradients(sharded, plain)
        drop(sharded, plain)


@distributed(2)
def test_sums_of_low_precision_gradients_are_in_the_dtype_of_the_reduction() -> None:
    """A thousand and one ones: in bf16 the sum would stop at 256."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(2, 2, bias=False), mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for _ in range(1001):
        model(torch.ones(1, 2)).sum().backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 2), 1001.0))


@distributed(2, 3)
def test_asynchronous_finalization() -> None:
    """Nothing may begin before the handle is waited for, which may be done twice."""
    sharded, plain = pair(TRANSFORMER)
    model = manual(sharded)
    batch = TRANSFORMER.batch(7, dist.get_rank(), torch.float64)
    for step in range(2):
        accumulate(TRANSFORMER, model, plain, step)
        handle = model.finalize_backward(async_op=True)
        assert isinstance(handle, GradientReductionHandle)
        assert_sharded(sharded)
        with pytest.raises(RuntimeError, match="must be waited on before forward"):
            sharded(*batch)
        for async_op in (False, True):
            with pytest.raises(RuntimeError, match="must be waited on before finalizing"):
                model.finalize_backward(async_op=async_op)
        handle.wait()
        handle.wait()
        assert_same_gradients(sharded, plain)
        drop(sharded, plain)


@cpu_only("on a device, streams wait and not the host")
@pytest.mark.parametrize("reset", [False, True])
@distributed(2)
def test_a_reduction_that_failed_is_not_attached_by_waiting_again(reset: bool) -> None:
    sharded, plain = pair(TRANSFORMER)
    model = manual(sharded)
    accumulate(TRANSFORMER, model, plain, 0)
    handle = model.finalize_backward(async_op=True)
    finish = Reduction._run_finish

    def fails(reduction: Reduction) -> None:
        finish(reduction)
        raise RuntimeError("lost")

    with (
        mock.patch.object(Reduction, "_run_finish", fails),
        pytest.raises(RuntimeError, match="lost"),
    ):
        handle.wait()
    with pytest.raises(RuntimeError, match="an earlier wait"):
        handle.wait()
    if reset:
        model.reset_iter_state()
    plain.zero_grad()
    accumulate(TRANSFORMER, model, plain, 1)
    model.finalize_backward()
    assert_same_gradients(sharded, plain)


@distributed(2)
def test_a_reset_invalidates_the_handle() -> None:
    """Its gradients are dropped, those of shards too, and the next iteration is right."""
    sharded, plain = pair(TRANSFORMER)
    model = manual(sharded)
    accumulate(TRANSFORMER, model, plain, 0)
    handle = model.finalize_backward(async_op=True)
    assert handle is not None
    model.reset_iter_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="handle was invalidated"):
            handle.wait()
    assert all(p.grad is None for p in sharded.parameters())
    plain.zero_grad()
    model.set_manual_backward_finalization(False)  # no iteration runs any more
    manual(sharded)
    accumulate(TRANSFORMER, model, plain, 1)
    model.finalize_backward()
    assert_same_gradients(sharded, plain)


@distributed(2)
def test_the_mode_changes_between_iterations_only() -> None:
    sharded, plain = pair(MLP)
    model = manual(sharded)
    batch = MLP.batch(0, dist.get_rank(), torch.float64)
    output = sharded(*batch)
    model.set_manual_backward_finalization(False)  # between forward and backward it may
    model.set_manual_backward_finalization(True)

    def hook(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="cannot change mode during backward"):
            model.set_manual_backward_finalization(False)
        with pytest.raises(RuntimeError, match="after backward completes"):
            model.finalize_backward()

    output.register_hook(hook)
    output.sum().backward()
    with pytest.raises(RuntimeError, match="cannot change mode after backward starts"):
        model.set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)  # no change
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    drop(sharded, plain)
    run_both(MLP, sharded, plain, 1)
    assert_same_gradients(sharded, plain)


@distributed(2)
def test_when_it_may_not_be_finalized() -> None:
    sharded, plain = pair(TRANSFORMER)
    assert isinstance(sharded, FSDPModule)
    handle = sharded.finalize_backward(async_op=True)  # no forward so far: nothing to do
    assert handle is not None
    handle.wait()
    assert sharded.finalize_backward() is None
    run_both(TRANSFORMER, sharded, plain, 0)
    with pytest.raises(RuntimeError, match="requires manual backward finalization"):
        sharded.finalize_backward()
    assert_same_gradients(sharded, plain)
    inner = next(m for m in sharded.modules() if isinstance(m, FSDPModule) and m is not sharded)
    with pytest.raises(RuntimeError, match="finalize_backward must be called on the root FSDP"):
        inner.finalize_backward()
    with pytest.raises(
        RuntimeError, match="set_manual_backward_finalization must be called on the root FSDP"
    ):
        inner.set_manual_backward_finalization(True)


@distributed(2)
def test_the_mode_of_a_module_that_turns_out_not_to_be_the_root() -> None:
    sharded, plain = pair(TRANSFORMER)
    inner = next(m for m in sharded.modules() if isinstance(m, FSDPModule) and m is not sharded)
    inner.set_manual_backward_finalization(True)
    batch = TRANSFORMER.batch(0, dist.get_rank(), torch.float64)
    with pytest.raises(RuntimeError, match="must be called on the root FSDP module"):
        sharded(*batch)
    inner.set_manual_backward_finalization(False)
    run_both(TRANSFORMER, sharded, plain, 0)
    assert_same_gradients(sharded, plain)


@distributed(2)
def test_nothing_to_finalize() -> None:
    """After an evaluation, or twice; the gradients that are there stay."""
    sharded, plain = pair(MLP)
    model = manual(sharded)
    accumulate(MLP, model, plain, 0)
    model.finalize_backward()
    model.finalize_backward()
    with torch.no_grad():
        sharded(*MLP.batch(0, dist.get_rank(), torch.float64))
    model.finalize_backward()
    assert_same_gradients(sharded, plain)


@distributed(4)
def test_the_all_reduce_waits_for_a_later_finalization() -> None:
    """HSDP: torch refuses a finalization without the all-reduce; here it reduces over shards."""
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    sharded, plain = pair(TRANSFORMER, mesh=mesh)
    model = manual(sharded)
    for last in (False, True):
        model.set_requires_gradient_sync(False)
        run_both(TRANSFORMER, sharded, plain, int(last), average=False)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(last)
        model.finalize_backward()
        assert all((p.grad is not None) == last for p in sharded.parameters())
    average_gradients(plain)
    assert_same_gradients(sharded, plain)


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


@pytest.mark.parametrize("sync", [False, True])
@distributed(2)
def test_ranks_that_use_different_layers(sync: bool) -> None:
    """Unused ones are reduced with zeros, once, in the finalization."""
    torch.manual_seed(0)
    model = Branches()
    plain = Branches()
    plain.load_state_dict(model.state_dict())
    sharded = fully_shard(model)
    assert isinstance(sharded, FSDPModule)
    sharded.set_reduce_scatter_unused_params(True)
    manual(sharded)
    rank = dist.get_rank()
    sharded.set_requires_gradient_sync(sync)
    for _ in range(2):
        x = torch.full((2, 4), 1.0 + rank, dtype=torch.float64)
        for each in (sharded, plain):
            each(x, rank).square().sum().backward()
    sharded.set_requires_gradient_sync(True)
    sharded.finalize_backward()
    for parameter in plain.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_gradients(plain)
    assert_same_gradients(sharded, plain)


@distributed(2, 3)
def test_a_forward_that_raises_between_micro_batches_is_tried_again() -> None:
    sharded, plain = pair(FRAGILE)
    model = manual(sharded)
    model.set_requires_gradient_sync(False)
    run_both(FRAGILE, sharded, plain, 0, average=False)
    set_fault(sharded, 2, "after forward")
    with pytest.raises(PlannedError):
        sharded(*FRAGILE.batch(1, dist.get_rank(), torch.float64))
    set_fault(sharded, 2, "")
    run_both(FRAGILE, sharded, plain, 1)
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert_same_gradients(sharded, plain)


@pytest.mark.parametrize("reset", [False, True])
@distributed(2)
def test_a_backward_that_raises_drops_the_iteration(reset: bool) -> None:
    sharded, plain = pair(FRAGILE)
    model = manual(sharded)
    model.set_requires_gradient_sync(False)
    run_both(FRAGILE, sharded, plain, 0, average=False)
    set_fault(sharded, 2, "late in backward")
    with pytest.raises(PlannedError):
        FRAGILE.loss(sharded, *FRAGILE.batch(1, dist.get_rank(), torch.float64)).backward()
    set_fault(sharded, 2, "")
    with pytest.raises(RuntimeError, match="reset_iter_state"):
        model.finalize_backward()
    if reset:
        model.reset_iter_state()
    else:  # said once, and then it is as after a reset
        with pytest.raises(RuntimeError, match="in the middle of an accumulation"):
            sharded(*FRAGILE.batch(2, dist.get_rank(), torch.float64))
    plain.zero_grad()
    run_both(FRAGILE, sharded, plain, 2)
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert_same_gradients(sharded, plain)


# ---------------------------------------------------------------------------- stable addresses


class Addresses(nn.Module):
    """Notes where its weight is in every forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        # Memory that was given back is taken by what is allocated next.
        self.taken = [torch.zeros(5, 5) for _ in range(8)]
        self.seen.append(self.linear.weight.data_ptr())
        y = self.linear(x)
        y.register_hook(lambda _: self.seen.append(self.linear.weight.data_ptr()))
        return y.tanh()


@pytest.mark.parametrize("cast", [False, True])
@distributed(2)
def test_addresses_of_gathered_parameters_stay(cast: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cast else None)
    model = nn.Sequential(*(Addresses() for _ in range(3)))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    sharded = fully_shard(model, mp_policy=policy)
    assert isinstance(sharded, FSDPModule)
    sharded.set_keep_unsharded_storage(True)
    for _ in range(3):
        sharded(torch.ones(2, 5)).sum().backward()
        assert_sharded(sharded)
    for layer in model:
        assert len(layer.seen) == 6
        assert len(set(layer.seen)) == 1
    sharded.set_keep_unsharded_storage(False)
    sharded(torch.ones(2, 5)).sum().backward()
    assert_sharded(sharded)
