"""A transport under a `CommPolicy`: messages with fewer bytes than the tensors.

`quantize` makes the bytes. This module moves them, by two collectives of the group: all-gather and
all-to-all. A reduction is an all-to-all and a sum on the owner, so that nothing is rounded between
additions (a ring would round a sum at each of its steps).

[Note: streams and memory under a policy]
As in `GroupTransport`: everything runs on the current stream, the stream of gathers or of
reductions, and all temporary memory is allocated, used and dropped there. Residuals of error
feedback live from step to step; only the stream of reductions ever touches them. Where the host
orders the work, messages read and write the rows until they are waited for, so the function that
finishes a call holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from ...comm.mesh_transports import CommOptions, MeshTransports, Use, register_wrapper
from ...comm.transports import Finish, Transport, _either, ended
from ...sharding.bucket import Bucket
from ...sharding.gathered import GatherBatch, GatherPlan
from ...sharding.gradients import ReducePlan, copy_in
from ...sharding.mesh import DataParallelMesh
from ...sharding.process_groups import own_group
from ..host.exchange import Exchange
from ..host.sums import exchanged_sum_dtype
from .policy import CommPolicy, hops_of
from .quantize import Cut, Key, WireRow, cut_reduction, gather_row

Parts = list[torch.Tensor]
Keys = Sequence[Key]
HeldByAll = Sequence[tuple[int, int]]


class Hops(NamedTuple):
    """The groups of a reduction in two hops: the ranks of a node, and those at the same place in
    each node."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


class CutGradients(list[torch.Tensor]):
    """What an all-reduce over replicas takes, cut where parameters end; see `Cut`."""

    def __init__(self, parts: Sequence[torch.Tensor], cut: Cut) -> None:
        super().__init__(parts)
        self.cut = cut


class CompressedTransport:
    """A transport that sends what ``policy`` narrows in fewer bytes, and leaves the rest to
    ``base``.

    Args:
        base: the transport over the same ranks without a policy.
        hops: reduce in two hops over these groups; None: in one.
    """

    def __init__(
        self,
        base: Transport,
        device: torch.device,
        policy: CommPolicy,
        *,
        hops: Hops | None = None,
    ) -> None:
        self.base = base
        self.device = device
        self.policy = policy
        self.group = base.group
        self.stream_ordered = base.stream_ordered
        # Each bucket has separate rows.
        self.coalesces = policy.gather is None and base.coalesces
        exchange = base if isinstance(base, Exchange) else None
        self._wire = Wire(base.group, host=not base.stream_ordered, exchange=exchange)
        self._hops = None
        if hops is not None:
            self._hops = [Wire(group, host=not base.stream_ordered) for group in hops]
        self._residuals: dict[Key, torch.Tensor] = {}

    def connect(self) -> None:
        """Find out how ranks exchange data; all ranks of the group call this."""
        self.base.connect()

    # -- weights ----------------------------------------------------------------------------

    def all_gather(self, plan: GatherPlan | GatherBatch, tag: int) -> Finish:
        policy = self.policy
        if isinstance(plan, GatherBatch) or not plan.outputs:
            return self.base.all_gather(plan, tag)
        if not policy.gathers(plan.outputs[0].dtype):
            return self.base.all_gather(plan, tag)
        assert policy.gather is not None
        row = plan.row
        if not isinstance(row, WireRow):
            row = plan.row = gather_row(plan.layout, policy.gather, policy.block)
            # From now on: what is sent is made of the shards, and own slices of what is received.
            plan.cast = False
        size = self.group.size()
        mine = plan.encoded
        if mine is None:
            mine = torch.empty(row.nbytes, dtype=torch.uint8, device=self.device)
            row.encode(plan.source, mine)
        rows = torch.empty((size, row.nbytes), dtype=torch.uint8, device=self.device)
        wait = self._wire.all_gather(rows, mine, tag)

        def finish() -> None:
            wait()
            # The own slices too, or this rank would compute with other weights than the others.
            row.decode(rows, [output.view(size, -1) for output in plan.outputs])
            plan.unpack()

        return ended(finish, stream_ordered=self.stream_ordered)

    # -- gradients --------------------------------------------------------------------------

    def must_copy_in(self, bucket: Bucket) -> tuple[int, ...]:
        # As for a collective: the rows of each rank must be of one length.
        return bucket.layout.tail if self._reduces(bucket) else self.base.must_copy_in(bucket)

    def casts(self, bucket: Bucket) -> bool:
        # What is cast is written to the rows at once: to stage it before would be a copy more.
        return not self._reduces(bucket) and self.base.casts(bucket)

    def out_dtype(self, bucket: Bucket) -> torch.dtype:
        if not self._reduces(bucket):
            return self.base.out_dtype(bucket)
        return exchanged_sum_dtype(bucket.reduce_dtype, bucket.grad_dtype)

    def _reduces(self, bucket: Bucket) -> bool:
        return self.policy.reduces(bucket.reduce_dtype)

    def reduce_scatter(
        self,
        bucket: Bucket,
        plan: ReducePlan,
        grads: Sequence[torch.Tensor | None],
        outs: list[torch.Tensor],
        tag: int,
    ) -> Finish:
        if not self._reduces(bucket):
            return self.base.reduce_scatter(bucket, plan, grads, outs, tag)
        size, dtype = self.group.size(), outs[0].dtype
        cut = cut_reduction(bucket.layout, plan.direct, plan.copied_in)
        parts: Parts = []
        for i in plan.direct:
            grad = grads[i]
            assert grad is not None
            parts.append(grad.view(size, -1))
        sums = [out.view(-1) for out in outs[: cut.direct]]
        if plan.copied_in:
            staged = copy_in(bucket.layout, plan, grads, dtype, bucket.device)
            for offset, numel in cut.spans[cut.direct :]:
                start = offset - plan.stage_offset
                parts.append(staged[:, start : start + numel])
                sums.append(outs[-1][start : start + numel])
        finish = self._reduce(parts, sums, cut, dtype, tag)
        return ended(finish, stream_ordered=self.stream_ordered)

    def _reduce(self, parts: Parts, sums: Parts, cut: Cut, dtype: torch.dtype, tag: int) -> Finish:
        """Mean over ranks of ``parts``, of shapes (ranks, numel), whose rows go one to each rank.

        Args:
            sums: where this rank's rows of the mean go, of shapes (numel,).
        """
        row = cut.row(self._reduce_dtype, self.policy.block)
        if self._hops is None:
            keys = cut.keys(tag, "one")
            return self._hop(
                self._wire, row, parts, sums, keys, cut.held_by_all, divide_by=self.group.size()
            )
        within, across = self._hops
        # Ranks are numbered node by node. The first hop sends to each rank of this node what it and
        # its counterparts in all other nodes will own.
        shape = (across.size, within.size)
        first = [part.unflatten(0, shape).transpose(0, 1) for part in parts]
        of_node = [torch.empty_like(part[0], dtype=dtype) for part in first]
        keys = cut.keys(tag, "within")
        finish_first = self._hop(within, row, first, of_node, keys, cut.held_by_all)
        divide_by = self.group.size()

        def finish() -> None:
            finish_first()
            keys = cut.keys(tag, "across")
            self._hop(across, row, of_node, sums, keys, cut.held_by_all, divide_by=divide_by)()

        return finish

    @property
    def _reduce_dtype(self) -> torch.dtype:
        assert self.policy.reduce is not None
        return self.policy.reduce

    def _hop(
        self,
        wire: Wire,
        row: WireRow,
        parts: Parts,
        sums: Parts,
        keys: Keys,
        held_by_all: HeldByAll = (),
        *,
        divide_by: int = 1,
    ) -> Finish:
        """Send ``parts[:, r]`` to rank r and add what comes, in rank order, into ``sums``.

        Args:
            parts: of shapes (ranks, ..., numel).
            sums: of shapes (..., numel).
            held_by_all: of the `Cut`.
        """
        shape = (*parts[0].shape[:-1], row.nbytes)
        sent = torch.empty(shape, dtype=torch.uint8, device=self.device)
        own = [part[wire.rank] for part in parts]
        self._encode(row, parts, sent, keys, held_by_all, exact=wire.rank)
        if held_by_all:
            _take_as_sent(own, row.views(sent[wire.rank]), held_by_all)
        received = torch.empty_like(sent)
        wait = wire.all_to_all(received, sent)

        def finish() -> None:
            wait()
            torch._foreach_zero_(sums)
            for rank in range(wire.size):
                if rank == wire.rank:
                    # Exact: this was not on the wire.
                    for total, mine in zip(sums, own, strict=True):
                        total.add_(mine)
                else:
                    row.add_decoded(received[rank], sums)
            own.clear()
            if divide_by != 1:
                torch._foreach_div_(sums, divide_by)

        return finish

    def _encode(
        self,
        row: WireRow,
        parts: Parts,
        rows: torch.Tensor,
        keys: Keys,
        held_by_all: HeldByAll = (),
        *,
        exact: int | None = None,
    ) -> None:
        """Write ``parts`` to ``rows``, with the rounding errors of the last call.

        Args:
            keys: of their residuals.
            held_by_all: of the `Cut`.
            exact: the part of this number is not sent, so it has no rounding errors, except in
                elements that all ranks hold.
        """
        if not self.policy.error_feedback:
            row.encode(parts, rows)
            return
        residuals = []
        for key, part in zip(keys, parts, strict=True):
            residual = self._residuals.get(key)
            if residual is None:
                residual = self._residuals[key] = torch.zeros(
                    part.shape, dtype=torch.float32, device=part.device
                )
            residuals.append(residual.add_(part))
        row.encode(residuals, rows)
        row.add_decoded(rows, residuals, times=-1)
        for number, residual in enumerate(residuals):
            # What is not finite is reported by the gradient that arrives. Kept, it would spoil all
            # steps to come.
            residual.nan_to_num_(0.0, 0.0, 0.0)
            if exact is not None:
                places = [place for of, place in held_by_all if of == number]
                kept = [residual[exact, ..., place].clone() for place in places]
                residual[exact].zero_()
                for place, value in zip(places, kept, strict=True):
                    residual[exact, ..., place] = value

    def cut(self, bucket: Bucket, plan: ReducePlan, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of ``flat``, laid out like the sharded storage, for `all_reduce`."""
        if not self._reduces(bucket):
            return [flat[offset : offset + numel] for offset, numel in plan.ranges]
        cut = cut_reduction(bucket.layout, plan.direct, plan.copied_in)
        return CutGradients([flat[start : start + numel] for start, numel in cut.spans], cut)

    def all_reduce(self, tensors: Sequence[torch.Tensor], tag: int) -> Finish:
        if not isinstance(tensors, CutGradients) or not tensors:
            return self.base.all_reduce(tensors, tag)
        size, dtype = self.group.size(), tensors[0].dtype
        row = tensors.cut.row(self._reduce_dtype, self.policy.block, size)
        # As a matrix with a row for each rank, of its share of every part.
        whole = torch.empty((size, sum(row.numels)), dtype=dtype, device=self.device)
        torch._chunk_cat(list(tensors), dim=0, num_chunks=size, out=whole)
        shares = list(whole.split(row.numels, dim=1))
        means = [share.new_empty(share.shape[1]) for share in shares]
        cut = tensors.cut
        keys = cut.keys(tag, "to owners")
        reduce = self._hop(self._wire, row, shares, means, keys, divide_by=size)
        held = list(tensors)

        def finish() -> None:
            reduce()
            mine = torch.empty(row.nbytes, dtype=torch.uint8, device=self.device)
            self._encode(row, means, mine, cut.keys(tag, "back"))
            rows = torch.empty((size, row.nbytes), dtype=torch.uint8, device=self.device)
            self._wire.all_gather(rows, mine, tag)()
            # The own share too: replicas must not differ.
            row.decode(rows, shares)
            for tensor, share in zip(held, shares, strict=True):
                tensor.copy_(share.reshape(-1)[: tensor.numel()])
            held.clear()

        return ended(finish, stream_ordered=self.stream_ordered)


def _take_as_sent(
    own: Parts,
    sent: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    held_by_all: HeldByAll,
) -> None:
    """In the ``own`` terms of a rank, replace 0-dim parameters with what it ``sent`` to the others.

    Else each rank would add its own term exactly and the others' rounded: replicas would differ.
    """
    for part in {part for part, _ in held_by_all}:
        own[part] = own[part].clone()
    for part, i in held_by_all:
        numbers, scales = sent[part]
        assert scales is None  # one element is less than a block
        own[part][..., i] = numbers[..., i]


class Wire:
    """The collectives of a group that move rows of bytes.

    Args:
        exchange: of the group, on gloo: gathers by reads of memory, where ranks share hosts. A row
            then crosses the link to each other host once.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, host: bool, exchange: Exchange | None = None
    ) -> None:
        self.group, self._among = group, exchange
        self.rank, self.size = group.rank(), group.size()
        self._gather_options, self._options = AllgatherOptions(), AllToAllOptions()
        # False puts a collective on the current stream; True on a stream of the group.
        self._gather_options.asyncOp = self._options.asyncOp = host
        # torch 2.13 renames these; 2.11 has the former names only.
        self._gather = _either(
            group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        )
        self._exchange = _either(group, "all_to_all_single", "alltoall_base")

    def all_gather(self, rows: torch.Tensor, mine: torch.Tensor, tag: int) -> Callable[[], None]:
        """Gather the row of every rank."""
        finish = None if self._among is None else self._among.gather_rows(rows, mine, tag)
        if finish is not None:
            return _finishing(finish, rows, mine)
        return _waiting(self._gather([rows.view(-1)], [mine], self._gather_options), rows, mine)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Callable[[], None]:
        """Send ``sent[r]`` to rank r; ``received[r]`` is what it sent here."""
        work = self._exchange(received.view(-1), sent.view(-1), [], [], self._options)
        return _waiting(work, received, sent)


def _finishing(finish: Callable[[], None], *held: torch.Tensor) -> Callable[[], None]:
    """``finish``, which holds what others read and what is written until then."""
    holding = list(held)

    def wait() -> None:
        finish()
        holding.clear()

    return wait


def _waiting(work: dist.Work | None, *held: torch.Tensor) -> Callable[[], None]:
    """A function that waits once, and holds what the messages read and write until then."""
    holding = [work, *held]

    def wait() -> None:
        if work is not None:
            work.wait()
        holding.clear()

    return wait


# By the group over all shards, and ranks per node.
_hop_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, Hops]] = WeakKeyDictionary()


def _hops(mesh: DataParallelMesh, device: torch.device, policy: CommPolicy | None) -> Hops | None:
    """The groups of a reduction over ``mesh`` in two hops; None: in one.

    Collective over the ranks of the mesh at the first call for a number of ranks per node.
    """
    shards = mesh.shard_group
    if policy is None or policy.ranks_per_node is None or shards is None:
        return None
    size = hops_of(policy, mesh.num_shards)
    if size == 1:
        return None
    made = _hop_groups.setdefault(shards, {})
    if size not in made:
        ranks = dist.get_process_group_ranks(shards)
        node, place = divmod(mesh.shard_rank, size)
        within = ranks[node * size : (node + 1) * size]
        made[size] = Hops(
            own_group(shards, device, "fsdp2_reduce_within", within),
            own_group(shards, device, "fsdp2_reduce_across", ranks[place::size]),
        )
    return made[size]


def wrap(transport: Transport, use: Use, of: MeshTransports) -> Transport:
    """Send fewer bytes where the unit has a `CommPolicy`."""
    policy, hops = of.options.policy, None
    if policy is None or (use == "secondary all-gather" and policy.secondary is None):
        return transport
    if use == "secondary all-gather":
        policy = replace(policy, gather=policy.secondary)
    elif use == "reduce-scatter":
        hops = _hops(of.mesh, of.device, policy)
    return CompressedTransport(transport, of.device, policy, hops=hops)


def reduce_groups(
    mesh: DataParallelMesh, device: torch.device, options: CommOptions
) -> list[tuple[str, dist.ProcessGroup]]:
    """The groups of a reduction in two hops."""
    hops = _hops(mesh, device, options.policy)
    if hops is None:
        return []
    return [
        (f"reduce within {hops.within.size()} ranks", hops.within),
        (f"reduce across {hops.across.size()} nodes", hops.across),
    ]


register_wrapper(wrap, reduce_groups)
