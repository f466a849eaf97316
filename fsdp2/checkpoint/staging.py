"""Copies of a rank's tensors, so that training can go on while a thread writes them."""

from __future__ import annotations

import torch

from .capture import Captured
from .saving import Part
from .tensors import memory_of

ALIGN_BYTES = 64


class Staging:
    """One host buffer, pinned where there is an accelerator, kept from save to save."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def fill(self, captured: Captured):
        """Copy everything that this rank writes; returns a reader for a `Writer`.

        The tensors in ``captured`` are replaced by their copies, the small ones too.
        """
        places: dict[tuple[str, str], tuple[int, int]] = {}
        end = 0
        for key, tensor in captured.locals.items():
            nbytes = tensor.numel() * tensor.element_size()
            places[key] = (end, nbytes)
            end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        accelerator = torch.accelerator.is_available()
        if self._buffer is None or self._buffer.numel() < end:
            self._buffer = None
            self._buffer = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=accelerator)
        copies, sources = [], []
        for key, tensor in captured.locals.items():
            start, nbytes = places[key]
            if nbytes:
                copy = self._buffer[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
                copies.append(copy)
                sources.append(tensor)
        with torch.no_grad():
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
        if accelerator:
            torch.accelerator.synchronize()
        captured.own = {name: t.detach().to("cpu", copy=True) for name, t in captured.own.items()}
        captured.locals.clear()
        memory = memory_of(self._buffer)

        def read(part: Part, start: int, stop: int) -> memoryview:
            first, _ = places[part.kind, part.tensor.name]
            return memory[first + start : first + stop]

        return read

    def clear(self) -> None:
        """Give the buffer back."""
        self._buffer = None
