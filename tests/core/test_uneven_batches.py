"""Ranks of different speeds: batches of different sizes, and the gradients of the whole batch."""

from __future__ import annotations

import copy
import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard, split_batch
from harness import cached_mesh, distributed, ours_only
from reference import whole

pytestmark = ours_only("torch does not divide batches")


def test_no_other_split_ends_earlier() -> None:
    for speeds in ([1.0, 1.0], [1.0, 0.5], [3.0, 1.0, 2.0], [1.0, 0.01, 0.4]):
        for batch in range(len(speeds), 12):
            sizes = split_batch(batch, speeds)
            assert sum(sizes) == batch
            assert min(sizes) >= 1
            others = product(range(1, batch + 1), repeat=len(speeds))
            best = min(
                max(n / s for n, s in zip(other, speeds, strict=True))
                for other in others
                if sum(other) == batch
            )
            assert max(n / s for n, s in zip(sizes, speeds, strict=True)) == best
    assert split_batch(7, [2.0, 2.0, 2.0]) == [3, 2, 2]
    assert split_batch(12, [1.0, 1.0, 0.5, 0.5]) == [4, 4, 2, 2]


def test_what_cannot_be_split() -> None:
    with pytest.raises(TypeError, match="global_batch must be an int"):
        split_batch(8.0, [1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="speeds is empty"):
        split_batch(8, [])
    for speed in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"speeds\[1\] must be positive and finite"):
            split_batch(8, [1.0, speed])
    with pytest.raises(ValueError, match="2 samples is too small for 3 ranks"):
        split_batch(2, [1.0, 1.0, 1.0])


def check_gradients(mesh: Any) -> None:
    """Two micro-batches, of different sizes on each rank, beside the plain model on all samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model: Any = copy.deepcopy(plain)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = 11 * ranks
    x = torch.randn(batch, 5, dtype=torch.float64)
    plain(x).square().mean().backward()
    speeds = [1.0 / (1 + r) for r in range(ranks)]
    for accumulate in (1, 2):
        # Of each micro-batch, as if it were a batch of its own: all ranks run as many.
        start = 0
        for i in range(accumulate):
            part = batch // accumulate if i + 1 < accumulate else batch - start
            sizes = split_batch(part, speeds)
            begin = start + sum(sizes[:rank])
            start += part
            model.set_requires_gradient_sync(i + 1 == accumulate)
            loss = model(x[begin : begin + sizes[rank]]).square().mean()
            (loss * (sizes[rank] * ranks / batch)).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-10, atol=1e-13)
        model.zero_grad()


@distributed(2, long=(3,))
def test_gradients_are_those_of_the_whole_batch() -> None:
    check_gradients(None)


@distributed(4)
def test_gradients_are_those_of_the_whole_batch_with_replicas() -> None:
    check_gradients(cached_mesh(2, 2, names=("replicate", "shard")))
