"""Messages between the ranks that share a model, outside of training steps."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.transports import backend_name, reserve_tags
from ..common.failures import explained
from ..common.memory import current_device
from ..dtensor.placement import this_rank

_T = TypeVar("_T")

_CALL = "a message of full_state_dict or load_full_state_dict, a call of all ranks,"


class P2PBatch:
    """Messages between pairs of ranks: posted one by one, then sent and waited for together.

    Both ends must post the messages between them in the same order. Tensors are sent as bytes, so
    any dtype will do.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = this_rank()
        self.ranks: tuple[int, ...] = (self.rank,)
        self.group: Any = None
        self._first_tag = 0
        if dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.ranks = tuple(dist.get_process_group_ranks(self.group))
            # Above the tags of units, whose gathers may be in flight. None are reserved: `finish`
            # waits for all, so the next unit or batch may use the same ones.
            self._first_tag = reserve_tags([self.group], 0)
            self._open()
        self._posted: list[dist.P2POp] = []
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._unpack: list[tuple[Tensor, Tensor]] = []
        self._broadcasts: list[tuple[Tensor, int]] = []

    def _open(self) -> None:
        """Connect the group, where that takes all of its ranks."""
        # The first call of an NCCL group makes its communicator, with all ranks. If that were a
        # message between two of them, they would wait for the others.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return
        device = current_device(accelerator.type)
        if len(self.ranks) > 1 and backend_name(self.group, device) == "nccl":
            with explained(_CALL, self.group):
                dist.all_reduce(torch.zeros(1, device=device), group=self.group)

    def send(self, tensor: Tensor, rank: int, device: torch.device | None = None) -> None:
        """Send ``tensor``, by way of ``device`` if it is on another one."""
        where = self._device(tensor.device if device is None else device)
        self._post(dist.isend, tensor.to(where).contiguous(), rank, (self.rank, rank))

    def receive(self, into: Tensor, rank: int, device: torch.device) -> None:
        """Receive on ``device``, straight into ``into`` if that is possible."""
        buffer = self._buffer(into, device)
        self._post(dist.irecv, buffer, rank, (rank, self.rank))

    def broadcast(self, into: Tensor, value: Tensor | None, source: int) -> None:
        """Copy ``value``, which only ``source`` has, into the tensors of all ranks."""
        # Broadcasts are posted by all ranks in the same order, and run after the messages, so the
        # two kinds need no common order.
        if value is not None:
            into.copy_(value)
        if len(self.ranks) > 1:
            buffer = self._buffer(into, into.device)
            if value is not None and buffer is not into:
                buffer.copy_(into)
            self._broadcasts.append((as_bytes(buffer), source))

    def finish(self) -> None:
        """Send and receive all that was posted."""
        with explained(_CALL, self.group):
            # In one batch: posted one after the other, two ranks that both send first would wait
            # for each other where a send ends with its receive (NCCL).
            if self._posted:
                for work in dist.batch_isend_irecv(self._posted):
                    work.wait()
            for data, source in self._broadcasts:
                dist.broadcast(data, source, group=self.group)
        for into, buffer in self._unpack:
            if into is not buffer:
                into.copy_(buffer)
            else:
                # Received straight into it, which no version counter noticed. Gathers that are
                # cached go by these.
                torch.autograd.graph.increment_version(into)
        for posted in (self._posted, self._broadcasts, self._unpack):
            posted.clear()
        self._numbers.clear()

    def exchange(self, value: _T) -> list[_T]:
        """The values of all ranks, in the order of ``ranks``: small objects, which are pickled."""
        if len(self.ranks) == 1:
            return [value]
        values = [value] * len(self.ranks)
        with explained(_CALL, self.group):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def share(self, value: _T | None, source: int) -> _T:
        """What ``source`` has, on all ranks; others may give None."""
        values = [value]
        if len(self.ranks) > 1:
            device = self._device(torch.device("cpu"))
            with explained(_CALL, self.group):
                dist.broadcast_object_list(values, source, group=self.group, device=device)
        assert values[0] is not None
        return values[0]

    def _post(self, op: Any, data: Tensor, peer: int, pair: tuple[int, int]) -> None:
        # Counted per pair and direction: a rank does not know how many messages others exchange.
        tag = self._first_tag + self._numbers[pair]
        self._numbers[pair] += 1
        self._posted.append(dist.P2POp(op, as_bytes(data), peer, self.group, tag))

    def _buffer(self, into: Tensor, device: torch.device) -> Tensor:
        where = self._device(device)
        direct = into.is_contiguous() and into.device == where
        buffer = into if direct else torch.empty(into.shape, dtype=into.dtype, device=where)
        self._unpack.append((into, buffer))
        return buffer

    def _device(self, device: torch.device) -> torch.device:
        """The device on which this group needs a tensor of ``device``."""
        # By its backends and not by a table: a group of NCCL alone supports no tensors of the CPU,
        # one of "cpu:gloo,cuda:nccl" supports both.
        try:
            self.group._get_backend(torch.device(device.type))
        except RuntimeError:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is not None:
                return current_device(accelerator.type)
        return device


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
