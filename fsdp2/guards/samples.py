"""A few elements that stand for a whole tensor: cheap to copy from a device and to compare.

A write to a tensor (an init, a load, another seed) changes all of it, so sixteen elements show it.
They do not show a change of a single element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

NUM_SAMPLES = 16
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_KINDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor | None) -> tuple[torch.Tensor, slice] | None:
    """The elements of a plain tensor as integers over the same memory, and which of them to take.

    Returns:
        None for subclasses, meta tensors, bool and complex tensors, and tensors that are not
        contiguous, or empty.
    """
    # Subclasses may compute, or communicate, when they are indexed.
    if tensor is None or type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta:
        return None
    is_number = tensor.dtype.is_floating_point or tensor.dtype in _INTEGERS
    dense = tensor.layout is torch.strided and tensor.is_contiguous()
    if not (is_number and dense and tensor.numel()):
        return None
    # Integers over the same memory compare bit by bit: NaN equals itself, and 0.0 is not -0.0.
    kind = _KINDS[tensor.itemsize]
    # A slice, since a list of indices would be copied to the device first.
    step = -(-tensor.numel() // NUM_SAMPLES)
    return tensor.detach().view(-1).view(kind), slice(None, None, step)


class Samples:
    """Copies of samples of some tensors, on their devices until they are read.

    Args:
        tensors: of any dtypes, on any devices; tensors without samples are left out.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sizes: list[int] = []
        parts: dict[torch.device, list[torch.Tensor]] = {}
        self._devices: list[torch.device | None] = []
        for tensor in tensors:
            found = bits_of(tensor)
            if found is None:
                self._sizes.append(0)
                self._devices.append(None)
                continue
            bits, index = found
            # A copy on the device, not a view: what was sampled may be written or freed before
            # `read`, and to copy it to the host here would wait for the device once per tensor.
            taken = bits[index].contiguous().view(torch.uint8)
            self._sizes.append(taken.numel())
            self._devices.append(taken.device)
            parts.setdefault(taken.device, []).append(taken)
        self._data = {device: torch.cat(taken) for device, taken in parts.items()}

    def read(self) -> list[bytes]:
        """The samples of each tensor; empty where there are none. One transfer per device."""
        data = {device: t.cpu().numpy() for device, t in self._data.items()}
        starts = dict.fromkeys(data, 0)
        found = []
        for size, device in zip(self._sizes, self._devices, strict=True):
            if device is None:
                found.append(b"")
                continue
            start = starts[device]
            starts[device] += size
            found.append(data[device][start : start + size].tobytes())
        return found
