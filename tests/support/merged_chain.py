"""A chain of layers that are merged into one unit, and what programs over it have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import fully_shard, merge_units
from fsdp2.runtime.hooks import hooks_of
from fsdp2.runtime.unit import unit_of

NUM = 6


class Chain(nn.Module):
    """Layers one after the other, or what the caller does with them in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(NUM))
        self.after = nn.Linear(6, 6)

    def forward(self, x: Tensor, body: Callable[[Any, Tensor], Any]) -> Any:
        return body(self, x)


def build(merged: bool, change: str = "", **options: Any) -> Any:
    """A chain whose layers are units, or one unit of all of them.

    Args:
        change: what is special about its parameters. If two layers are tied, all are one unit in
            any case, and without ``merged`` each of its modules has all hooks.
    """
    torch.manual_seed(0)
    model: Any = Chain().to(torch.float64)
    layers = list(model.layers)
    if change == "tied":
        layers[4].weight = layers[1].weight
        fully_shard(layers, **options)
        hooks_of(unit_of(layers[0])).marks_all = not merged
    else:
        for layer in layers:
            fully_shard(layer, **options)
    if change == "frozen":
        model.layers[2:4].requires_grad_(False)
    elif change == "frozen first":
        model.before.requires_grad_(False)
        model.layers[:2].requires_grad_(False)
    for layer in (model.before, model.after):  # other settings: not merged
        fully_shard(layer, direct_min_bytes=1, **options)
    fully_shard(model, **options)
    if merged and change != "tied":
        made = merge_units(model, min_bytes=10**6).merged
        assert made == (tuple(f"layers.{i}" for i in range(NUM)),)
    return model


def outputs(model: Any, x: Tensor) -> list[Tensor]:
    """What layers give: a graph goes through all of them, and may begin at each."""
    found = [model.before(x).tanh()]
    for layer in model.layers:
        found.append(layer(found[-1]).tanh())
    return [*found, model.after(found[-1])]


def loss_and_backward(output: Tensor) -> list[Tensor]:
    loss = output.square().mean()
    loss.backward()
    return [loss]


def plain(model: Any, x: Tensor) -> list[Tensor]:
    return loss_and_backward(model(x, outputs)[-1])


@contextmanager
def patched(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """The layer computes this inside."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
