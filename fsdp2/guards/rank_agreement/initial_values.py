"""Whether all ranks passed the same initial values to `fully_shard`.

Every rank keeps its own rows of a parameter, so ranks that initialized it from different seeds
make a mixture, which no later step can tell from a model. Samples of the whole parameters are kept
from `fully_shard` to the first forward, where ranks compare those whose shards nothing has written
since: a checkpoint that is loaded in between puts everything right.
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
    """Samples of the whole parameters of which every rank gets rows.

    Args:
        params: about to be sharded.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        cut = (param for param in params if param.mesh.num_shards > 1 and param.dim is not None)
        self._params = [param for param in cut if is_seen_by_all(param)]
        self._whole = Samples([whole_of(param) for param in self._params])
        self._shards = Samples([])
        self._others: list[InitialValues] = []

    def of_shards(self) -> InitialValues | None:
        """Sample the shards too, once there are any; None if there is nothing to compare."""
        # From the shards, not from the whole: the sharded dtype may be another one
        # (`cast_frozen_params`), and a cast is not a write.
        self._shards = Samples([param.local for param in self._params])
        return self if self._params else None

    def joined(self, others: Iterable[InitialValues]) -> InitialValues:
        """These and others: of units that became one."""
        self._others += others
        return self

    def unwritten(self) -> list[tuple[ShardedParam, bytes]]:
        """The parameters whose shards are as they were, with samples of what they were cut from."""
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
        # Afterwards no rank has whole parameters to compare with those of others.
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
    """What was sharded, until the first forward."""
    return unit.of_parts.get(InitialValues)


def forget_initial(unit: Unit) -> None:
    """Samples of whole parameters have memory on the device; nothing compares them again."""
    unit.of_parts.pop(InitialValues, None)


def whole_of(param: ShardedParam) -> torch.Tensor:
    """A parameter before it is sharded, apart from tensor parallelism."""
    return local_of(param.sharded.detach())


def is_seen_by_all(param: ShardedParam) -> bool:
    """Whether the shards of all ranks can show whether they were written: no rank has too few rows.

    That one would leave the parameter out of what it says, and so disagree with the others.
    """
    dim, num_shards, local = param.dim, param.mesh.num_shards, local_of(param.sharded)
    if dim is None or num_shards == 1 or not local.numel():
        return dim is None or num_shards == 1
    last = split_evenly(param.full_shape[dim], num_shards, num_shards - 1, param.granularity)[1]
    return last * (local.nbytes // local.shape[dim]) >= 4  # as `unwritten` wants


registry.add(_KeptInitial())
