"""Where tensors get memory, and the bytes of that memory on the host."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def current_device(kind: str) -> torch.device:
    """The device of type ``kind`` that this rank computes on."""
    # The CPU has no index: ``torch.cpu.current_device()`` is a string, and ``cpu:0 != cpu``.
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def device_for(tensor: Tensor | None) -> torch.device:
    """Where a tensor on the meta device gets memory: on the device of its mesh, else the CPU."""
    return current_device(tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu")


def usual_device(model: nn.Module | None) -> torch.device:
    """Where a model's buffers belong: on the device of the sharded parameters they compute with."""
    parameters = model.parameters() if model is not None else ()
    return device_for(next((p for p in parameters if isinstance(p, DTensor)), None))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; valid as long as the tensor is."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
