"""Collectives and memory that users bring: `FSDPModule.set_custom_all_gather` and its like.

A user's collective moves one flat tensor. So this is the classic way: parameters are copied out
of one flat buffer after the gather, and gradients into one before the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..sharding.bucket import Bucket
from ..sharding.gather_plan import GatherBatch, GatherPlan
from ..sharding.reduce_plan import ReducePlan, copy_in
from .means import as_real, mean_over
from .transports import Finish, Transport, ended


class Comm(Protocol):
    """What `AllGather` and `ReduceScatter` share."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A buffer of shape ``size`` for the collective to work on; its contents do not matter.

        Called before every collective, on its stream. It may return memory again once nothing else
        refers to it.
        """
        ...


class AllGather(Comm, Protocol):
    """An all-gather to use in place of the group's own. No base class is needed.

    `FSDPModule.set_custom_all_gather` has an example.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor`` of every rank into ``output_tensor``.

        Args:
            output_tensor: 1-D, from `allocate`, of ``group.size()`` times the input's elements.
            input_tensor: 1-D; this rank's slice of ``output_tensor``: the gather is in place.
            group: the ranks to gather from.
            async_op: whether to return a Work at once.
        """
        ...


class ReduceScatter(Comm, Protocol):
    """A reduce-scatter to use in place of the group's own. No base class is needed.

    `FSDPModule.set_custom_reduce_scatter` takes it.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce this rank's slice of all ranks' ``input_tensor``.

        Args:
            output_tensor: 1-D, from `allocate`.
            input_tensor: 1-D, from `allocate`, of ``group.size()`` times the output's elements.
            group: the ranks to reduce over.
            op: ``ReduceOp.AVG``; ``ReduceOp.SUM`` for float16, and for all dtypes after
                ``set_force_sum_reduction_for_comms(True)``.
            async_op: whether to return a Work at once.
        """
        ...


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
        # A user's collective takes one tensor of one dtype, so each bucket is a call of its own.
        self.coalesces = all_gather is None and base.coalesces
        self._all_gather = all_gather
        self._reduce_scatter = reduce_scatter
        self._sum_only = sum_only

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
            # (Complex numbers as pairs of real ones, which every backend knows.)
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
            _wait_for(work)
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
        # Not into ``out``: a collective may need memory of its own on both sides (registered,
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
            _wait_for(work)
            held.clear()  # only now: where the host orders, messages read it until the wait is over
            out.copy_(reduced)
            mean.finish([out])

        return ended(finish, stream_ordered=self.stream_ordered)

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        return self.base.all_reduce(tensors, tag)


def _wait_for(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


# -- memory of the group, symmetric memory --------------------------------------------------------


def with_memory_of(
    kind: str, group: dist.ProcessGroup, *, sum_only: bool
) -> tuple[AllGather, ReduceScatter | None]:
    """The group's own collectives on the memory that its backend prefers.

    Args:
        kind: "group" or "symmetric"; CUDA and NCCL only.
        sum_only: whether reductions use SUM.
    """
    if kind == "group":
        allocate = _memory_of_group(group)
        return _AllGatherOn(allocate), _ReduceScatterOn(allocate)
    allocate = _symmetric_memory(group)
    # NCCL's kernels for symmetric memory reduce with SUM only. With AVG the usual reduce-scatter
    # runs, straight from the gradients, without a copy into such memory.
    scatter = _ReduceScatterOn(allocate, rendezvous=True) if sum_only else None
    return _AllGatherOn(allocate, rendezvous=True), scatter


Allocate = Callable[..., torch.Tensor]


def _memory_of_group(group: dist.ProcessGroup) -> Allocate:
    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        backend: Any = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return torch.empty(size, dtype=dtype, device=device)
        return backend.allocate_tensor(prod(size), dtype=dtype, device=device).view(size)

    return allocate


def _symmetric_memory(group: dist.ProcessGroup) -> Allocate:
    import torch.distributed._symmetric_memory as symm_mem

    symm_mem.set_backend("NCCL")
    dist.barrier(group)  # a rendezvous needs a communicator, which NCCL makes at its first use

    def allocate(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pool: Any = symm_mem.get_mem_pool(device)
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(size, dtype=dtype, device=device)

    return allocate


class _OnMemory:
    """What both collectives share: the memory, and making it known to the other ranks."""

    def __init__(self, allocate: Allocate, *, rendezvous: bool = False) -> None:
        self.allocate = allocate
        self._rendezvous = rendezvous

    def _meet(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._rendezvous:
            import torch.distributed._symmetric_memory as symm_mem

            symm_mem.rendezvous(tensor, group=group.group_name)


class _AllGatherOn(_OnMemory):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._meet(output_tensor, group)
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class _ReduceScatterOn(_OnMemory):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        # Both sides: the kernels for symmetric memory neither read nor write any other.
        self._meet(input_tensor, group)
        self._meet(output_tensor, group)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
