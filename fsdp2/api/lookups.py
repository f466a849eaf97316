"""Embeddings that backward does not gather, although something in it may read their weight.

The backward of a lookup reads only indices. But a hook, another method or another module may
compute with the weight, which autograd then saves. So when such a unit is freed, the references to
its parameters are counted, as in `early_free`. While there are any besides the library's, this rank
keeps the memory. That changes no collective, so other ranks may decide differently.
"""

from __future__ import annotations

from typing import Self
from weakref import WeakKeyDictionary

from typing_extensions import override

from ..features.early_free.early_free import references_to
from ..features.early_free.references import References
from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatheredStorage

# The library's own references to the parameters of a bucket, in their order.
_own: WeakKeyDictionary[GatheredStorage, list[References]] = WeakKeyDictionary()


class _Lookups(TreePart):
    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        gathered_twice = all(unit.config.unshard_in_backward for unit in runtime.units)
        return None if gathered_twice else cls(runtime)

    @override
    def first_gathered(self, unit: Unit) -> None:
        for bucket in unit.param_group.buckets:
            if bucket.gathered is not None:
                _own[bucket.gathered] = [
                    references_to(bucket, i) for i in range(len(bucket.params))
                ]

    @override
    def before_reshard(self, unit: Unit, to_secondary: bool) -> None:
        if unit.config.unshard_in_backward:
            return
        for bucket in unit.param_group.buckets:
            gathered = bucket.gathered
            if gathered is not None and gathered in _own:  # else its first gather raised
                keeps = unit.config.keep_unsharded_storage or self._is_referenced(
                    bucket, _own[gathered]
                )
                gathered.keeps_memory = keeps

    def _is_referenced(self, bucket: Bucket, counts: list[References]) -> bool:
        for i, own in enumerate(counts):
            now = references_to(bucket, i)
            if self.runtime.in_backward:  # the hook that has its gradient refers to the object
                now = now._replace(objects=own.objects)
            if now.exceed(own, accumulates_gradient=bucket.params[i].sharded.requires_grad):
                return True
        return False


registry.add(_Lookups)
