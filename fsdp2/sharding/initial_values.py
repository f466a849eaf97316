"""Whether all ranks passed the same initial values to `fully_shard`.

Every rank keeps its own rows of a parameter, so ranks that initialized it from different seeds
make a mixture, which no later step can tell from a model. Samples of the whole parameters are kept
from `fully_shard` to the first forward, where ranks compare those whose shards nothing has written
since: a checkpoint that is loaded in between puts everything right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..dtensor.boxes import split_evenly
from ..dtensor.from_local import local_of
from .param import ShardedParam
from .samples import Samples


class InitialValues:
    """Samples of the whole parameters of which every rank gets rows.

    Args:
        params: about to be sharded.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = [param for param in params if _is_cut_for_all(param)]
        self._whole = Samples([whole_of(param) for param in self._params])
        self._shards = Samples([])
        self._others: list[InitialValues] = []

    def of_shards(self) -> InitialValues | None:
        """Sample the shards too, once there are any; None if there is nothing to compare."""
        # From the shards, not from the whole: the sharded dtype may be another one
        # (`cast_frozen_params`), and a cast is not a write.
        self._shards = Samples([param.local for param in self._params])
        return self if self._params else None

    def joined(self, others: Iterable[InitialValues | None]) -> InitialValues:
        """These and others: of units that became one."""
        self._others += filter(None, others)
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


def whole_of(param: ShardedParam) -> torch.Tensor:
    """A parameter before it is sharded, apart from tensor parallelism."""
    return local_of(param.sharded.detach())


def _is_cut_for_all(param: ShardedParam) -> bool:
    """Whether there are several shards of it, and none is empty."""
    # A rank without rows cannot see that they were not written. It would leave the parameter out of
    # what it says, and so disagree with ranks that have some.
    num_shards, dim = param.mesh.num_shards, param.dim
    if num_shards == 1 or dim is None or not param.full_shape[dim]:
        return False
    last = split_evenly(param.full_shape[dim], num_shards, num_shards - 1, param.granularity)
    return last[1] > 0
