"""The counterpart of `transports.compressed`: counts what a `CommPolicy` sends and holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from ...comm.transports import Finish, ended
from ...policy import CommPolicy
from ...sharding.bucket import Bucket
from ...sharding.plans import ReducePlan
from ...transports.compressed.quantize import Cut, cut_reduction, gather_row
from ...transports.compressed.transports import CompressedTransport
from ..trace.account import Held
from .counted_transports import CountedGatherBatch, _stage
from .device import Transfer

BUFFERS = "communication buffers"
FLOAT32 = torch.float32.itemsize


class CountedCut(list):
    """What `CompressedTransport.cut` gives an all-reduce."""

    def __init__(self, bucket: Any, cut: Cut) -> None:
        super().__init__(numel for _, numel in cut.spans)
        self.bucket, self.cut = bucket, cut


class CountingPolicy(CompressedTransport):
    """A counting transport under a `CommPolicy`.

    Args:
        base: the counting transport over the same ranks without a policy.
        node: ranks per node of a reduction in two hops; 1: in one.
    """

    base: Any

    def __init__(self, base: Any, policy: CommPolicy, *, node: int = 1) -> None:
        self.base, self.name = base, base.name
        self.policy = policy
        self.node = node
        self.replay = base.replay
        self.size = base.size
        self.group = base.group
        self.stream_ordered = base.stream_ordered
        self.coalesces = policy.gather is None and base.coalesces
        self._fed_back: dict[Any, Held] = {}

    @override
    def all_gather(self, plan: Any, tag: int) -> Finish:
        policy = self.policy
        if isinstance(plan, CountedGatherBatch) or not policy.gathers(plan.bucket.gather_dtype):
            return self.base.all_gather(plan, tag)
        assert policy.gather is not None
        bucket, layout, size = plan.bucket, plan.layout, self.size
        row = gather_row(layout, policy.gather, policy.block)
        numel, itemsize = sum(row.numels), bucket.gather_dtype.itemsize
        group = "secondary" if layout is not bucket.layout else self.name
        # Shards are read and rows written; all rows are read, and what they stand for is written.
        copied = numel * bucket.orig_dtype.itemsize + row.nbytes
        copied += size * (row.nbytes + numel * itemsize + 2 * layout.pack_numel * itemsize)
        held = [self._held((size + 1) * row.nbytes)]
        self._transfer("all_gather", group, size, row.nbytes, bucket.unit_name, copied)
        return ended(held.clear, stream_ordered=self.stream_ordered)

    @override
    def reduce_scatter(
        self, bucket: Any, plan: ReducePlan, grads: Any, outs: Any, tag: int
    ) -> Finish:
        if not self._reduces(bucket):
            return self.base.reduce_scatter(bucket, plan, grads, outs, tag)
        size, node = self.size, self.node
        cut = cut_reduction(bucket.layout, plan.direct, plan.copied_in)
        row = cut.row(self._reduce_dtype, self.policy.block)
        numel = sum(row.numels)
        staged = _stage(self.replay.account, bucket, plan, grads, outs[0].dtype)
        held = [staged, self._held(2 * size * row.nbytes)]
        self._feed_back(bucket, cut, "one", size)
        copied = sum(g.numel * g.dtype.itemsize for g in grads if g is not None)
        copied += size * (2 * row.nbytes + numel * FLOAT32)
        unit = bucket.unit_name
        if node == 1:
            self._transfer("all_to_all", self.name, size, row.nbytes, unit, copied)
        else:
            nodes = size // node
            self._transfer("all_to_all", "within", node, nodes * row.nbytes, unit, copied)
            held.append(self._held(nodes * numel * outs[0].dtype.itemsize))
            self._feed_back(bucket, cut, "across", nodes)
            copied = nodes * (2 * row.nbytes + 2 * numel * FLOAT32)
            self._transfer("all_to_all", "across", nodes, row.nbytes, unit, copied)
        return ended(held.clear, stream_ordered=self.stream_ordered)

    @override
    def cut(self, bucket: Bucket, plan: ReducePlan, flat: Any) -> list[Any]:
        """What `all_reduce` takes; nothing, if that is what it would take without a policy."""
        if not self._reduces(bucket):
            return []
        return CountedCut(bucket, cut_reduction(bucket.layout, plan.direct, plan.copied_in))

    @override
    def all_reduce(self, tensors: Sequence[Any], tag: int) -> Finish:
        if not isinstance(tensors, CountedCut) or not tensors:
            return self.base.all_reduce(tensors, tag)
        bucket, size = tensors.bucket, self.size
        row = tensors.cut.row(self._reduce_dtype, self.policy.block, size)
        numel = sum(row.numels)
        sums = self.out_dtype(bucket).itemsize
        held = [self._held(2 * size * row.nbytes + (size + 1) * numel * sums)]
        for hop, rows in (("to owners", size), ("back", 1)):
            self._feed_back(bucket, tensors.cut, hop, rows, of=size)
        copied = size * (2 * row.nbytes + 3 * numel * FLOAT32)
        name, unit = self.name, bucket.unit_name
        self._transfer("all_to_all", name, size, row.nbytes, unit, copied)
        self._transfer("all_gather", name, size, row.nbytes, unit, copied)
        return ended(held.clear, stream_ordered=self.stream_ordered)

    def _held(self, nbytes: int) -> Held:
        return Held(self.replay.account, BUFFERS, nbytes)

    def _feed_back(self, bucket: Any, cut: Cut, hop: str, rows: int, *, of: int = 1) -> None:
        """Count residuals of ``rows`` rows, each of the ``of``-th of every part."""
        for key, (_, numel) in zip(cut.keys(0, hop), cut.spans, strict=True):
            if self.policy.error_feedback and (bucket, key) not in self._fed_back:
                nbytes = rows * -(-numel // of) * FLOAT32
                held = Held(self.replay.account, "error feedback", nbytes)
                self._fed_back[bucket, key] = held

    def _transfer(
        self, kind: str, group: str, size: int, nbytes: int, unit: str, copied: int
    ) -> None:
        """Rows of ``nbytes`` from each of ``size`` ranks to each."""
        sent, between = (size - 1) * nbytes, None
        if kind == "all_gather" and self.base.exchanges:
            between = self.replay.topology.ring(group, size).places(0).gather(nbytes).between
        self.replay.transfer(Transfer(kind, group, size * nbytes, sent, 1, unit, copied, between))
