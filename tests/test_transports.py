"""The collectives of the group itself, which gloo uses above four ranks and NCCL always.

Small gloo groups exchange messages instead; here that is turned off, so that the batched calls
and the padding they need are held against the same reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fsdp2.collectives
from fsdp2 import FSDPModule, MixedPrecisionPolicy
from harness import cached_mesh, distributed
from models import BY_NAME, EVEN_MLP, MLP, TRANSFORMER
from reference import Training, check_training, pair, run_both


@contextmanager
def no_exchange() -> Iterator[None]:
    before = fsdp2.collectives.EXCHANGE_MAX_RANKS
    fsdp2.collectives.EXCHANGE_MAX_RANKS = 0
    try:
        yield
    finally:
        fsdp2.collectives.EXCHANGE_MAX_RANKS = before


@pytest.mark.parametrize("direct_min_bytes", [0, pytest.param(200, marks=pytest.mark.long), 10**9])
@pytest.mark.parametrize("name", ["mlp", "transformer", "recurrent", "conditional", "lora"])
@distributed(3, long=(2,))
def test_training(name: str, direct_min_bytes: int) -> None:
    training = Training(steps=2, bitwise=False)
    with no_exchange():
        check_training(BY_NAME[name], training, direct_min_bytes=direct_min_bytes)


@distributed(4)
def test_hybrid_sharding_and_regrouping() -> None:
    training = Training(steps=2, bitwise=False)
    with no_exchange():
        mesh = cached_mesh(2, 2, names=("replicate", "shard"))
        check_training(MLP, training, mesh=mesh)
        check_training(TRANSFORMER, training, reshard_after_forward=2)


@pytest.mark.parametrize("direct_min_bytes", [0, 10**9])
@distributed(2)
def test_mixed_precision_is_that_of_an_exchange(direct_min_bytes: int) -> None:
    """bf16 gradients widened before a float32 reduce-scatter, or sent as they are and widened
    before they are added: the same sums."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mp_policy": policy, "direct_min_bytes": direct_min_bytes}
    found = []
    for exchange in (True, False):
        model, plain = pair(EVEN_MLP, dtype=torch.float32, **options)
        if exchange:
            loss = EVEN_MLP.loss(model, *EVEN_MLP.batch(0, 0, torch.float32))
        else:
            with no_exchange():
                loss = EVEN_MLP.loss(model, *EVEN_MLP.batch(0, 0, torch.float32))
        loss.backward()
        assert isinstance(model, FSDPModule)
        found.append([p.grad.to_local().clone() for p in model.parameters()])
        del plain
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@distributed(2)
def test_means_are_divided_only_by_what_is_left() -> None:
    """Collectives give means where an exchange gives sums."""
    mesh = cached_mesh(1, 2, names=("replicate", "shard"))
    for factor in (None, 3.0):
        with no_exchange():
            model, plain = pair(EVEN_MLP, mesh=mesh, direct_min_bytes=0)
            assert isinstance(model, FSDPModule)
            if factor is not None:
                for unit in model.modules():
                    if isinstance(unit, FSDPModule):
                        unit.set_gradient_divide_factor(factor)
            run_both(EVEN_MLP, model, plain, 0)
        scale = 1.0 if factor is None else 2 / factor
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert q.grad is not None
            torch.testing.assert_close(p.grad.full_tensor(), q.grad * scale)
