"""Copies of a rank's tensors, so that training can go on while a thread writes them."""

from __future__ import annotations

import torch

from ...common.memory import memory_of
from ...common.pinned import PinnedBytes
from ..format.manifest import Part
from .capture import Captured

ALIGN_BYTES = 64


class Staging:
    """Host memory, pinned where there is an accelerator, kept from save to save."""

    def __init__(self) -> None:
        self._bytes: PinnedBytes | None = None

    def fill(self, captured: Captured):
        """Copy everything that this rank writes; returns a reader for a `Writer`.

        ``captured`` keeps no tensor of the model: copies replace the small ones, and ``locals`` is
        emptied.
        """
        places: dict[tuple[str, str], tuple[int, int]] = {}
        end = 0
        for key, tensor in captured.locals.items():
            nbytes = tensor.numel() * tensor.element_size()
            places[key] = (end, nbytes)
            end += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        accelerator = torch.accelerator.is_available()
        self._bytes = staged = self._bytes or PinnedBytes(accelerator)
        staged.reserve(end)
        with torch.no_grad():
            for key, tensor in captured.locals.items():
                start, nbytes = places[key]
                _copy(list(staged.pieces(start, start + nbytes)), tensor)
        if accelerator:
            # The copies above do not block. They must be done before the caller trains on and
            # overwrites their sources, and before a thread writes what they copied.
            torch.accelerator.synchronize()
        captured.own = {name: t.detach().to("cpu", copy=True) for name, t in captured.own.items()}
        captured.locals.clear()

        def read(part: Part, start: int, stop: int) -> memoryview:
            first, _ = places[part.kind, part.tensor.name]
            found = [memory_of(piece) for piece in staged.pieces(first + start, first + stop)]
            return found[0] if len(found) == 1 else memoryview(b"".join(found))

        return read

    def clear(self) -> None:
        """Free the memory."""
        self._bytes = None


def _copy(pieces: list[torch.Tensor], source: torch.Tensor) -> None:
    """Copy a tensor into pieces of bytes, without blocking."""
    if len(pieces) == 1:
        target = pieces[0].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
    elif pieces:
        sizes = [piece.numel() for piece in pieces]
        parts = source.contiguous().view(-1).view(torch.uint8).split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part, non_blocking=True)
