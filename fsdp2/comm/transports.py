"""Batched collectives over the plans of a bucket. Only this file depends on backends.

A transport moves the data of one bucket between the ranks of one group. It runs in one of two ways:

- *stream-ordered* (NCCL and the like): everything is enqueued on the current stream, which also
  orders the result. The calls return `done`. A backend may still use its own stream: then it
  returns a ``Work``, and the current stream waits for that.
- *host-ordered* (gloo): the call starts the messages and returns a function that waits for them
  and does the rest. It must be called exactly once, and before that nothing may be read.

`GroupTransport` uses the group's own collectives, coalesced: one launch per batch. It serves every
backend for which nothing else is registered (`register_backend`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherBatch, GatherPlan
from ..sharding.gradients import ReducePlan, copy_in
from ..sharding.process_groups import native_backend, num_hosts, own_group
from .means import as_real, mean_over
from .streams import Finish, device_module, done, ended, wait_for


class Transport(Protocol):
    """Moves buckets between the ranks of ``group``. Reductions give means over its ranks.

    Attributes:
        coalesces: whether several buckets are better gathered by one call, as a `GatherBatch`.
    """

    group: dist.ProcessGroup
    stream_ordered: bool
    coalesces: bool

    def connect(self) -> None: ...

    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish: ...

    def must_copy_in(self, bucket: Bucket) -> tuple[int, ...]: ...

    def casts(self, bucket: Bucket) -> bool: ...

    def out_dtype(self, bucket: Bucket) -> torch.dtype: ...

    def reduce_scatter(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        outs: list[torch.Tensor],
        tag: int,
    ) -> Finish: ...

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish: ...


_MakeTransport = Callable[[dist.ProcessGroup], Transport | None]
_of_backends: dict[str, _MakeTransport] = {}
_forget_tags: list[Callable[[range], None]] = []


def register_backend(
    name: str, make: _MakeTransport, forget_tags: Callable[[range], None] | None = None
) -> None:
    """Give groups of a backend another transport than `GroupTransport`.

    Args:
        make: makes the transport of a group; None: the group's own collectives.
        forget_tags: called, from any thread, once these tags will not be used any more.
    """
    _of_backends[name] = make
    if forget_tags is not None:
        _forget_tags.append(forget_tags)


def make_transport(
    group: dist.ProcessGroup, device: torch.device, *, sum_only: bool = False
) -> Transport:
    """The transport for ``group``: the one registered for its backend, else its collectives.

    Args:
        sum_only: reduce with SUM and divide afterwards.
    """
    backend = backend_name(group, device)
    if backend in _of_backends and (made := _of_backends[backend](group)) is not None:
        return made
    hosts = num_hosts(group) if backend == "nccl" else None
    return GroupTransport(group, device, sum_only=sum_only, num_hosts=hosts)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves ``device`` in ``group``: "nccl", "gloo", "fake", ..."""
    backend = native_backend(group, device)
    return (group if backend is None else backend).name().lower()


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Check that ``group`` can communicate tensors on ``device``, in the order of its streams.

    Raises:
        ValueError: if no backend serves that device, or gloo does.
    """
    # gloo's collectives are ordered by the host, and cannot send from the memory of a device.
    try:
        backend = backend_name(group, device)
    except RuntimeError:
        backend = "no backend"
    if device.type != "cpu" and backend in ("gloo", "no backend"):
        usual = dist.Backend.default_device_backend_map.get(device.type, "nccl")
        raise ValueError(
            f"The mesh is of device type '{device.type}', but '{backend}' serves it in the mesh's "
            f"process group. Call init_process_group('cpu:gloo,{device.type}:{usual}') (or without "
            "a backend, which means the same) before the mesh is made, or make a mesh of 'cpu'"
        )


def separate_group(
    group: dist.ProcessGroup, device: torch.device, wanted: bool | None = None
) -> dist.ProcessGroup:
    """A group of the same ranks with a separate communicator: if ``wanted``, or where it helps.

    Collective over the ranks of ``group`` at the first call; later calls return the same group.

    Returns:
        ``group`` itself if none is wanted, and on MPI, where only all ranks of the world together
        can make groups.
    """
    # Collectives of one communicator of an accelerator (NCCL's, say) run one after the other, even
    # on two streams: reduce-scatters would wait for prefetched all-gathers.
    if wanted is None:
        # gloo has threads and tags; in a group written in Python nothing is known to take turns.
        backend = None if device.type == "cpu" else native_backend(group, device)
        wanted = backend is not None and backend.name().lower() not in ("gloo", "fake")
    if not wanted or backend_name(group, device) == "mpi":
        return group
    if group not in _separate_groups:
        _separate_groups[group] = own_group(group, device, "fsdp2_reduce_scatter")
    return _separate_groups[group]


def reserve_tags(groups: Sequence[dist.ProcessGroup], count: int, owner: object = None) -> int:
    """Reserve ``count`` message tags in all of ``groups``, and return the first.

    Args:
        owner: when it is collected, everything that is kept for these tags is freed.
    """
    # Untagged messages of several units in flight would swap data without an error. All ranks of a
    # group get the same numbers, since they make units in the same order. And they are reserved
    # once, not counted message by message: if one rank alone plans its buckets again (it loaded a
    # checkpoint by assignment), it must continue with the tags of the others.
    start = max(_next_tag.get(group, 0) for group in groups)
    _next_tag.update(dict.fromkeys(groups, start + count))
    for forget in _forget_tags if owner is not None else ():
        finalize(owner, forget, range(start, start + count)).atexit = False
    return start


def release_tags(groups: Sequence[dist.ProcessGroup], start: int) -> None:
    """Undo `reserve_tags` that returned ``start``, and all later ones: all of them are unused."""
    # Ranks that disagreed about a model have taken different numbers of tags for it. A corrected
    # model in the same processes would otherwise wait for messages with the wrong tags.
    for group in groups:
        _next_tag[group] = min(_next_tag.get(group, 0), start)


_next_tag: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_separate_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


# Dtypes that all backends support. Others (float8, complex, bool) are gathered as bytes.
_SENT = {
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.uint8, torch.int8, torch.int32, torch.int64,
}  # fmt: skip


class GroupTransport:
    """The collectives of the process group itself, coalesced: one call per gather of a unit, and
    one per reduction of a bucket.

    [Note: what a collective reads and writes, and until when]

    No tensor is recorded on a stream (``record_stream``). So each must stay alive until the stream
    it was allocated on is ordered behind its last use.

    - Stream-ordered: temporary inputs (a stage, casts, divided gradients) are allocated and read on
      the current stream, and may be dropped once everything is enqueued. The gradients of autograd
      belong to compute's stream, so the reduction holds them until compute has waited for it.
    - Host-ordered: gloo's threads read the inputs until ``wait()`` has returned. So the function
      that finishes a call holds them, and drops them between the wait and what follows.
    - On gloo the result is not there before the wait: ``wait()`` copies it into the outputs, and a
      second one would copy it again, over what was computed since. So each Work is waited for once.
    """

    coalesces = True
    in_place = False  # whether gathers read this rank's slices of their outputs

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        sum_only: bool = False,
        num_hosts: int | None = None,
    ) -> None:
        """``sum_only``, ``num_hosts``: as of `mean_over`."""
        self.group = group
        self.stream_ordered = device_module(device) is not None
        self._mean = partial(mean_over, group.size(), sum_only=sum_only, num_hosts=num_hosts)
        host = not self.stream_ordered
        self._gather_options = AllgatherOptions()
        self._reduce_options = ReduceScatterOptions()
        self._all_reduce_options = AllreduceOptions()
        for options in (self._gather_options, self._reduce_options, self._all_reduce_options):
            # False puts a collective on the current stream; True on a stream of the group.
            options.asyncOp = host
        # torch 2.13 renames these; 2.11 has the former names only.
        self._gather = _either(
            group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        )
        self._reduce = _either(
            group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )

    def connect(self) -> None:
        """Nothing: `connect_group` has done it."""

    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish:
        if isinstance(plan, GatherPlan) and plan.outputs and plan.outputs[0].dtype not in _SENT:
            plan.as_bytes = plan.as_bytes or GatherBatch([plan])
            plan = plan.as_bytes
        inputs = plan.own if self.in_place else plan.inputs
        work = self._gather(plan.outputs, inputs, self._gather_options)

        def finish() -> None:
            wait_for([work])
            plan.unpack()

        return ended(finish, stream_ordered=self.stream_ordered)

    def must_copy_in(self, bucket: Bucket) -> tuple[int, ...]:
        # Uneven direct gradients too: a collective's input must have the same size for every rank,
        # and what autograd makes ends with the last row.
        return bucket.layout.tail

    def casts(self, bucket: Bucket) -> bool:
        """Whether gradients in the compute dtype are copied anyway, to widen them or to divide them
        before the sum."""
        return bucket.widens or self._mean(bucket.reduce_dtype).before != 1

    def out_dtype(self, bucket: Bucket) -> torch.dtype:
        return bucket.reduce_dtype

    def reduce_scatter(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        outs: list[torch.Tensor],
        tag: int,
    ) -> Finish:
        dtype = outs[0].dtype
        mean = self._mean(dtype)
        inputs: list[torch.Tensor] = []
        if plan.direct:
            inputs = _all_as([grads[i] for i in plan.direct], dtype)
            # Not in place: these may be tensors of autograd, which users' hooks may have kept.
            if mean.before != 1:
                inputs = list(torch._foreach_div(inputs, mean.before))
        if plan.copied_in:
            staged = copy_in(bucket.layout, plan, grads, dtype, outs[0].device).view(-1)
            if mean.before != 1:
                mean.begin([staged])
            inputs.append(staged)
        if dtype.is_complex:
            inputs = [as_real(tensor) for tensor in inputs]
        sums = [as_real(out) for out in outs] if dtype.is_complex else outs
        self._reduce_options.reduceOp = mean.operation
        work = self._reduce(sums, inputs, self._reduce_options)

        def finish() -> None:
            wait_for([work])
            inputs.clear()
            if mean.after != 1:
                mean.finish(outs)

        return ended(finish, stream_ordered=self.stream_ordered)

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        if not tensors:
            return done
        mean = self._mean(tensors[0].dtype)
        mean.begin(tensors)  # in place: what the reduce-scatter made is ours
        self._all_reduce_options.reduceOp = mean.operation
        # A call for each: usually there is one, as neighbours were merged (`ReducePlan.ranges`).
        works = [self.group.allreduce([as_real(t)], self._all_reduce_options) for t in tensors]

        def finish() -> None:
            wait_for(works)
            mean.finish(tensors)

        return ended(finish, stream_ordered=self.stream_ordered)


def _all_as(tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors in ``dtype``; tensors of other dtypes are cast into one buffer by one kernel."""
    given = [tensor for tensor in tensors if tensor is not None]
    others = [tensor for tensor in given if tensor.dtype != dtype]
    if not others:
        return given
    numels = [tensor.numel() for tensor in others]
    flat = torch.empty(sum(numels), dtype=dtype, device=others[0].device)
    cast = [part.view_as(t) for part, t in zip(flat.split(numels), others, strict=True)]
    torch._foreach_copy_(cast, others)
    made = iter(cast)
    return [tensor if tensor.dtype == dtype else next(made) for tensor in given]


def _either(group: dist.ProcessGroup, *names: str) -> Callable:
    for name in names:
        if hasattr(group, name):
            return getattr(group, name)
    raise NotImplementedError(f"{type(group).__name__} has none of {', '.join(names)}")
