"""Writes in place to the unsharded parameters of a unit, which are lost when it is freed.

Code that worked in a single process writes like this: an initialization between ``unshard()`` and
``reshard()``, or ``nn.Embedding(max_norm=...)`` in forward. This is a warning and no error: such an
embedding computes correctly, since it renormalizes again in every forward.
"""

from __future__ import annotations

import warnings
from weakref import ref

from torch import nn
from typing_extensions import override

from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit
from ..sharding.param import ShardedParam


class GatheredWrites(TreePart):
    """Finds writes in place to unsharded parameters."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._num_forwards = 0
        self._noted: dict[ShardedParam, tuple[ref[nn.Parameter], int]] = {}

    @override
    def root_forward_begins(self) -> None:
        # Code that writes to gathered parameters does so in every step. A check takes a tenth of a
        # microsecond per parameter, so it runs before forwards 1, 2, 4, 8 and so on.
        self._num_forwards += 1
        if self._num_forwards.bit_count() == 1:
            for unit in self.runtime.units:
                self.look(unit)

    @override
    def gathered_for_user(self, unit: Unit) -> None:
        self.look(unit)

    @override
    def before_user_reshards(self, unit: Unit) -> None:
        self.look(unit)

    def look(self, unit: Unit) -> None:
        """Warn of writes since the last check."""
        written = []
        # If a bucket computes on its shards, the write changes the shard.
        for param in (p for b in unit.buckets if not b.aliases_shards for p in b.params):
            unsharded = param.unsharded
            if unsharded is None:
                continue
            # Gathers write to the storage, which changes no version counter.
            version = unsharded._version
            before = self._noted.get(param)
            if before is not None and before[0]() is unsharded and before[1] != version:
                written.append(param.fqn)
            self._noted[param] = ref(unsharded), version
        if written:
            more = f" and {len(written) - 1} more" if len(written) > 1 else ""
            warnings.warn(
                f"Parameter '{written[0]}'{more} of unit '{unit.name}' was written while gathered. "
                "The gathered copy is freed, so the write is lost; the sharded parameter is "
                "unchanged. Write to that: outside of forward, without unshard(), "
                f"`param.copy_(dtensor)` under torch.no_grad(), or "
                f"model.load_state_dict({{'{written[0]}': whole}}, strict=False)",
                stacklevel=4,
            )


registry.add(GatheredWrites)
