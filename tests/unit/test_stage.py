"""Staging of small gradients: one buffer, whatever the dtypes and whoever has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.sharding.gradients import ReducePlan, copy_in
from fsdp2.sharding.layout import plan_bucket

SHAPES = [(4, 3), (2,), (6,)]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.bfloat16, None),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_gradients_of_several_dtypes_or_none(dtypes: tuple[torch.dtype | None, ...]) -> None:
    """Earlier micro-batches leave float32 sums beside new low-precision gradients."""
    layout = plan_bucket(SHAPES, [0, 0, 0], 2, itemsizes=(2, 4, 4), direct_min_bytes=10**9)
    grads = [
        None
        if dtype is None
        else torch.arange(float(torch.Size(shape).numel())).view(shape).to(dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]
    present = [i for i, grad in enumerate(grads) if grad is not None]
    plan = ReducePlan(layout, present, layout.packed)
    staged = copy_in(layout, plan, grads, torch.float32, torch.device("cpu"))
    for slot, grad in zip(layout.slots, grads, strict=True):
        whole = torch.zeros(slot.shape) if grad is None else grad.float()
        start = slot.shard_offset - plan.stage_offset
        for row, half in zip(staged, whole.chunk(2), strict=True):
            assert row[start : start + half.numel()].tolist() == half.flatten().tolist()


class _Copies(TorchDispatchMode):
    """Counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_a_parameter_of_fewer_rows_than_ranks_is_not_copied_rank_by_rank() -> None:
    """64 kernels for one bias on 64 ranks would be more than the rest of the reduction."""
    layout = plan_bucket([(40, 2), (4, 3)], [0, 0], 64, itemsizes=(4,), direct_min_bytes=10**9)
    plan = ReducePlan(layout, [0, 1], layout.tail)
    grads = [torch.rand(40, 2), torch.rand(4, 3)]
    with _Copies() as copies:
        staged = copy_in(layout, plan, grads, torch.float32, torch.device("cpu"))
    assert copies.num == 0
    starts = [slot.shard_offset - plan.stage_offset for slot in layout.slots]
    assert torch.equal(staged[:40, starts[0] : starts[0] + 2], grads[0])
    assert torch.equal(staged[:4, starts[1] : starts[1] + 3], grads[1])
