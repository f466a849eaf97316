"""Copies of a rank's tensors, so that training can go on while a thread writes them."""

from __future__ import annotations

import torch

from ...common.memory import memory_of
from ...common.pinned import PinnedBytes
from ..format.manifest import Part
from .capture import Captured

ALIGN_BYTES = 64
Key = tuple[str, str]


class Staging:
    """Host memory, pinned where there is an accelerator, kept from save to save.

    Training waits for the copies. So where they go is kept as well, as long as what is saved has
    the same names, shapes and dtypes.
    """

    def __init__(self) -> None:
        self._bytes: PinnedBytes | None = None
        self._form: list[object] = []
        self._places: dict[Key, int] = {}
        self._targets: list[list[torch.Tensor]] = []

    def fill(self, captured: Captured):
        """Copy everything that this rank writes; returns a reader for a `Writer`.

        ``captured`` keeps no tensor of the model: copies replace the small ones, and ``locals`` is
        emptied.
        """
        form: list[object] = [(k, t.shape, t.dtype) for k, t in captured.locals.items()]
        if self._bytes is None or form != self._form:
            self._place(captured.locals)
            self._form = form
        staged, places = self._bytes, self._places
        assert staged is not None
        with torch.no_grad():
            for pieces, tensor in zip(self._targets, captured.locals.values(), strict=True):
                _copy(pieces, tensor)
        if torch.accelerator.is_available():
            # The copies above do not block. They must be done before the caller trains on and
            # overwrites their sources, and before a thread writes what they copied.
            torch.accelerator.synchronize()
        captured.own = {name: t.detach().to("cpu", copy=True) for name, t in captured.own.items()}
        captured.locals.clear()

        def read(part: Part, start: int, stop: int) -> memoryview:
            first = places[part.kind, part.tensor.name]
            found = [memory_of(piece) for piece in staged.pieces(first + start, first + stop)]
            return found[0] if len(found) == 1 else memoryview(b"".join(found))

        return read

    def _place(self, tensors: dict[Key, torch.Tensor]) -> None:
        """Find a place for each tensor, and make the memory as large as they need it."""
        places: dict[Key, int] = {}
        end = 0
        for key, tensor in tensors.items():
            places[key] = end
            end += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        self._bytes = staged = self._bytes or PinnedBytes(torch.accelerator.is_available())
        self._form, self._targets = [], []  # views would keep memory that is given up for more
        staged.reserve(end)
        self._places = places
        for key, tensor in tensors.items():
            pieces = list(staged.pieces(places[key], places[key] + tensor.nbytes))
            if len(pieces) == 1:
                pieces = [pieces[0].view(tensor.dtype).view(tensor.shape)]
            self._targets.append(pieces)

    def clear(self) -> None:
        """Free the memory."""
        self._bytes, self._form, self._places, self._targets = None, [], {}, []


def _copy(pieces: list[torch.Tensor], source: torch.Tensor) -> None:
    """Copy a tensor into one of its shape, or into several pieces of bytes, without blocking."""
    if len(pieces) == 1:
        pieces[0].copy_(source, non_blocking=True)
    elif pieces:
        sizes = [piece.numel() for piece in pieces]
        parts = source.contiguous().view(-1).view(torch.uint8).split(sizes)
        for piece, part in zip(pieces, parts, strict=True):
            piece.copy_(part, non_blocking=True)
