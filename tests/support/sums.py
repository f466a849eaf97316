"""What ranks contribute to the sums of an exchange, for the tests of its ways."""

from __future__ import annotations

import torch
from torch import Tensor

# Of the parts, and of their sum.
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


def rows(num: int) -> list[list[int]]:
    """Elements of each of ``num`` ranks, by tensor: even, and with none on the last ranks."""
    return [[70_001] * num, [max(0, min(3, 13 - 3 * r)) * 16 for r in range(num)]]


def term(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` contributes: values whose sum depends on the order."""
    made = torch.Generator().manual_seed(1000 * rank + numel % 997)
    return (torch.randn(numel, generator=made) * 10.0 ** (rank % 3)).to(dtype)
