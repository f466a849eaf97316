"""Accelerate drives a loop whose model is sharded by our `fully_shard` before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

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

STEPS = 3
MICRO_BATCHES = 2
CLIP = 0.05


@contextmanager
def accelerator(**options: Any) -> Iterator[Any]:
    """One that knows of the other ranks, as those do that a launcher has started."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        # (The process group is there already.)
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        for name, value in given.items():
            patch.setenv(name, value)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield Accelerator(cpu=True, **options)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@distributed(2)
def test_accumulation_clipping_and_a_scheduler() -> None:
    """`prepare` for the optimizer; the model is prepared already. The same steps as those of a
    plain model on whole batches."""
    torch.manual_seed(0)
    plain = MLP.build().double()
    torch.manual_seed(0)
    model = shard_case(MLP, MLP.build().double())
    number, rank = STEPS * MICRO_BATCHES, dist.get_rank()
    batches = [MLP.batch(i, rank, torch.float64)[0] for i in range(number)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with accelerator(gradient_accumulation_steps=MICRO_BATCHES) as driver:
        assert driver.num_processes == dist.get_world_size()
        optimizer = driver.prepare(optimizer)
        for i, batch in enumerate(DataLoader(batches, batch_size=None)):
            with driver.accumulate(model):
                driver.backward((model(batch) - 1).square().mean())
                reduced = [param.grad is not None for param in model.parameters()]
                assert reduced == [driver.sync_gradients] * len(reduced), i
                if driver.sync_gradients:
                    driver.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if driver.sync_gradients:
                scheduler.step()

    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 2)
    for step in range(STEPS):
        whole = torch.cat(batches[step * MICRO_BATCHES :][:MICRO_BATCHES])
        (plain(whole) - 1).square().mean().backward()
        average_gradients(plain)
        nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        reference.step()
        schedule.step()
        reference.zero_grad()
    assert_same_parameters(model, plain)
