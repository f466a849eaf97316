"""What is saved of a training run: the model, its optimizers, and the small state around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..format.values import encode
from .capture import Captured, RankLocal, capture
from .random_state import random_states
from .repeated import Repeated

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def capture_training(
    model: nn.Module,
    optimizer: Optimizers,
    scheduler: Any,
    extra: Any,
    ranks: tuple[int, ...],
    rank: int,
    rank_local: RankLocal | None = None,
    repeated: Repeated | None = None,
) -> Captured:
    """Everything that this rank needs to resume, as passed to `Checkpointer.save`.

    Args:
        repeated: what is kept of the last save, by one who saves again and again.
    """
    take = repeated.capture if repeated is not None else capture
    captured = take(model, as_list(optimizer), ranks, rank, rank_local)
    captured.values["random"] = random_states()
    captured.values["extra"] = encode(extra, "extra")
    captured.values["schedulers"] = [
        encode(s.state_dict(), f"scheduler {i}") for i, s in enumerate(as_list(scheduler))
    ]
    return captured


def as_list(value: Any) -> list[Any]:
    """One or several, as arguments may be given; None: nothing."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
