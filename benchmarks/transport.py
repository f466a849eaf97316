"""Tells apart what a collective does inside itself from what the library above it does.

gloo copies results into place inside `Work.wait()`, on the thread that waits, through ordinary
operators. They are the transport's, whoever calls it, and must not be booked as the library's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp2.comm.host_links import HostLinks
from fsdp2.comm.messages import Messages

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
def counting_sent() -> Iterator[Counter[str]]:
    """Counts the bytes that exchanges of this rank send, or let others read.

    Yields:
        Bytes by what they are part of, one of `KINDS`.
    """
    sent: Counter[str] = Counter()
    kinds: list[str] = []  # of the calls that are running, the outermost first

    def counting(name: str, kind: str) -> Any:
        original = getattr(Messages, name)

        def inside(function: Callable[..., Any], *args: Any) -> Any:
            kinds.append(kind)
            try:
                return function(*args)
            finally:
                kinds.pop()

        def method(self: Messages, *args: Any) -> Any:
            finish = inside(original, self, *args)
            return lambda: inside(finish)

        return method

    def counted_start(self: Messages, sends: Any, receives: Any) -> Any:
        sent[kinds[0]] += sum(tensors[0].nbytes for tensors, *_ in sends)
        return start(self, sends, receives)

    def counted_begin(self: HostLinks, key: int, posts: Any, *args: Any, **kwargs: Any) -> Any:
        if posts is not None:
            sent[USES[key % 8]] += sum(sum(ranges[1::2]) for ranges in posts.values())
        return begin(self, key, posts, *args, **kwargs)

    start, begin = Messages._start, HostLinks.begin
    names = ("gather", "scatter", "all_reduce")
    methods = {name: counting(name, kind) for name, kind in zip(names, KINDS, strict=True)}
    with (
        mock.patch.multiple(Messages, _start=counted_start, **methods),
        mock.patch.object(HostLinks, "begin", counted_begin),
    ):
        yield sent
