"""`offload_activations`: keeps tensors saved for backward in host memory, beyond a limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from ..comm.streams import copy_stream_for
from ..common.checks import check_bytes
from ..dtensor.memory import is_gathered
from .saved_memory import Entry, SavedBytes, SavedMemory

# Kernels may depend on how memory is aligned; what comes back is aligned as it was.
ALIGN_BYTES = 512


@dataclass(frozen=True)
class ActivationBytes:
    """What `offload_activations` holds and has copied, in bytes, over all devices.

    Attributes:
        device, device_peak: saved tensors on the device, now and at most. Only tensors that may be
            offloaded count: no parameters, and none smaller than ``min_bytes``.
        host, host_peak: host memory in use for saved tensors, now and at most.
        to_host, to_device: copied so far.

    Example:
        >>> with offload_activations(nn.Identity()) as offload:
        ...     loss = model(tokens).mean()
        >>> offload.bytes.to_host  # nothing: on the CPU
        0
    """

    device: int
    device_peak: int
    host: int
    host_peak: int
    to_host: int
    to_device: int


class offload_activations:  # noqa: N801 (used like a function)
    """Context for forward that moves tensors saved for backward to host memory, beyond a limit.

    The tensors that forward saves first are needed last in backward. They are copied to page-locked
    memory on a separate stream while forward continues, and brought back before they are needed.
    Gradients are bitwise the same. Activation checkpointing computes tensors again instead. Both
    can be combined: the inputs of checkpointed blocks are then offloaded.

    Compared with ``torch.autograd.graph.save_on_cpu``, which copies every saved tensor while
    compute waits:

    - up to ``max_device_bytes`` stay on the device, without a copy;
    - parameters, also gathered ones (which their units free and gather again), and buffers are
      never copied;
    - tensors that share memory (views, the same input of several layers) are copied once;
    - compute continues during copies;
    - a saved tensor that was changed in place is an error in backward, as without offload.

    Args:
        model: the model whose forward runs in the context, sharded or not. Its parameters and
            buffers are not offloaded.
        max_device_bytes: how many bytes of saved tensors stay on the device. A quarter of them is
            for copies in flight, so choose at least four times what a block saves; with 0, compute
            waits for each copy. The tensor being saved does not count, nor do, in backward, the
            tensors in use and the next one.
        min_bytes: smaller tensors stay on the device, and are not counted.
        pin_memory: whether to page-lock host memory. Without it, copies block the host.

    Run only the forward in the context; backward needs none. Create one context and enter it for
    every micro-batch: it keeps its host memory. Tensors on the CPU are left alone, so the same
    program runs there, too. The inner tensors of tensor subclasses (DTensor) are offloaded. With
    torch.compile, enter the context outside of the compiled function. ``torch.func`` transforms
    raise an error, since they do not support hooks on saved tensors.

    Raises:
        ValueError: if a number is negative.
        RuntimeError: in forward, while a CUDA graph is captured; in backward, if a saved tensor has
            been changed in place.

    Example:
        >>> offload = offload_activations(model, max_device_bytes=4 << 30)
        >>> for batch in loader:
        ...     with offload:
        ...         loss = model(batch).mean()
        ...     loss.backward()
    """

    _plain: type[Tensor] = Tensor  # `fsdp2.planning` has fake ones

    # Copies during forward, and back during backward, the last ones first: vDNN (Rhu et al., MICRO
    # 2016, arXiv 1602.08124). Rejected: to begin with the largest tensors, which are few. The first
    # ones are needed last, and backward begins with the tensors that stayed.

    def __init__(
        self,
        model: nn.Module,
        *,
        max_device_bytes: int = 0,
        min_bytes: int = 64 * 1024,
        pin_memory: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        for name, value in (("max_device_bytes", max_device_bytes), ("min_bytes", min_bytes)):
            check_bytes(name, value)
        self._model = model
        self._limit, self._min_bytes, self._pin = max_device_bytes, min_bytes, pin_memory
        self._permanent: frozenset[int] = frozenset()
        self._memories: dict[torch.device, SavedMemory | None] = {}

    def __enter__(self) -> offload_activations:
        model = self._model
        held = (s for t in (*model.parameters(), *model.buffers()) for s in _storages(t))
        self._permanent = frozenset(storage._cdata for storage in held)
        # Its exit takes off the hooks that were set last, whichever object it is called on.
        torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack).__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack).__exit__(*exc)

    @property
    def bytes(self) -> ActivationBytes:
        """How many bytes are on the device and on the host, and how many were copied."""
        counts = [memory.counted() for memory in self._memories.values() if memory is not None]
        return ActivationBytes(
            **{name: sum(getattr(c, name) for c in counts) for name in vars(SavedBytes())}
        )

    # -- what autograd saves --------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> _Packed:
        part = self._offload(tensor, tensor)
        if part is None:
            # Detached: with itself, the output of an operator would be kept alive by its own graph.
            kept = tensor.detach()
            return _Packed(kept, tensor._version, _Kept(kept))
        return _Packed(_without_memory(tensor), tensor._version, part)

    def _offload(self, tensor: Tensor, saved: Tensor) -> _Part | None:
        """What brings it back; None: it stays.

        Args:
            saved: what autograd saves: ``tensor``, or a subclass with ``tensor`` inside.
        """
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and (base.requires_grad or isinstance(base, nn.Parameter)):
            return None  # who made it keeps it
        if type(tensor) is not self._plain:
            return self._offload_inner(tensor, saved)
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        memory = self._memory_of(tensor.device)
        if memory is None or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        start, stop = _range_of(tensor, storage.nbytes())
        if stop - start < self._min_bytes:
            return None
        if storage._cdata in self._permanent or is_gathered(storage):
            return None
        # Not by the storage alone: tensors that were made of ``.data`` share it, but not the
        # counter, and a write through one of them in between goes unnoticed by the other.
        owner = saved if saved._base is None else saved._base
        key = (storage._cdata, start, stop, owner._cdata, saved._version)
        entry, number = memory.save(storage, start, stop - start, key, owner)
        return _Away(memory, entry, number, tensor, start)

    def _offload_inner(self, tensor: Tensor, saved: Tensor) -> _Part | None:
        """Of a subclass: its inner tensors."""
        if not is_traceable_wrapper_subclass(tensor):
            return None
        names, context = tensor.__tensor_flatten__()
        parts: dict[str, Any] = {}
        for name in names:
            inner = _waited_for(getattr(tensor, name))
            # Since torch 2.15 the mesh of a DTensor is among them.
            away = self._offload(inner, saved) if isinstance(inner, Tensor) else None
            parts[name] = inner if away is None else away
        if not any(isinstance(part, _Part) for part in parts.values()):
            return None
        return _Wrapper(tensor, parts, context)

    def _memory_of(self, device: torch.device) -> SavedMemory | None:
        if device not in self._memories:
            copies = None if device.type == "meta" else copy_stream_for(device)
            self._memories[device] = (
                None if copies is None else SavedMemory(device, self._limit, self._pin, copies)
            )
        return self._memories[device]


def _unpack(packed: _Packed) -> Tensor:
    return packed.tensor()


class _Packed:
    """What takes the place of a saved tensor.

    Args:
        witness: shares the version counter of the saved tensor, but not its memory.
        version: what the counter was.
    """

    __slots__ = ("part", "version", "witness")

    def __init__(self, witness: Tensor, version: int, part: _Part) -> None:
        self.witness, self.version, self.part = witness, version, part

    def tensor(self) -> Tensor:
        # With hooks, autograd does not compare the versions.
        now = self.witness._version
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of {self.part.describe()} is at version {now}; "
                f"expected version {self.version} instead. It was saved in offload_activations; "
                "torch.autograd.set_detect_anomaly(True) finds the operation that saved it"
            )
        return self.part.tensor()


class _Part:
    """A tensor, or what makes it again."""

    __slots__ = ()

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError


class _Kept(_Part):
    """One that stays where it is."""

    __slots__ = ("kept",)

    def __init__(self, kept: Tensor) -> None:
        self.kept = kept

    @override
    def tensor(self) -> Tensor:
        return self.kept

    @override
    def describe(self) -> str:
        return f"{self.kept.dtype} and shape {list(self.kept.shape)}"


class _Away(_Part):
    """A view of the bytes of an entry."""

    __slots__ = ("dtype", "entry", "memory", "number", "offset", "shape", "strides")

    def __init__(
        self, memory: SavedMemory, entry: Entry, number: int, tensor: Tensor, start: int
    ) -> None:
        self.memory, self.entry, self.number = memory, entry, number
        self.offset = tensor.storage_offset() * tensor.itemsize - start
        self.dtype, self.shape, self.strides = tensor.dtype, tensor.shape, tensor.stride()

    @override
    def tensor(self) -> Tensor:
        storage, start = self.memory.use(self.entry, self.number)
        start += int(self.offset)
        return self.memory.view(storage, start, self.dtype, self.shape, self.strides)

    @override
    def describe(self) -> str:
        return f"{self.dtype} and shape {list(self.shape)}"


class _Wrapper(_Part):
    """A subclass, from its inner tensors: those that are elsewhere, and all else as it is."""

    __slots__ = ("cls", "context", "parts", "shape", "strides")

    def __init__(self, tensor: Any, parts: dict[str, Any], context: Any) -> None:
        self.cls, self.parts, self.context = type(tensor), parts, context
        self.shape, self.strides = tensor.shape, tensor.stride()

    @override
    def tensor(self) -> Tensor:
        inner = {
            name: part.tensor() if isinstance(part, _Part) else part
            for name, part in self.parts.items()
        }
        cls: Any = self.cls
        return cls.__tensor_unflatten__(inner, self.context, self.shape, self.strides)

    @override
    def describe(self) -> str:
        return f"class {self.cls.__name__} and shape {list(self.shape)}"


def _range_of(tensor: Tensor, storage_bytes: int) -> tuple[int, int]:
    """The bytes of the storage to move: the tensor's, or all if others may want the rest."""
    first = int(tensor.storage_offset())
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start, stop = first * tensor.itemsize, (first + span) * tensor.itemsize
    # One of three heads in one tensor has a third of it, but interleaved with the others: its
    # bytes span nearly all. A half is a half of a gated layer, whose other half is saved too.
    if (stop - start) * 2 >= storage_bytes:
        return 0, storage_bytes
    return start // ALIGN_BYTES * ALIGN_BYTES, stop


def _without_memory(saved: Tensor) -> Tensor:
    """A tensor that only shares the version counter."""
    witness = saved.detach()
    if not is_traceable_wrapper_subclass(witness):
        witness.data = torch.empty(0, dtype=witness.dtype, device=witness.device)
        return witness
    subclass: Any = witness
    for name in subclass.__tensor_flatten__()[0]:
        inner = getattr(witness, name)
        if isinstance(inner, Tensor):
            setattr(witness, name, torch.empty(0, dtype=inner.dtype, device=inner.device))
    return witness


def _waited_for(inner: Any) -> Any:
    """Of what a collective of DTensors fills: the tensor, once compute waits for that."""
    wait = getattr(inner, "trigger_wait", None)
    return inner if wait is None else wait()


def _storages(tensor: Any) -> Iterator[torch.UntypedStorage]:
    """Where a parameter or buffer is, as far as it has memory."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _storages(getattr(tensor, name))
    elif isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
        yield tensor.untyped_storage()
