"""schedulefree and pytorch_optimizer over the sharded parameters, as their pages show them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import distributed
from models import TRANSFORMER
from reference import assert_same_parameters, average_gradients, shard_case


def schedulefree_adamw(parameters: Any) -> Any:
    import schedulefree

    return schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=2)


def schedulefree_sgd(parameters: Any) -> Any:
    import schedulefree

    return schedulefree.SGDScheduleFree(parameters, lr=0.05)


def lion(parameters: Any) -> Any:
    import pytorch_optimizer

    return pytorch_optimizer.Lion(parameters, lr=0.001)


MAKERS = {
    "schedulefree, AdamW": ("schedulefree", schedulefree_adamw),
    "schedulefree, SGD": ("schedulefree", schedulefree_sgd),
    "pytorch_optimizer, Lion": ("pytorch_optimizer", lion),
}


def train(model: nn.Module, make: Callable[[Any], Any], plain: bool) -> None:
    optimizer = make(model.parameters())
    switched = hasattr(optimizer, "eval") and hasattr(optimizer, "train")
    if switched:
        optimizer.train()
    for step in range(4):
        TRANSFORMER.loss(model, *TRANSFORMER.batch(step, dist.get_rank(), torch.float64)).backward()
        if plain:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    if switched:
        optimizer.eval()  # schedulefree: the weights for evaluation


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                find_spec(package) is None, reason=f"{package} is not installed"
            ),
        )
        for name, (package, _) in MAKERS.items()
    ],
)
@distributed(2)
def test_training(name: str) -> None:
    """As on one process with averaged gradients."""
    _, make = MAKERS[name]
    torch.manual_seed(0)
    plain = TRANSFORMER.build().double()
    torch.manual_seed(0)
    model = shard_case(TRANSFORMER, TRANSFORMER.build().double())
    train(model, make, plain=False)
    train(plain, make, plain=True)
    assert_same_parameters(model, plain)
