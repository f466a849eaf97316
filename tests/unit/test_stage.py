"""Staging of small gradients: one buffer, whatever the dtypes and whoever has none."""

from __future__ import annotations

import pytest
import torch

from fsdp2.sharding.layout import plan_bucket
from fsdp2.sharding.reduce_plan import ReducePlan, copy_in

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
