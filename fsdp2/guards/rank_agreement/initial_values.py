"""Whether all ranks passed the same initial values to `fully_shard`.

Every rank keeps only its rows of a parameter. If ranks initialized it from different seeds, the
result is a mixture, which no later step can detect. So samples of the whole parameters are kept
from `fully_shard` to the first forward, where ranks compare them. Parameters whose shards were
written in between are left out: loading a checkpoint removes the problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from typing_extensions import override

from ...dtensor.boxes import split_evenly
from ...dtensor.from_local import local_of
from ...runtime.events import UnitPart, registry
from ...runtime.unit import Unit
from ...sharding.param import ShardedParam
from ..samples import Samples


class InitialValues:
    """Samples of the whole parameters that are split into rows for the ranks.

    Args:
        params: the parameters that are about to be sharded.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        cut = (param for param in params if param.mesh.num_shards > 1 and param.dim is not None)
        self._params = [param for param in cut if is_seen_by_all(param)]
        self._whole = Samples([whole_of(param) for param in self._params])
        self._shards = Samples([])
        self._others: list[InitialValues] = []

    def of_shards(self) -> InitialValues | None:
        """Also sample the shards, once they exist; None if there is nothing to compare."""
        # From the shards, not from the whole parameter: the sharded dtype may differ
        # (`cast_frozen_params`), and a cast is not a write.
        self._shards = Samples([param.local for param in self._params])
        return self if self._params else None

    def joined(self, others: Iterable[InitialValues]) -> InitialValues:
        """These samples and ``others``, for units that became one."""
        self._others += others
        return self

    def unwritten(self) -> list[tuple[ShardedParam, bytes]]:
        """The parameters with unchanged shards, and samples of the whole parameters."""
        # By value, not by version counter: a load with ``assign=True``, a move and a write through
        # ``.data`` all leave counters as they were, or bring new ones.
        now = Samples([param.local for param in self._params]).read()
        rows = zip(self._params, self._whole.read(), self._shards.read(), now, strict=True)
        found = [
            (param, whole) for param, whole, before, own in rows if whole and own and own == before
        ]
        return found + [each for other in self._others for each in other.unwritten()]


class _KeptInitial(UnitPart):
    """Samples from `fully_shard` to the first forward."""

    @override
    def before_sharding(self, unit: Unit, params: Sequence[ShardedParam]) -> None:
        # Afterwards no rank has whole parameters to compare with other ranks.
        unit.of_parts[InitialValues] = InitialValues(params)

    @override
    def sharded(self, unit: Unit) -> None:
        kept = unit.of_parts.pop(InitialValues).of_shards()
        if kept is not None:
            unit.of_parts[InitialValues] = kept

    @override
    def merged(self, unit: Unit, former: Sequence[Unit]) -> None:
        kept = list(filter(None, map(initial_of, former)))
        if kept:
            unit.of_parts[InitialValues] = kept[0].joined(kept[1:])


def initial_of(unit: Unit) -> InitialValues | None:
    """The samples of the sharded parameters, until the first forward."""
    return unit.of_parts.get(InitialValues)


def forget_initial(unit: Unit) -> None:
    """Drop the samples of whole parameters, which use device memory and are not compared again."""
    unit.of_parts.pop(InitialValues, None)


def whole_of(param: ShardedParam) -> torch.Tensor:
    """A parameter before it is sharded, apart from tensor parallelism."""
    return local_of(param.sharded.detach())


def is_seen_by_all(param: ShardedParam) -> bool:
    """Whether every rank has enough rows to detect writes to its shard.

    A rank with too few rows would leave the parameter out, and so disagree with the others.
    """
    dim, num_shards, local = param.dim, param.mesh.num_shards, local_of(param.sharded)
    if dim is None or num_shards == 1 or not local.numel():
        return dim is None or num_shards == 1
    last = split_evenly(param.full_shape[dim], num_shards, num_shards - 1, param.granularity)[1]
    return last * (local.nbytes // local.shape[dim]) >= 4  # as `unwritten` requires


registry.add(_KeptInitial())
