"""Records what a run reads, writes, allocates and frees, and on which simulated stream.

A `Recorder` is a dispatch mode: it sees every operation of torch below autograd, on local tensors,
including everything inside DTensor, checkpointing and optimizers. It has three more sources: the
simulated device (events and waits), `sharding.gathered.resizers` (storages that are freed and
allocated in place) and weak references to storages (memory that is freed with its last tensor).

The recorder holds no tensor and no storage, so it does not change lifetimes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from .device import SimulatedDevice
from .effects import Effects, argument, effects_of, span, tensors
from .order import HOST, Access, Allocate, Event, Finish, Free, Held, Launch, Mark, Synchronize

# To or from host memory, these make the host wait unless they are non-blocking.
_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class UsedAfterFreeError(RuntimeError):
    """An operation would have touched freed memory; it was recorded but not run."""


@dataclass(slots=True)
class _Memory:
    """A storage: its block, and its offset in the block.

    A storage that is a slice of ``whole`` (sharded parameters and gradients) is in the current
    block of ``whole``.
    """

    own_block: int
    offset: int
    pointer: int
    nbytes: int
    on_host: bool
    reference: Any
    whole: _Memory | None = None

    @property
    def block(self) -> int:
        return self.own_block if self.whole is None else self.whole.own_block


class Recorder(TorchDispatchMode):
    """Records a trace of everything inside ``with recorder:``.

    Args:
        host_ordered: without streams: the host does work at once, and collectives are messages that
            the host waits for.

    Attributes:
        events: the trace.
        device: the simulated device.
        making_host_memory: whether new memory is currently host memory: offloaded shards and
            gradients, which streams only copy from and to. Computation whose inputs are all in
            host memory is the host's work.
    """

    def __init__(self, *, host_ordered: bool = False) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.making_host_memory = False
        self.device = SimulatedDevice(self.emit)
        self._host_ordered = host_ordered
        self._storages: dict[int, _Memory] = {}
        self._num_blocks = 0
        self._num_messages = 0
        self._message: int | None = None  # the message that the next operation sends or receives
        self._network: dict[int, str] = {}  # stream name of each message in flight
        self._idle: list[str] = []
        self._closed = False

    def emit(self, event: Event) -> None:
        """Append an event to the trace."""
        self.events.append(event)

    def mark(self, name: str, subject: str = "") -> None:
        """Mark a moment in the trace, to find overlap later."""
        self.emit(Mark(name, subject))

    def close(self) -> None:
        """Stop recording; memory that is freed from now on is ignored."""
        self._closed = True
        self._storages.clear()

    # -- operations -----------------------------------------------------------------------------

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # DTensor computes shapes
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # subclasses run first; this mode sees what they do inside
        effects = effects_of(func)
        if effects.is_view:
            return self._view(func, effects, args, kwargs)
        accesses, on_host, mixed = self._accesses(effects, args, kwargs)
        name = str(func._schema.name)
        if any(self._is_missing(t) for t in _touched(effects, args, kwargs)):
            self.emit(Launch(self._stream(on_host), name, tuple(accesses)))
            raise UsedAfterFreeError(f"{name} on memory that was freed")
        result = func(*args, **kwargs)
        if effects.makes:
            made_on_host = self._made_on_host(args, kwargs)
            accesses += self._allocated(result, effects, made_on_host)
            on_host = made_on_host if on_host is None else on_host
        if accesses:
            self.emit(Launch(self._stream(on_host), name, tuple(accesses), self._message))
        if mixed and name in _COPIES and not argument((2, "non_blocking"), args, kwargs):
            self.emit(Synchronize(self._stream(on_host)))
        return result

    def _view(self, func: Any, effects: Effects, args: tuple, kwargs: dict) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # some views check that there is enough memory
            missing = [t for t in _touched(effects, args, kwargs) if self._is_missing(t)]
            if not missing:
                raise
            accesses, on_host, _ = self._accesses(effects, args, kwargs)
            name = str(func._schema.name)
            self.emit(Launch(self._stream(on_host), name, tuple(accesses)))
            raise UsedAfterFreeError(f"{name} on memory that was freed") from error

    def _accesses(
        self, effects: Effects, args: tuple, kwargs: dict
    ) -> tuple[list[Access], bool | None, bool]:
        """The accesses of an operation; whether all are to host memory (None if there are none);
        and whether host and device memory are mixed."""
        accesses, on_host = [], []
        both = set(effects.reads) & set(effects.writes)
        for place in dict.fromkeys(effects.reads + effects.writes):
            reads = place in effects.reads
            for tensor in tensors(argument(place, args, kwargs)):
                memory = self.memory(tensor)
                start, stop = span(tensor)
                accesses.append(
                    Access(
                        memory.block,
                        memory.offset + start,
                        memory.offset + stop,
                        reads,
                        place in both or not reads,
                        effects.pads,
                    )
                )
                on_host.append(memory.on_host)
        return accesses, all(on_host) if on_host else None, len(set(on_host)) > 1

    def _stream(self, on_host: bool | None) -> str:
        if self._message is not None:
            return self._network[self._message]
        return HOST if self._host_ordered or on_host else self.device.current_stream().name

    def _made_on_host(self, args: tuple, kwargs: dict) -> bool:
        """Whether the results are in host memory."""
        if self.making_host_memory:
            return True
        like = [self.memory(tensor).on_host for tensor in tensors(args)]
        where = kwargs.get("device")  # with an index it is the device; the host has none
        return bool(like) and all(like) and (where is None or where.index is None)

    def _allocated(self, result: Any, effects: Effects, on_host: bool) -> list[Access]:
        """Record the results that are new memory; returns the writes to them."""
        accesses = []
        for tensor in tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata in self._storages:
                continue
            memory = self._register(storage, on_host=on_host, filled=False)
            if effects.fills:
                accesses.append(Access(memory.block, *span(tensor), writes=True))
        return accesses

    def _is_missing(self, tensor: torch.Tensor) -> bool:
        memory = self._storages.get(tensor.untyped_storage()._cdata)
        if memory is not None and memory.whole is not None:
            return not memory.whole.nbytes
        return span(tensor)[1] > tensor.untyped_storage().nbytes()

    # -- memory ---------------------------------------------------------------------------------

    def memory(self, tensor: torch.Tensor) -> _Memory:
        """The memory of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        memory = self._storages.get(storage._cdata)
        if memory is None:
            memory = self._first_seen(storage)
        elif memory.whole is None and memory.nbytes != storage.nbytes():
            self._resized(memory, storage)  # by torch, to make room for a result
        return memory

    def _first_seen(self, storage: torch.UntypedStorage) -> _Memory:
        """Register a storage created before the recording, unseen, or as a slice of another."""
        pointer = storage.data_ptr()
        for other in self._storages.values():
            if other.whole is None and other.nbytes and 0 <= pointer - other.pointer < other.nbytes:
                offset = pointer - other.pointer
                reference = self._watch(storage, owns=False)
                memory = _Memory(-1, offset, pointer, 0, other.on_host, reference, whole=other)
                self._storages[storage._cdata] = memory
                return memory
        return self._register(storage, on_host=False, filled=True)

    def _register(self, storage: torch.UntypedStorage, *, on_host: bool, filled: bool) -> _Memory:
        memory = _Memory(-1, 0, 0, 0, on_host, self._watch(storage, owns=True))
        self._storages[storage._cdata] = memory
        self._allocate(memory, storage, filled=filled)
        return memory

    def _allocate(self, memory: _Memory, storage: torch.UntypedStorage, *, filled: bool) -> None:
        memory.own_block, self._num_blocks = self._num_blocks, self._num_blocks + 1
        memory.pointer, memory.nbytes = storage.data_ptr(), storage.nbytes()
        on_host = memory.on_host or self._host_ordered
        owner = HOST if on_host else self.device.current_stream().name
        self.emit(Allocate(memory.block, memory.nbytes, owner, filled))

    def _watch(self, storage: torch.UntypedStorage, *, owns: bool) -> Any:
        key = storage._cdata

        def died(_: Any) -> None:
            memory = self._storages.pop(key, None)
            if memory is not None and owns and memory.nbytes and not self._closed:
                self.emit(Free(memory.block))

        return weakref.ref(storage, died)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage as units do, and record it."""
        memory = self._storages.get(storage._cdata)
        if memory is None:
            memory = self._register(storage, on_host=False, filled=True)
        storage.resize_(nbytes)
        self._resized(memory, storage)

    def _resized(self, memory: _Memory, storage: torch.UntypedStorage) -> None:
        if memory.nbytes == storage.nbytes():
            return
        if memory.nbytes:
            self.emit(Free(memory.block))
        filled = bool(memory.nbytes)  # the old contents were copied
        memory.nbytes = 0
        if storage.nbytes():
            self._allocate(memory, storage, filled=filled)

    # -- what is still needed -------------------------------------------------------------------

    def hold(self, reason: str, held: Iterable[torch.Tensor], *, also: Iterable[torch.Tensor] = ()):
        """From now on, the bytes of ``held`` must not be overwritten, for ``reason``.

        Args:
            also: tensors whose blocks' earlier holds for this reason are released.
        """
        ranges: dict[int, list[tuple[int, int]]] = {}
        for tensor in also:
            ranges.setdefault(self.memory(tensor).block, [])
        for tensor in held:
            if not tensor.numel():
                continue
            memory = self.memory(tensor)
            start, stop = span(tensor)
            place = (memory.offset + start, memory.offset + stop)
            ranges.setdefault(memory.block, []).append(place)
        for block, found in ranges.items():
            self.emit(Held(block, reason, tuple(found)))

    # -- messages -------------------------------------------------------------------------------

    def send(self, start: Callable[..., Any], *args: Any) -> Message:
        """Start a host-ordered collective; its operation is recorded as a message."""
        self._num_messages += 1
        number = self._message = self._num_messages
        # A name can be reused once the host has waited: later work is ordered after it.
        self._network[number] = self._idle.pop() if self._idle else f"message {number}"
        try:
            return Message(self, number, start(*args))
        finally:
            self._message = None

    def finish(self, number: int) -> None:
        """Record that the host waits for a message."""
        self.emit(Finish(number))
        name = self._network.pop(number, None)
        if name is not None:
            self._idle.append(name)


class Message:
    """A ``dist.Work`` whose waits are recorded."""

    def __init__(self, recorder: Recorder, number: int, work: Any) -> None:
        self._recorder = recorder
        self._number = number
        self._work = work

    def wait(self) -> Any:
        self._recorder.finish(self._number)
        return self._work.wait()


class RecordedGroup:
    """A process group whose collectives are recorded as messages."""

    _messages = (
        "send",
        "recv",
        "allreduce",
        "all_gather_single_coalesced",
        "allgather_into_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced",
        "all_to_all_single",
        "alltoall_base",
    )

    def __init__(self, recorder: Recorder, group: Any) -> None:
        self._recorder = recorder
        self._group = group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        if name not in self._messages:
            return value
        return lambda *args: self._recorder.send(value, *args)


def _touched(effects: Effects, args: tuple, kwargs: dict) -> Sequence[torch.Tensor]:
    places = dict.fromkeys(effects.reads + effects.writes)
    return [t for place in places for t in tensors(argument(place, args, kwargs))]
