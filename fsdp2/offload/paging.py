"""The state of one parameter while it is elsewhere, and during a step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..common.copies import CopyStream
from ..dtensor.memory import with_own_storage
from ..dtensor.parts import laid_out_like, local_part, placed_like
from ..optim.local import state_outside
from ..optim.values import is_container, map_tensors
from .homes import FileHome, MemoryHome, aligned_buffer

ALIGN_BYTES = 256
_NOTHING = object()  # what the optimizer had seen of a new entry


@dataclass
class PagingOptions:
    """As `offload_optimizer` describes them. ``folder``: None for host memory."""

    folder: Path | None
    max_device_bytes: int
    chunk_bytes: int
    min_bytes: int
    pin_memory: bool


@dataclass
class StateBytes:
    """Bytes that stay, that are elsewhere, and how many of the latter a step has brought back, now
    and at most."""

    kept: int = 0
    away: int = 0
    back: int = 0
    back_peak: int = 0


@dataclass(frozen=True)
class StateSlot:
    """A tensor of the state among the bytes of its parameter."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, memory: Tensor) -> Tensor:
        nbytes = self.shape.numel() * self.dtype.itemsize
        return memory[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


class Page:
    """One parameter, what the optimizer sees of it, and where its state is.

    Attributes:
        plain: what the optimizer sees in place of the parameter.
        nbytes: of its state that is elsewhere, or an estimate before there is any.
    """

    def __init__(self, param: Tensor, options: PagingOptions, counts: StateBytes) -> None:
        self.param = param
        self.source = local_part(param)
        self.plain = param
        if isinstance(param, DTensor):
            self.plain = nn.Parameter(self.source, requires_grad=param.requires_grad)
        self.nbytes = self._expected_bytes()
        self._options, self._counts = options, counts
        self._pin = options.pin_memory and not is_on_host(self.source)
        self._home: MemoryHome | FileHome | None = None
        self._slots: dict[Any, StateSlot] = {}
        self._placed: dict[Any, Tensor] = {}  # in the optimizer's state, over the home
        self._kept = 0
        self._before: dict[Any, tuple[Any, Any]] = {}  # what the optimizer had, and sees
        # During a step.
        self._buffer: Tensor | None = None  # host memory
        self._image: Tensor | None = None  # where the parameter is
        self._future: Future[None] | None = None
        self._event: Any = None

    def _expected_bytes(self) -> int:
        return 2 * self.source.nbytes  # as of Adam

    # -- what the optimizer sees ----------------------------------------------------------------

    def adopt(self, state: dict[Any, Any]) -> None:
        """Before a step: take over state that was loaded, made without this, or removed."""
        found = {key for key, value in state.items() if self._can_be_away(value)}
        if found == set(self._placed) and all(state[k] is v for k, v in self._placed.items()):
            return
        if self._home is None and self._kept:
            return
        values = {key: local_part(placed_like(state[key], self.param)) for key in found}
        self._place(state, values)

    def enter(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """The state as the optimizer sees it; the image is ready."""
        self._before = {}
        for key, value in state.items():
            if key in self._slots:
                assert self._image is not None
                seen: Any = self._slots[key].of(self._image)
            elif isinstance(value, DTensor):
                seen = local_part(placed_like(value, self.param))
            elif is_container(value):
                seen = map_tensors(value, lambda t: local_part(placed_like(t, self.param)))
            else:
                seen = value
            self._before[key] = (value, seen)
        if isinstance(self.param, DTensor):
            grad = self.param.grad
            assert grad is not None
            self.plain.grad = local_part(placed_like(grad, self.param))
        return {key: seen for key, (_, seen) in self._before.items()}

    def hide(self) -> None:
        """After the step, or an error in it."""
        if self.plain is not self.param:
            self.plain.grad = None  # code that reuses its memory counts references

    def leave(self, inner: dict[Any, Any], state: dict[Any, Any], who: str) -> None:
        """After the step: take over what is new, and note what has to be moved."""
        made: dict[Any, Tensor] = {}
        for key, value in inner.items():
            had, saw = self._before.pop(key, (None, _NOTHING))
            if key in self._slots and isinstance(value, Tensor):
                if value is not saw:
                    made[key] = value
            elif value is not saw or is_container(value):
                param = self.param
                had = state_outside(key, value, param, who) if isinstance(param, DTensor) else value
                state[key] = had
                if self._can_be_away(had):
                    made[key] = value
        for key in self._before:
            del state[key]
            self._slots.pop(key, None)
            self._placed.pop(key, None)
        self._before = {}
        fitting = all(
            key in self._slots and self._slots[key] == _like(self._slots[key], value)
            for key, value in made.items()
        )
        if fitting:  # new tensors of the kind that there was
            for key, value in made.items():
                assert self._image is not None
                self._slots[key].of(self._image).copy_(value)
        elif not self._kept:
            image = self._image
            assert image is not None or not self._slots
            values = {key: slot.of(image) for key, slot in self._slots.items() if image is not None}
            self._give_up_image()
            self._place(state, {**values, **made})  # all of it is in its home then

    def _can_be_away(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        if isinstance(self.param, DTensor) and not isinstance(value, DTensor):
            return False  # one number for all elements, as a count of steps: it has no layout
        local = local_part(value)
        plain = not is_traceable_wrapper_subclass(local) and local.layout == torch.strided
        return plain and local.nbytes >= self._options.min_bytes

    # -- where it is ----------------------------------------------------------------------------

    def _place(self, state: dict[Any, Any], values: dict[Any, Tensor]) -> None:
        """Give all these a home, unless they may stay."""
        options, counts = self._options, self._counts
        counts.away -= self.nbytes if self._home is not None else 0
        counts.kept -= self._kept
        self._kept = 0
        self._slots, self._placed, self._home = {}, {}, None
        slots, end = {}, 0
        for key, value in values.items():
            slots[key] = StateSlot(end, value.dtype, value.shape)
            end += -(-value.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        in_memory = options.folder is None
        if (
            not end
            or (in_memory and is_on_host(self.source))
            or counts.kept + end <= options.max_device_bytes
        ):
            for key, value in values.items():
                here = value.to(self.source.device)
                state[key] = self._laid_out(here)
            self._kept = end
            self.nbytes = end or self._expected_bytes()
            counts.kept += end
            return
        self.nbytes = end
        counts.away += end
        home = self._home = (
            MemoryHome(end, device=self.source.device if self._pin else None)
            if options.folder is None
            else FileHome(options.folder, end)
        )
        self._slots = slots
        for key, slot in slots.items():
            # A separate storage: DTensors need it, and of a part ``torch.save`` writes all.
            here = with_own_storage(slot.of(home.bytes))
            here.copy_(values[key])
            self._placed[key] = state[key] = self._laid_out(here)

    def forget(self) -> None:
        """The parameter is gone, or has other memory."""
        self._counts.kept -= self._kept
        self._counts.away -= self.nbytes if self._home is not None else 0

    def _laid_out(self, here: Tensor) -> Tensor:
        return laid_out_like(here, self.param) if isinstance(self.param, DTensor) else here

    def read(self, pool: ThreadPoolExecutor) -> None:
        """Begin to bring it to host memory."""
        home = self._home
        if isinstance(home, FileHome):
            self._buffer = aligned_buffer(self.nbytes, pin=self._pin)
            self._future = pool.submit(home.read, self._buffer)
        elif home is not None:
            self._buffer = home.bytes

    def bring(self, copies: CopyStream | None) -> None:
        """Begin to bring it from there to where the parameter is."""
        if self._home is None:
            return
        self.wait()
        assert self._buffer is not None
        self._counts.back += self.nbytes
        self._counts.back_peak = max(self._counts.back_peak, self._counts.back)
        if copies is None:
            self._image = self._buffer
            return
        image = torch.empty(self.nbytes, dtype=torch.uint8, device=self.source.device)
        with copies.copying():
            image.copy_(self._buffer[: self.nbytes], non_blocking=True)
            self._event = copies.copied()
        self._image = image

    def use(self, copies: CopyStream | None) -> None:
        """Compute may use the image."""
        if self._event is not None and copies is not None:
            copies.compute.wait_event(self._event)
            self._event = None

    def send(self, copies: CopyStream | None) -> None:
        """Begin to take it to host memory."""
        if self._image is None or copies is None:
            return
        assert self._buffer is not None
        with copies.copying():
            self._buffer[: self.nbytes].copy_(self._image, non_blocking=True)
            self._event = copies.copied()

    def finish(self, copies: CopyStream | None, pool: ThreadPoolExecutor) -> None:
        """Give up the image, and begin to write it."""
        event = self._event
        if event is not None and copies is not None:
            copies.compute.wait_event(event)
        if self._image is not None and isinstance(self._home, FileHome):
            assert self._buffer is not None
            self._future = pool.submit(_write, self._home, self._buffer, event)
        self._event = None
        self._give_up_image()

    def _give_up_image(self) -> None:
        if self._image is not None:
            self._counts.back -= self.nbytes
        self._image = self._buffer = None

    def wait(self) -> None:
        """The host waits until it is read, or written."""
        future = self._future
        if future is None:
            return
        try:
            future.result()
        finally:
            if future.done():  # else this was interrupted: a read must not overtake a write
                self._future = None


def is_on_host(tensor: Tensor) -> bool:
    """Whether it is where state would be taken."""
    return tensor.device.type == "cpu"


def _write(home: FileHome, buffer: Tensor, event: Any) -> None:
    if event is not None:
        event.synchronize()
    home.write(buffer)


def _like(slot: StateSlot, value: Tensor) -> StateSlot:
    return StateSlot(slot.offset, value.dtype, value.shape)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=_Sized)


def chunks_of(pages: list[P], chunk_bytes: int) -> Iterator[list[P]]:
    """Pages in their order, of about so many bytes together; at least one."""
    chunk: list[P] = []
    size = 0
    for page in pages:
        if chunk and size + page.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(page)
        size += page.nbytes
    if chunk:
        yield chunk
