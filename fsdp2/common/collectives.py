"""Collectives that the caller waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

from .failures import explained


def sum_over(group: dist.ProcessGroup, tensor: torch.Tensor, what: str) -> None:
    """Replace ``tensor`` by its sum over ``group``, on the current stream.

    If the host orders the work of ``group``, the call returns when the sum is complete.

    Args:
        what: what is summed, for errors.
    """
    options = AllreduceOptions()
    options.asyncOp = False
    with explained(what, group):
        work = group.allreduce([tensor], options)
        if work is not None:
            work.wait()
