"""Ranks of one host tell each other where their data lies, and read it there.

One exchange of a group, seen from one rank: it *posts* to every other rank the address of what that
one is to read, reads what the others have posted as soon as all have, and acknowledges. It is over
when the others have acknowledged too: then what was posted may change. Posts and acknowledgements
are a few bytes on a Unix socket per pair of ranks; the data is copied once, by the reader
(`cross_memory`). A rank that ends closes its sockets, which the others see at once.

While a rank waits for an exchange, it serves all that it has begun, of all groups. But it may also
be busy, or wait elsewhere: in a collective of the user, for a rank that waits for it to read. So a
thread serves what is still unread every few milliseconds. (A thread that did all of it would wake
up for each message, and take turns with the caller's for Python's lock.)
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ...common.threads import work_in_turns
from ...sharding.process_groups import timeout_of
from .cross_memory import Ranges, ReadError, read
from .meeting import Met, meet
from .topology import Places

Posts = dict[int, Ranges]  # by rank of the group

_POST, _ACKNOWLEDGE = 1, 2
_HEADER = struct.Struct("=BQ")
_LONGEST = 1 << 16  # bytes of a message
_FULL = 8000  # numbers of a message, two for a range
_LATE_S = 0.004  # after which the thread serves
_SLICE_S = 0.05  # of waiting, after which a thread looks whether another one was told
_LONGEST_END_S = 5.0  # at exit
USES_OF_TAG = 8  # keys per message tag
_CPU = torch.device("cpu")


class PendingExchange:
    """One exchange that this rank has begun.

    Args:
        sequence: how many of its key there were before, and this one.
        read_all: reads what the others have posted.
        is_acknowledged: whether others tell when they have read.
    """

    def __init__(
        self,
        links: HostLinks,
        channel: _Channel,
        read_all: Callable[[Posts], None],
        is_acknowledged: bool,
    ) -> None:
        self.links, self.channel = links, channel
        self.sequence = channel.num_begun
        self.read_all = read_all
        self.is_acknowledged = is_acknowledged
        self.has_read = False

    def missing(self) -> list[int]:
        """The ranks that have not posted, else those that have not read."""
        channel = self.channel
        if not self.has_read:
            return [peer for peer, posts in channel.posts.items() if not posts]
        if not self.is_acknowledged:
            return []
        return [peer for peer, count in channel.num_read.items() if count < self.sequence]

    def wait(self) -> None:
        """Return when everything was read here, and by the others.

        Raises:
            torch.distributed.DistNetworkError: a rank has ended or given up, or the timeout of the
                group is over.
        """
        deadline = None
        while (missing := self.missing()) or not self.has_read:
            self.links.check(missing)
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.links.timeout_s()
            elif now > deadline:
                self.links.fail(
                    f"timed out after {self.links.timeout_s():g} s; of the group's ranks, "
                    f"{missing} did not {'read' if self.has_read else 'come'}"
                )
            _serve(min(_SLICE_S, max(0.0, deadline - now)))


class _Channel:
    """The exchanges of one key: posts and acknowledgements of each other rank, in order."""

    def __init__(self, peers: Sequence[int]) -> None:
        self.posts: dict[int, deque[Ranges]] = {peer: deque() for peer in peers}
        self.begun: Posts = {peer: [] for peer in peers}  # posts that are not complete
        self.num_read = dict.fromkeys(peers, 0)
        self.num_begun = 0  # of those that are acknowledged
        self.num_ready = 0  # ranks that have posted
        self.unread: deque[PendingExchange] = deque()

    def is_idle(self) -> bool:
        """Whether nothing is under way. A new channel would do as well then."""
        if self.unread or self.num_ready or any(self.begun.values()):
            return False
        return all(num == self.num_begun for num in self.num_read.values())


class HostLinks:
    """Connections of this rank to the other ranks of a group on its host.

    Attributes:
        size, rank: of the group, and of this process in it.
        hosts, in_rank_order: see `Met`.
        places: all this as arithmetic.
        members: the ranks of this host.
        peers: its other ranks, from the next one on: were all to begin with the same rank, they
            would read the same memory at once.
    """

    def __init__(self, group: dist.ProcessGroup, met: Met) -> None:
        self.size, self.rank = group.size(), group.rank()
        self.hosts, self.in_rank_order = met.hosts, met.in_rank_order
        hosts = tuple(map(tuple, met.hosts))
        self.places = Places(hosts, self.rank, met.in_rank_order, tuple(met.machines))
        self.members = next(host for host in met.hosts if self.rank in host)
        place = self.members.index(self.rank)
        self.peers = [*self.members[place + 1 :], *self.members[:place]]
        # Not the group: these links live in a dictionary as long as it does.
        self._group = ref(group)
        self._pids, self._sockets = met.pids, met.sockets
        self._channels: dict[int, _Channel] = {}
        self._lost: set[int] = set()
        self._broken = ""
        self._owner = os.getpid()
        for peer, connection in met.sockets.items():
            connection.setblocking(False)
            _served.epoll.register(connection, select.EPOLLIN)
            _served.links[connection.fileno()] = (ref(self), peer)

    def begin(
        self,
        key: int,
        posts: Posts | None,
        read_all: Callable[[Posts], None],
        *,
        is_acknowledged: bool = True,
    ) -> PendingExchange:
        """Begin an exchange: tell each other rank which ranges of this process to read.

        Args:
            key: the same on all ranks; exchanges of one key are in the same order on all.
            posts: what each other rank is to read; None: `post` follows later, as nothing is there
                yet.
            read_all: called once with what the others have posted, here or while this rank waits
                for any exchange.
            is_acknowledged: False where a later exchange shows that all have read.
        """
        with _lock:
            self.check(())
            channel = self._channel(key)
            channel.num_begun += is_acknowledged
            operation = PendingExchange(self, channel, read_all, is_acknowledged)
            channel.unread.append(operation)
            _served.note_unread(1)
            if posts is not None:
                self.post(key, posts)
            _serve(0)
            self._read_ready(channel, key)
        return operation

    def post(self, key: int, posts: Posts) -> None:
        """Tell each other rank which ranges of this process to read."""
        with _lock:
            for peer in self.peers:
                ranges = posts[peer]
                # In as many messages as it takes: a post ends with the first that is not full.
                for start in range(0, len(ranges) + 1, _FULL):
                    part = ranges[start : start + _FULL]
                    message = _HEADER.pack(_POST, key) + struct.pack(f"={len(part)}Q", *part)
                    self._send(peer, message)

    def read(self, peer: int, into: Ranges, ranges: Ranges) -> None:
        """Copy ``ranges`` of the memory of rank ``peer``."""
        read(self._pids[peer], into, ranges)

    def check_sizes(self, peer: int, expected: Sequence[int], ranges: Ranges) -> None:
        if list(expected) != ranges[1::2]:
            self.fail(f"rank {peer} of the group offers ranges of other sizes than expected")

    def timeout_s(self) -> float:
        group = self._group()
        timeout = dist.default_pg_timeout if group is None else timeout_of(group, _CPU)
        return timeout.total_seconds()

    def check(self, needed: Sequence[int]) -> None:
        """Raise if an exchange has failed, or one of the ranks ``needed`` is gone."""
        if self._broken:
            raise dist.DistNetworkError(self._broken)
        gone = [peer for peer in needed if peer in self._lost]
        if gone:
            self.fail(f"ranks {gone} of the group have ended, or given up after an error")

    def fail(self, reason: str) -> NoReturn:
        """Give up: this rank's exchanges raise from now on, and the others' too."""
        # Closed before memory is freed that others may be reading: who finds the connection open
        # after it has read, has read what was posted. And not while the thread reads, into memory
        # that the caller frees next.
        with _lock:
            self.close()
            self._broken = f"Exchange of memory within the host: {reason}"
        raise dist.DistNetworkError(self._broken)

    def close(self) -> None:
        """Close the connections; without effect in a fork of the process that made them."""
        if os.getpid() != self._owner:
            return
        for connection in self._sockets.values():
            _served.drop(connection)
            connection.close()
        self._sockets = {}
        for channel in self._channels.values():
            _served.note_unread(-len(channel.unread))
            channel.unread.clear()

    def close_copies(self) -> None:
        """In a fork: close its copies of the connections, which stay open in its parent."""
        for connection in self._sockets.values():
            connection.close()

    def __del__(self) -> None:
        with suppress(OSError, TypeError, AttributeError):  # at the end of the interpreter
            self.close()

    def _channel(self, key: int) -> _Channel:
        channel = self._channels.get(key)
        if channel is None:
            if _forgotten:
                _drop_forgotten()
            channel = self._channels[key] = _Channel(self.peers)
        return channel

    def drop_idle(self, tags: Sequence[range]) -> bool:
        """Drop the channels of these tags; returns whether some are still in use."""
        chosen = [k for k in self._channels if any(k // USES_OF_TAG in some for some in tags)]
        for key in chosen:
            if self._channels[key].is_idle():
                del self._channels[key]
        return any(key in self._channels for key in chosen)

    def _send(self, peer: int, message: bytes) -> None:
        deadline = None
        while True:
            connection = self._sockets.get(peer)
            if connection is None:  # another thread has given up
                self._lost.add(peer)
                self.check((peer,))
                return
            try:
                connection.send(message)
                return
            except BlockingIOError:
                # Its buffer is full: hundreds of posts that it has not looked at. It does so in
                # its next exchange.
                if deadline is None:
                    deadline = time.monotonic() + self.timeout_s()
                if time.monotonic() > deadline:
                    self.fail(f"rank {peer} of the group took no message")
                _serve(0.001)
                self.check((peer,))
            except OSError:
                self._lost.add(peer)
                self.check((peer,))

    def receive(self, peer: int) -> None:
        """Take the next message of a rank, if there is one."""
        connection = self._sockets.get(peer)
        if connection is None:
            return
        try:
            message = connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lost.add(peer)
            _served.drop(connection)
            return
        kind, key = _HEADER.unpack_from(message)
        channel = self._channel(key)
        if kind == _ACKNOWLEDGE:
            channel.num_read[peer] += 1
            return
        count = (len(message) - _HEADER.size) // 8
        channel.begun[peer] += struct.unpack_from(f"={count}Q", message, _HEADER.size)
        if count == _FULL:
            return
        posts = channel.posts[peer]
        channel.num_ready += not posts
        posts.append(channel.begun[peer])
        channel.begun[peer] = []
        self._read_ready(channel, key)

    def _read_ready(self, channel: _Channel, key: int) -> None:
        """Read what all the others have posted, and tell them."""
        while channel.unread and channel.num_ready == len(self.peers):
            operation = channel.unread.popleft()
            _served.note_unread(-1)
            posts = {peer: theirs.popleft() for peer, theirs in channel.posts.items()}
            channel.num_ready = sum(map(bool, channel.posts.values()))
            try:
                operation.read_all(posts)
            except dist.DistNetworkError:
                raise
            except (ReadError, RuntimeError) as error:
                self.fail(str(error))
            except Exception as error:
                # Not raised as it is: who serves now may wait for another group, or be the thread,
                # which would end for all groups.
                self.fail(f"{type(error).__name__}: {error}")
            except BaseException as error:  # Ctrl-C: what was not read now never will be
                with suppress(dist.DistNetworkError):
                    self.fail(f"interrupted by {type(error).__name__}")
                raise
            operation.read_all = _nothing  # it holds tensors
            # A rank that gave up has freed what it posted, perhaps before it was read here. But
            # then it has closed its connection before, and to send to it is an error. (Without an
            # acknowledgement, the next exchange sends.)
            if operation.is_acknowledged:
                for peer in self.peers:
                    self._send(peer, _HEADER.pack(_ACKNOWLEDGE, key))
            operation.has_read = True


def _nothing(posts: Posts) -> None:
    pass


class _Served:
    """The connections of all links of this process."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.links: dict[int, tuple[ref[HostLinks], int]] = {}  # by file descriptor
        self.num_unread = self.num_waiting = 0
        self.is_late = threading.Event()
        self.thread: threading.Thread | None = None
        self.has_ended = False

    def note_unread(self, change: int) -> None:
        """Count exchanges that were begun and not read; the caller has the lock."""
        self.num_unread += change
        if self.num_unread and not self.is_late.is_set():
            if self.thread is None:
                self.thread = work_in_turns("fsdp2 exchange", self._serve_late)
            self.is_late.set()

    @torch.no_grad()
    def _serve_late(self) -> bool:
        self.is_late.wait()
        time.sleep(_LATE_S)
        with _lock:
            if not self.num_unread:
                self.is_late.clear()
        if self.num_unread and not self.num_waiting:
            _serve(0)
        return not self.has_ended

    def end(self) -> None:
        """End the thread, before the interpreter does (as in `followers`)."""
        self.has_ended = True
        self.is_late.set()
        if self.thread is not None:
            self.thread.join(_LONGEST_END_S)

    def drop(self, connection: socket.socket) -> None:
        if self.links.pop(connection.fileno(), None) is not None:
            self.epoll.unregister(connection)


def _serve(timeout_s: float) -> None:
    """Take the messages that came, or the first that comes within ``timeout_s``."""
    # (A message that the thread took would wake up nobody who waits here.)
    _served.num_waiting += timeout_s > 0
    try:
        events = _served.epoll.poll(timeout_s)
    finally:
        _served.num_waiting -= timeout_s > 0
    with _lock:
        for number, _ in events:
            found = _served.links.get(number)
            links = None if found is None else found[0]()
            if found is not None and links is not None:
                # Links that break say so to who waits for them: it may be others that wait here.
                with suppress(dist.DistNetworkError):
                    links.receive(found[1])


def _start_anew() -> None:
    """In a fork: its connections and its epoll would be its parent's as well."""
    global _served, _lock
    # Closed, or none of the others would see when the parent ends or gives up: a connection is open
    # for as long as any process has it, and workers that load data may outlive a rank.
    for links, _ in _served.links.values():
        there = links()
        if there is not None:
            there.close_copies()
    _served.epoll.close()
    _served, _lock = _Served(), threading.RLock()


def forget_tags(tags: range) -> None:
    """Note that nothing will be sent with these tags any more, on whatever group it was."""
    # Only noted: garbage is collected at any moment, in any thread, while channels are in use. Who
    # makes the next new channel drops those. Other groups may use the same tags: what is dropped
    # there is idle and will be made anew.
    _forgotten.append(tags)


def _drop_forgotten() -> None:
    taken = sorted((_forgotten.popleft() for _ in range(len(_forgotten))), key=lambda r: r.start)
    joined: list[range] = []
    for tags in taken:  # the units of a model have consecutive tags
        if joined and joined[-1].stop >= tags.start:
            joined[-1] = range(joined[-1].start, max(joined[-1].stop, tags.stop))
        else:
            joined.append(tags)
    # (All of them, also after one that still uses some.)
    every = [each for each in list(_found.values()) if isinstance(each, HostLinks)]
    left = [links.drop_idle(joined) for links in every]
    if any(left):
        _forgotten.extend(joined)


_forgotten: deque[range] = deque()
_served = _Served()
_lock = threading.RLock()
# Of groups without links: where their ranks are.
_found: WeakKeyDictionary[dist.ProcessGroup, HostLinks | Places] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_start_anew)
atexit.register(lambda: _served.end())


def host_links(group: dist.ProcessGroup) -> HostLinks | None:
    """The links of a group, or None: no two of its ranks are on one host and may read each other.

    Collective over the ranks of ``group`` at the first call; all get links, or none does.
    """
    if group not in _found:
        _found[group] = connect(group)
    found = _found[group]
    return found if isinstance(found, HostLinks) else None


def connect(group: dist.ProcessGroup) -> HostLinks | Places:
    """New links, or where the ranks are if none may read another's memory; collective."""
    met = meet(group)
    return HostLinks(group, met) if isinstance(met, Met) else met


def places_of(group: dist.ProcessGroup) -> Places | None:
    """Where the ranks of a group are, if they have found out; not a collective."""
    found = _found.get(group)
    return found.places if isinstance(found, HostLinks) else found


def adds_by_host() -> bool:
    """Whether groups of this process add host by host, and not in the order of ranks."""
    every = [each for each in _found.values() if isinstance(each, HostLinks)]
    return any(links.places.others and not links.in_rank_order for links in every)
