"""A transport for gloo groups: ranks exchange data in pairs, straight into place.

On gloo this is 1.8 times faster than its all-gather and 3 times faster than its reduce-scatter
(inside, that is an all-reduce of the whole input). It adds in rank order, and needs no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.profiler import record_function

from ...comm.streams import Finish
from ...comm.transports import register_backend
from ...sharding.bucket import Bucket
from ...sharding.gathered import GatherBatch, GatherPlan
from ...sharding.gradients import ReducePlan, copy_in
from .links import forget_tags, host_links, places_of
from .messages import Messages, RowGather
from .reads import HostReads
from .relays import HostRelays
from .sums import exchanged_sum_dtype

# Most ranks that exchange data in pairs: one number on all ranks, for all sizes. It follows from
# what `python -m benchmarks.exchange` has measured and keeps (`limit_of` there; a test compares the
# two). More have not been measured, and messages grow with their square.
EXCHANGE_MAX_RANKS = 32


class Exchange:
    """Every rank gets from every other one what it needs, straight into place.

    A reduce-scatter is an all-to-all and a local sum in rank order. So all replicas of a result are
    bitwise equal, and low-precision gradients need no cast: they travel as they are and are added
    in the dtype of the output. An all-reduce is a reduce-scatter and an all-gather of the sums.

    Args:
        group: of gloo.
        reads: whether ranks of one host read each other's memory, where that is permitted, and
            send messages to other hosts only; else all send messages.
    """

    stream_ordered = False
    coalesces = False

    def __init__(self, group: dist.ProcessGroup, *, reads: bool = False) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self._ways: HostReads | HostRelays | Messages | None = None if reads else Messages(group)

    @property
    def _way(self) -> HostReads | HostRelays | Messages:
        if self._ways is None:
            # At the latest at the first exchange, in which all ranks of the group take part.
            links = host_links(self.group)
            if links is None:
                places = places_of(self.group)
                one_host = places is not None and places.one_host
                self._ways = Messages(self.group, one_host=one_host)
            elif len(links.hosts) == 1:
                self._ways = HostReads(links)
            else:
                self._ways = HostRelays(self.group, links)
        return self._ways

    def connect(self) -> None:
        """Find out how ranks exchange data; all ranks of the group call this."""
        assert self._way

    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish:
        assert isinstance(plan, GatherPlan)  # batches are for transports that coalesce
        with record_function("fsdp2::exchange"):
            wait = self._way.gather(plan, tag)
            # While messages are under way. (A cast has written the own slices before, and they are
            # what is sent.)
            if not plan.cast:
                torch._foreach_copy_(plan.own, plan.source)

        def finish() -> None:
            wait()
            plan.unpack()

        return finish

    def gather_rows(self, rows: torch.Tensor, mine: torch.Tensor, tag: int) -> Finish | None:
        """Start to gather ``mine`` of every rank into ``rows``, of shape (ranks, length).

        Returns:
            The function that finishes it; None, if no two ranks read each other's memory: messages
            between all pairs would send more over links than a ring.
        """
        if isinstance(self._way, Messages):
            return None
        with record_function("fsdp2::exchange"):
            wait = self._way.gather(RowGather(rows, mine), tag)
            rows[self.rank] = mine
        return wait

    def must_copy_in(self, bucket: Bucket) -> tuple[int, ...]:
        return bucket.layout.packed

    def casts(self, bucket: Bucket) -> bool:
        return False  # what is narrow is sent as it is, and widened by the addition

    def out_dtype(self, bucket: Bucket) -> torch.dtype:
        return exchanged_sum_dtype(bucket.reduce_dtype, bucket.grad_dtype)

    def reduce_scatter(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        outs: list[torch.Tensor],
        tag: int,
    ) -> Finish:
        layout = bucket.layout
        wire = bucket.wire_dtype(plan)
        parts: list[Sequence[torch.Tensor]] = []  # per input: what each rank gets
        for i in plan.direct:
            grad = _as_dtype(grads[i], wire).view(-1)
            parts.append(grad.split([layout.slots[i].local_numel(r) for r in range(self.size)]))
        if plan.copied_in:
            # In the dtype of the reduction, whatever autograd made: it makes some of the small ones
            # (of norms) wide, and ranks must agree on the size of messages.
            staged = copy_in(layout, plan, grads, bucket.reduce_dtype, bucket.device)
            parts.append(staged.unbind(0))
        flat = [out.view(-1) for out in outs]
        with record_function("fsdp2::exchange"):
            wait = self._way.scatter(parts, flat, tag)

        def finish() -> None:
            wait()
            for part, out in zip(parts, flat, strict=True):
                # Padding is not sent, and ``out`` may be new memory: hooks on the result would
                # see what was there before, NaNs even.
                if len(out) > len(part[self.rank]):
                    out[len(part[self.rank]) :].zero_()
            parts.clear()

        return finish

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        with record_function("fsdp2::exchange"):
            return self._way.all_reduce([tensor.view(-1) for tensor in tensors], tag)


def _as_dtype(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    assert tensor is not None
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def exchange_of(group: dist.ProcessGroup) -> Exchange | None:
    """The exchange of a gloo group; None if it has too many ranks."""
    return Exchange(group, reads=True) if group.size() <= EXCHANGE_MAX_RANKS else None


register_backend("gloo", exchange_of, forget_tags)
