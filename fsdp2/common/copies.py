"""Copies between a device and host memory that are no part of communication, ordered by events."""

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
        module: what makes streams and events: ``torch.cuda``, or something like it.
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
        """Copy what compute has written, or to memory that compute has used, inside.

        Args:
            after: streams other than the current one that have used it.
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
        """Context of ``stream``, to which memory allocated there belongs; None: of the copies."""
        return self._module.stream(self._stream if stream is None else stream)

    def synchronize(self) -> None:
        """The host waits for all copies."""
        self._stream.synchronize()

    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        capturing = getattr(self._module, "is_current_stream_capturing", None)
        return capturing is not None and capturing()
