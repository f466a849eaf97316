"""Counts the live bytes of all tensors, and says which storages they are.

Three ways were weighed.
- Resident size is what the allocator of the C library has not given back: it depends on what ran
  before, and cannot say what a byte is for.
- The memory events of torch.profiler see every allocation, but only on threads that the profiler
  follows: when another thread drops a tensor's last reference, it is never seen to go, and the
  count stays too high from then on. Asynchronous communication does just that.
- A dispatch mode sees the tensors that go in and out of every operation. With weak references to
  their storages, it does not matter who frees them; with the sizes read again after every
  operation, `untyped_storage().resize_()`, which no operator reports, is seen at the next one.

This is the third. It does not see what lives and dies inside one operation: scratch memory of a
kernel, and what gloo makes for itself in a collective. The waits of a collective are left out too
(`transport.around_waits`), because gloo's own buffers come up there. The receive buffers of a
library that sends and receives by itself are ordinary tensors, and count.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass
class StorageHistory:
    """Where one storage was in memory over time.

    Attributes:
        made_by: The operation that brought it up first, and the Python function around it.
        ranges: (moment, address, bytes) at every change, in order.
    """

    made_by: str
    ranges: list[tuple[int, int, int]] = field(default_factory=list)

    def range_at(self, moment: int) -> tuple[int, int]:
        """Address and bytes at a moment; 0 bytes before it was made and after it was freed."""
        last = (0, 0)
        for when, address, num_bytes in self.ranges:
            if when > moment:
                break
            last = (address, num_bytes)
        return last


def covered_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """How many bytes lie in at least one of the ranges of (address, bytes).

    Two storages may share memory: a slice of an UntypedStorage is a storage of its own.
    """
    total = end = 0
    for address, num_bytes in sorted(ranges):
        total += max(0, address + num_bytes - max(address, end))
        end = max(end, address + num_bytes)
    return total


def _lies_in(part: tuple[int, int], ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether a range of (address, bytes) lies in one of the others."""
    start, stop = part[0], sum(part)
    return any(address <= start and stop <= address + size for address, size in ranges)


class Ledger(TorchDispatchMode):
    """Records the bytes of every live tensor storage after every operation.

    A moment is the number of samples so far. Storages made before the mode was entered are known
    from their first use on.

    Args:
        every_operation: Take a sample after every operation. Otherwise only new storages are noted,
            which is a good deal faster, until the attribute of that name is set.

    Example:
        >>> with Ledger() as ledger:
        ...     a = torch.ones(256)
        ...     b = a + a
        >>> ledger.live_bytes[-1]
        2048
    """

    def __init__(self, every_operation: bool = True) -> None:
        super().__init__()
        self.every_operation = every_operation
        self.histories: list[StorageHistory] = []
        self.live_bytes: list[int] = []
        self.operations: list[str] = []
        # Where the object of a live storage is, its weak reference, its place in `histories`.
        # Holding the reference keeps that place from being given to another storage.
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # Storages that are slices of others. A slice keeps the storage that it was cut from, not
        # the memory: when that is resized to nothing, the slice still names bytes that are gone.
        self._slices: set[int] = set()
        # By thread: one that waits for messages while another one computes pauses itself only.
        self._paused: set[int] = set()

    @property
    def now(self) -> int:
        """The moment of the last sample; -1 before the first."""
        return len(self.live_bytes) - 1

    def history_of(self, tensor: Tensor) -> int:
        """The place in `histories` of the storage of a tensor that was seen."""
        return self._live[StorageWeakRef(tensor.untyped_storage()).cdata][1]

    def memory_of(self, tensor: Tensor) -> int:
        """The place in `histories` of the storage that brought up the memory of a tensor.

        That is the tensor's own storage, or the one that it is a slice of. A slice may be cut
        some operations after the memory is there, and its own history begins only then.
        """
        storage = tensor.untyped_storage()
        if not storage.resizable():
            part = (storage.data_ptr(), storage.nbytes())
            for key, (_, place) in self._live.items():
                other = torch.UntypedStorage._new_with_weak_ptr(key)
                if other is None or not other.resizable():
                    continue
                if _lies_in(part, [(other.data_ptr(), other.nbytes())]):
                    return place
        return self.history_of(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if threading.get_ident() not in self._paused:
            self._track((result, args, kwargs), str(func))
            if self.every_operation:
                self.sample(str(func))
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes no notice of this thread's operations inside; what is alive after it is counted."""
        thread = threading.get_ident()
        is_outermost = thread not in self._paused
        self._paused.add(thread)
        try:
            yield
        finally:
            if is_outermost:
                self._paused.discard(thread)

    def sample(self, operation: str) -> None:
        """Counts now, right after `operation`."""
        moment = len(self.live_bytes)
        live, fixed = [], []
        for key, (reference, place) in list(self._live.items()):
            now = (0, 0)
            if reference.expired():
                del self._live[key]
                self._slices.discard(key)
            else:
                storage = torch.UntypedStorage._new_with_weak_ptr(key)
                if storage is not None and storage.nbytes():
                    now = (storage.data_ptr(), storage.nbytes())
                    if storage.resizable():
                        live.append(now)
                    elif key not in self._slices:
                        fixed.append((key, now))
            ranges = self.histories[place].ranges
            if now != (ranges[-1][1:] if ranges else (0, 0)):
                ranges.append((moment, now[0], now[1]))
        for key, now in fixed:  # a slice, or memory that is not torch's
            if _lies_in(now, live):
                self._slices.add(key)
            else:
                live.append(now)
        self.operations.append(operation)
        self.live_bytes.append(covered_bytes(live))

    def _is_slice(self, part: torch.UntypedStorage) -> bool:
        others = map(torch.UntypedStorage._new_with_weak_ptr, list(self._live))
        ranges = [(s.data_ptr(), s.nbytes()) for s in others if s is not None and s.resizable()]
        return _lies_in((part.data_ptr(), part.nbytes()), ranges)

    def _track(self, tensors: object, operation: str) -> None:
        for tensor in tree_iter(tensors):
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor
            if isinstance(local, AsyncCollectiveTensor):  # a wrapper, without memory of its own
                local = local.elem
            storage = local.untyped_storage()
            reference = StorageWeakRef(storage)
            if reference.cdata not in self._live:
                if not storage.resizable() and self._is_slice(storage):
                    self._slices.add(reference.cdata)
                self._live[reference.cdata] = (reference, len(self.histories))
                self.histories.append(StorageHistory(f"{operation} in {_caller()}"))


def _caller() -> str:
    """The innermost Python function that is not torch's machinery, as `file.py:function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        machinery = "/torch/" in path and "/torch/distributed/" not in path
        if path != __file__ and not machinery:
            return f"{Path(path).name}:{code.co_name}"
        frame = frame.f_back
    return "?"
