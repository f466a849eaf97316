"""Every order between streams, in one place.

There are four streams: compute (the user's current stream), all-gather, reduce-scatter and
all-reduce. ``record_stream`` is not used: events and references decide how long a buffer lives, so
memory is deterministic. Only the stream on which a buffer was allocated may reuse its memory. So a
backward keeps the compute stream that it began on until its end, even if that is reached on another
stream: see `ending`.

====================  ===============  ====================================================
buffer                allocated on     why it is safe to free
====================  ===============  ====================================================
gathered storage      all-gather       `before_free`: all-gather waits for compute's last use
cast or staged shard  all-gather       read by gathers on the same stream only
secondary shards      compute          read by a gather; freed after its `use_gathered`
gradient (autograd)   compute          held until compute has waited for `reduced`
stage, sum buffers    reduce-scatter   released after `use_reduced` (all-reduce: see there)
sharded gradients     compute          written between `reducing` and `use_reduced`; so are sums
                                       over shards that wait for a later all-reduce
====================  ===============  ====================================================

`Streams` is for devices whose work is ordered by the host (CPU). It does nothing: there, the
function that finishes a collective is called before its result is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from typing_extensions import override

from ..common.copies import CopyStream

Event = Any
_no_context: AbstractContextManager[None] = nullcontext()


class Freeable(Protocol):
    """Something in gathered storage: a `Bucket`."""

    def free(self) -> None: ...


class Streams:
    """Host-ordered devices: no streams, no events."""

    stream_ordered = False
    compute: Any = None  # the user's stream that is current now

    def before_gathers(self, optimizer_event: Event = None) -> None:
        """All-gathers must see what compute has written into the shards: all, or up to an event."""

    def gathering(self) -> AbstractContextManager[None]:
        """Allocate gathered storage, cast and all-gather inside this context."""
        return _no_context

    def gathered(self, event: Event) -> Event:
        """Mark the end of a gather; called inside `gathering`."""
        return None

    def use_gathered(self, event: Event) -> None:
        """Compute may use what was gathered before ``event``."""

    def before_free(self) -> None:
        """Gathered storage may be freed or overwritten after compute's last use of it."""

    def free(self, gathered: Iterable[Freeable]) -> None:
        """Free gathered storage after compute's last use of it."""
        for each in gathered:
            each.free()

    def reducing(self, then_on: Any = None) -> AbstractContextManager[None]:
        """Stage and reduce-scatter gradients that compute has written, inside this context.

        Args:
            then_on: a user's stream to continue on, after what was reduced so far.
        """
        return _no_context

    def all_reducing(self) -> AbstractContextManager[None]:
        """All-reduce what the reduce-scatter stream has written, inside this context."""
        return _no_context

    def reduced(self) -> Event:
        """Mark the end of a reduction; called inside `reducing` or `all_reducing`."""
        return None

    def use_reduced(self, event: Event) -> None:
        """Compute may use sharded gradients, and the inputs of the reduction may be freed."""

    def wait_on_host(self, event: Event) -> None:
        """The host waits for one reduction: it is about to use an offloaded gradient."""

    def synchronize(self) -> None:
        """The host waits for all streams: it is about to use offloaded shards and gradients."""

    def ending(self, compute: Any) -> AbstractContextManager[None]:
        """End a backward inside: reduce what is left, complete reductions, free units.

        Args:
            compute: `compute` of that backward; the caller may be on another stream.
        """
        return _no_context


class DeviceStreams(Streams):
    """Stream-ordered devices (CUDA and the like)."""

    stream_ordered = True

    def __init__(self, device: torch.device, module: Any) -> None:
        """
        Args:
            module: makes streams and events: ``torch.cuda``, or a similar module.
        """
        self.device = device
        self.module = module
        # Communication kernels should be scheduled ahead of compute that is queued already.
        self.gather = self.module.Stream(device=device, priority=-1)
        self.reduce = self.module.Stream(device=device, priority=-1)
        self.all_reduce = self.module.Stream(device=device)

    @property
    @override
    def compute(self) -> Any:
        return self.module.current_stream(self.device)

    @override
    def before_gathers(self, optimizer_event: Event = None) -> None:
        if optimizer_event is not None:
            self.gather.wait_event(optimizer_event)
        else:
            self.gather.wait_stream(self.compute)

    @override
    def gathering(self) -> AbstractContextManager[None]:
        return self.module.stream(self.gather)

    @override
    def gathered(self, event: Event) -> Event:
        return self.gather.record_event(event)

    @override
    def use_gathered(self, event: Event) -> None:
        self.compute.wait_event(event)

    @override
    def before_free(self) -> None:
        # This wait is also the rate limiter: the gather of unit i+1, issued after unit i-1 was
        # freed, runs next to unit i and not earlier.
        self.gather.wait_stream(self.compute)

    @override
    def free(self, gathered: Iterable[Freeable]) -> None:
        self.before_free()
        with self.gathering():
            super().free(gathered)

    @override
    def reducing(self, then_on: Any = None) -> AbstractContextManager[None]:
        if then_on is not None:
            then_on.wait_stream(self.reduce)
            return self.module.stream(then_on)
        self.reduce.wait_stream(self.compute)
        return self.module.stream(self.reduce)

    @override
    def all_reducing(self) -> AbstractContextManager[None]:
        self.all_reduce.wait_stream(self.reduce)
        return self.module.stream(self.all_reduce)

    @override
    def reduced(self) -> Event:
        return self.module.current_stream(self.device).record_event()

    @override
    def use_reduced(self, event: Event) -> None:
        # The sum buffers belong to the reduce-scatter stream but may have been read by the
        # all-reduce stream last, so their stream waits too before they are released.
        self.compute.wait_event(event)
        self.reduce.wait_event(event)

    @override
    def wait_on_host(self, event: Event) -> None:
        event.synchronize()

    @override
    def synchronize(self) -> None:
        for stream in (self.gather, self.reduce, self.all_reduce):
            stream.synchronize()

    @contextmanager
    @override
    def ending(self, compute: Any) -> Iterator[None]:
        caller = self.compute
        if caller == compute:
            yield
        else:
            # Autograd computes on the streams of the forward. It calls the end of a backward on the
            # caller's stream, which has waited for them; the memory freed there belongs to them.
            compute.wait_stream(caller)
            with self.module.stream(compute):
                yield
            caller.wait_stream(compute)
        # A graph that is being captured may end: no work is left on our streams.
        capturing = getattr(self.module, "is_current_stream_capturing", None)
        if capturing is None or not capturing():
            return
        for stream in (self.gather, self.reduce, self.all_reduce):
            # First the other way round: a capture must not wait for a stream outside of it.
            stream.wait_stream(caller)
            caller.wait_stream(stream)


Kept = dict[tuple[torch.device, Any], DeviceStreams]
_kept: Kept = {}
# Device modules that stand in for the real ones, with the streams of each; see `simulating`.
_simulated: list[tuple[Any, Kept]] = []


def device_module(device: torch.device) -> Any:
    """The module whose streams order the work of ``device``; None if the host orders it."""
    if _simulated:
        return _simulated[-1][0]
    return None if device.type == "cpu" else torch.get_device_module(device)


@contextmanager
def simulating(module: Any) -> Iterator[None]:
    """Context in which the streams of ``module`` order every device: for `fsdp2.testing`."""
    _simulated.append((module, {}))
    try:
        yield
    finally:
        _simulated.pop()


def streams_for(device: torch.device) -> Streams:
    """The streams for ``device`` next to the one that computes now: the same at every call.

    Models that compute on different streams may run side by side, each rank in its own order, and
    share nothing.
    """
    # A caching allocator keeps what a stream has freed for that stream. Were the streams made per
    # root, a larger root would leave the pools of the old streams behind, and each of two models
    # would have its own. Shared streams only add order, and no model relies on having less: each
    # makes its streams wait for its own uses.
    module = device_module(device)
    if module is None:
        return Streams()
    kept = _simulated[-1][1] if _simulated else _kept
    key = (device, module.current_stream(device))
    if key not in kept:
        kept[key] = DeviceStreams(device, module)
    return kept[key]


def copy_stream_for(device: torch.device) -> CopyStream | None:
    """A new one; None if the host orders the work (CPU), where no copy can overlap."""
    module = device_module(device)
    if module is None:
        return None
    # Simulated streams are told apart by the names that they get.
    return CopyStream(device, module, module.Stream(device="copies" if _simulated else device))


Finish = Callable[[], None]


def done() -> None:
    """Returned by calls whose result the current stream orders: nothing is left to do."""


def ended(finish: Finish, *, stream_ordered: bool) -> Finish:
    """``finish``, for the caller to call later; where streams order the work it is called here."""
    # With streams, waiting means that the stream waits, and later work is enqueued behind it. If
    # called later, it would be enqueued on the stream that is current then.
    if not stream_ordered:
        return finish
    finish()
    return done


def wait_for(works: list[Any]) -> None:
    """Wait on the current stream if streams order the work, else on the host; None: no wait."""
    # Each is dropped once it is over, as a second wait would write the results again (see
    # `GroupTransport`). After Ctrl-C in the middle, the others must still be waited for.
    while works:
        if works[-1] is not None:
            works[-1].wait()
        del works[-1]
