"""Tells apart what a collective does inside itself from what the library above it does.

gloo copies results into place inside `Work.wait()`, on the thread that waits, through ordinary
operators. They are the transport's, whoever calls it, and must not be booked as the library's.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

import fsdp2.transports.host.links
import fsdp2.transports.host.meeting
import fsdp2.transports.host.messages
from fsdp2.transports.host.followers import Step, follow
from fsdp2.transports.host.links import HostLinks
from fsdp2.transports.host.messages import Messages
from fsdp2.transports.host.relays import HostRelays

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
USES = (*KINDS, "all_reduce")  # of the exchanges within a host


@contextmanager
def around_waits(make_context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Runs every `Work.wait()` of the block inside a context of its own.

    Args:
        make_context: Called for every wait; a context manager.
    """
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with make_context():
            return original(work, *args, **kwargs)

    setattr(dist.Work, "wait", wait)  # noqa: B010
    try:
        yield
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010


@contextmanager
def pretended_hosts(places: Sequence[int]) -> Iterator[None]:
    """Groups that find out inside where their ranks are find them on these hosts, by global rank.

    What they have found is forgotten before and after.
    """
    host_links, host_meeting = fsdp2.transports.host.links, fsdp2.transports.host.meeting
    real = host_meeting.host_id()

    def pretended() -> str:
        return f"{real} {places[dist.get_rank()]}" if real else ""

    host_links._found.clear()
    with mock.patch.object(host_meeting, "host_id", pretended):
        yield
    host_links._found.clear()


BETWEEN = " between hosts"  # behind one of `KINDS`


@contextmanager
def counting_sent(places: Sequence[int] | None = None) -> Iterator[Counter[str]]:
    """Counts the bytes that exchanges of this rank send, or let others read.

    Args:
        places: the host of each global rank; None: what is sent to other hosts is not counted
            apart.

    Yields:
        Bytes by what they are part of, one of `KINDS`; with ``places``, under the same names with
        `BETWEEN` those of them that go to other hosts.
    """
    sent: Counter[str] = Counter()
    running = threading.local()  # in each thread the kinds of its calls, the outermost first

    def kinds() -> list[str]:
        return running.__dict__.setdefault("kinds", [])

    def inside(kind: str, function: Callable[..., Any], *args: Any) -> Any:
        kinds().append(kind)
        try:
            return function(*args)
        finally:
            kinds().pop()

    def counting(name: str, kind: str) -> Any:
        original = getattr(Messages, name)

        def method(self: Messages, *args: Any) -> Any:
            finish = inside(kind, original, self, *args)
            return lambda: inside(kind, finish)

        return method

    def counted_start(self: Messages, sends: Any, receives: Any) -> Any:
        for tensors, peer, _ in sends:
            count(self.group, kinds()[0], tensors[0].nbytes, peer)
        return start(self, sends, receives)

    def counted_send(self: HostRelays, message: Any, use: int) -> Any:
        count(self.group, USES[use], message[0][0].nbytes, message[1])
        return send(self, message, use)

    def counted_post(self: HostLinks, key: int, posts: Any) -> None:
        # Two steps of an exchange over hosts, in the same order as the uses of one.
        sent[USES[key % 8 % 4]] += sum(sum(ranges[1::2]) for ranges in posts.values())
        post(self, key, posts)

    def count(group: dist.ProcessGroup, kind: str, nbytes: int, peer: int) -> None:
        sent[kind] += nbytes
        if places is not None:
            there = places[dist.get_global_rank(group, peer)]
            if there != places[dist.get_rank()]:
                sent[kind + BETWEEN] += nbytes

    def counted_follow(
        owner: object, purpose: str, job: Callable[[], Any], group: dist.ProcessGroup
    ) -> Step:
        # What follows is part of the same, whatever runs here by then.
        return follow(owner, purpose, functools.partial(inside, kinds()[0], job), group)

    start, send, post = Messages._start, HostRelays._send, HostLinks.post
    names = ("gather", "scatter", "all_reduce")
    methods = {name: counting(name, kind) for name, kind in zip(names, KINDS, strict=True)}
    methods |= {name: counting(name, "all_reduce") for name in ("in_one", "in_two_phases")}
    with (
        mock.patch.multiple(Messages, _start=counted_start, **methods),
        mock.patch.object(fsdp2.transports.host.messages, "follow", counted_follow),
        mock.patch.object(HostRelays, "_send", counted_send),
        mock.patch.object(HostLinks, "post", counted_post),
    ):
        yield sent
