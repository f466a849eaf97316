"""Collectives that the host orders, as operators of a graph: those of eager steps on the CPU.

There are two operators. ``start`` begins a collective by the transport of a bucket and returns a
ticket. ``wait`` finishes it and returns its result. To a compiler both are functions of tensors.
``wait`` gets the tensors that were sent as well, so that nobody reuses their memory while other
ranks read it. And both may get a tensor that they come after: compilers move nodes that nothing
holds back.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..comm.streams import Finish
from ..comm.transports import Transport
from ..common.failures import reraise
from ..runtime.unit import Unit
from ..sharding.gathered import GatherPlan, Segments

GATHER, SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
Tensors = Sequence[Tensor | None]


class HostCollectives:
    """The collectives of one bucket, which graphs know by a number.

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
        out = torch.empty(numel, dtype=dtype)
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
        """A gather into new memory, which the graph frees; the pack is freed once it is copied."""
        layout = self.bucket.layout
        bounds = [0, layout.pack_full_offset]
        if layout.pack_numel:
            bounds.append(layout.gathered_numel)
        memory = Segments(bounds, self.bucket.gather_dtype, self.bucket.device)
        plan = GatherPlan(layout, self.bucket.rank, shards, memory)
        if plan.cast:
            torch._foreach_copy_(plan.own, plan.source)
        return plan, memory.flats[0]

    def reraise(self, use: str, error: RuntimeError) -> None:
        transport = self._transports[use]
        what = f"the {use} of unit '{self._unit_name}' in a compiled step"
        reraise(error, what, transport and transport.group)


def abandon() -> None:
    """After a step that raised: wait for what is in flight, and forget it."""
    while _in_flight:
        _, (finish, _) = _in_flight.popitem()
        with suppress(RuntimeError):
            finish()


def _start(tensors: Tensors, use: str, number: int, after: Tensor | None = None) -> Tensor:
    collectives = _by_number[number]
    ticket = next(_numbers)
    try:
        _in_flight[ticket] = collectives.begin(use, tensors)
    except RuntimeError as error:
        collectives.reraise(use, error)
    return torch.tensor(ticket)


def _wait(
    ticket: Tensor, tensors: Tensors, use: str, number: int, after: Tensor | None = None
) -> Tensor:
    finish, out = _in_flight.pop(int(ticket))
    try:
        finish()
    except RuntimeError as error:
        _by_number[number].reraise(use, error)
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
_in_flight: dict[int, tuple[Finish, Tensor]] = {}
_library = torch.library.Library("fsdp2_graph", "DEF")
_arguments = "Tensor?[] tensors, str use, int bucket, Tensor? after=None"
_library.define(f"start({_arguments}) -> Tensor")
_library.define(f"wait(Tensor ticket, {_arguments}) -> Tensor")
for _name, _host, _meta in (("start", _start, _start_meta), ("wait", _wait, _wait_meta)):
    _library.impl(_name, _host, "CPU")
    _library.impl(_name, _meta, "Meta")
