"""Collectives that the caller waits for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions

from .failures import explained


def sum_over(group: dist.ProcessGroup, tensor: torch.Tensor, what: str) -> None:
    """Replace ``tensor`` by its sum over ``group``, on the current stream.

    Where the host orders the work of ``group``, the call returns when that is done.

    Args:
        what: of which an error speaks.
    """
    options = AllreduceOptions()
    options.asyncOp = False
    with explained(what, group):
        work = group.allreduce([tensor], options)
        if work is not None:
            work.wait()
