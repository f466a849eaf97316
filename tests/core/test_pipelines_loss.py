"""Pipelines whose loss calls the head of the last stage, with a backward inside or without."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from test_pipelines import Pipeline, Stage, check, data_and_pipeline
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from chunked_losses import ChunkedLoss, at_once, in_a_function, in_backward, in_the_loss
from fsdp2 import fully_shard
from harness import distributed, ours_only
from reference import gathering

pytestmark = [ours_only("torch's stages walk torch's own state")]

SPLIT: list[Any] = [ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV]
WHOLE: list[Any] = [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS]


def pipeline(kind: Any, loss: ChunkedLoss, **options: Any) -> Pipeline:
    """The head of the last stage is a unit of its own, which the loss calls, not forward."""
    mesh, data = data_and_pipeline()
    loss_fns: list[Any] = []

    def give_the_head_to_the_loss(stage: nn.Module) -> None:
        assert isinstance(stage, Stage)
        if stage.head is not None:
            fully_shard(stage.head, mesh=data, **gathering(), **options)
            stage.skips_head = True
            loss_fns.append(functools.partial(loss, stage.head))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return loss_fns[0](output, target)

    return Pipeline.make(
        kind,
        mesh,
        data,
        norm=True,
        shard_first=give_the_head_to_the_loss,
        loss_fn=loss_fn,
        **options,
    )


USUAL = [
    (ScheduleInterleavedZeroBubble, in_the_loss),
    (ScheduleZBVZeroBubble, in_a_function),
    (ScheduleDualPipeV, in_the_loss),
    (Schedule1F1B, in_backward),
]


def matrix() -> list[Any]:
    """Every schedule with every loss; what has failed before and one more in every run."""
    pairs = itertools.product([*SPLIT, *WHOLE], [at_once, in_the_loss, in_a_function, in_backward])
    return [pytest.param(*p, marks=() if p in USUAL else pytest.mark.long) for p in pairs]


@pytest.mark.parametrize(("kind", "loss"), matrix())
@distributed(4)
def test_the_head_is_called_by_the_loss(kind: Any, loss: ChunkedLoss) -> None:
    check(pipeline(kind, loss), 2)
