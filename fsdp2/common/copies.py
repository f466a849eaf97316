"""Copies between a device and host memory outside of communication, ordered by events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

Event = Any


class CopyStream:
    """A stream for copies between a device and host memory.

    Blocks of host memory belong to it: used on this stream alone, they need no event. Memory of the
    device belongs to compute, which waits for a copy before it uses or frees what was copied.

    Args:
        module: makes streams and events: ``torch.cuda``, or a similar module.
        stream: None: a new one.
    """

    def __init__(self, device: torch.device, module: Any, stream: Any = None) -> None:
        self._device, self._module = device, module
        self._stream = module.Stream(device=device) if stream is None else stream

    @property
    def compute(self) -> Any:
        return self._module.current_stream(self._device)

    @contextmanager
    def copying(self, after: Iterable[object] = ()) -> Iterator[None]:
        """Context for copies from memory that compute wrote, or to memory that compute used.

        Args:
            after: other streams that have used the memory.
        """
        compute = self.compute
        for stream in (compute, *(other for other in after if other != compute)):
            self._stream.wait_stream(stream)
        with self._module.stream(self._stream):
            yield

    def copied(self) -> Event:
        """Mark the end of a copy; called inside `copying`."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def on(self, stream: object = None) -> AbstractContextManager[None]:
        """Context of ``stream``, which owns memory allocated inside; None: the stream of copies."""
        return self._module.stream(self._stream if stream is None else stream)

    def synchronize(self) -> None:
        """The host waits for all copies."""
        self._stream.synchronize()

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        return capturing is not None and capturing()
