"""The bytes that a bucket holds and sends: arithmetic on its layout.

This needs neither tensors nor processes, so the numbers are available before a model is sharded and
for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from ..policy import compute_dtype, exchanged_sum_dtype, sum_dtype, wire_dtype
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
        return _sent_by_gather(self.layout, self.gather_dtype)

    def sent_by_regather(self, num_ranks: int) -> int:
        """The same for the gather in backward after ``reshard_after_forward=num_ranks``."""
        if self.num_shards % num_ranks or num_ranks >= self.num_shards:
            return self.sent_by_gather
        itemsizes = [d.itemsize for d in (self.gather_dtype, self.orig_dtype, self.reduce_dtype)]
        layout = secondary_layout(self.layout, num_ranks, itemsizes=itemsizes)
        return _sent_by_gather(layout, self.gather_dtype)

    @property
    def sent_by_reduce(self) -> int:
        """Bytes that a rank sends in one reduce-scatter of all its gradients."""
        return self.sent_in_reduce(self._reduced)

    def sent_in_reduce(self, plan: ReducePlan) -> int:
        """The same for the gradients of one reduction."""
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
        dtype = self.reduce_dtype
        if self.exchanged:
            dtype = exchanged_sum_dtype(dtype, self.orig_dtype)
        numel = sum(numel for _, numel in plan.ranges)
        return 2 * numel * dtype.itemsize * (self.num_replicas - 1) // self.num_replicas

    @cached_property
    def _reduced(self) -> ReducePlan:
        present = [i for i, trained in enumerate(self.trained) if trained]
        must_copy_in = self.layout.packed if self.exchanged else self.layout.tail
        return ReducePlan(self.layout, present, must_copy_in if self.num_shards > 1 else ())


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
) -> list[BucketFacts]:
    """The buckets that `Unit` would make for these parameters.

    Args:
        params: the parameters of one unit, in order.
        num_shards, num_replicas: sizes of the mesh.
        reduce_dtype: ``reduce_dtype`` of the mixed-precision policy.
        direct_min_bytes: as in `fully_shard`; not None.
        exchanged: see `BucketFacts`.
        offloaded: whether shards are in host memory.
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
            )
        )
    return buckets
