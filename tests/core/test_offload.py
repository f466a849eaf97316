"""Parameters, gradients and optimizer state in host memory. On the CPU that is where they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER
from reference import (
    Training,
    assert_same_gradients,
    assert_same_parameters,
    check_training,
    pair,
    run_both,
    shard_case,
)

UNPINNED = CPUOffloadPolicy(pin_memory=False)


@pytest.mark.parametrize("name", ["mlp", "transformer", "lora", "conditional", "recurrent"])
@distributed(1, 2, 3)
def test_training(name: str) -> None:
    check_training(BY_NAME[name], Training(steps=3), offload_policy=UNPINNED)


@ours_only("torch pins by default, and fails where nothing can be pinned")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
@distributed(1, 2)
def test_pinning_is_left_out_where_there_is_nothing_to_pin_for() -> None:
    check_training(MLP, Training(steps=2), offload_policy=CPUOffloadPolicy())


@distributed(1, 2)
def test_the_default_policy_is_no_offload() -> None:
    check_training(MLP, Training(steps=2), offload_policy=OffloadPolicy())


@distributed(4)
def test_hybrid_sharding() -> None:
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))
    check_training(TRANSFORMER, Training(steps=2), offload_policy=UNPINNED, mesh=mesh)


@pytest.mark.parametrize("mode", [True, False])
@distributed(2, 3)
def test_accumulation(mode: bool) -> None:
    model, plain = pair(MLP, offload_policy=UNPINNED, reshard_after_forward=mode)
    assert isinstance(model, FSDPModule)
    for every_time in (True, False):
        for step in range(3):
            reduce = every_time or step == 2
            model.set_requires_gradient_sync(reduce)
            run_both(MLP, model, plain, step, average=reduce)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(1, 2)
def test_shards_and_gradients_are_on_the_cpu() -> None:
    model, plain = pair(EVEN_MLP, offload_policy=UNPINNED)
    for step in range(2):
        run_both(EVEN_MLP, model, plain, step)
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            assert parameter.to_local().device.type == "cpu"
            assert parameter.grad.to_local().device.type == "cpu"


@distributed(2)
def test_with_mixed_precision_it_changes_nothing() -> None:
    """Bitwise the same as without offload."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    plain = TRANSFORMER.build()
    both = [
        shard_case(TRANSFORMER, copy.deepcopy(plain), mp_policy=policy, offload_policy=offload)
        for offload in (OffloadPolicy(), UNPINNED)
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in both]
    for step in range(3):
        losses = []
        for model, optimizer in zip(both, optimizers, strict=True):
            loss = TRANSFORMER.loss(model, *TRANSFORMER.batch(step, 0, torch.float32))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    for one, other in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(other, DTensor)
        assert torch.equal(one.to_local().cpu(), other.to_local().cpu())


@pytest.mark.parametrize("offload", [True, False])
@distributed(1, 2, 3)
def test_an_optimizer_in_backward(offload: bool) -> None:
    """A step as soon as a gradient is there, which is then dropped: the same as one at the end."""
    policy = UNPINNED if offload else OffloadPolicy()
    model, plain = pair(TRANSFORMER, offload_policy=policy)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}
    alive: list[int] = []

    def step(parameter: torch.Tensor) -> None:
        alive.append(sum(p.grad is not None for p in optimizers))
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        run_both(TRANSFORMER, model, plain, number)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert all(p.grad is None for p in optimizers)
    assert_same_parameters(model, plain)
    assert len(alive) == 3 * len(optimizers)
    assert max(alive) < len(optimizers)  # never all gradients at once
