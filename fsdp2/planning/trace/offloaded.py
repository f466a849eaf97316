"""`offload_activations` in a trace: decides as in a run which activations are copied.

The decision depends on sizes and on the order of a step, which are the same as in a run. So the
code of `fsdp2.offload` runs here, too. Only its copies are replaced by events of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from ...offload.activations import offload_activations
from ...offload.host_memory import HostMemory
from ...offload.saved_memory import Entry, SavedMemory
from .events import CopyEnd, HostCopy
from .meter import StorageMeter

Record = Callable[[HostCopy | CopyEnd], None]


class CountedOffload(offload_activations):
    """The context for the forward of a trace.

    Args:
        model: with the stand-ins of its parameters.
        max_device_bytes: as in `offload_activations`.
        meter: does not count host memory.
        record: called with each copy, and when compute waits for one.
    """

    _plain = FakeTensor

    def __init__(
        self, model: nn.Module, max_device_bytes: int, meter: StorageMeter, record: Record
    ) -> None:
        super().__init__(model, max_device_bytes=max_device_bytes)
        self._meter, self._record = meter, record

    @override
    def _memory_of(self, device: torch.device) -> SavedMemory:
        # Fake tensors are on the CPU, whichever device they represent.
        memory = self._memories.get(device)
        if memory is None:
            memory = CountedMemory(device, self._limit, self._meter, self._record)
            self._memories[device] = memory
        return memory


class CountedMemory(SavedMemory):
    """Saved memory whose copies are events."""

    def __init__(
        self, device: torch.device, limit: int, meter: StorageMeter, record: Record
    ) -> None:
        super().__init__(device, limit, False, _copies(record))
        self._host = _HostBytes(meter)
        self._meter, self._record, self._num_copies = meter, record, 0

    @override
    def save(
        self,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        key: Hashable,
        named: torch.Tensor,
    ) -> tuple[Entry, int]:
        memory: Any = self._bytes_of(named)
        return super().save(memory, start, nbytes, key, named)

    @override
    def _weakly(self, storage: Any, named: torch.Tensor) -> tuple[object, ...]:
        # Not to the storage: this would keep its Python object alive, and the meter would not see
        # that the storage is freed. The tensor is enough: no trace has two tensors of one storage
        # with separate versions that outlive each other.
        return (torch._C._WeakTensorRef(named),)  # type: ignore[attr-defined]

    def _bytes_of(self, named: torch.Tensor) -> torch.Tensor:
        """The whole storage as bytes."""
        # As a tensor: fake mode never frees the arguments of `Tensor.set_`.
        with self._meter.paused():
            flat = named.detach().as_strided(
                (named.untyped_storage().nbytes() // named.itemsize,), (1,), 0
            )
            return flat.view(torch.uint8)

    @override
    def view(
        self,
        storage: Any,
        start: int,
        dtype: torch.dtype,
        shape: torch.Size,
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        with self._meter.paused():
            whole = storage[start:]
            rest = whole.numel() % dtype.itemsize
            return whole[: whole.numel() - rest].view(dtype).as_strided(shape, strides, 0)

    @override
    def _copy_to(self, blocks: list[torch.Tensor], entry: Entry) -> None:
        self._copy("to host", entry)

    @override
    def _copy_from(self, blocks: list[torch.Tensor], target: torch.Tensor, entry: Entry) -> Any:
        self._copy("to device", entry)
        return target

    def _copy(self, kind: str, entry: Entry) -> None:
        entry.copied = self._num_copies
        self._num_copies += 1
        self._record(HostCopy(entry.copied, kind, entry.nbytes))


def _copies(record: Record) -> Any:
    """The part of a `CopyStream` that `SavedMemory` uses; all compute is on one stream."""
    return SimpleNamespace(
        compute=SimpleNamespace(wait_event=lambda number: record(CopyEnd(number))),
        is_capturing=lambda: False,
        on=lambda stream: nullcontext(),
    )


class _HostBytes(HostMemory):
    """Blocks without memory, which only have sizes."""

    def __init__(self, meter: StorageMeter) -> None:
        super().__init__(pin=False)
        self._meter = meter

    @override
    def _allocate(self, size: int) -> torch.Tensor:
        self.reserved_bytes += size
        with self._meter.paused():  # which counts the memory of the device
            return torch.empty(size, dtype=torch.uint8, device="meta")


def counted_offload(
    model: nn.Module, max_device_bytes: int | None, meter: StorageMeter, record: Record
) -> AbstractContextManager[Any]:
    """A `CountedOffload` for the forward of ``model``; does nothing if ``max_device_bytes`` is
    None."""
    if max_device_bytes is None:
        return nullcontext()
    return CountedOffload(model, max_device_bytes, meter, record)
