"""The bytes that a bucket holds and sends: arithmetic on its layout.

This needs neither tensors nor processes, so the numbers are available before a model is sharded and
for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ..comm.quantize import Cut, cut_reduction, gather_row
from ..policy import (
    CommPolicy,
    compute_dtype,
    exchanged_sum_dtype,
    hops_of,
    sum_dtype,
    wire_dtype,
)
from ..sharding.layout import BucketLayout, plan_bucket, secondary_layout
from ..sharding.reduce_plan import ReducePlan


@dataclass(frozen=True)
class BucketFacts:
    """The properties of one bucket that determine its bytes.

    Attributes:
        names: names of its parameters, in the order of ``layout.slots``.
        trained: which of them get gradients.
        num_shards, num_replicas: number of ranks that share each parameter; that hold the same
            shard.
        aliased: computation uses the shards themselves; nothing is gathered.
        kept: frozen, and kept gathered from step to step.
        exchanged: ranks exchange messages in pairs instead of using collectives; low-precision
            gradients are sent uncast and added in float32.
        policy: in which fewer bytes weights and gradients are sent, if any.
    """

    names: tuple[str, ...]
    trained: tuple[bool, ...]
    layout: BucketLayout
    orig_dtype: torch.dtype
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype
    num_shards: int
    num_replicas: int
    aliased: bool
    exchanged: bool
    kept: bool = False
    policy: CommPolicy | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole parameters."""
        return sum(prod(slot.shape) for slot in self.layout.slots)

    @property
    def trained_numel(self) -> int:
        """Elements of the parameters that get gradients."""
        slots = zip(self.layout.slots, self.trained, strict=True)
        return sum(prod(slot.shape) for slot, trained in slots if trained)

    @property
    def shard_bytes(self) -> int:
        """Bytes of each rank's sharded storage; that of the sharded gradients is as large."""
        return self.layout.shard_numel * self.orig_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the sharded storages of all ranks together."""
        held = sum(
            slot.local_numel(rank) for slot in self.layout.slots for rank in range(self.num_shards)
        )
        padding = self.num_shards * self.layout.shard_numel - held
        return padding * self.num_replicas * self.orig_dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered storage; packed parameters count in both of their places."""
        return 0 if self.aliased else self.layout.gathered_numel * self.gather_dtype.itemsize

    @property
    def sent_by_gather(self) -> int:
        """Bytes that a rank sends (and receives) in one all-gather, padding included."""
        policy = self.policy
        if policy is not None and policy.gather and policy.gathers(self.gather_dtype):
            row = gather_row(self.layout, policy.gather, policy.block)
            return (self.num_shards - 1) * row.nbytes
        return _sent_by_gather(self.layout, self.gather_dtype)

    def sent_by_regather(self, num_ranks: int) -> int:
        """The same for the gather in backward after ``reshard_after_forward=num_ranks``."""
        if self.num_shards % num_ranks or num_ranks >= self.num_shards:
            return self.sent_by_gather
        itemsizes = [d.itemsize for d in (self.gather_dtype, self.orig_dtype, self.reduce_dtype)]
        layout = secondary_layout(self.layout, num_ranks, itemsizes=itemsizes)
        policy = self.policy
        if policy is not None and policy.secondary and policy.keeps(self.gather_dtype):
            row = gather_row(layout, policy.secondary, policy.block)
            return (num_ranks - 1) * row.nbytes
        return _sent_by_gather(layout, self.gather_dtype)

    @property
    def sent_by_reduce(self) -> int:
        """Bytes that a rank sends in one reduce-scatter of all its gradients."""
        return self.sent_in_reduce(self._reduced)

    def sent_in_reduce(self, plan: ReducePlan) -> int:
        """The same for the gradients of one reduction."""
        if self._narrow is not None and plan.spans:
            return self._hops[1] * self._row_bytes(cut_reduction(self.layout, *_cut_of(plan)))
        wire = self.reduce_dtype
        if self.exchanged:
            wire = wire_dtype(self.gather_dtype, wire)
        direct = sum(numel for _, numel in plan.spans[: len(plan.direct)])
        staged = sum(numel for _, numel in plan.spans[len(plan.direct) :])
        nbytes = direct * wire.itemsize + staged * self.reduce_dtype.itemsize
        return (self.num_shards - 1) * nbytes

    @property
    def sent_by_all_reduce(self) -> int:
        """Bytes that a rank sends in one all-reduce over the replicas (ring)."""
        return self.sent_in_all_reduce(self._reduced)

    def sent_in_all_reduce(self, plan: ReducePlan) -> int:
        """The same for the gradients of one reduction."""
        if self.num_replicas == 1:
            return 0
        if self._narrow is not None and plan.spans:
            # In two phases: the terms to their owners, and the means back.
            nbytes = self._row_bytes(cut_reduction(self.layout, *_cut_of(plan)), self.num_replicas)
            return 2 * (self.num_replicas - 1) * nbytes
        dtype = self.reduce_dtype
        if self.exchanged:
            dtype = exchanged_sum_dtype(dtype, self.orig_dtype)
        numel = sum(numel for _, numel in plan.ranges)
        return 2 * numel * dtype.itemsize * (self.num_replicas - 1) // self.num_replicas

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback keeps: what rounding took from the last gradients."""
        policy, plan = self.policy, self._reduced
        if policy is None or not policy.error_feedback or self._narrow is None or not plan.spans:
            return 0
        cut = cut_reduction(self.layout, *_cut_of(plan))
        numel, itemsize = sum(numel for _, numel in cut.spans), torch.float32.itemsize
        of_shards = 0
        if self.num_shards > 1:
            node = self._hops[0]
            of_shards = self.num_shards * numel + (
                self.num_shards // node * numel if node > 1 else 0
            )
        of_replicas = 0
        if self.num_replicas > 1:
            share = sum(-(-numel // self.num_replicas) for _, numel in cut.spans)
            of_replicas = (self.num_replicas + 1) * share
        return (of_shards + of_replicas) * itemsize

    @cached_property
    def _narrow(self) -> CommPolicy | None:
        """The policy, if it narrows these gradients."""
        policy = self.policy
        return policy if policy is not None and policy.reduces(self.reduce_dtype) else None

    def _row_bytes(self, cut: Cut, num_ranks: int = 1) -> int:
        policy = self._narrow
        assert policy is not None
        assert policy.reduce is not None
        return cut.row(policy.reduce, policy.block, num_ranks).nbytes

    @cached_property
    def _hops(self) -> tuple[int, int]:
        """Ranks per node of a reduction in two hops (1: in one), and how many rows a rank sends."""
        node = 1 if self.policy is None else hops_of(self.policy, self.num_shards)
        if node == 1:
            return 1, self.num_shards - 1
        nodes = self.num_shards // node
        return node, (node - 1) * nodes + nodes - 1

    @cached_property
    def _reduced(self) -> ReducePlan:
        present = [i for i, trained in enumerate(self.trained) if trained]
        exchanged = self.exchanged and self._narrow is None
        must_copy_in = self.layout.packed if exchanged else self.layout.tail
        return ReducePlan(self.layout, present, must_copy_in if self.num_shards > 1 else ())


def _cut_of(plan: ReducePlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return plan.direct, plan.copied_in


def _sent_by_gather(layout: BucketLayout, dtype: torch.dtype) -> int:
    numel = sum(layout.slots[i].shard_numel for i in layout.direct) + layout.pack_numel
    return (layout.num_shards - 1) * numel * dtype.itemsize


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter to be sharded on dim 0.

    Attributes:
        shape: its shape as this rank sees it.
        replicated: whether every rank holds it whole.
        param_dtype: the ``param_dtype`` that the mixed-precision policy gives it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool = True
    replicated: bool = False
    param_dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def buckets_of(
    params: list[ParameterFacts],
    num_shards: int,
    num_replicas: int,
    *,
    reduce_dtype: torch.dtype | None,
    direct_min_bytes: int,
    exchanged: bool = False,
    offloaded: bool = False,
    comm_policy: CommPolicy | None = None,
) -> list[BucketFacts]:
    """The buckets that `Unit` would make for these parameters.

    Args:
        params: the parameters of one unit, in order.
        num_shards, num_replicas: sizes of the mesh.
        reduce_dtype: ``reduce_dtype`` of the mixed-precision policy.
        direct_min_bytes: as in `fully_shard`; not None.
        exchanged: see `BucketFacts`.
        offloaded: whether shards are in host memory.
        comm_policy: as in `fully_shard`.
    """
    groups: dict[tuple[bool, torch.dtype, torch.dtype, bool], list[ParameterFacts]] = {}
    for param in params:
        gather = compute_dtype(param.dtype, param.param_dtype)
        groups.setdefault((param.replicated, gather, param.dtype, param.trained), []).append(param)
    buckets = []
    for (replicated, gather, orig, _), members in groups.items():
        shards = 1 if replicated else num_shards
        reduce = sum_dtype(orig, reduce_dtype)
        layout = plan_bucket(
            [param.shape for param in members],
            [0 if param.shape else None for param in members],
            shards,
            itemsizes=(gather.itemsize, orig.itemsize, reduce.itemsize),
            direct_min_bytes=direct_min_bytes,
        )
        buckets.append(
            BucketFacts(
                names=tuple(param.name for param in members),
                trained=tuple(param.trained for param in members),
                layout=layout,
                orig_dtype=orig,
                gather_dtype=gather,
                reduce_dtype=reduce,
                num_shards=shards,
                num_replicas=num_shards * num_replicas if replicated else num_replicas,
                aliased=shards == 1 and gather == orig and not offloaded,
                exchanged=exchanged,
                policy=comm_policy,
            )
        )
    return buckets
