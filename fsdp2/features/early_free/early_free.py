"""Parameters that are freed before backward ends, although no hook reports that it left their unit.

There is no such hook in units around others, and in embeddings that stay gathered: their inputs
need no gradient. Backward does not read these embeddings, so the whole unit is freed when its
gradients are complete.

The embedding of a language model belongs to the root. Backward does not read its weight, so it is
freed after forward. The head's weight is freed as soon as its gradient is complete, while backward
continues through the blocks. Only parameters with a separate piece of memory are freed
(`GatheredStorage.own_pieces`), and only if nothing refers to that piece.

References are counted per rank: a debugger that holds the parameter on one rank keeps it there.
Ranks must agree on every later gather, so all of them treat it as freed. The next use gathers it
again, even on the rank that kept it. Symmetric memory is freed by all ranks or by none; see the
note in `transports.custom`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Self
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from typing_extensions import override

from ...runtime.events import TreePart, registry
from ...runtime.runtime import Runtime
from ...runtime.states import GATHERED, State
from ...runtime.unit import Forward, Unit
from ...runtime.unit_grads import Taken
from ...sharding.bucket import Bucket
from ...sharding.gathered import GatheredStorage, resize
from ...sharding.param import ShardedParam
from .freed_params import FreedParameterProxy
from .references import References

# Parameters that were needed after all are kept from then on: a model that used one this way will
# do so in every step, and each time the whole unit would be gathered for it.
_recalled: WeakSet[ShardedParam] = WeakSet()
# The library's own references to them, by the storage and the place in its bucket.
_own: WeakKeyDictionary[GatheredStorage, dict[int, References]] = WeakKeyDictionary()


@dataclass
class _Found:
    """The parameters of one unit that may be freed early.

    Attributes:
        buckets: the list of buckets that they are in: a new plan makes another list.
        embeddings: with the place of each in its bucket.
        freed: parameters freed since the last gather, on some rank.
    """

    buckets: list[Bucket]
    embeddings: list[tuple[Bucket, int]]
    freed: set[ShardedParam] = field(default_factory=set)


class EarlyFree(TreePart):
    """Frees parameters of the units of one tree."""

    runtime: Runtime

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._found: dict[Unit, _Found] = {}

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        return cls(runtime) if any(unit.encloses for unit in runtime.units) else None

    @override
    def first_gathered(self, unit: Unit) -> None:
        for bucket in unit.param_group.buckets:
            self.count_own(bucket)

    @override
    def unit_kept(self, unit: Unit, forward: Forward | None) -> None:
        config = unit.config
        for_backward = config.reshard_after_forward is None and config.reshard_after_backward
        if forward is not None and unit.encloses and for_backward:
            self._free_embeddings(unit)

    @override
    def backward_enters_inside(self, unit: Unit) -> None:
        """Reduce large gradients of ``unit`` that are already complete.

        The head of a language model belongs to the root, and its gradient is done when backward
        enters the last block. Otherwise it would be held until the embedding's is done, too.
        """
        config = unit.config
        # With `reduce_unused`, which gradients are complete by now differs from rank to rank.
        waits = config.reduce_unused or unit.gradients.holds_earlier
        if unit.step.backward_began and config.reduce_grads and not waits:
            self.runtime.reduce(unit, direct_only=True)

    @override
    def gradients_taken(self, unit: Unit, taken: Taken) -> None:
        runtime, freed_whole = self.runtime, not unit.config.unshard_in_backward
        # (Gradients of uses outside of the modules are taken after backward has left these.)
        frees = (unit.encloses or freed_whole) and unit.state in GATHERED and runtime.in_backward
        if not (frees and runtime.residency.frees_after_backward(unit, runtime.backward)):
            return
        if not unit.encloses:
            unit.reshard(runtime.streams)
            return
        self._free_embeddings(unit)
        for bucket, grads in zip(unit.param_group.buckets, taken, strict=True):
            for i in grads:
                self._free(unit, bucket, i)

    def _free_embeddings(self, unit: Unit) -> None:
        """After forward, or when backward enters a unit inside if they are tied: the head has read
        the weight by then, and its gradient waits for the embedding's."""
        for bucket, i in self._found_in(unit).embeddings:
            param = bucket.params[i]
            tied = len(param.owners) > 1 and not unit.step.backward_began
            if not (tied or bucket.cached or param in _recalled):
                self._free(unit, bucket, i)

    def _found_in(self, unit: Unit) -> _Found:
        found = self._found.get(unit)
        if found is None or found.buckets is not unit.param_group.buckets:
            embeddings = [
                (bucket, i)
                for bucket in unit.param_group.buckets
                for i in bucket.layout.direct
                if any(type(module) is nn.Embedding for module, _ in bucket.params[i].owners)
            ]
            found = self._found[unit] = _Found(unit.param_group.buckets, embeddings)
        return found

    def _free(self, unit: Unit, bucket: Bucket, i: int) -> None:
        shared, gathered = unit.config.comm_options.memory == "symmetric", bucket.gathered
        if gathered is None or i not in gathered.own_pieces or gathered.keeps_memory or shared:
            return
        param, freed = bucket.params[i], self._found_in(unit).freed
        if unit.state is State.UNSHARDED:
            freed.clear()  # these have been gathered again since
        if param in freed and not self.has_memory(bucket, i):
            return
        streams = self.runtime.streams
        streams.before_free()
        with streams.gathering():
            self.free(bucket, i)
        unit.transition("free_early")
        if param not in freed:
            freed.add(param)
            self.stand_in(unit, param)

    def stand_in(self, unit: Unit, param: ShardedParam) -> None:
        """Put an object into the modules that gathers the unit again when it is used."""
        proxy = FreedParameterProxy.make(param, partial(self._recall, unit, param))
        unit.registration.register_stand_in(param, proxy)

    def _recall(self, unit: Unit, param: ShardedParam) -> None:
        _recalled.add(param)
        # By the runtime, which leaves torch's modes: the user's own computation is running.
        if unit.state is State.PARTLY_FREED:
            self.runtime.wait_unshard(unit)

    # -- the memory of one parameter --------------------------------------------------------

    def count_own(self, bucket: Bucket) -> None:
        """Count the library's own references to the parameters that may be freed early."""
        # After the launch of the first gather, which makes the last views (messages are kept), and
        # before anything computes with the parameters. Earlier, our views would be mistaken for a
        # user's; later, a user's for ours.
        gathered = bucket.gathered
        if gathered is not None:
            _own[gathered] = {i: references_to(bucket, i) for i in gathered.own_pieces}

    def has_memory(self, bucket: Bucket, i: int) -> bool:
        """Whether this rank has not freed it."""
        assert bucket.gathered is not None
        return bucket.gathered.own_piece(i).size() > 0

    def free(self, bucket: Bucket, i: int) -> None:
        """Free the memory of one parameter, which has its own, if nothing refers to it."""
        # Everything that backward will read has a reference: from autograd's saved variables and
        # views, or from the ``ctx`` of a custom function that computes the gradient.
        assert bucket.gathered is not None
        own = _own.get(bucket.gathered)
        if own is None:
            return  # the launch of the first gather raised
        trains = bucket.params[i].sharded.requires_grad
        if not references_to(bucket, i).exceed(own[i], accumulates_gradient=trains):
            resize(bucket.gathered.own_piece(i), 0)  # the next `allocate` gives it memory again


def references_to(bucket: Bucket, i: int) -> References:
    """The references to parameter ``i`` of a bucket and to its memory."""
    assert bucket.gathered is not None
    param = bucket.params[i]
    registered = sum(
        module._parameters.get(name) is param.unsharded for module, name in param.owners
    )
    return References.to(param.unsharded, bucket.gathered.own_piece(i), not_counting=registered)


registry.add(EarlyFree)
