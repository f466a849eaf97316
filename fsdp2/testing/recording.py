"""Records the order of the runtime's work: see `recording`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..comm.mesh_transports import MeshTransports
from ..comm.streams import Streams, simulating
from ..comm.transports import GroupTransport, Transport, make_transport
from ..runtime.building import made_types
from ..runtime.param_group import ParamGroup
from ..runtime.reduction import Reduction
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit
from ..runtime.unit_grads import UnitGrads
from ..sharding.bucket import Bucket
from ..sharding.gathered import resizers
from ..sharding.gradients import GradientStore
from ..transports.host.exchange import Exchange
from .trace import RecordedGroup, Recorder


@dataclass(frozen=True)
class _Recording:
    """A recorder, and the arguments of `recording`."""

    recorder: Recorder
    host_ordered: bool
    offload: bool
    exchange: bool


_recordings: list[_Recording] = []  # the last one records


@contextmanager
def recording(
    *, host_ordered: bool = False, offload: bool = False, exchange: bool = False
) -> Iterator[Recorder]:
    """Record everything inside the context, for `check`.

    Use CPU tensors, and a process group of any backend. With ``fake``, which needs only one
    process, the values are wrong but the order is right. Create, shard and train the model inside
    the context, and do not use it afterwards.

    Args:
        host_ordered: record the path for CPUs, where the host waits for collectives, instead of the
            path with streams and events.
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
        if not host_ordered:
            stack.enter_context(simulating(recorder.device))
        made = _Recording(recorder, host_ordered, offload, exchange)
        ours: Any
        for seam, ours in (
            (_recordings, made),
            (made_types, (_Unit, _Runtime)),
            (resizers, recorder.resize),
        ):
            seam.append(ours)
            stack.callback(seam.pop)
        stack.callback(recorder.close)
        stack.enter_context(recorder)
        yield recorder


def _mark(name: str, unit: Unit | None, call: Callable[[], None]) -> None:
    """Call it, with a mark before and after it."""
    recorder, subject = _recordings[-1].recorder, "" if unit is None else unit.name
    recorder.mark(f"{name} begins", subject)
    call()
    recorder.mark(f"{name} ends", subject)


class _Transports(MeshTransports):
    @override
    @staticmethod
    def make(
        group: dist.ProcessGroup, device: torch.device, *, sum_only: bool = False
    ) -> Transport:
        made = _recordings[-1]
        if not made.host_ordered:
            return make_transport(group, device, sum_only=sum_only)
        recorded: Any = RecordedGroup(made.recorder, group)  # whose collectives are messages
        if made.exchange:
            return Exchange(recorded)
        return GroupTransport(recorded, device, sum_only=sum_only)


class _Bucket(Bucket):
    """Marks its allocations of host memory, which it makes for offloaded shards."""

    @override
    def shard_from(self, sources: Sequence[torch.Tensor], *, whole: bool) -> None:
        with self._making():
            super().shard_from(sources, whole=whole)

    @override
    def gradient_store(self, detached: Collection[int] | None) -> GradientStore:
        with self._making():
            return super().gradient_store(detached)

    @contextmanager
    def _making(self) -> Iterator[None]:
        recorder = _recordings[-1].recorder
        recorder.making_host_memory = self.shard_device != self.device
        try:
            yield
        finally:
            recorder.making_host_memory = False


class _Reduction(Reduction):
    """Must not overwrite sharded gradients that are still needed: attached ones, and ones that a
    reduction in flight is writing."""

    @override
    def launch(self, streams: Streams) -> None:
        recorder, bucket, store = _recordings[-1].recorder, self.bucket, self.bucket.grads
        if store is None or not store.storage.size():
            super().launch(streams)
            return
        held = [
            local
            for i, (param, local) in enumerate(zip(bucket.params, store.locals, strict=True))
            if i in bucket.in_flight or param.sharded.grad is store.dtensors[i]
        ]
        recorder.hold("a gradient", held, also=[store.flat])
        del held  # references are counted
        try:
            super().launch(streams)
        finally:
            recorder.hold("a gradient", (), also=[store.flat])


class _ParamGroup(ParamGroup):
    bucket_type = _Bucket
    transports_type = _Transports


class _UnitGrads(UnitGrads):
    reduction_type = _Reduction


class _Unit(Unit):
    """Marks its gathers and frees."""

    param_group_type = _ParamGroup
    grads_type = _UnitGrads

    def __init__(self, modules: Any, mesh: Any, device: torch.device, config: Any) -> None:
        if _recordings[-1].offload:
            device = torch.device("cpu", 0)  # not of offloaded shards
        super().__init__(modules, mesh, device, config)

    @override
    def start_unshard(self, streams: Streams) -> None:
        _mark("start_unshard", self, partial(super().start_unshard, streams))

    @override
    def reshard(self, streams: Streams, **how: Any) -> None:
        _mark("reshard", self, partial(super().reshard, streams, **how))


class _Runtime(Runtime):
    """Marks what it does with units."""

    @override
    def pre_forward(self, unit: Unit, *given: Any) -> None:
        _mark("pre_forward", unit, partial(super().pre_forward, unit, *given))

    @override
    def post_forward(self, unit: Unit, **how: Any) -> None:
        _mark("post_forward", unit, partial(super().post_forward, unit, **how))

    @override
    def pre_backward(self, unit: Unit, *given: Any, **how: Any) -> None:
        _mark("pre_backward", unit, partial(super().pre_backward, unit, *given, **how))

    @override
    def post_backward(self, unit: Unit) -> None:
        _mark("post_backward", unit, partial(super().post_backward, unit))

    @override
    def reduce(self, unit: Unit, **how: Any) -> None:
        _mark("reduce", unit, partial(super().reduce, unit, **how))

    @override
    def end_backward(self) -> None:
        _mark("end_backward", None, super().end_backward)
