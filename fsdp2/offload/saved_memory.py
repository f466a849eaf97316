"""Memory that autograd has saved, of one device: what of it is there, and what is in host memory.

An `Entry` is a range of bytes of one storage, shared by all saved tensors that lie in it. Numbers
that only grow tell when it was saved last; backward needs the entries in reverse order. Where an
entry is:

=========  ==================  ==========  ======================================================
place      memory of the       host        left for
           device              memory
=========  ==================  ==========  ======================================================
resident   what was saved      -           leaving, the oldest first
leaving    what was saved      being       away, once the copy or the room is needed: compute
                               written     waits for the copy
away       -                   valid       back, when it is used, or shortly before
back       a copy              valid       away, if this backward is through with it and others
                                           need the room (``retain_graph``)
=========  ==================  ==========  ======================================================

Nothing here keeps an entry alive: it ends with the graph that needs it. What has been done by then
is deterministic, as in `comm.streams`: no decision depends on how fast a copy was.

A forward may compute on several streams (experts next to attention), and backward enters each
operator on the stream of its forward. So what comes back gets memory of the stream that saved it,
which waits for the copy. Only what several streams have saved is recorded (``record_stream``) on
those that use the memory of another.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..common.copies import CopyStream
from .host_memory import HostMemory

Places = dict[int, "weakref.ref[Entry]"]


@dataclass
class SavedBytes:
    """Bytes that are held, now and at most, and bytes that were copied so far."""

    device: int = 0
    device_peak: int = 0
    host: int = 0
    host_peak: int = 0
    to_host: int = 0
    to_device: int = 0


class Entry:
    """Some bytes of a storage.

    Attributes:
        first, last: when it was saved first, and last.
        original: what has the addresses in its key, weakly.
        storage: where the bytes are on the device, from ``start`` on; None while they are away.
        blocks: where they are in host memory; None before they were copied.
        copied: the end of a copy that ``stream`` has not waited for.
        stream: compute's, where it was saved first.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "blocks",
        "copied",
        "first",
        "key",
        "last",
        "nbytes",
        "original",
        "start",
        "storage",
        "stream",
    )

    def __init__(
        self,
        memory: SavedMemory,
        key: Hashable,
        original: tuple[object, ...],
        number: int,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        stream: Any,
    ) -> None:
        self._memory = memory
        self.key = key
        self.first = self.last = number
        self.original = original
        self.storage: torch.UntypedStorage | None = storage
        self.start, self.nbytes = start, nbytes
        self.blocks: list[torch.Tensor] | None = None
        self.copied: Any = None
        self.stream = stream

    def wait_for_copy(self) -> None:
        """Before others get the memory."""
        self.stream.wait_event(self.copied)
        self.copied = None

    def __del__(self) -> None:
        # Anywhere, also in the middle of the functions below: they look at ``dead`` when they
        # begin.
        if self.copied is not None and self.storage is not None:
            self.wait_for_copy()
        dead = (self.key, self.last, self.nbytes, self.storage is None, self.blocks)
        self._memory.dead.append(dead)


class SavedMemory:
    """All entries of one device, within a number of bytes.

    Args:
        device: where tensors are saved.
        limit: bytes that may stay there.
        pin: whether to page-lock host memory.
        copies: the stream to copy on.
    """

    def __init__(self, device: torch.device, limit: int, pin: bool, copies: CopyStream) -> None:
        self.counts = SavedBytes()
        self.dead: deque[tuple[Any, ...]] = deque()  # entries that nobody needs any more
        self.device, self._limit, self._copies = device, limit, copies
        # What may be in flight while compute continues.
        self._window = limit // 4
        self._host = HostMemory(pin)
        self._lock = threading.RLock()  # backward runs in other threads
        self._number = 0
        self._known: dict[Hashable, weakref.ref[Entry]] = {}
        self._resident: Places = {}
        self._resident_bytes = 0
        self._leaving: Places = {}
        self._away: Places = {}
        self._away_numbers: list[int] = []  # sorted
        self._back: Places = {}
        self._ahead: set[int] = set()  # what came back and was not used yet

    def save(
        self,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        key: Hashable,
        named: torch.Tensor,
    ) -> tuple[Entry, int]:
        """Save a range of bytes; the same range and content has the same key.

        Args:
            named: the tensor whose address is in the key, next to the storage's address.

        Returns:
            Its entry, and the number to `use` it with.
        """
        with self._lock:
            self._forget_dead()
            self._number += 1
            known = self._known.get(key)
            entry = None if known is None else known()
            if entry is not None:
                self._renumber(entry)
                return entry, self._number
            if self._copies.is_capturing():
                raise RuntimeError(
                    "offload_activations cannot be part of a CUDA graph: replays would copy what "
                    "the capture saw. Leave the context while a graph is captured"
                )
            self._make_room(nbytes)
            compute = self._copies.compute
            original = self._weakly(storage, named)
            entry = Entry(self, key, original, self._number, storage, start, nbytes, compute)
            self._known[key] = self._resident[entry.last] = weakref.ref(entry)
            self._resident_bytes += nbytes
            self._count_device(nbytes)
            while self._resident and self._resident_bytes > self._limit - self._window:
                self._start_leaving()
            return entry, self._number

    def _weakly(self, storage: torch.UntypedStorage, named: torch.Tensor) -> tuple[object, ...]:
        """Weak references to both: while there are some, no others can have their addresses."""
        owner = torch._C._WeakTensorRef(named)  # type: ignore[attr-defined]
        return StorageWeakRef(storage), owner

    def use(self, entry: Entry, number: int) -> tuple[torch.UntypedStorage, int]:
        """Where the bytes are on the device, for compute's current stream to read.

        Args:
            number: of `save`; what was saved shortly before is brought back as well.

        Returns:
            A storage, and where the bytes begin there.
        """
        with self._lock:
            self._forget_dead()
            if entry.storage is None:
                self._bring_back(entry, number)
            storage = entry.storage
            assert storage is not None
            if entry.last in self._back:
                self._wait_for(entry)
            self._ahead.discard(entry.last)
            self._bring_back_before(number)
            return storage, entry.start

    def _wait_for(self, entry: Entry) -> None:
        """Let compute use what was brought back."""
        compute = self._copies.compute
        if compute != entry.stream:
            if entry.copied is not None:
                compute.wait_event(entry.copied)
            else:
                compute.wait_stream(entry.stream)  # which has waited for the copy
            _bytes_of(entry, self.device).record_stream(compute)
        elif entry.copied is not None:
            compute.wait_event(entry.copied)
            entry.copied = None

    # -- to the host ----------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> None:
        """Have so many bytes left of the limit, if that is possible."""
        while self.counts.device + nbytes > self._limit:
            if self._leaving:
                self._finish_leaving()
            elif self._resident:
                self._start_leaving()
            else:
                return

    def _start_leaving(self) -> None:
        """Copy the entry that backward will need last."""
        number = next(iter(self._resident))
        entry = self._resident[number]()
        if entry is not None:
            blocks = self._host.take(entry.nbytes)
            self._copy_to(blocks, entry)
            entry.blocks = blocks
            self.counts.to_host += entry.nbytes
            self.counts.host = self._host.used_bytes
            self.counts.host_peak = max(self.counts.host_peak, self.counts.host)
            self._resident_bytes -= entry.nbytes
            self._leaving[number] = self._resident[number]
        else:
            self._forget_dead()
        self._resident.pop(number, None)

    def _finish_leaving(self) -> None:
        """Give up the memory of the entry whose copy was started first."""
        number = next(iter(self._leaving))
        entry = self._leaving.pop(number)()
        if entry is not None:
            entry.wait_for_copy()
            self._send_away(entry)
        else:
            self._forget_dead()

    def _send_away(self, entry: Entry) -> None:
        entry.storage = None
        self.counts.device -= entry.nbytes
        self._away[entry.last] = weakref.ref(entry)
        insort(self._away_numbers, entry.last)

    # -- and back -------------------------------------------------------------------------------

    def _bring_back(self, entry: Entry, now: int) -> None:
        """Start to copy it to the device, where backward is at ``now``."""
        for number in list(self._back):
            if self.counts.device + entry.nbytes <= self._limit:
                break
            other = self._back[number]()
            # Of what backward is still to come to, nothing: to copy it again would take longer.
            if other is not None and other.first > now and number not in self._ahead:
                del self._back[number]
                if other.copied is not None:  # used, but not on the stream that has its memory
                    other.wait_for_copy()
                self._send_away(other)
        assert entry.blocks is not None
        self._count_device(entry.nbytes)  # before it is there, so that errors leave it balanced
        try:
            with self._copies.on(entry.stream):
                target = torch.empty(entry.nbytes, dtype=torch.uint8, device=self.device)
        except BaseException:
            self.counts.device -= entry.nbytes
            raise
        entry.storage, entry.start = self._copy_from(entry.blocks, target, entry), 0
        self.counts.to_device += entry.nbytes
        self._drop_away(entry.last)
        self._back[entry.last] = weakref.ref(entry)

    def _bring_back_before(self, now: int) -> None:
        """Bring back what backward needs next: as much as there is room for, at least one."""
        while (index := bisect_left(self._away_numbers, now)) > 0:
            number = self._away_numbers[index - 1]
            entry = self._away[number]()
            if entry is None:
                self._forget_dead()
                self._drop_away(number)
                continue
            full = self.counts.device + entry.nbytes > self._limit
            if full and (self._ahead or self._is_needed_before(number, now)):
                return
            self._bring_back(entry, now)
            self._ahead.add(number)

    def _is_needed_before(self, number: int, now: int) -> bool:
        """Whether backward comes to something on the device before it comes to ``number``."""
        return any(
            number < saved < now for places in (self._resident, self._leaving) for saved in places
        )

    # -- the copies: what `fsdp2.planning` replaces by numbers ----------------------------------

    def _copy_to(self, blocks: list[torch.Tensor], entry: Entry) -> None:
        """Copy the bytes of ``entry`` to host memory, and mark the end of that."""
        source = _bytes_of(entry, self.device)
        with self._copies.copying([entry.stream]):
            for part, block in _pieces(source, blocks):
                block.copy_(part, non_blocking=True)
            entry.copied = self._copies.copied()

    def _copy_from(
        self, blocks: list[torch.Tensor], target: torch.Tensor, entry: Entry
    ) -> torch.UntypedStorage:
        """Copy host memory to ``target``, the new memory of ``entry``, and mark the end."""
        with self._copies.copying([entry.stream]):
            for part, block in _pieces(target, blocks):
                part.copy_(block, non_blocking=True)
            entry.copied = self._copies.copied()
        return target.untyped_storage()

    def view(
        self,
        storage: torch.UntypedStorage,
        start: int,
        dtype: torch.dtype,
        shape: torch.Size,
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        """A tensor over the bytes of ``storage`` from ``start`` on."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(storage, start // dtype.itemsize, shape, strides)

    # -- bookkeeping ----------------------------------------------------------------------------

    def _places_of(self, number: int) -> Places | None:
        all_places = (self._resident, self._leaving, self._away, self._back)
        return next((places for places in all_places if number in places), None)

    def _renumber(self, entry: Entry) -> None:
        """It was saved again, now."""
        places = self._places_of(entry.last)
        assert places is not None
        places[self._number] = places.pop(entry.last)
        if places is self._away:
            self._away_numbers.remove(entry.last)
            self._away_numbers.append(self._number)
        if entry.last in self._ahead:
            self._ahead.remove(entry.last)
            self._ahead.add(self._number)
        entry.last = self._number

    def _drop_away(self, number: int) -> None:
        if self._away.pop(number, None) is not None:
            del self._away_numbers[bisect_left(self._away_numbers, number)]

    def _count_device(self, nbytes: int) -> None:
        self.counts.device += nbytes
        self.counts.device_peak = max(self.counts.device_peak, self.counts.device)

    def _forget_dead(self) -> None:
        while self.dead:
            key, number, nbytes, away, blocks = self.dead.popleft()
            known = self._known.get(key)
            if known is not None and known() is None:
                del self._known[key]
            if self._resident.pop(number, None) is not None:
                self._resident_bytes -= nbytes
            self._leaving.pop(number, None)
            self._back.pop(number, None)
            self._ahead.discard(number)
            self._drop_away(number)
            if not away:
                self.counts.device -= nbytes
            if blocks is not None:
                self._host.give_back(blocks)
                self.counts.host = self._host.used_bytes

    def counted(self) -> SavedBytes:
        """The counts of now."""
        with self._lock:
            self._forget_dead()
            return self.counts


def _bytes_of(entry: Entry, device: torch.device) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    assert entry.storage is not None
    return empty.set_(entry.storage, entry.start, (entry.nbytes,), (1,))


def _pieces(
    tensor: torch.Tensor, blocks: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of ``tensor`` that follow each other, and the block of each, as long as it."""
    start = 0
    for block in blocks:
        part = tensor[start : start + block.numel()]
        yield part, block[: part.numel()]
        start += block.numel()
