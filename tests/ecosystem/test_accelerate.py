"""Accelerate drives a loop whose model is sharded by our `fully_shard` before it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from harness import distributed
from models import MLP
from reference import assert_same_parameters, average_gradients, shard_case

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)

STEPS = 4
CLIP = 0.05


@distributed(2)
def test_accumulation_clipping_and_a_scheduler() -> None:
    """`prepare` for the optimizer and the scheduler; the model is prepared already."""
    from accelerate import Accelerator

    torch.manual_seed(0)
    plain = MLP.build().double()
    torch.manual_seed(0)
    model = shard_case(MLP, MLP.build().double())
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches = [MLP.batch(step, dist.get_rank(), torch.float64)[0] for step in range(STEPS)]
    loader = DataLoader(batches, batch_size=None)
    optimizer = accelerator.prepare(optimizer)
    for batch in loader:
        accelerator.backward((model(batch) - 1).square().mean())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 2)
    for batch in batches:
        (plain(batch) - 1).square().mean().backward()
        average_gradients(plain)
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        reference.step()
        schedule.step()
        reference.zero_grad()
    assert_same_parameters(model, plain)
