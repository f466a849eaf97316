"""Protocols for custom collectives and their memory; see `FSDPModule.set_custom_all_gather`."""

from __future__ import annotations

# First: its error names all that this torch lacks.
from .common import torch_private as torch_private  # isort: split

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Comm(Protocol):
    """The method that `AllGather` and `ReduceScatter` share."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of shape ``size`` for the collective; its contents do not matter.

        Called before every collective, on its stream. It may return the same memory again once
        nothing else refers to it.
        """
        ...


class AllGather(Comm, Protocol):
    """An all-gather that replaces the process group's. No base class is needed.

    `FSDPModule.set_custom_all_gather` has an example.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of every rank into ``output_tensor``.

        Args:
            output_tensor: 1-D, from `allocate`, with ``group.size()`` times the input's elements.
            input_tensor: 1-D, this rank's slice of ``output_tensor``: the gather is in place.
            group: the ranks to gather from.
            async_op: whether to return a Work at once.
        """
        ...


class ReduceScatter(Comm, Protocol):
    """A reduce-scatter that replaces the process group's. No base class is needed.

    Pass it to `FSDPModule.set_custom_reduce_scatter`.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce this rank's slice of all ranks' ``input_tensor``.

        Args:
            output_tensor: 1-D, from `allocate`.
            input_tensor: 1-D, from `allocate`, with ``group.size()`` times the output's elements.
            group: the ranks to reduce over.
            op: ``ReduceOp.AVG``; ``ReduceOp.SUM`` for float16, and for all dtypes after
                ``set_force_sum_reduction_for_comms(True)``.
            async_op: whether to return a Work at once.
        """
        ...
