"""Records the order of the runtime's work: see `recording`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch

from ..comm import mesh_transports as transports
from ..comm import transports as collectives
from ..comm.streams import simulating
from ..features.tensor_subclasses import extension
from ..runtime import unit
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..sharding import bucket as storage
from ..transports.host.exchange import Exchange
from .trace import RecordedGroup, Recorder


@contextmanager
def recording(
    *, host_ordered: bool = False, offload: bool = False, exchange: bool = False
) -> Iterator[Recorder]:
    """Record everything inside the context, for `check`.

    The tensors are CPU tensors, and the process group may be of any backend (``fake`` needs only
    one process; values are wrong then, but the order is right). Create, shard and train the model
    inside the context, and do not use it afterwards.

    Args:
        host_ordered: record the CPU path, where functions finish collectives, instead of the one
            with streams and events.
        offload: distinguish host memory from device memory, for units with ``CPUOffloadPolicy``.
        exchange: with ``host_ordered``, use the point-to-point transport of small gloo groups.

    Yields:
        The recorder; ``recorder.events`` is the trace, ``recorder.device`` has the streams.

    Example:
        >>> with recording() as recorder:
        ...     model = build()
        ...     fully_shard(model, mesh=mesh)
        ...     model(x).sum().backward()
        >>> assert not check(recorder.events)
    """
    recorder = Recorder(host_ordered=host_ordered)
    with ExitStack() as stack:
        patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
        if host_ordered:
            patch(transports, "make_transport", _messages(recorder, exchange))
        else:
            stack.enter_context(simulating(recorder.device))
        if offload:
            device = torch.device("cpu", 0)
            patch(importlib.import_module("fsdp2.api.arguments"), "device_of", lambda _: device)
            for name in ("shard_from", "gradient_store"):
                patch(storage.Bucket, name, _on_host(recorder, getattr(storage.Bucket, name)))
        patch(storage, "resize", recorder.resize)
        patch(extension, "resize", recorder.resize)
        patch(Reduction, "launch", _holding(recorder, Reduction.launch))
        for cls, name in _MARKED:
            patch(cls, name, _marking(recorder, getattr(cls, name)))
        stack.callback(recorder.close)
        stack.enter_context(recorder)
        yield recorder


_MARKED = (
    (unit.Unit, "start_unshard"),
    (unit.Unit, "reshard"),
    (Runtime, "pre_forward"),
    (Runtime, "post_forward"),
    (Runtime, "pre_backward"),
    (Runtime, "post_backward"),
    (Runtime, "reduce"),
    (Runtime, "end_backward"),
)


def _marking(recorder: Recorder, method: Callable) -> Callable:
    """``method`` with marks before and after it, with its name and that of the unit."""
    name = method.__name__

    @wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        of = self if isinstance(self, unit.Unit) else args[0] if args else None
        subject = "" if of is None else of.name
        recorder.mark(f"{name} begins", subject)
        result = method(self, *args, **kwargs)
        recorder.mark(f"{name} ends", subject)
        return result

    return marked


def _on_host(recorder: Recorder, method: Callable) -> Callable:
    """A method of `Bucket` that allocates host memory if shards are offloaded."""

    @wraps(method)
    def making(self: storage.Bucket, *args: Any, **kwargs: Any) -> Any:
        recorder.making_host_memory = self.shard_device != self.device
        try:
            return method(self, *args, **kwargs)
        finally:
            recorder.making_host_memory = False

    return making


def _holding(recorder: Recorder, launch: Callable) -> Callable:
    """`Reduction.launch`, which must not overwrite sharded gradients that are still needed: those
    that are attached, and those that a reduction in flight is writing."""

    @wraps(launch)
    def holding(self: Reduction, *args: Any, **kwargs: Any) -> None:
        bucket, store = self.bucket, self.bucket.grads
        if store is None or not store.storage.size():
            return launch(self, *args, **kwargs)
        held = [
            local
            for i, (param, local) in enumerate(zip(bucket.params, store.locals, strict=True))
            if i in bucket.in_flight or param.sharded.grad is store.dtensors[i]
        ]
        recorder.hold("a gradient", held, also=[store.flat])
        del held  # references are counted
        try:
            return launch(self, *args, **kwargs)
        finally:
            recorder.hold("a gradient", (), also=[store.flat])

    return holding


def _messages(recorder: Recorder, exchange: bool) -> Callable:
    """`make_transport` for groups whose collectives are recorded."""

    def make(group: Any, device: torch.device, *, sum_only: bool = False) -> collectives.Transport:
        recorded: Any = RecordedGroup(recorder, group)
        if exchange:
            return Exchange(recorded)
        return collectives.GroupTransport(recorded, device, sum_only=sum_only)

    return make
