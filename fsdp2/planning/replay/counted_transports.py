"""Transports that send nothing: they count the bytes of real transports, with policies or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from ...comm.means import mean_over
from ...comm.transports import Finish, GroupTransport, done, ended
from ...sharding.bucket import Bucket
from ...sharding.gradients import ReducePlan, _is_simple
from ...sharding.layout import BucketLayout
from ...transports.compressed.policy import CommPolicy
from ...transports.compressed.quantize import Cut, cut_reduction, gather_row
from ...transports.compressed.transports import CompressedTransport
from ...transports.host.exchange import EXCHANGE_MAX_RANKS, Exchange
from ...transports.host.sums import BLOCK_NUMEL, cut_length
from ...transports.host.topology import Places, Sent
from ..trace.account import Account, HeldBytes
from .device import Collective, ReplayState


class CountedGather:
    """The traffic of a bucket's gather."""

    def __init__(self, bucket: Bucket, layout: BucketLayout, rank: int) -> None:
        self.bucket = bucket
        self.layout = layout
        self.rank = rank


class CountedGatherBatch:
    """Several gathers in one call."""

    def __init__(self, plans: Sequence[CountedGather]) -> None:
        self.plans = tuple(plans)


def make_counting_transport(
    replay: ReplayState, device: torch.device, size: int, group: str
) -> Any:
    """The counterpart of the transport that `transports.make_transport` would choose."""
    exchanges = device.type == "cpu" and size <= EXCHANGE_MAX_RANKS
    return (_CountingExchange if exchanges else _CountingCollectives)(replay, device, size, group)


class _CountingExchange(Exchange):
    """The exchange of gloo ranks: reads within a node, and relays between nodes.

    Rows are received in place, and rows that ranks do not have are not sent.
    """

    exchanges = True

    def __init__(self, replay: ReplayState, device: torch.device, size: int, group: str) -> None:
        self.replay = replay
        self.size = size
        self.name = group
        self.group = SimpleNamespace(size=lambda: size)  # type: ignore[assignment]

    @override
    def all_gather(self, plan: Any, tag: int) -> Finish:
        layout, size = plan.layout, plan.bucket.gather_dtype.itemsize
        own = sum(layout.slots[i].local_numel(plan.rank) for i in layout.direct)
        sent = self._places(plan.rank).gather((own + layout.pack_numel) * size)
        self._note_gather(_padded(layout) * self.size * size, sent, plan)
        return done

    def _places(self, rank: int) -> Places:
        return self.replay.topology.ring(self.name, self.size).places(rank)

    @override
    def reduce_scatter(
        self, bucket: Bucket, plan: ReducePlan, grads: Any, outs: Any, tag: int
    ) -> Finish:
        account, layout = self.replay.account, bucket.layout
        wire, wide = bucket.wire_dtype(plan), bucket.reduce_dtype
        held: list[Any] = [_cast(account, grads[i], wire) for i in plan.direct]
        held.append(_stage(account, bucket, plan, grads, wide))
        staged = (layout.shard_numel - plan.stage_offset) * wide.itemsize if plan.copied_in else 0
        numels = [[layout.slots[i].local_numel(r) for i in plan.direct] for r in range(self.size)]
        sizes = [sum(n) * wire.itemsize + staged for n in numels]
        summed = outs[0].dtype.itemsize
        sums = [sum(n) * summed + staged // wide.itemsize * summed for n in numels]
        blocks = [min(n, BLOCK_NUMEL) * wire.itemsize for n in numels[bucket.rank]]
        blocks.append(min(staged, BLOCK_NUMEL * wide.itemsize))
        places = self._places(bucket.rank)
        sent = places.scatter_parts(sizes, sums)
        nbytes = (sum(layout.slots[i].full_numel for i in plan.direct)) * wire.itemsize
        nbytes += staged * self.size
        copied = _copied(plan, grads, wire, wide)
        self._note_reduce(nbytes, sent, bucket, plan, copied)
        part, total = sizes[bucket.rank], sums[bucket.rank]
        held.append(HeldBytes(account, "communication buffers", places.received(part, total)))
        return self._add_up(len(places.members) * max(blocks) + places.added_up(total), held)

    def _add_up(self, made: int, held: list[Any]) -> Finish:
        """The end of a reduction: the memory of other ranks in the node is read block by block.

        Args:
            made: bytes of a block of each rank, and of sums for other nodes.
        """

        def finish() -> None:
            # None of these bytes exist while the reduction is in flight.
            self.replay.account.touch("communication buffers", made)
            held.clear()

        return finish

    @override
    def all_reduce(self, tensors: Sequence[Any], tag: int) -> Finish:
        nbytes = sum(t.nbytes for t in tensors)
        parts = [cut_length(t.nbytes, self.size) for t in tensors]
        block = min(max(parts, default=0), BLOCK_NUMEL * 4)  # of floats
        places = self._places(0)
        self._note_all_reduce(tensors, nbytes, places.all_reduce(nbytes))
        if places.is_whole(nbytes):
            received, made = (self.size - 1) * nbytes, 0
        else:
            part = nbytes // self.size
            received = places.received(part, part)
            made = len(places.members) * block + places.added_up(part)
        buffers = HeldBytes(self.replay.account, "communication buffers", received)
        return self._add_up(made, [buffers])

    def _note_gather(self, nbytes: int, sent: int | Sent, *plans: Any) -> None:
        messages = sum(len(p.layout.direct) + bool(p.layout.pack_numel) for p in plans)
        plan = plans[0]
        group = "secondary" if plan.layout is not plan.bucket.layout else self.name
        pack = sum(p.layout.pack_numel * p.bucket.gather_dtype.itemsize for p in plans)
        facts = {"copied": 2 * pack * self.size, "params": sum(len(p.layout.slots) for p in plans)}
        self._note("all_gather", group, nbytes, sent, messages, plan.bucket.unit_name, **facts)

    def _note_reduce(
        self, nbytes: int, sent: int | Sent, bucket: Any, plan: ReducePlan, copied: int
    ) -> None:
        facts = {"copied": copied, "params": len(plan.present)}
        num, unit = len(plan.spans), bucket.unit_name
        self._note("reduce_scatter", self.name, nbytes, sent, num, unit, **facts)

    def _note_all_reduce(self, tensors: Sequence[Any], nbytes: int, sent: int | Sent) -> None:
        unit = tensors[0].unit if tensors else ""
        params = sum(t.params for t in tensors)
        self._note("all_reduce", self.name, nbytes, sent, len(tensors), unit, params=params)

    def _note(
        self, kind: str, group: str, nbytes: int, sent: int | Sent, *rest: Any, **facts: Any
    ) -> None:
        total, between = (sent.total, sent.between) if isinstance(sent, Sent) else (sent, None)
        facts["between"] = between
        self.replay.transfer(Collective(kind, group, nbytes, total, *rest, **facts))


class _CountingCollectives(_CountingExchange):
    """The collectives of a group, as rings."""

    def __init__(self, replay: ReplayState, device: torch.device, size: int, group: str) -> None:
        super().__init__(replay, device, size, group)
        self.stream_ordered = device.type != "cpu"
        self._mean = partial(mean_over, size, sum_only=False)

    exchanges = False
    coalesces = GroupTransport.coalesces
    must_copy_in = GroupTransport.must_copy_in
    casts = GroupTransport.casts
    out_dtype = GroupTransport.out_dtype

    @override
    def all_gather(self, plan: Any, tag: int) -> Finish:
        plans = plan.plans if isinstance(plan, CountedGatherBatch) else (plan,)
        shard = sum(_padded(p.layout) * p.bucket.gather_dtype.itemsize for p in plans)
        self._note_gather(shard * self.size, shard * (self.size - 1), *plans)
        return ended(done, stream_ordered=self.stream_ordered)

    @override
    def reduce_scatter(
        self, bucket: Bucket, plan: ReducePlan, grads: Any, outs: Any, tag: int
    ) -> Finish:
        account, dtype = self.replay.account, outs[0].dtype
        held: list[Any] = [_cast(account, grads[i], dtype) for i in plan.direct]
        held.append(_stage(account, bucket, plan, grads, dtype))
        shard = sum(numel for _, numel in plan.spans) * dtype.itemsize
        copied = _copied(plan, grads, dtype, dtype)
        self._note_reduce(shard * self.size, shard * (self.size - 1), bucket, plan, copied)
        return ended(held.clear, stream_ordered=self.stream_ordered)

    @override
    def all_reduce(self, tensors: Sequence[Any], tag: int) -> Finish:
        nbytes = sum(t.nbytes for t in tensors)
        self._note_all_reduce(tensors, nbytes, 2 * nbytes * (self.size - 1) // self.size)
        return ended(done, stream_ordered=self.stream_ordered)


def _padded(layout: BucketLayout) -> int:
    """Elements that a rank contributes to a gather, padding included."""
    return sum(layout.slots[i].shard_numel for i in layout.direct) + layout.pack_numel


def _cast(account: Account, grad: Any, dtype: torch.dtype) -> HeldBytes | None:
    if grad.dtype == dtype:
        return None
    return HeldBytes(account, "communication buffers", grad.numel * dtype.itemsize)


def _copied(
    plan: ReducePlan, grads: Any, sent_dtype: torch.dtype, staged_dtype: torch.dtype
) -> int:
    """Bytes that are read and written to cast gradients or copy them to the buffer."""
    cast = [(grads[i], sent_dtype) for i in plan.direct if grads[i].dtype != sent_dtype]
    staged = [(grads[i], staged_dtype) for i in plan.copied_in if grads[i] is not None]
    return sum(g.numel * (g.dtype.itemsize + dtype.itemsize) for g, dtype in cast + staged)


def _stage(
    account: Account, bucket: Bucket, plan: ReducePlan, grads: Any, dtype: torch.dtype
) -> HeldBytes | None:
    """The buffer that small gradients are copied into; also counts temporary memory."""
    if not plan.copied_in:
        return None
    layout = bucket.layout
    numel = layout.num_shards * (layout.shard_numel - plan.stage_offset)
    held = HeldBytes(account, "communication buffers", numel * dtype.itemsize)
    moment = layout.num_shards * layout.filler_numel
    for i in plan.copied_in:
        slot = layout.slots[i]
        if not plan.all_simple and not _is_simple(slot):
            moment += slot.full_numel
    account.touch("communication buffers", moment * bucket.gather_dtype.itemsize)
    return held


BUFFERS = "communication buffers"
FLOAT32 = torch.float32.itemsize


class CountedCut(list):
    """The result of `CompressedTransport.cut` for an all-reduce."""

    def __init__(self, bucket: Any, cut: Cut) -> None:
        super().__init__(numel for _, numel in cut.spans)
        self.bucket, self.cut = bucket, cut


class CountingPolicy(CompressedTransport):
    """A counting transport with a `CommPolicy`.

    Args:
        base: the counting transport over the same ranks without a policy.
        node: ranks per node of a two-hop reduction; 1: one hop.
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
        self._fed_back: dict[Any, HeldBytes] = {}

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
        # Shards are read and rows written; then all rows are read, and their values written.
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
        """The argument of `all_reduce`; empty if the policy does not change it."""
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

    def _held(self, nbytes: int) -> HeldBytes:
        return HeldBytes(self.replay.account, BUFFERS, nbytes)

    def _feed_back(self, bucket: Any, cut: Cut, hop: str, rows: int, *, of: int = 1) -> None:
        """Count residuals of ``rows`` rows, each of the ``of``-th of every part."""
        for key, (_, numel) in zip(cut.keys(0, hop), cut.spans, strict=True):
            if self.policy.error_feedback and (bucket, key) not in self._fed_back:
                nbytes = rows * -(-numel // of) * FLOAT32
                held = HeldBytes(self.replay.account, "error feedback", nbytes)
                self._fed_back[bucket, key] = held

    def _transfer(
        self, kind: str, group: str, size: int, nbytes: int, unit: str, copied: int
    ) -> None:
        """Rows of ``nbytes`` from each of ``size`` ranks to each."""
        sent, between = (size - 1) * nbytes, None
        if kind == "all_gather" and self.base.exchanges:
            between = self.replay.topology.ring(group, size).places(0).gather(nbytes).between
        self.replay.transfer(Collective(kind, group, size * nbytes, sent, 1, unit, copied, between))
