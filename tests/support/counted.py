"""Reductions counted by a collective of the user's, which torch's `fully_shard` takes as well."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule


class CountedReduceScatter:
    """Counts the reductions of the modules that it is given to."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op, group=group, async_op=async_op
        )


def counting_reductions(model: nn.Module) -> dict[FSDPModule, CountedReduceScatter]:
    """A counter for each sharded module of ``model``."""
    counted = {m: CountedReduceScatter() for m in model.modules() if isinstance(m, FSDPModule)}
    for module, counter in counted.items():
        module.set_custom_reduce_scatter(counter)
    return counted
