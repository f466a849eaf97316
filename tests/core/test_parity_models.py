"""Sharded training equals replicated training, for every model and world size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2 import MixedPrecisionPolicy
from harness import cached_mesh, distributed, ours_only
from models import BY_NAME
from reference import Training, check_training

every_model = pytest.mark.parametrize("name", list(BY_NAME))


@every_model
@distributed(1, 2, 3, 4)
def test_fp64_with_sgd(name: str) -> None:
    options = {"lr": 0.05, "momentum": 0.9}
    check_training(BY_NAME[name], Training(optimizer_options=options))


@every_model
@distributed(3, long=(1, 2, 4))
def test_fp32_with_sgd(name: str) -> None:
    check_training(BY_NAME[name], Training(dtype=torch.float32))


@every_model
@distributed(2, long=(1, 3, 4))
def test_fp32_with_adamw_fed_the_reference_gradients(name: str) -> None:
    training = Training(
        dtype=torch.float32,
        optimizer=torch.optim.AdamW,
        optimizer_options={"lr": 1e-2, "weight_decay": 0.1},
        feed_reference_gradients=True,
    )
    check_training(BY_NAME[name], training)


@ours_only("a choice between direct and packed gathers")
@pytest.mark.parametrize(  # (By default all shards of models as small as these are packed.)
    "direct_min_bytes", [0, 128, pytest.param(10**9, marks=pytest.mark.long)]
)
@every_model
@distributed(3, long=(1, 2, 4))
def test_direct_and_packed_gathers(name: str, direct_min_bytes: int) -> None:
    check_training(BY_NAME[name], Training(steps=2), direct_min_bytes=direct_min_bytes)


@pytest.mark.parametrize("name", ["mlp", "even_mlp", "transformer"])
@distributed(5)
def test_more_ranks(name: str) -> None:
    """An odd number, above what is exchanged directly on the CPU by default."""
    check_training(BY_NAME[name])
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    check_training(BY_NAME[name], Training(dtype=torch.float32, steps=2), mp_policy=policy)


@pytest.mark.long
@pytest.mark.parametrize("reshard_after_forward", [True, False, 2, 3])
@every_model
@distributed(6)
def test_six_ranks(name: str, reshard_after_forward: bool | int) -> None:
    check_training(BY_NAME[name], reshard_after_forward=reshard_after_forward)
    mesh = cached_mesh(2, 3, names=("replicate", "shard"))
    mode = reshard_after_forward if reshard_after_forward != 2 else True
    check_training(BY_NAME[name], mesh=mesh, reshard_after_forward=mode)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "foreach AdamW": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "Nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@distributed(2, 3)
def test_other_optimizers_fed_the_reference_gradients(optimizer: str) -> None:
    make, options = OPTIMIZERS[optimizer]
    training = Training(
        optimizer=make,
        optimizer_options=options,
        steps=3,
        feed_reference_gradients=True,
        bitwise=False,
    )
    for name in ("mlp", "transformer"):
        check_training(BY_NAME[name], training)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@every_model
@distributed(3, long=(2,))
def test_either_reshard_mode_for_all_units(name: str, reshard_after_forward: bool) -> None:
    training = Training(steps=3)
    check_training(BY_NAME[name], training, reshard_after_forward=reshard_after_forward)
