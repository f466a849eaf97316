"""Conversion between torch tensors and bytes."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ...common.memory import memory_of
from ...common.pinned import power_of_two
from ...dtensor.parts import local_part
from ..errors import CheckpointError
from .header import MAX_DIMS, TensorInfo, header_length, parse_header
from .manifest import TensorPart

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "U16": torch.uint16, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "U64": torch.uint64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def describe(name: str, tensor: Tensor) -> TensorInfo:
    """How a file describes the whole tensor, for a DTensor too.

    Raises:
        CheckpointError: for dtypes and layouts that safetensors files cannot hold.
    """
    if tensor.dtype not in NAMES:
        raise CheckpointError(
            f"'{name}' has dtype {tensor.dtype}, which safetensors files cannot hold"
        )
    if tensor.ndim > MAX_DIMS:
        raise CheckpointError(f"'{name}' has {tensor.ndim} dims: at most {MAX_DIMS} are saved")
    if tensor.layout != torch.strided:
        raise CheckpointError(f"'{name}' has layout {tensor.layout}: only dense tensors are saved")
    return TensorInfo(name, NAMES[tensor.dtype], tuple(tensor.shape))


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part: a DTensor's local tensor, detached; else the tensor, detached."""
    return local_part(tensor).detach()


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read a tensor's memory in place."""
    return tensor.device.type == "cpu"


class LocalBytes:
    """The bytes of this rank's tensors, for a `Writer`.

    Host memory is returned in place. Device memory is copied piece by piece into one buffer per
    thread of the writer; a view of it stays valid until the same thread's next call.
    """

    def __init__(self, tensors: dict[tuple[str, str], Tensor]) -> None:
        """
        Args:
            tensors: the local tensor of each (kind, name).
        """
        self._tensors = {
            key: t if t.is_contiguous() else t.contiguous() for key, t in tensors.items()
        }
        self._memory = {key: memory_of(t) for key, t in self._tensors.items() if on_host(t)}
        self._buffers = threading.local()
        if len(self._memory) < len(self._tensors) and torch.accelerator.is_available():
            # The writer's threads copy on separate streams, which do not wait for the streams of
            # the optimizer and of the copies above.
            torch.accelerator.synchronize()

    def __call__(self, part: TensorPart, start: int, stop: int) -> memoryview:
        key = (part.kind, part.tensor.name)
        memory = self._memory.get(key)
        if memory is not None:
            return memory[start:stop]
        tensor = self._tensors[key]
        size = tensor.element_size()
        piece = tensor.view(-1)[start // size : stop // size]
        buffer = self._buffer(stop - start)
        # Not `piece.cpu()`: that temporary would be freed before its memory is written.
        buffer[: stop - start].view(tensor.dtype).copy_(piece)
        return memory_of(buffer)[: stop - start]

    def _buffer(self, nbytes: int) -> Tensor:
        """This thread's buffer; page-locked, because copies from a device are faster then."""
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None or buffer.numel() < nbytes:
            pin = torch.accelerator.is_available()
            if pin:
                nbytes = power_of_two(nbytes)  # torch's allocator rounds up anyway
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._buffers.buffer = buffer
        return buffer


def tensors_in(data: bytes, file: str) -> dict[str, Tensor]:
    """Read the tensors of a small safetensors file; whole, on the CPU.

    Args:
        data: the bytes of the file.
        file: its name, for messages.

    Raises:
        CorruptCheckpoint: if it is not a safetensors file.
    """
    length = header_length(data[:8], len(data), file)
    header = parse_header(data[8 : 8 + length], len(data), file)
    tensors = {}
    for name, info in header.tensors.items():
        start = header.offsets[name]
        raw = bytearray(data[start : start + info.nbytes])
        dtype = DTYPES[info.dtype]
        flat = (
            torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype, device="cpu")
        )
        tensors[name] = flat.reshape(info.shape)
    return tensors
