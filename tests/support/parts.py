"""Gradients of which each rank has a part, beside those of one process."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from reference import assert_same


def assert_gradients_of_parts(model: nn.Module, plain: nn.Module) -> int:
    """Compare the gradients of DTensors with ``plain``'s; returns how many there are."""
    compared = 0
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if isinstance(param, DTensor):
            compared += 1
            assert param.grad is not None
            assert expected.grad is not None
            found = param.grad.full_tensor().float()  # (losses are computed in float32)
            assert_same(found, expected.grad.float(), f"gradient of {name}")
    return compared
