"""Collectives and memory that users bring: `FSDPModule.set_custom_all_gather` and its like.

A user's collective moves one flat tensor. So this is the classic way: parameters are copied out
of one flat buffer after the gather, and gradients into one before the reduction. Gathers into
symmetric memory need no such buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ..comm.means import as_real, mean_over
from ..comm.mesh_transports import MeshTransports, Use, register_wrapper
from ..comm.streams import Finish, ended, wait_for
from ..comm.transports import GroupTransport, Transport
from ..custom import AllGather, ReduceScatter
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherBatch, GatherPlan
from ..sharding.gradients import ReducePlan, copy_in


class FlatTransport:
    """A transport whose gathers or reduce-scatters are a user's; the others are ``base``'s."""

    def __init__(
        self,
        base: Transport,
        device: torch.device,
        all_gather: AllGather | None,
        reduce_scatter: ReduceScatter | None,
        *,
        sum_only: bool,
    ) -> None:
        self.base = base
        self.device = device
        self.group = base.group
        self.stream_ordered = base.stream_ordered
        # A user's collective takes one tensor of one dtype, so each bucket is a separate call.
        self.coalesces = all_gather is None and base.coalesces
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self._sum_only = sum_only

    def connect(self) -> None:
        self.base.connect()

    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish:
        comm = self._all_gather
        if comm is None:
            return self.base.all_gather(plan, tag)
        assert isinstance(plan, GatherPlan)  # batches are for transports that coalesce
        num_ranks = self.group.size()
        numels = [source.numel() for source in plan.source]
        dtype = plan.outputs[0].dtype
        flat = comm.allocate((num_ranks * sum(numels),), dtype=dtype, device=self.device)
        rows = flat.view(num_ranks, sum(numels))
        own = rows[self.group.rank()]
        torch._foreach_copy_(own.split(numels), plan.source)
        work = comm(
            # (Complex numbers as pairs of real ones, which every backend supports.)
            output_tensor=as_real(flat).view(-1),
            input_tensor=as_real(own).view(-1),
            group=self.group,
            # Synchronous means on the current stream, which orders what follows. Otherwise the
            # collective would run on a stream of the group, and would need a wait more.
            async_op=not self.stream_ordered,
        )

        def finish() -> None:
            # ``flat`` lives until here, since ``rows`` is a view of it. Where streams order the
            # work it is freed on the stream it was allocated on, behind these copies.
            wait_for([work])
            outputs = [output.view(num_ranks, -1) for output in plan.outputs]
            torch._foreach_copy_(outputs, rows.split(numels, dim=1))
            plan.unpack()

        return ended(finish, stream_ordered=self.stream_ordered)

    def must_copy_in(self, bucket: Bucket) -> tuple[int, ...]:
        if self._reduce_scatter is None:
            return self.base.must_copy_in(bucket)
        # All of them, in storage order: then the result is one range of the sharded storage.
        return bucket.layout.direct + bucket.layout.packed

    def casts(self, bucket: Bucket) -> bool:
        # Everything is staged anyway, and cast by that.
        return self._reduce_scatter is None and self.base.casts(bucket)

    def out_dtype(self, bucket: Bucket) -> torch.dtype:
        if self._reduce_scatter is None:
            return self.base.out_dtype(bucket)
        # The user's collective adds in the dtype that it is given: a wider sum means more bytes.
        return bucket.reduce_dtype

    def reduce_scatter(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        outs: list[torch.Tensor],
        tag: int,
    ) -> Finish:
        comm = self._reduce_scatter
        if comm is None:
            return self.base.reduce_scatter(bucket, plan, grads, outs, tag)
        (out,) = outs  # one, since everything is staged
        num_ranks = self.group.size()
        staged = copy_in(
            bucket.layout, plan, grads, out.dtype, bucket.device, allocate=comm.allocate
        ).view(-1)
        mean = mean_over(num_ranks, out.dtype, sum_only=self._sum_only)
        mean.begin([staged])  # in place: the stage is ours, unlike the gradients
        # Not into ``out``: a collective may need special memory on both sides (registered,
        # symmetric), and ``out`` is a slice of the sharded gradients.
        reduced = comm.allocate((out.numel(),), dtype=out.dtype, device=bucket.device)
        work = comm(
            output_tensor=as_real(reduced).view(-1),
            input_tensor=as_real(staged).view(-1),
            group=self.group,
            op=mean.operation,
            async_op=not self.stream_ordered,
        )
        held = [staged]

        def finish() -> None:
            wait_for([work])
            held.clear()  # only now: where the host orders, messages read it until the wait is over
            out.copy_(reduced)
            mean.finish([out])

        return ended(finish, stream_ordered=self.stream_ordered)

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        return self.base.all_reduce(tensors, tag)


# -- memory of the group, symmetric memory --------------------------------------------------------

# [Note: symmetric memory]
# Where both sides of a gather are registered with the communicator, at the same place on all ranks,
# NCCL writes to all of them at once, or lets copy engines do it and leaves the multiprocessors to
# compute. Here gathered storage itself is such memory, so there is no flat buffer to copy out of.
# Only this rank's slices, 1/n of the bytes, are copied in.
#
# It is from torch's pool for symmetric memory, whose segments units use in turn, as they do with
# any memory. A segment is registered with a group once, by a call that all ranks of the group make
# and in which the host waits; later calls only look it up. So ranks must allocate and free in the
# same order: where one took a new segment and another one a known one, they would wait for ever.
# All gathers and frees are in an order that ranks share, but for one: parameters that are freed
# early if nothing on this rank refers to them. In this memory they are not (`EarlyFree`).


def on_memory(kind: str, base: Transport, device: torch.device, *, sum_only: bool) -> Transport:
    """The collectives of ``base``'s group on memory of a ``kind``: "group" (of its backend, in flat
    buffers) or "symmetric". CUDA and NCCL only."""
    gather, reduce = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    if kind == "group":
        allocate = _memory_of_group(base.group)
        on_group = _On(gather, allocate), _On(reduce, allocate)
        return FlatTransport(base, device, *on_group, sum_only=sum_only)
    base = SymmetricTransport(base.group, device)
    if not sum_only:
        # NCCL's kernels for symmetric memory reduce with SUM only. With AVG the usual one runs,
        # straight from the gradients, without a copy into such memory.
        return base
    return FlatTransport(
        base, device, None, _On(reduce, _symmetric_empty, _register), sum_only=True
    )


@dataclass(frozen=True)
class _On:
    """A collective of the group itself, on memory of ``allocate``."""

    collective: Callable[..., dist.Work | None]
    allocate: Callable[..., torch.Tensor]
    register: Callable[..., None] | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        *args: Any,
        **options: Any,
    ) -> dist.Work | None:
        if self.register is not None:  # both: kernels for such memory read and write no other
            self.register(input_tensor, group)
            self.register(output_tensor, group)
        return self.collective(output_tensor, input_tensor, *args, group=group, **options)


def _memory_of_group(group: dist.ProcessGroup) -> Callable[..., torch.Tensor]:
    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return backend.allocate_tensor(prod(size), dtype=dtype, device=device).view(size)

    return allocate


class SymmetricTransport(GroupTransport):
    """The group's own collectives; gathers are between registered memory."""

    in_place = True  # shards are in other memory

    @override
    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish:
        for each in plan.plans if isinstance(plan, GatherBatch) else (plan,):
            if each.pieces is None:
                of_storage = {t.untyped_storage()._cdata: t for t in each.outputs}
                each.pieces = tuple(of_storage.values())
            for piece in each.pieces:
                _register(piece, self.group)
            if each.inputs is not each.own:
                torch._foreach_copy_(each.own, each.inputs)
        return super().all_gather(plan, tag)


def choose_symmetric_backend(device: torch.device) -> None:
    """Let torch allocate symmetric memory by NCCL, from now on and for the whole process.

    Raises:
        RuntimeError: if this torch cannot, or has allocated some in another way.
    """
    symm_mem = _symm_mem()
    try:
        if symm_mem.get_backend(device) != "NCCL":
            symm_mem.set_backend("NCCL")
    except RuntimeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} with NCCL {torch.cuda.nccl.version()} cannot allocate "
            "symmetric memory by NCCL. That needs NCCL 2.27, and no symmetric memory of another "
            f"backend allocated before in this process: {error}"
        ) from error


def allocating_symmetric(device: torch.device) -> AbstractContextManager[None]:
    """Context in which memory of ``device`` is symmetric; on all ranks alike (see the note)."""
    return torch.get_device_module(device).use_mem_pool(_symm_mem().get_mem_pool(device))


def _symmetric_empty(
    size: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    with allocating_symmetric(device):
        return torch.empty(size, dtype=dtype, device=device)


def _register(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Make the segment of ``tensor`` known to ``group``; collective at the first call for it."""
    _symm_mem().rendezvous(tensor, group=group.group_name)


def _symm_mem() -> Any:
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem


def wrap(transport: Transport, use: Use, of: MeshTransports) -> Transport:
    """Gather and reduce by a user's collective, or on memory of a kind, where that is chosen."""
    options, device = of.options, of.device
    all_gather, reduce_scatter = options.all_gather, options.reduce_scatter
    if use == "all-reduce":
        # In place on the result of the reduce-scatter: there is no buffer to replace.
        return transport
    if options.memory is not None:
        if options.memory == "symmetric":
            of.allocating = partial(allocating_symmetric, device)
        return on_memory(options.memory, transport, device, sum_only=options.sum_only)
    if all_gather is None and reduce_scatter is None:
        return transport
    return FlatTransport(transport, device, all_gather, reduce_scatter, sum_only=options.sum_only)


register_wrapper(wrap)
