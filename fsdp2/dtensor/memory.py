"""Memory that several tensors share: a part as a separate storage, neighbours as one tensor."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..common.torch_patches import register


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor at offset 0 of a storage of the same size.

    For local tensors of DTensors: torch.compile, `copy.deepcopy` and pickle need offset 0; see
    `TensorSpec.wrap`.

    Args:
        tensor: contiguous, in a storage whose size does not change: the slice would keep the old
            address.
    """
    return tensor.new_empty(0).set_(storage_part(tensor), 0, tensor.shape, tensor.stride())


def storage_part(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The bytes of a contiguous tensor, as a storage at their present address."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return storage_slice(tensor.untyped_storage(), start, start + int(tensor.nbytes))


def storage_slice(whole: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
    """Bytes ``start`` to ``stop`` as a storage at their present address."""
    storage: Any = whole[start:stop]
    for name in _SHARING:
        setattr(storage, name, _refuse_to_share)
    if whole.device.type != "cpu":
        storage.part_of = whole
        _honour_record_stream()
    return storage


def _honour_record_stream() -> None:
    """Let ``record_stream`` of a part record the memory that the part is in.

    Caching allocators only recognize memory blocks that they returned, and silently ignore other
    addresses: the memory would be reused while the user's stream reads it.
    """

    def add_kernel() -> object:
        # Below Python and autograd, where calls of the method, of the operator, and of both by
        # tensor subclasses pass; torch registers nothing there.
        library = torch.library.Library("aten", "IMPL")
        library.impl("record_stream", _record_stream, "BackendSelect", with_keyset=True)
        return library  # the kernel goes with it

    register(_record_stream, add_kernel)


def _record_stream(keys: Any, tensor: torch.Tensor, stream: torch.Stream) -> None:
    record = torch.ops.aten.record_stream.default
    record.redispatch(keys.remove(torch._C.DispatchKey.BackendSelect), tensor, stream)
    whole: Any = getattr(tensor.untyped_storage(), "part_of", None)
    if whole is not None:
        whole.is_recorded = True
        record(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(whole), stream)


# `torch.multiprocessing` and ``share_memory_`` call these on a storage. On the CPU they move it to
# shared memory: the unit would silently keep the old memory. On CUDA they look for an allocation
# that begins where the storage does.
_SHARING = ("_share_fd_cpu_", "_share_filename_cpu_", "_share_cuda_")


def _refuse_to_share(*_: object, **__: object) -> None:
    raise RuntimeError(
        "This tensor is a part of the memory of its unit (a shard of a parameter, or its "
        "gradient), so it cannot be shared with other processes. Share a copy: "
        "param.to_local().detach().clone(), or fsdp2.full_state_dict(model) for whole tensors"
    )


def at_address(address: int, numel: int, like: torch.Tensor) -> torch.Tensor:
    """A flat tensor over memory that other tensors own.

    It does not keep the memory alive: use it only while the owners exist.

    Args:
        address: of the first element, in bytes.
        numel: number of elements.
        like: has the dtype and the device.
    """
    storage = torch._C._construct_storage_from_data_pointer(
        address, like.device, numel * like.itemsize
    )
    return like.new_empty(0).set_(storage, 0, (numel,), (1,))


# Recorded when storages are made, never in a step. Python's object of a storage stays the same as
# long as something holds it, and buckets hold theirs.
_gathered: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()


def record_gathered(storages: Iterable[torch.UntypedStorage]) -> None:
    """From now on `is_gathered` is true for ``storages``, which are not kept alive."""
    _gathered.update(storages)


def is_gathered(storage: torch.UntypedStorage) -> bool:
    """Whether unsharded parameters lie in it: their unit frees it and fills it again."""
    return storage in _gathered


class Pack:
    """DTensors whose local tensors are slices of one storage and stay there.

    The owner of the storage makes one (for example a unit, for its gradients). From the identity of
    the DTensors and one address, others then find all of them without checking each.

    Attributes:
        dtensors: never changed. Nothing else may keep references to them: the owner counts
            references to them, and to ``storage``.
        storage: may get other memory; the owner moves the slices along.
    """

    dtensors: list[torch.Tensor]
    storage: torch.UntypedStorage

    def publish(self) -> None:
        """Let `packs` find it, as long as it lives."""
        _published.add(self)


_published: weakref.WeakSet[Pack] = weakref.WeakSet()


def packs() -> dict[int, Pack]:
    """All packs, by the ids of their DTensors."""
    return {id(dtensor): pack for pack in _published for dtensor in pack.dtensors}


# Not weak references to the parameters: a tensor that has some cannot be swapped, and `to_empty`
# swaps.
_asking: weakref.WeakSet[Any] = weakref.WeakSet()


def ask_side_by_side(optimizer: Any) -> None:
    """Ask the owners of the parameters' memory to place them in contiguous memory.

    They may ignore this, or do it later, before anything uses the memory.
    """
    _asking.add(optimizer)


def asked_side_by_side() -> set[int]:
    """Ids of the parameters for which optimizers have asked."""
    groups = [group for optimizer in _asking for group in optimizer.param_groups]
    return {id(param) for group in groups for param in group["params"]}
