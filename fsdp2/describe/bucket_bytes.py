"""The bytes that a bucket holds and sends: arithmetic on its layout.

This needs neither tensors nor processes, so the numbers are available before a model is sharded and
for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import nn

from ..features.secondary_shards import secondary_layout
from ..policy import MixedPrecisionPolicy, compute_dtype, sum_dtype, wire_dtype
from ..sharding.gradients import ReducePlan
from ..sharding.layout import BucketLayout, plan_bucket
from ..transports.compressed.policy import CommPolicy, hops_of
from ..transports.compressed.quantize import Cut, cut_reduction, gather_row
from ..transports.host.sums import exchanged_sum_dtype
from ..transports.host.topology import Places, Sent, Topology


def stored_dtype_of(
    policy: MixedPrecisionPolicy, param: nn.Parameter, param_dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype in which ``policy``, ours or torch's, stores the shards of a parameter with this
    ``param_dtype``."""
    if getattr(policy, "cast_frozen_params", False) and not param.requires_grad:
        return compute_dtype(param.dtype, param_dtype)
    return param.dtype


@dataclass(frozen=True)
class BucketFacts:
    """The properties of one bucket that determine its bytes.

    Attributes:
        names: names of its parameters, in the order of ``layout.slots``.
        trained: which of them get gradients.
        num_shards, num_replicas: number of ranks that share each parameter, and number of ranks
            that hold the same shard.
        aliased: computation uses the shards themselves; nothing is gathered.
        kept: frozen, and kept gathered from step to step.
        exchanged: ranks exchange messages in pairs instead of using collectives; low-precision
            gradients are sent uncast and added in float32.
        policy: for weights and gradients that are sent in fewer bytes, if any.
        shard_places, replica_places: hosts of the ranks that share each parameter, and of the ranks
            that hold the same shard. None: not known.
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
    shard_places: Places | None = None
    replica_places: Places | None = None

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
        """Bytes of each rank's sharded parameters; sharded gradients have the same size."""
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

    def gather(self) -> Sent:
        """Bytes that a rank sends (and receives) in one all-gather, padding included."""
        policy = self.policy
        narrow = policy.gather if policy and policy.gathers(self.gather_dtype) else None
        return self._gather(self.layout, narrow, self.shard_places)

    def regather(self, num_ranks: int) -> Sent:
        """The same for the gather in backward after ``reshard_after_forward=num_ranks``."""
        if self.num_shards % num_ranks or num_ranks >= self.num_shards:
            return self.gather()
        itemsizes = [d.itemsize for d in (self.gather_dtype, self.orig_dtype, self.reduce_dtype)]
        layout = secondary_layout(self.layout, num_ranks, itemsizes=itemsizes)
        policy, places = self.policy, self.shard_places
        if places is not None:
            start = places.rank // num_ranks * num_ranks
            places = places.among(range(start, start + num_ranks))
        narrow = policy.secondary if policy and policy.keeps(self.gather_dtype) else None
        return self._gather(layout, narrow, places)

    def _gather(
        self, layout: BucketLayout, narrow: torch.dtype | None, places: Places | None
    ) -> Sent:
        nbytes = _gathered_row(layout, self.gather_dtype)
        if self.policy is not None and narrow is not None:
            nbytes = gather_row(layout, narrow, self.policy.block).nbytes
        if places is not None and self.exchanged:
            in_rows = self.policy is not None and narrow is not None
            return places.gather_rows(nbytes) if in_rows else places.gather(nbytes)
        return _split((layout.num_shards - 1) * nbytes, _ring(places))

    def reduce(self, plan: ReducePlan | None = None) -> Sent:
        """Bytes that a rank sends in the reduce-scatter of all its gradients, or in ``plan``'s."""
        if self.num_shards == 1:
            return Sent(0, 0)
        plan, places = plan or self._reduced, self.shard_places
        if self._narrow is not None and plan.spans:
            return self._reduce_narrow(self._row_bytes(cut_reduction(self.layout, *_cut_of(plan))))
        wire = sums = self.reduce_dtype
        if self.exchanged:
            wire = wire_dtype(self.gather_dtype, wire)
            sums = exchanged_sum_dtype(sums, self.orig_dtype)
        direct = sum(numel for _, numel in plan.spans[: len(plan.direct)])
        staged = sum(numel for _, numel in plan.spans[len(plan.direct) :])
        nbytes = direct * wire.itemsize + staged * self.reduce_dtype.itemsize
        if places is not None and self.exchanged:
            return places.scatter(nbytes, (direct + staged) * sums.itemsize)
        return _split((self.num_shards - 1) * nbytes, _ring(places))

    def _reduce_narrow(self, row: int) -> Sent:
        """Bytes of an all-to-all, or of two, whose rows have ``row`` bytes."""
        places, (node, num) = self.shard_places, self._hops
        if places is None or node == 1:
            return _split(num * row, _pairs(places))
        start = places.rank // node * node
        within = places.among(range(start, start + node))
        across = places.among(range(places.rank % node, self.num_shards, node))
        nodes = across.size
        between = within.pairs((node - 1) * nodes * row) + across.pairs((nodes - 1) * row)
        return Sent(num * row - between, between)

    def all_reduce(self, plan: ReducePlan | None = None) -> Sent:
        """Bytes that a rank sends in the all-reduce of all its gradients over the replicas, or in
        ``plan``'s."""
        if self.num_replicas == 1:
            return Sent(0, 0)
        plan, places = plan or self._reduced, self.replica_places
        others = self.num_replicas - 1
        if self._narrow is not None and plan.spans:
            # In two phases: the terms to their owners, and the means back.
            row = self._row_bytes(cut_reduction(self.layout, *_cut_of(plan)), self.num_replicas)
            there = _split(others * row, _pairs(places))
            if places is not None and self.exchanged:
                back = places.gather_rows(row)
            else:
                back = _split(others * row, _ring(places))
            return there + back
        dtype = self.reduce_dtype
        if self.exchanged:
            dtype = exchanged_sum_dtype(dtype, self.orig_dtype)
        nbytes = sum(numel for _, numel in plan.ranges) * dtype.itemsize
        if places is not None and self.exchanged:
            return places.all_reduce(nbytes)
        return _split(2 * nbytes * others // self.num_replicas, _ring(places))

    @property
    def knows_places(self) -> bool:
        """Whether the hosts of all ranks that this rank sends to are known."""
        shards_known = self.num_shards == 1 or self.shard_places is not None
        return shards_known and (self.num_replicas == 1 or self.replica_places is not None)

    @property
    def residual_bytes(self) -> int:
        """Bytes that error feedback keeps: the rounding errors of the last gradients."""
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
        """Ranks per node of a two-hop reduction (1: one hop), and how many rows a rank sends."""
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


def _gathered_row(layout: BucketLayout, dtype: torch.dtype) -> int:
    """Bytes of a rank that a gather sends to each other rank."""
    numel = sum(layout.slots[i].shard_numel for i in layout.direct) + layout.pack_numel
    return numel * dtype.itemsize


def _first(topology: Topology | None, group: str) -> Places | None:
    """The places of a group's ranks, seen from its first rank."""
    return None if topology is None else topology.ring(group).places(0)


def _ring(places: Places | None) -> Callable[[int], int] | None:
    return None if places is None else places.ring


def _pairs(places: Places | None) -> Callable[[int], int] | None:
    return None if places is None else places.pairs


def _split(nbytes: int, between: Callable[[int], int] | None) -> Sent:
    """``nbytes``, split by host; ``between`` None: not known, so nothing goes to other hosts."""
    found = 0 if between is None else between(nbytes)
    return Sent(nbytes - found, found)


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
    direct_min_bytes: int | None,
    num_hosts: int | None = None,
    exchanged: bool = False,
    offloaded: bool = False,
    comm_policy: CommPolicy | None = None,
    topology: Topology | None = None,
) -> list[BucketFacts]:
    """The buckets that `Unit` would make for these parameters.

    Args:
        params: the parameters of one unit, in order.
        num_shards, num_replicas: sizes of the mesh.
        reduce_dtype: ``reduce_dtype`` of the mixed-precision policy.
        direct_min_bytes: as in `fully_shard`.
        num_hosts: as in `direct_limit`.
        exchanged: see `BucketFacts`.
        offloaded: whether shards are in host memory.
        comm_policy: as in `fully_shard`.
        topology: the hosts of the ranks, if known.
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
            num_hosts=num_hosts,
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
                shard_places=_first(topology, "shard"),
                replica_places=_first(topology, "all" if replicated else "replicate"),
            )
        )
    return buckets
