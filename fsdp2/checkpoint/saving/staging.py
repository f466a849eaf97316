"""Copies of a rank's tensors, so that training can continue while a thread writes them.

A checkpoint holds the values at the moment of its save, whatever is done next: an optimizer's step,
``param.data.mul_()``, a kernel of the user's own. No hook sees all of these, so none is relied on.
Tensors on a device are copied to the host on a separate stream, and the stream on which the save
was called *waits for these copies at once*: its later work runs behind them. The host does not
wait, and no other stream does.

Forward only reads, so it could run during the copies, with a wait before the next optimizer step,
as in DataStates-LLM (Maurya et al., HPDC 2024). But any other write would then be silently wrong.
Memory buys the same without a promise: up to `max_device_bytes` of the state are copied on the
device first, at the speed of its memory, and from there to the host while training continues.

That second copy is started by the thread that writes. So in the first save, this thread also
page-locks the memory that it goes to. Memory for what is copied directly has to be there before the
save returns: a stream cannot wait for a copy that is not enqueued yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...common.copies import CopyStream
from ...common.memory import memory_of
from ...common.pinned import PinnedBytes
from ...dtensor.subclasses import is_subclass
from ..errors import CheckpointError
from ..format.manifest import TensorPart
from .capture import Captured

ALIGN_BYTES = 64
MAX_GAP_BYTES = 4096  # between tensors that one call copies, together with what lies between them
OWN = "own"  # the kind of `Captured.own`
Key = tuple[str, str]
Read = Callable[[TensorPart, int, int], memoryview]
Staged = Callable[[], Read]


class Staging:
    """Host memory, page-locked for what is on a device, kept from save to save.

    The places of tensors are kept too, as long as their names, shapes and dtypes stay the same, and
    the tensors that one call copies still lie together.

    Args:
        max_device_bytes: how much of what is on a device to copy there first.
    """

    def __init__(self, max_device_bytes: int = 0) -> None:
        self._max_device_bytes = max_device_bytes
        self._forget()

    def _forget(self) -> None:
        self._areas: dict[torch.device, tuple[_Area, list[int]]] = {}  # and which tensors
        self._places: dict[Key, tuple[_Area, int]] = {}
        self._form: list[object] = []
        self._plans: object = None  # of the last save: equal forms share them

    def clear(self) -> None:
        """Free the memory. The thread that writes must have ended."""
        for area, _ in self._areas.values():
            area.wait()
        self._forget()

    def fill(self, captured: Captured) -> Staged:
        """Copy everything that this rank writes, as it is now.

        Returns:
            A function for the thread that writes: it waits for the copies, gives ``captured`` the
            small tensors, and returns a reader for a `Writer`. Until then ``captured`` has none.

        Raises:
            CheckpointError: if a graph is being captured.
        """
        own = {name: t for name, t in captured.own.items() if not is_subclass(t)}
        others = captured.own.keys() - own.keys()
        tensors = captured.locals | {(OWN, name): t for name, t in own.items()}
        if not self._fits(captured, tensors):
            self._place(tensors)
            self._form, self._plans = _form_of(tensors), captured.plans
        places, values = self._places, list(tensors.values())
        waits = [area.copy([values[i] for i in which]) for area, which in self._areas.values()]
        rest = {name: captured.own[name].detach().to("cpu", copy=True) for name in others}
        forms = {name: (t.dtype, t.shape) for name, t in own.items()}
        captured.locals.clear()
        captured.own.clear()

        def bytes_at(key: Key, start: int, stop: int) -> memoryview:
            area, first = places[key]
            found = [memory_of(piece) for piece in area.bytes.pieces(first + start, first + stop)]
            return found[0] if len(found) == 1 else memoryview(b"".join(found))

        def read(part: TensorPart, start: int, stop: int) -> memoryview:
            return bytes_at((part.kind, part.tensor.name), start, stop)

        def staged() -> Read:
            for wait in waits:
                wait()
            captured.own.update(rest)
            for name, (dtype, shape) in forms.items():
                tensor = captured.own[name] = torch.empty(shape, dtype=dtype, device="cpu")
                if tensor.nbytes:
                    memory_of(tensor)[:] = bytes_at((OWN, name), 0, tensor.nbytes)
            return read

        return staged

    def _fits(self, captured: Captured, tensors: dict[Key, Tensor]) -> bool:
        """Whether all tensors fit into the places that the last save used."""
        if captured.plans is not self._plans and _form_of(tensors) != self._form:
            return False
        values = list(tensors.values())
        return all(area.fits([values[i] for i in which]) for area, which in self._areas.values())

    def _place(self, tensors: dict[Key, Tensor]) -> None:
        """Find a place for each tensor."""
        before = self._areas
        self._forget()
        on: dict[torch.device, list[Key]] = {}
        for key, tensor in tensors.items():
            on.setdefault(tensor.device, []).append(key)
        index_of = {key: index for index, key in enumerate(tensors)}
        # What the host copies comes last: the others are on their way then.
        for device in sorted(on, key=lambda device: device.type == "cpu"):
            area = before[device][0] if device in before else _Area(device, self._max_device_bytes)
            starts = area.place([tensors[key] for key in on[device]])
            self._areas[device] = area, [index_of[key] for key in on[device]]
            for key, start in zip(on[device], starts, strict=True):
                self._places[key] = area, start
        for device in before.keys() - on.keys():
            before[device][0].wait()


class _Area:
    """Host memory for the tensors of one device."""

    def __init__(self, device: torch.device, max_device_bytes: int) -> None:
        on_host = device.type == "cpu"
        self._copies = None if on_host else _copy_stream(device)
        self._must_synchronize = self._copies is None and not on_host
        self._held_bytes = max_device_bytes if self._copies is not None else 0
        self.bytes = PinnedBytes(pin=not on_host and torch.accelerator.is_available())
        self._together: list[_Run] = []  # of several tensors
        self._direct: list[_Run] = []
        self._held: list[_Run] = []  # on the device first

    def place(self, tensors: Sequence[Tensor]) -> list[int]:
        """Find a place for each; returns where it begins."""
        runs, starts, end = _runs_of(tensors), [0] * len(tensors), 0
        for run in runs:
            run.start = end
            for index, distance in zip(run.indices, run.distances, strict=True):
                starts[index] = end + distance
            end += -(-run.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        # Memory grows at its end. So what the thread that writes makes room for is placed last.
        num = sum(end - run.start > self._held_bytes for run in runs)
        num = num if self._held_bytes else len(runs)  # without elements: no bytes
        self._direct, self._held = runs[:num], runs[num:]
        self._together = [run for run in runs if len(run.indices) > 1]
        return starts

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors whose form is the same can go where the last ones went."""
        return all(run.is_in(tensors) for run in self._together)

    def copy(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Copy them, as they are now; returns what waits for it, in the thread that writes."""
        copies = self._copies
        direct = [run.source(tensors) for run in self._direct]
        if copies is None:
            self._to_host(self._direct, direct)
            if self._must_synchronize:
                torch.accelerator.synchronize()
            return _done
        if copies.is_capturing():
            raise CheckpointError(
                "A graph is being captured: a save inside would become part of it, and save "
                "nothing now. Save before or after the capture"
            )
        sources = [run.source(tensors) for run in self._held]
        held = [torch.empty_like(s, memory_format=torch.contiguous_format) for s in sources]
        if held:
            torch._foreach_copy_(held, sources)
        try:
            with copies.copying():
                self._to_host(self._direct, direct)
        finally:
            if direct:
                copies.compute.wait_event(copies.copied())

        def wait() -> None:
            with copies.on():
                self._to_host(self._held, held)
                copied = copies.copied()
            copied.synchronize()
            # Not before: their memory may belong to a stream that has not waited for the copies.
            for tensors in (direct, sources, held):
                tensors.clear()

        return wait

    def _to_host(self, runs: Sequence[_Run], sources: Sequence[Tensor]) -> None:
        """Make room, and enqueue copies."""
        if any(run.into is None for run in runs):
            self.bytes.reserve(runs[-1].start + runs[-1].nbytes)
            for run, source in zip(runs, sources, strict=True):
                run.into = self._pieces_for(run, source)
        into, whole = [], []
        with torch.no_grad():
            for run, source in zip(runs, sources, strict=True):
                assert run.into is not None
                if len(run.into) == 1:
                    into.append(run.into[0])
                    whole.append(source)
                else:
                    _copy(run.into, source.contiguous().view(-1).view(torch.uint8))
            if into:
                torch._foreach_copy_(into, whole, non_blocking=True)

    def _pieces_for(self, run: _Run, source: Tensor) -> list[Tensor]:
        pieces = list(self.bytes.pieces(run.start, run.start + run.nbytes))
        if len(pieces) == 1:
            return [pieces[0].view(source.dtype).view(source.shape)]
        return pieces

    def wait(self) -> None:
        """The host waits for all copies, whose memory is about to be freed."""
        if self._copies is not None:
            self._copies.synchronize()


def _copy_stream(device: torch.device) -> CopyStream | None:
    """None where the device has no streams to order copies by (MPS)."""
    module = torch.get_device_module(device)
    return CopyStream(device, module) if hasattr(module, "Stream") else None


def _done() -> None:
    """The host has copied: there is nothing to wait for."""


@dataclass
class _Run:
    """One copy: of a tensor, or of several behind each other in one storage, as shards of a unit.

    Attributes:
        indices: of its tensors among the device's tensors.
        distances: bytes from the beginning of the first tensor to the beginning of each.
        nbytes: from the beginning of the first to the end of the last.
        start, into: where they go; None: not found yet.
    """

    indices: list[int]
    distances: list[int]
    nbytes: int
    start: int = 0
    into: Sequence[Tensor] | None = None

    def is_in(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``tensors``, whose form is the same, lie like this now."""
        mine = [tensors[index] for index in self.indices]
        first = mine[0].data_ptr()
        return (
            [t.data_ptr() - first for t in mine] == self.distances
            and all(map(Tensor.is_contiguous, mine))
            and _after(mine[0]) >= self.nbytes
        )

    def source(self, tensors: Sequence[Tensor]) -> Tensor:
        """What to copy: the tensor, or the bytes of all of them."""
        first = tensors[self.indices[0]]
        if len(self.indices) == 1:
            return first
        return first.view(-1).view(torch.uint8).as_strided((self.nbytes,), (1,))


def _runs_of(tensors: Sequence[Tensor]) -> list[_Run]:
    """All of them; together where they lie behind each other, with next to nothing in between."""
    dense = [i for i, t in enumerate(tensors) if t.nbytes and t.is_contiguous()]
    dense.sort(key=lambda i: tensors[i].data_ptr())
    runs: list[_Run] = []
    first, room = 0, 0  # of the last run: where it begins, and its storage ends
    for index in dense:
        tensor = tensors[index]
        distance, run = tensor.data_ptr() - first, runs[-1] if runs else None
        if (
            run is not None
            and 0 <= distance - run.nbytes <= MAX_GAP_BYTES
            and distance + tensor.nbytes <= room
        ):
            run.indices.append(index)
            run.distances.append(distance)
            run.nbytes = distance + tensor.nbytes
            continue
        first, room = tensor.data_ptr(), _after(tensor)
        runs.append(_Run([index], [0], tensor.nbytes))
    together = [run for run in runs if len(run.indices) > 1]
    alone = set(range(len(tensors))) - {index for run in together for index in run.indices}
    return [*together, *(_Run([index], [0], tensors[index].nbytes) for index in sorted(alone))]


def _after(tensor: Tensor) -> int:
    """How many bytes there are from its beginning to the end of its storage."""
    storage = tensor.untyped_storage()
    return storage.nbytes() - (tensor.data_ptr() - storage.data_ptr())


def _form_of(tensors: dict[Key, Tensor]) -> list[object]:
    return [(key, t.shape, t.dtype, t.device) for key, t in tensors.items()]


def _copy(pieces: Sequence[Tensor], source: Tensor) -> None:
    """Copy bytes into several pieces of memory, without blocking."""
    parts = source.split([piece.numel() for piece in pieces])
    for piece, part in zip(pieces, parts, strict=True):
        piece.copy_(part, non_blocking=True)
