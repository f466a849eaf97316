"""Copies of a rank's tensors, so that training can go on while a thread writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.memory import memory_of
from ...common.pinned import PinnedBytes
from ..format.manifest import Part
from .capture import Captured

ALIGN_BYTES = 64
MAX_GAP_BYTES = 4096  # between tensors that one call copies, together with what lies between them
Key = tuple[str, str]


class Staging:
    """Host memory, pinned where there is an accelerator, kept from save to save.

    Training waits for the copies. So where they go is kept as well, as long as what is saved has
    the same names, shapes and dtypes, and as long as what one call copies still lies together.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Free the memory."""
        self._bytes: PinnedBytes | None = None
        self._form: list[object] = []
        self._plans: object = None  # of the last save: equal forms share them
        self._places: dict[Key, int] = {}
        self._targets: list[list[Tensor]] = []
        self._runs: list[_Run] = []
        self._single: list[int] = []

    def fill(self, captured: Captured):
        """Copy everything that this rank writes; returns a reader for a `Writer`.

        ``captured`` keeps no tensor of the model: copies replace the small ones, and ``locals`` is
        emptied.
        """
        tensors = list(captured.locals.values())
        if not self._fits(captured, tensors):
            self._place(captured.locals)
            self._form = _form_of(captured)
            self._plans = captured.plans
        staged, places = self._bytes, self._places
        assert staged is not None
        with torch.no_grad():
            for run in self._runs:
                _copy(run.into, run.bytes_in(tensors))
            into, sources = [], []
            for index in self._single:
                pieces, source = self._targets[index], tensors[index]
                if len(pieces) == 1:
                    into.append(pieces[0])
                    sources.append(source)
                else:
                    _copy(pieces, source.contiguous().view(-1).view(torch.uint8))
            if into:
                torch._foreach_copy_(into, sources, non_blocking=True)
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

    def _fits(self, captured: Captured, tensors: Sequence[Tensor]) -> bool:
        """Whether all of it goes where that of the last save went."""
        if self._bytes is None:
            return False
        if captured.plans is not self._plans and _form_of(captured) != self._form:
            return False
        return all(run.is_in(tensors) for run in self._runs)

    def _place(self, tensors: dict[Key, Tensor]) -> None:
        """Find a place for each tensor, and make the memory as large as they need it."""
        self._bytes = staged = self._bytes or PinnedBytes(torch.accelerator.is_available())
        # Views would keep memory that is given up for more.
        self._form, self._plans, self._targets, self._runs = [], None, [], []
        values, starts = list(tensors.values()), [0] * len(tensors)
        runs = _runs_of(values)
        self._single = sorted(set(range(len(values))) - {i for r in runs for i in r.indices})
        end = 0
        for run in runs:
            run.start = end
            for index, distance in zip(run.indices, run.distances, strict=True):
                starts[index] = end + distance
            end += -(-run.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        for index in self._single:
            starts[index] = end
            end += -(-values[index].nbytes // ALIGN_BYTES) * ALIGN_BYTES
        staged.reserve(end)
        for run in runs:
            run.into = list(staged.pieces(run.start, run.start + run.nbytes))
        self._targets = [[] for _ in values]
        for index in self._single:
            tensor = values[index]
            pieces = list(staged.pieces(starts[index], starts[index] + tensor.nbytes))
            if len(pieces) == 1:
                pieces = [pieces[0].view(tensor.dtype).view(tensor.shape)]
            self._targets[index] = pieces
        self._places = dict(zip(tensors, starts, strict=True))
        self._runs = runs


@dataclass
class _Run:
    """Tensors that lie behind each other in one storage, as shards of a unit do: one copy.

    Attributes:
        indices: of the tensors among those that are saved.
        distances: bytes from the beginning of the first to that of each.
        nbytes: from there to the end of the last.
        start, into: where they go.
    """

    indices: list[int]
    distances: list[int]
    nbytes: int
    start: int = 0
    into: Sequence[Tensor] = ()

    def is_in(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, whose form is the same, lie like this now."""
        mine = [tensors[index] for index in self.indices]
        first = mine[0].data_ptr()
        return (
            [t.data_ptr() - first for t in mine] == self.distances
            and all(map(Tensor.is_contiguous, mine))
            and _after(mine[0]) >= self.nbytes
        )

    def bytes_in(self, tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[self.indices[0]].view(-1).view(torch.uint8)
        return first.as_strided((self.nbytes,), (1,))


def _runs_of(tensors: Sequence[Tensor]) -> list[_Run]:
    """Two or more tensors that lie behind each other, with next to nothing in between."""
    dense = [i for i, t in enumerate(tensors) if t.nbytes and t.is_contiguous()]
    dense.sort(key=lambda i: (str(tensors[i].device), tensors[i].data_ptr()))
    runs: list[_Run] = []
    device, first, room = None, 0, 0  # of the last run: where it begins, and its storage ends
    for index in dense:
        tensor = tensors[index]
        distance, run = tensor.data_ptr() - first, runs[-1] if runs else None
        if (
            run is not None
            and tensor.device == device
            and 0 <= distance - run.nbytes <= MAX_GAP_BYTES
            and distance + tensor.nbytes <= room
        ):
            run.indices.append(index)
            run.distances.append(distance)
            run.nbytes = distance + tensor.nbytes
            continue
        device, first, room = tensor.device, tensor.data_ptr(), _after(tensor)
        runs.append(_Run([index], [0], tensor.nbytes))
    return [run for run in runs if len(run.indices) > 1]


def _after(tensor: Tensor) -> int:
    """How many bytes there are from its beginning to the end of its storage."""
    storage = tensor.untyped_storage()
    return storage.nbytes() - (tensor.data_ptr() - storage.data_ptr())


def _form_of(captured: Captured) -> list[object]:
    return [(key, t.shape, t.dtype, t.device) for key, t in captured.locals.items()]


def _copy(pieces: Sequence[Tensor], source: Tensor) -> None:
    """Copy bytes into several pieces of memory, without blocking."""
    parts = source.split([piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(part, non_blocking=True)
