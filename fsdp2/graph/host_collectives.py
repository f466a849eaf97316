"""Collectives that the host orders, as operators of a graph: as in eager steps on the CPU.

There are two operators, functions of tensors to a compiler. ``start`` begins a collective by the
transport of a bucket, and returns an empty ticket. ``wait`` needs the ticket; it finishes the
collective and returns its result. It gets the tensors that were sent as well, so that nobody reuses
their memory while other ranks read it. And both may get a tensor that they come after: compilers
move nodes that nothing holds back.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..comm.streams import Finish
from ..comm.transports import Transport
from ..common.failures import reraise
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherPlan, Segments

GATHER, SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
Tensors = Sequence[Tensor | None]


class HostCollectives:
    """The collectives of one bucket, to which graphs refer by a number.

    Args:
        index: of the bucket in ``unit``.
    """

    def __init__(self, unit: Unit, index: int) -> None:
        self._unit_name, self._param_group, self._index = unit.name, unit.param_group, index
        self.bucket = unit.buckets[index]
        transports = unit.param_group.transports[index]
        self._transports: dict[str, Transport | None] = {
            GATHER: transports.gather,
            SCATTER: transports.scatter,
            ALL_REDUCE: transports.replicate,
        }
        # Begun and not finished, in order: a graph finishes each use's collectives in that order.
        self.in_flight: dict[str, deque[tuple[Finish, Tensor]]] = {
            use: deque() for use in self._transports
        }
        self._template: _GatherTemplate | None = None
        self._number = next(_numbers)
        _by_number[self._number] = self

    def call(self, use: str, tensors: Tensors) -> Tensor:
        """A whole collective.

        Args:
            use: `GATHER`, `SCATTER` or `ALL_REDUCE`.
            tensors: the sharded storage, the gradients of all parameters, or the sums of shards.

        Returns:
            The gathered storage, where whole parameters begin at ``full_offset`` of their slots;
            or means of gradients, of shape (shard_numel,).
        """
        ticket = torch.ops.fsdp2_graph.start(tensors, use, self._number)
        return torch.ops.fsdp2_graph.wait(ticket, tensors, use, self._number)

    def result_of(self, use: str) -> tuple[int, torch.dtype]:
        """The number of elements, and their dtype."""
        layout = self.bucket.layout
        if use == GATHER:
            return layout.pack_full_offset, self.bucket.gather_dtype
        transport = self._transports[SCATTER] or self._transports[ALL_REDUCE]
        assert transport is not None
        return layout.shard_numel, transport.out_dtype(self.bucket)

    def begin(self, use: str, tensors: Tensors) -> tuple[Finish, Tensor]:
        """Start a collective.

        Returns:
            The function that finishes it, and the tensor that has its result then.
        """
        transport, group = self._transports[use], self._param_group
        assert transport is not None
        if use == GATHER:
            [shards] = tensors
            assert shards is not None
            plan, out = self._plan_gather(shards)
            return transport.all_gather(plan, group.gather_tags[self._index]), out
        tag = group.reduce_tags[self._index]
        numel, dtype = self.result_of(use)
        out = torch.empty(numel, dtype=dtype, device=self.bucket.device)
        if use == ALL_REDUCE:
            [sums] = tensors
            assert sums is not None
            out.copy_(sums)
            return transport.all_reduce([out], tag), out
        present = [i for i, grad in enumerate(tensors) if grad is not None]
        reduce_plan = group.reduce_plan(self._index, present, sums=False)
        if len(reduce_plan.covered) < len(tensors):
            out.zero_()  # an all-reduce sends those without a gradient, too
        outs = reduce_plan.outputs(out)
        return transport.reduce_scatter(self.bucket, reduce_plan, tensors, outs, tag), out

    def _plan_gather(self, shards: Tensor) -> tuple[GatherPlan, Tensor]:
        template = self._template
        if template is None or template.address != shards.data_ptr():
            template = self._template = _GatherTemplate(self.bucket, shards)
        plan, out = template.make()
        if plan.cast:
            torch._foreach_copy_(plan.own, plan.source)
        return plan, out

    def reraise(self, use: str, error: RuntimeError) -> None:
        transport = self._transports[use]
        what = f"the {use} of unit '{self._unit_name}' in a compiled step"
        reraise(error, what, transport and transport.group)


class _GatherTemplate:
    """Makes plans of gathers into new memory, which the graph frees; packs go once they are copied.

    To plan each gather from the layout takes five times as long as to make its views anew.
    """

    def __init__(self, bucket: Bucket, shards: Tensor) -> None:
        layout = bucket.layout
        bounds = [0, layout.pack_full_offset]
        if layout.pack_numel:
            bounds.append(layout.gathered_numel)
        memory = Segments(bounds, bucket.gather_dtype, bucket.device)
        self.address = shards.data_ptr()
        self._plan = plan = GatherPlan(layout, bucket.rank, shards, memory)
        self._sizes = [len(flat) for flat in memory.flats]
        self._empty = partial(torch.empty, dtype=bucket.gather_dtype, device=bucket.device)
        pieces = {flat.untyped_storage().data_ptr(): i for i, flat in enumerate(memory.flats)}
        self._views = {
            name: [
                (pieces[v.untyped_storage().data_ptr()], v.shape, v.stride(), v.storage_offset())
                for v in getattr(plan, name)
            ]
            for name in ("outputs", "own", "unpack_to", "unpack_from")
        }
        # The views of the plan would keep the memory that they were made in.
        vars(plan).update({name: [] for name in (*self._views, "inputs")})

    def make(self) -> tuple[GatherPlan, Tensor]:
        """A plan, and what it gathers into."""
        pieces = [self._empty(size) for size in self._sizes]
        made = {
            name: [pieces[i].as_strided(shape, stride, at) for i, shape, stride, at in views]
            for name, views in self._views.items()
        }
        inputs = made["own"] if self._plan.cast else self._plan.source
        plan = object.__new__(GatherPlan)
        vars(plan).update(vars(self._plan), inputs=inputs, **made)
        return plan, pieces[0]


def abandon() -> None:
    """After a step that raised: wait for what is in flight, and forget it."""
    for collectives in list(_by_number.values()):
        for begun in collectives.in_flight.values():
            while begun:
                with suppress(RuntimeError):
                    begun.popleft()[0]()


def _start(tensors: Tensors, use: str, number: int, after: Tensor | None = None) -> Tensor:
    collectives = _by_number[number]
    try:
        collectives.in_flight[use].append(collectives.begin(use, tensors))
    except RuntimeError as error:
        collectives.reraise(use, error)
    return torch.empty((), dtype=torch.int64, device="cpu")


def _wait(
    ticket: Tensor, tensors: Tensors, use: str, number: int, after: Tensor | None = None
) -> Tensor:
    collectives = _by_number[number]
    finish, out = collectives.in_flight[use].popleft()
    try:
        finish()
    except RuntimeError as error:
        collectives.reraise(use, error)
    return out


def _start_meta(tensors: Tensors, use: str, number: int, after: Tensor | None = None) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="meta")


def _wait_meta(
    ticket: Tensor, tensors: Tensors, use: str, number: int, after: Tensor | None = None
) -> Tensor:
    numel, dtype = _by_number[number].result_of(use)
    return torch.empty(numel, dtype=dtype, device="meta")


_numbers = itertools.count()
_by_number: WeakValueDictionary[int, HostCollectives] = WeakValueDictionary()
_library = torch.library.Library("fsdp2_graph", "DEF")
_arguments = "Tensor?[] tensors, str use, int bucket, Tensor? after=None"
_library.define(f"start({_arguments}) -> Tensor")
_library.define(f"wait(Tensor ticket, {_arguments}) -> Tensor")
for _name, _host, _meta in (("start", _start, _start_meta), ("wait", _wait, _wait_meta)):
    _library.impl(_name, _host, "CPU")
    _library.impl(_name, _meta, "Meta")
