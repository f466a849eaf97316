"""One communication unit: the parameters that are gathered and reduced together.

States, one method per transition::

    SHARDED --launch_gather--> GATHERING --finish_gather--> UNSHARDED
       ^                                                        |
       +--------------------------- free -----------------------+

What is *registered* in the modules is a second, independent question: a unit may keep its
gathered storage while users see the sharded parameters (after forward, or in ``state_dict``).

What a unit consists of is in `param_group`, what backward leaves in it in `unit_grads`, what users
chose for it in `unit_config`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.mesh_transports import Links
from ..comm.streams import Streams
from ..comm.transports import Finish, Transport
from ..common.failures import reraise
from ..sharding.bucket import Bucket
from ..sharding.mesh import DataParallelMesh
from ..sharding.param import ShardedParam
from .forwards import Forward, are_awaited
from .freed_params import ReleasedParameter
from .frozen_cache import free_held
from .param_group import UnitContents
from .registration import Registration
from .unit_config import Settings
from .unit_grads import Taken, UnitGradients

_KEY = "_fsdp2_unit"  # of a module's `__dict__`


class State(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """The parameters of one call of `fully_shard` and their state.

    Attributes:
        modules: those that were given to that call.
        name: their qualified names, as far as sharded modules around them are known.
        settings, contents, gradients: see the modules of these names.
        registration: which parameters the modules hold.
        reshard_after_forward: what the choice in ``settings`` means here, root or not.
        runtime: of the tree that the unit is in; None before the first forward.
        hooks: on ``modules``.
        enclosing: units whose modules contain this one's; ``encloses``: whether others are inside
            of this one.
    """

    contents_type: type[UnitContents] = UnitContents
    gradients_type: type[UnitGradients] = UnitGradients

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: DataParallelMesh,
        device: torch.device,
        settings: Settings,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.settings = settings
        self.name = type(modules[0]).__name__
        self.registration = Registration(modules)
        self.contents = self.contents_type(mesh, device, settings, self.registration)
        self.gradients = self.gradients_type(self.contents, settings)
        self.reshard_after_forward: bool | int = True
        # Its place in the tree.
        self.runtime: Any = None
        self.hooks: Any = None
        self.enclosing: tuple[Unit, ...] = ()
        self.encloses = False
        # The state.
        self.state = State.SHARDED
        self.regrouped = False  # the data to gather next lies in the regrouped shards
        self.released = False  # some parameters may have been freed early
        self._recalled: set[ShardedParam] = set()  # were needed after all; not released again
        self._gather_finish: list[Finish] = []
        self._gather_event: Any = None
        self._waits_for_gather = False
        self._versions = (0, 0)  # of the shards, when the last gather began
        # What the runtime notes about it in a step.
        self.forwards: list[weakref.ref[Forward]] = []  # that backward may still come to
        self.next_in_backward: Unit | None = None
        self.running = 0  # forwards that have begun and not ended
        self.backward_began = False
        self.weight_grads_deferred = False  # see `Runtime.pre_backward`
        self.has_graph = False  # the forward that ended last
        self.recomputes_all = False  # forward without gradients, recomputed whole in backward
        self.reduced = False  # whether this backward has reduced anything of this unit
        self.holds_earlier_gradients = False  # unsharded ones of a backward without sync
        self.holds_partial_sums = False  # of a backward without the all-reduce over replicas

    def __deepcopy__(self, memo: dict) -> Any:
        """Of a module inside only; whole units are put into ``memo`` before, by `deepcopy`."""
        return copy.deepcopy(self.registration, memo)

    @property
    def params(self) -> list[ShardedParam]:
        return self.contents.params

    @property
    def buckets(self) -> list[Bucket]:
        return self.contents.buckets

    def choose_reshard(self, *, is_root: bool) -> None:
        """Whether to free after forward, or to how many ranks: as chosen, or what is usual."""
        chosen = self.settings.reshard_after_forward
        self.reshard_after_forward = (not is_root) if chosen is None else chosen

    @property
    def awaits_backward(self) -> bool:
        """Whether there is a graph by which backward may still come to this unit."""
        return are_awaited(self.forwards)

    @property
    def keeps_only_for_backward(self) -> bool:
        """Whether what forward leaves gathered is there for its backward only."""
        settings = self.settings
        return settings.reshard_after_forward is None and settings.reshard_after_backward

    def materialize(self) -> None:
        """Make what is needed from the first gather on."""
        self.contents.materialize(regroup_to=self.reshard_after_forward, split=self.encloses)

    # -- gathering --------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered storages."""
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    def launch_gather(self, streams: Streams) -> None:
        """SHARDED -> GATHERING: allocate and start the all-gathers of all buckets."""
        assert self.state is State.SHARDED
        contents, settings = self.contents, self.settings
        if contents.dirty or not contents.materialized:
            self.drop_kept(streams)
            self.materialize()
            self.runtime.choose_kept()
            streams.before_root_forward()  # compute has just written the new shards
        if contents.unwritten:
            self.runtime.look_for_unwritten()
        if not self.runtime.in_backward:
            if contents.follow_freezing():
                self.runtime.choose_kept()
            self._versions = contents.versions()
        elif not settings.reshard_after_backward:
            self._versions = contents.versions()
        buckets = contents.buckets
        if settings.keep_frozen is not None:
            free_held((b for b in buckets if b.held and b.is_rewritten()), streams)
        self._waits_for_gather = False
        gathering = [index for index, bucket in enumerate(buckets) if not bucket.held]
        with streams.gathering():
            if gathering:
                self._launch(gathering)
                if streams.stream_ordered:
                    self._free_packs()
                self._waits_for_gather = True
                self._gather_event = streams.gathered(self._gather_event)
        self.state = State.GATHERING

    def _launch(self, gathering: list[int]) -> None:
        """Start the all-gathers of the buckets of these indices: one call over the same ranks where
        the transport can."""
        contents = self.contents
        plans: dict[Transport, list[Any]] = {}
        tags: dict[Transport, list[int]] = {}
        group = self.mesh.shard_group
        try:
            for index in gathering:
                bucket, links = contents.buckets[index], contents.links[index]
                group = links.mesh.shard_group
                transport, plan = self._prepare(bucket, links)
                if transport is not None:
                    plans.setdefault(transport, []).append(plan)
                    tags.setdefault(transport, []).append(contents.gather_tags[index])
            for transport, given in plans.items():
                group = transport.group
                if transport.coalesces and len(given) > 1:
                    given = [contents.gather_batch(given)]
                for plan, tag in zip(given, tags[transport], strict=False):
                    finish = transport.all_gather(plan, tag)
                    if finish is not None:
                        self._gather_finish.append(finish)
        except RuntimeError as error:
            reraise(error, self._current_gather(), group)
        for index in gathering:
            bucket = contents.buckets[index]
            if bucket.staged is not None:
                bucket.free_staged()
            if self.encloses:
                bucket.note_references()

    def _free_packs(self) -> None:
        """After the packed parameters were copied to their places."""
        for bucket in self.buckets:
            bucket.free_pack()

    def _prepare(self, bucket: Bucket, links: Links) -> tuple[Transport | None, Any]:
        """Before the gather of a bucket: memory, and what it reads. Returns who gathers what."""
        if bucket.kept:
            bucket.hold()
        if self.regrouped and bucket.regrouped is not None and bucket.regrouped.saved:
            bucket.allocate()
            return links.regather, bucket.regrouped.plan
        if bucket.aliases_shards:
            return None, None
        bucket.allocate()
        if bucket.fills_own_slices:
            bucket.fill_own_slices()
        return links.gather, bucket.plan

    def _current_gather(self) -> str:
        phase = "backward" if self.runtime.in_backward else "forward"
        return f"the all-gather of unit '{self.name}' in {phase}"

    def finish_gather(self, streams: Streams) -> None:
        """GATHERING -> UNSHARDED: compute may use the parameters."""
        assert self.state is State.GATHERING
        try:
            for finish in self._gather_finish:
                finish()
        except RuntimeError as error:
            reraise(error, self._current_gather(), self.mesh.shard_group)
        if self._gather_finish:
            self._gather_finish.clear()
            self._free_packs()
        if self._waits_for_gather:
            streams.use_gathered(self._gather_event)
        if self.regrouped:
            self._drop_regrouped()
        self.state = State.UNSHARDED
        if self.contents.incomplete:
            self.contents.complete()
            self.runtime.choose_kept()

    def unshard(self, streams: Streams) -> None:
        """From any state to UNSHARDED, with the unsharded parameters registered."""
        if self.released:
            self.free(streams)
        if self.state is State.SHARDED:
            self.launch_gather(streams)
        if self.state is State.GATHERING:
            self.finish_gather(streams)
        self.show_unsharded()

    def show_unsharded(self) -> None:
        """Register what computes."""
        if self.registration.shown != "unsharded":
            self.registration.show("unsharded", for_forward=not self.runtime.in_backward)

    def free(self, streams: Streams, *, regroup: bool = False) -> None:
        """UNSHARDED -> SHARDED: give the gathered storage back; sharded parameters registered.

        Args:
            regroup: keep larger shards for a cheaper gather in backward.
        """
        if self.state is State.GATHERING:
            self.finish_gather(streams)
        if self.state is State.UNSHARDED:
            going = self.contents.buckets
            if self.settings.keep_frozen is not None:
                going = [bucket for bucket in going if not bucket.held]
            for bucket in going:
                if regroup and bucket.regrouped is not None:
                    bucket.regrouped.save()  # by compute: users may look at them
            if going:
                streams.before_free()
                with streams.gathering():
                    for bucket in going:
                        bucket.free()
            self.state = State.SHARDED
            self.regrouped = regroup
            self.released = False
        elif self.regrouped and not regroup:
            self._drop_regrouped()
        self.show_sharded()

    def keep(self, chosen: Collection[Bucket], streams: Streams) -> None:
        """Leave these buckets gathered from the next gather on, and no others."""
        for bucket in self.buckets:
            bucket.kept = bucket in chosen
        self.drop_kept(streams, [bucket for bucket in self.buckets if not bucket.kept])

    def drop_kept(self, streams: Streams, buckets: Iterable[Bucket] | None = None) -> None:
        """Free what is kept gathered, of ``buckets`` or all: at once, or with the unit."""
        held = [b for b in (self.buckets if buckets is None else buckets) if b.held]
        if self.state is State.SHARDED:
            free_held(held, streams)
        for bucket in held:
            bucket.held = False

    def release_embeddings(self, streams: Streams) -> None:
        """After forward: give back embeddings, whose weights backward does not read."""
        for bucket in self.buckets:
            for i in () if bucket.kept else bucket.layout.direct:
                param = bucket.params[i]
                is_embedding = type(param.owners[0][0]) is nn.Embedding
                if is_embedding and len(param.owners) == 1 and param not in self._recalled:
                    self._release(bucket, i, streams)

    def release_reduced(self, taken: Taken, streams: Streams) -> None:
        """In backward: give back parameters whose gradient is complete."""
        for bucket, grads in zip(self.buckets, taken, strict=True):
            for i in grads:
                self._release(bucket, i, streams)

    def _release(self, bucket: Bucket, i: int, streams: Streams) -> None:
        """Free one parameter early, if it has memory of its own and nothing refers to it.

        References are counted on this rank alone: a debugger that holds the parameter on one rank
        keeps it there. Ranks must agree on every gather that follows, so all of them go on as if
        it had been freed: the next use gathers it again, on the rank that kept it too.
        """
        if not bucket.can_free_early(i):
            return
        streams.before_free()
        with streams.gathering():
            bucket.free_early(i)
        self.released = True
        self._show_released(bucket.params[i])

    def _show_released(self, param: ShardedParam) -> None:
        assert param.unsharded is not None
        stand_in = ReleasedParameter.make(param.unsharded, partial(self._recall, param))
        self.registration.show_released(param, stand_in)

    def _recall(self, param: ShardedParam) -> None:
        """Backward needs a released parameter after all, to recompute activations."""
        self._recalled.add(param)
        if self.released:
            self.runtime.wait_unshard(self)

    @property
    def accumulates(self) -> bool:
        """Whether backwards before the present one have left gradients that no ``.grad`` has."""
        earlier = self.holds_earlier_gradients or self.holds_partial_sums
        return earlier and self.gradients.are_left()

    def drop_accumulated(self) -> None:
        """Forget the gradients that no ``.grad`` of a sharded parameter has."""
        self.gradients.drop()
        self.holds_earlier_gradients = self.holds_partial_sums = False

    def show_sharded(self) -> None:
        """Register what users should see while the unit is not computing."""
        kind = "sharded"
        if self.regrouped:
            self.contents.make_regrouped()
            kind = "regrouped"
        if self.registration.shown != kind:
            self.registration.show(kind)

    def _drop_regrouped(self) -> None:
        for bucket in self.buckets:
            if bucket.regrouped is not None:
                bucket.regrouped.free()
        self.regrouped = False

    def is_stale(self) -> bool:
        """Whether this rank knows of writes to the shards after the last gather began."""
        return self.contents.versions() != self._versions

    def is_rewritten(self) -> bool:
        """The same, of writes that all ranks know of: by operators on the DTensors."""
        return self.contents.versions()[1] != self._versions[1]


def set_unit(module: nn.Module, unit: Unit) -> None:
    """Note that ``module`` is one of the modules of ``unit``."""
    vars(module)[_KEY] = unit


def unit_of(module: Any) -> Unit:
    """The unit that ``module``, which is sharded, was made."""
    return vars(module)[_KEY]


def units_in(module: nn.Module) -> list[Unit]:
    """All units of the module tree under ``module``, in the order of the tree, each once."""
    found: dict[Unit, None] = {}
    for submodule in module.modules():
        unit = vars(submodule).get(_KEY)
        if unit is not None:
            found[unit] = None
    return list(found)


def own_modules(module: nn.Module, recurse: bool = True) -> Iterator[nn.Module]:
    """``module`` and the modules under it, without those of sharded modules inside."""
    yield module
    for child in module.children() if recurse else ():
        if _KEY not in vars(child):
            yield from own_modules(child)
