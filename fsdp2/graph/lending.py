"""The tensors that a step reads and writes, and modules that compute with others instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm.mesh_transports import MeshTransports
from ..comm.streams import device_module
from ..runtime.hooks import hooks_of
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from .host_collectives import HostCollectives

Places = list[tuple[nn.Module, dict[str, Any], str]]


@dataclass(frozen=True)
class StepBucket:
    """A bucket in a step.

    Attributes:
        unit: that it belongs to.
        transports: its own.
        host: if the host orders its collectives.
    """

    unit: Unit
    bucket: Bucket
    transports: MeshTransports
    host: HostCollectives | None

    @classmethod
    def all_of(cls, unit: Unit) -> list[StepBucket]:
        found = []
        for i, bucket in enumerate(unit.buckets):
            transports = unit.param_group.transports[i]
            by_host = device_module(bucket.device) is None
            host = HostCollectives(unit, i) if by_host else None
            found.append(cls(unit, bucket, transports, host))
        return found


class StepTensors:
    """What the modules of one tree hold.

    Attributes:
        units: of the tree.
        buckets: of all units.
        plain: trained or frozen parameters that no unit manages, with their places.
        buffers: the same of buffers.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.units = units
        self.buckets = [each for unit in units for each in StepBucket.all_of(unit)]
        managed = {id(p.sharded) for unit in units for p in unit.params}
        self.plain: list[tuple[Tensor, Places]] = []
        self.buffers: list[tuple[Tensor, Places]] = []
        found: dict[int, Places] = {}
        for module in model.modules():
            for kind, held in ((self.plain, module._parameters), (self.buffers, module._buffers)):
                for name, tensor in held.items():
                    if tensor is None or id(tensor) in managed:
                        continue
                    if id(tensor) not in found:
                        kind.append((tensor, found.setdefault(id(tensor), [])))
                    found[id(tensor)].append((module, held, name))

    def inputs(self) -> list[Tensor]:
        """What a step reads apart from its arguments."""
        others = [tensor for tensor, _ in (*self.plain, *self.buffers)]
        return [each.bucket.shards for each in self.buckets] + others

    def are_current(self) -> bool:
        """Whether the modules still hold them."""
        return all(
            held.get(name) is tensor
            for tensor, places in (*self.plain, *self.buffers)
            for _, held, name in places
        )

    @contextmanager
    def lent(
        self, whole: Sequence[Sequence[Tensor]], plain: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> Iterator[None]:
        """Context in which modules compute with these, and the hooks of units only cast.

        Args:
            whole: for each bucket its parameters.

        Raises:
            RuntimeError: at the end, if a buffer was replaced.
        """
        rows: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
        for each, tensors in zip(self.buckets, whole, strict=True):
            for param, tensor in zip(each.bucket.params, tensors, strict=True):
                rows += [(m, m._parameters, name, tensor) for m, name in param.owners]
        for kind, given in ((self.plain, plain), (self.buffers, buffers)):
            for (_, places), tensor in zip(kind, given, strict=True):
                rows += [(*place, tensor) for place in places]
        for unit in self.units:
            unit.registration.register("unsharded")
            hooks_of(unit).inside_method = True
        before = [(module, held, name, held[name]) for module, held, name, _ in rows]
        try:
            _put(rows)
            yield
            replaced = [
                f"{name} of {type(module).__name__}"
                for module, held, name, tensor in rows
                if held.get(name) is not tensor
            ]
        finally:
            _put(before)
            for unit in self.units:
                hooks_of(unit).inside_method = False
                unit.registration.register("sharded")
        if replaced:
            raise RuntimeError(
                f"compile_step: the step assigned another tensor to {', '.join(replaced)}. A graph "
                "writes into tensors that modules hold: use copy_(), add_() and the like"
            )


def _put(rows: Sequence[tuple[nn.Module, dict[str, Any], str, Tensor]]) -> None:
    for _, held, name, tensor in rows:
        held[name] = tensor
    for module in {module for module, *_ in rows if isinstance(module, nn.RNNBase)}:
        module._init_flat_weights()  # a second list of the weights
