"""Tells apart what a collective does inside itself from what the library above it does.

gloo copies results into place inside `Work.wait()`, on the thread that waits, through ordinary
operators. They are the transport's, whoever calls it, and must not be booked as the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist


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
