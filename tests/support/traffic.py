"""What a step sends, gathers and holds, counted where it happens.

Bytes are counted at the transports, which every collective of a unit goes through, and in the
messages of an exchange; memory by looking at all storages of all units before every operation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.transport import counting_sent
from fsdp2.comm.transports import GroupTransport, done
from fsdp2.runtime.unit import units_in
from fsdp2.transports.compressed.transports import CompressedTransport, Wire
from fsdp2.transports.host.exchange import Exchange


@dataclasses.dataclass
class Traffic:
    """Bytes that one rank has to send (ring algorithms), by collective, and messages really sent.

    An all-gather of n shards sends (n-1)/n of the whole, a reduce-scatter too, an all-reduce twice
    as much. ``narrow``: of these, what was sent under a `CommPolicy`.
    """

    gathered: float = 0
    reduced: float = 0
    all_reduced: float = 0
    by_kind: Counter[str] = dataclasses.field(default_factory=Counter)
    num_gathers: int = 0
    narrow: int = 0

    @property
    def sent(self) -> int:
        return self.by_kind.total()

    @property
    def total(self) -> float:
        return self.gathered + self.reduced + self.all_reduced


def _counted(kind: Any, traffic: Traffic) -> Any:
    """A patch that adds what transports of a class do to ``traffic``."""
    gather, scatter, reduce = kind.all_gather, kind.reduce_scatter, kind.all_reduce

    def all_gather(self: Any, plan: Any, tag: int) -> Any:
        payload, size = sum(output.nbytes for output in plan.outputs), self.group.size()
        traffic.gathered += payload * (size - 1) / size
        traffic.num_gathers += 1
        return gather(self, plan, tag)

    def reduce_scatter(self: Any, bucket: Any, plan: Any, grads: Any, outs: Any, tag: int) -> Any:
        direct = len(plan.direct)  # the others are staged, in the dtype of the reduction
        wide = narrow = bucket.reduce_dtype.itemsize
        if kind is Exchange:
            narrow = min([wide, *(grads[i].dtype.itemsize for i in plan.direct)])
        nbytes = narrow * sum(out.numel() for out in outs[:direct])
        nbytes += wide * sum(out.numel() for out in outs[direct:])
        traffic.reduced += (self.group.size() - 1) * nbytes
        return scatter(self, bucket, plan, grads, outs, tag)

    def all_reduce(self: Any, tensors: Any, tag: int) -> Any:
        payload, size = sum(t.nbytes for t in tensors), self.group.size()
        traffic.all_reduced += 2 * payload * (size - 1) / size
        return reduce(self, tensors, tag)

    return mock.patch.multiple(
        kind, all_gather=all_gather, reduce_scatter=reduce_scatter, all_reduce=all_reduce
    )


@contextmanager
def noting_messages() -> Iterator[list[int]]:
    """Yields the bytes of each message that a stage of a pipeline sends inside the context."""
    sent: list[int] = []
    make = dist.P2POp.__new__

    def noted(cls: Any, op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if op is dist.isend:
            sent.append(tensor.nbytes)
        return make(cls, op, tensor, *args, **kwargs)

    with mock.patch.object(dist.P2POp, "__new__", noted):
        yield sent


@contextmanager
def noting_tokens() -> Iterator[list[int]]:
    """Yields the bytes of each all-to-all of tokens inside the context, but not of their counts."""
    sent: list[int] = []
    real = dist.all_to_all_single

    def noted(out: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        if rows.is_floating_point():
            sent.append(rows.nbytes)
        return real(out, rows, *args, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", noted):
        yield sent


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts what this rank's transports do inside the context."""
    traffic = Traffic()

    # Rows of bytes under a `CommPolicy`: who asks for them tells what they are.
    in_all_reduce = 0
    rows, exchange, narrow_reduce = Wire.all_gather, Wire.all_to_all, CompressedTransport.all_reduce

    def narrow_gather(self: Wire, received: Any, mine: Any, tag: int) -> Any:
        nbytes = (self.size - 1) * mine.nbytes
        traffic.narrow += nbytes
        if in_all_reduce:
            traffic.all_reduced += nbytes
        else:
            traffic.gathered += nbytes
            traffic.num_gathers += 1
        return rows(self, received, mine, tag)

    def narrow_exchange(self: Wire, received: Any, sent: Any) -> Any:
        nbytes = sent.nbytes * (self.size - 1) // self.size
        traffic.narrow += nbytes
        if in_all_reduce:
            traffic.all_reduced += nbytes
        else:
            traffic.reduced += nbytes
        return exchange(self, received, sent)

    def all_reduce_narrow(self: CompressedTransport, tensors: Any, tag: int) -> Any:
        nonlocal in_all_reduce
        in_all_reduce += 1
        try:
            finish = narrow_reduce(self, tensors, tag)
        finally:
            in_all_reduce -= 1

        def finish_counted() -> None:
            nonlocal in_all_reduce
            in_all_reduce += 1
            try:
                finish()
            finally:
                in_all_reduce -= 1

        return finish_counted if finish is not done else finish

    with (
        mock.patch.multiple(Wire, all_gather=narrow_gather, all_to_all=narrow_exchange),
        mock.patch.object(CompressedTransport, "all_reduce", all_reduce_narrow),
        _counted(Exchange, traffic),
        _counted(GroupTransport, traffic),
        counting_sent() as traffic.by_kind,
    ):
        yield traffic


@dataclasses.dataclass
class Held:
    """Bytes of the storages of all units at one moment."""

    shards: int
    gathered: int
    sharded_grads: int
    whole_grads: int

    @property
    def total(self) -> int:
        return self.shards + self.gathered + self.sharded_grads + self.whole_grads


def held_by(model: nn.Module) -> Held:
    """What the units of ``model`` hold now. Gradients that a reduction has taken are not seen."""
    held = Held(0, 0, 0, 0)
    for unit in units_in(model):
        for bucket in unit.buckets:
            held.shards += bucket.shards.untyped_storage().nbytes()
            gathered = getattr(bucket, "gathered", None)
            if gathered is not None:
                held.gathered += sum(storage.nbytes() for storage in gathered.storages)
            adopted = {
                p.sharded.grad._local_tensor.untyped_storage()._cdata: p.sharded.grad
                for p in bucket.params
                if p.sharded.grad is not None
            }
            held.sharded_grads += sum(
                grad._local_tensor.untyped_storage().nbytes()  # type: ignore[attr-defined]
                for grad in adopted.values()
            )
            for param in bucket.params:
                if param.unsharded is not None and param.unsharded.grad is not None:
                    held.whole_grads += param.unsharded.grad.nbytes
    return held


class Peak(TorchDispatchMode):
    """The most that the units of a model hold at any operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.gathered = self.whole_grads = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = held_by(self._model)
        self.gathered = max(self.gathered, held.gathered)
        self.whole_grads = max(self.whole_grads, held.whole_grads)
        self.total = max(self.total, held.total)
        return func(*args, **(kwargs or {}))


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the state that is as large as a parameter."""
    return sum(
        getattr(value, "_local_tensor", value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
