"""One communication unit: the parameters that are gathered and reduced together.

States, one method per transition::

    SHARDED --launch_gather--> GATHERING --finish_gather--> UNSHARDED
       ^                                                        |
       +--------------------------- free -----------------------+

What is *registered* in the modules is a second, independent question: a unit may keep its
gathered storage while users see the sharded parameters (after forward, or in ``state_dict``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from .collectives import Finish, take_tags
from .extension import ExtensionBucket
from .gradients import Reduction
from .kept import KeepFrozen, free_held, mixes_frozen
from .late_sums import LateSums
from .links import LinkOptions, Links
from .mesh import DataParallelMesh
from .param import ShardedParam
from .policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .reduction import ReducePlan
from .registration import Registration
from .released import ReleasedParameter
from .storage import Bucket
from .streams import Streams

# A whole parameter of fewer bytes is packed with others. A copy of that many bytes costs about
# what a message or one more entry of a batched collective costs.
DIRECT_MIN_BYTES = {"cpu": 64 * 1024}
DIRECT_MIN_BYTES_DEFAULT = 256 * 1024

_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")


class State(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class Unit:
    """The parameters of one call of `fully_shard`, their storages, and their state."""

    # What it is made of; `fsdp2.estimation` has the same without memory.
    bucket_type: type[Bucket] = Bucket
    reduction_type: type[Reduction] = Reduction

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        mesh: DataParallelMesh,
        device: torch.device,
        *,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
        reshard_after_forward: bool | int | None,
        direct_min_bytes: int | None,
    ) -> None:
        self.modules = modules
        self.mesh = mesh
        self.device = device
        self.mp_policy = mp_policy
        self.offload = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = self.offload and device.type != "cpu" and offload_policy.pin_memory  # type: ignore[attr-defined]
        self.direct_min_bytes = (
            DIRECT_MIN_BYTES.get(device.type, DIRECT_MIN_BYTES_DEFAULT)
            if direct_min_bytes is None
            else direct_min_bytes
        )
        self.name = type(modules[0]).__name__  # replaced by its qualified name at first forward
        # Choices that may change between steps.
        self.reshard_policy = reshard_after_forward  # None: False for the root, else True
        self.reshard_after_forward: bool | int = True
        self.reshard_after_backward = True
        self.sync_grads = True
        self.accumulate_sharded = False
        self.reduce_grads = True  # either of them
        self.all_reduce_grads = True
        self.divide_factor: float | None = None
        self.unshard_in_backward = True
        self.gathered_once = False  # a step: stays gathered after backwards without sync
        self.strategy: str | None = None  # the name, for people
        self.reduce_unused = False
        self.max_input_buffers: int | None = None  # None: a number of bytes limits them
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.all_reduce_stream: Any = None
        self.link_options = LinkOptions()
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        # The plan.
        self.params: list[ShardedParam] = []
        self.buckets: list[Bucket] = []
        self.links: list[Links] = []  # of each bucket; buckets on the same mesh share one
        self._materialized = False
        self.generation = 0  # grows whenever the unsharded parameters or what is trained change
        self._tag = -1  # first of the message tags of this unit
        self._reduce_plans: dict[tuple[int, tuple[int, ...]], ReducePlan] = {}
        # What the runtime notes about this unit.
        self.runtime: Any = None
        self.hooks: Any = None
        self.encloses = False  # whether other units lie within this one's modules
        self.enclosing: tuple[Unit, ...] = ()  # units whose modules contain this one's
        self.forward_indices: list[int] = []  # of its forwards in the runtime's backward order
        self.backward_index = -1
        self.backward_began = False
        self.recomputes_all = False  # forward without gradients, recomputed whole in backward
        self.reduced = False  # whether this backward has reduced anything of this unit
        self.shared_streams: Any = None  # with units of other trees
        self.holds_earlier_gradients = False  # unsharded ones of a backward without sync
        # The state.
        self.state = State.SHARDED
        self.registration = Registration(modules)
        self._recalled: set[ShardedParam] = set()  # were needed after all; not released again
        self.released = False  # the memory of some parameters was given back early
        self._regrouped_for: Any = None  # what the parameters to show were made for
        self.regrouped = False  # the data to gather next lies in the regrouped shards
        self._gather_finish: list[Finish] = []
        self._gather_event: Any = None
        self._versions = 0
        self.dirty = False  # somebody replaced sharded parameters: plan anew before the next use
        self.accumulated: dict[int, torch.Tensor] = {}  # without sync, in the reduce dtype
        self.late_sums = LateSums(self)
        self.keep_frozen: KeepFrozen | None = None
        self._waits_for_gather = False

    def __deepcopy__(self, memo: dict) -> Any:
        """Of a module inside only; whole units are put into ``memo`` before, by `copying`."""
        return copy.deepcopy(self.registration, memo)

    # -- planning ---------------------------------------------------------------------------

    def shard(self, params: list[ShardedParam]) -> None:
        """Take over whole parameters: plan the buckets and keep this rank's shards."""
        self.params = params
        if getattr(self.mp_policy, "cast_frozen_params", False):
            for param in params:
                if param.dtype.is_floating_point and not param.sharded.requires_grad:
                    param.dtype = self.mp_policy.param_dtype or param.dtype
        self._make_buckets()
        for bucket in self.buckets:
            wholes = [p.sharded.detach() for p in bucket.params]
            bucket.shard_from(
                [getattr(w, "_local_tensor", w) for w in wholes],
                whole=True,
            )
        self._plan_registration()
        self.registration.show("sharded")

    def reshard_storage(self) -> None:
        """Plan anew from the sharded parameters as they are now.

        For when somebody replaced their local tensors: a move to another device or dtype, or
        ``load_state_dict(assign=True)``. The Parameter objects stay.
        """
        self.dirty = False
        for param in self.params:
            param.dtype = param.local.dtype
        locals_ = {id(p): p.local for p in self.params}
        self._make_buckets()
        for bucket in self.buckets:
            bucket.shard_from([locals_[id(p)] for p in bucket.params], whole=False)
        self._plan_registration()
        self.registration.show("sharded")

    def give_up(self, param: ShardedParam) -> None:
        """Leave a tied parameter to the unit of a module that contains both its owners."""
        self.params.remove(param)
        self.reshard_storage()

    def owners_changed(self) -> None:
        """Modules were tied to parameters of this unit after it was made."""
        self._plan_registration()
        self.registration.show("sharded")

    def _make_buckets(self) -> None:
        groups: dict[tuple[Any, ...], list[ShardedParam]] = {}
        for param in self.params:
            gather_dtype = param.dtype
            if param.dtype.is_floating_point and self.mp_policy.param_dtype is not None:
                gather_dtype = self.mp_policy.param_dtype
            alone = param if param.extension else None
            # Frozen ones apart: no gradients of theirs are stored or reduced, and they may be kept.
            trained = param.sharded.requires_grad
            key = (param.mesh, gather_dtype, param.dtype, trained, alone)
            groups.setdefault(key, []).append(param)
        shard_device = torch.device("cpu") if self.offload else self.device
        self.buckets = [
            (ExtensionBucket if alone else self.bucket_type)(
                params,
                mesh,
                mp_policy=self.mp_policy,
                gather_dtype=gather_dtype,
                reduce_dtype=self.mp_policy.reduce_dtype or gather_dtype,
                device=self.device,
                shard_device=shard_device,
                pin_memory=self.pin_memory,
                direct_min_bytes=self.direct_min_bytes,
            )
            for (mesh, gather_dtype, _, _, alone), params in groups.items()
        ]
        self._materialized = False
        self._reduce_plans.clear()

    def change_links(self, **options: Any) -> None:
        """Communicate in another way from the next gather on; fields of `LinkOptions`."""
        self.link_options = replace(self.link_options, **options)
        self.links.clear()
        self._reduce_plans.clear()
        self._materialized = False

    def materialize(self) -> None:
        """Make what is needed from the first gather on: transports, gathered storages, views.

        Raises:
            RuntimeError: if parameters are still on the meta device.
        """
        if self.dirty or mixes_frozen(self.buckets):
            self.reshard_storage()
        for bucket in self.buckets:
            if bucket.is_meta:
                names = [p.fqn for p in self.params if p.local.is_meta]
                raise RuntimeError(
                    "FSDP parameters should be materialized from meta device before training, but "
                    f"the following were still on meta device: {names} (unit '{self.name}'). Call "
                    "model.to_empty(device=...) and initialize them, or load a checkpoint with "
                    "load_state_dict(..., assign=True)"
                )
        with torch.inference_mode(False), torch.no_grad():
            self._make_links()
            for bucket, links in zip(self.buckets, self.links, strict=True):
                regroup_to = links.regroup(self.reshard_after_forward)
                bucket.materialize(regroup_to=regroup_to, split=self.encloses)
        self._plan_registration()
        self._materialized = True
        self.generation += 1

    def _make_links(self) -> None:
        made = {links.mesh: links for links in self.links}
        meshes = dict.fromkeys((self.mesh, *(bucket.mesh for bucket in self.buckets)))
        for mesh in dict.fromkeys(bucket.mesh for bucket in self.buckets):
            if mesh not in made:
                made[mesh] = Links(mesh, self.device, self.link_options)
        self.links = [made[bucket.mesh] for bucket in self.buckets]
        if self._tag >= 0:
            return
        groups = [g for m in meshes for g in (m.shard_group, m.replicate_group) if g is not None]
        # Every bucket takes two tags per parameter (gather, reduce) and two for its pack.
        self._tags_per_bucket = 2 * len(self.params) + 2
        count = self._tags_per_bucket * max(1, len(self.params))
        self._tag = take_tags(groups, count)

    def _plan_registration(self) -> None:
        self.registration.plan(self.params)
        self._sharded_list = [p.sharded for p in self.params]
        self._unsharded_list = [p.unsharded for p in self.params]
        locals_ = [p.local for p in self.params if p.is_sharded]
        self._versioned = [*locals_, *self._sharded_list]
        self._requires_grad = tuple(map(_requires_grad, self._sharded_list))

    def _sync_requires_grad(self) -> None:
        """Users freeze and unfreeze the sharded parameters; the unsharded ones must follow."""
        now = tuple(map(_requires_grad, self._sharded_list))
        if now != self._requires_grad:
            self._requires_grad = now
            self.generation += 1
            for param in self.params:
                assert param.unsharded is not None
                param.unsharded.requires_grad_(param.sharded.requires_grad)
            self.runtime.choose_kept()

    def adopt_replaced(self, *, keep_objects: bool = True) -> None:
        """Take the parameters that somebody put into the modules in place of the sharded ones.

        Args:
            keep_objects: after ``load_state_dict(assign=True)``: where shape, dtype and device are
                as before, copy the data and put the old Parameter object back, which an
                optimizer may hold. Without, before the first use, when what a user assigned is
                what optimizers were given.
        """
        for bucket in self.buckets:
            rank = bucket.rank
            for param, slot in zip(bucket.params, bucket.layout.slots, strict=True):
                module, name = param.owners[0]
                new = module._parameters.get(name)
                if new is param.sharded:
                    continue
                if not isinstance(new, nn.Parameter):
                    self.registration.check()  # (raises)
                    continue
                before = param.sharded
                param.replace_sharded(new, slot, rank, keep_object=keep_objects)
                self.dirty = self.dirty or param.sharded is not before
        self._plan_registration()
        self.registration.show("sharded")

    # -- gathering --------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered storages."""
        return sum(bucket.gathered_bytes for bucket in self.buckets)

    def launch_gather(self, streams: Streams) -> None:
        """SHARDED -> GATHERING: allocate and start the all-gathers of all buckets."""
        assert self.state is State.SHARDED
        if self.dirty or not self._materialized:
            self.drop_kept(streams)
            self.materialize()
            self.runtime.choose_kept()
            streams.before_root_forward()  # compute has just written the new shards
        if not self.runtime.in_backward:
            self._sync_requires_grad()
            self._versions = self.versions()
        elif not self.reshard_after_backward:
            self._versions = self.versions()
        if self.keep_frozen is not None:
            free_held((b for b in self.buckets if b.held and not b.holds()), streams)
        finishes = self._gather_finish
        self._waits_for_gather = False
        with streams.gathering():
            tag = self._tag
            for bucket, links in zip(self.buckets, self.links, strict=True):
                if bucket.held:
                    tag += self._tags_per_bucket
                    continue
                self._waits_for_gather = True
                if bucket.kept:
                    bucket.hold()
                if self.regrouped and bucket.regrouped is not None and bucket.regrouped.saved:
                    self._launch_regrouped(bucket, links, tag)
                elif not bucket.aliases_shards:
                    bucket.allocate()
                    if bucket.fills_own_slices:
                        bucket.fill_own_slices()
                    if links.gather is not None:
                        finish = links.gather.all_gather(bucket.plan, tag)
                        if finish is not None:
                            finishes.append(finish)
                    if bucket.staged is not None:
                        bucket.free_staged()
                if self.encloses:
                    bucket.note_references()
                tag += self._tags_per_bucket
            if self._waits_for_gather:
                self._gather_event = streams.gathered(self._gather_event)
        self.state = State.GATHERING

    def _launch_regrouped(self, bucket: Bucket, links: Links, tag: int) -> None:
        assert bucket.regrouped is not None
        assert links.regather is not None
        bucket.allocate()
        finish = links.regather.all_gather(bucket.regrouped.plan, tag)
        if finish is not None:
            self._gather_finish.append(finish)

    def finish_gather(self, streams: Streams) -> None:
        """GATHERING -> UNSHARDED: compute may use the parameters."""
        assert self.state is State.GATHERING
        for finish in self._gather_finish:
            finish()
        self._gather_finish.clear()
        if self._waits_for_gather:
            streams.use_gathered(self._gather_event)
        if self.regrouped:
            self._drop_regrouped()
        self.state = State.UNSHARDED

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
            going = self.buckets
            if self.keep_frozen is not None:
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

    def release_reduced(self, taken: list[dict[int, torch.Tensor]], streams: Streams) -> None:
        """In backward: give back parameters whose gradient is complete."""
        for bucket, grads in zip(self.buckets, taken, strict=True):
            for i in grads:
                self._release(bucket, i, streams)

    def _release(self, bucket: Bucket, i: int, streams: Streams) -> None:
        streams.before_free()
        with streams.gathering():
            if not bucket.release(i):
                return
        self.released = True
        param = bucket.params[i]
        assert param.unsharded is not None
        stand_in = ReleasedParameter.make(param.unsharded, partial(self._recall, param))
        self.registration.show_released(param, stand_in)

    def _recall(self, param: ShardedParam) -> None:
        """Backward needs a released parameter after all, to recompute activations."""
        self._recalled.add(param)
        if self.released:
            self.runtime.wait_unshard(self)

    def show_sharded(self) -> None:
        """Register what users should see while the unit is not computing."""
        kind = "sharded"
        if self.regrouped:
            self._make_regrouped_params()
            kind = "regrouped"
        if self.registration.shown != kind:
            self.registration.show(kind)

    def _drop_regrouped(self) -> None:
        for bucket in self.buckets:
            if bucket.regrouped is not None:
                bucket.regrouped.free()
        self.regrouped = False

    def _make_regrouped_params(self) -> None:
        saved = [b.regrouped is not None and b.regrouped.saved for b in self.buckets]
        if self._regrouped_for == (self.generation, saved):
            return
        self._regrouped_for = (self.generation, saved)
        for bucket, links in zip(self.buckets, self.links, strict=True):
            regrouped, mesh = bucket.regrouped, links.regroup_mesh
            for i, param in enumerate(bucket.params):
                param.regrouped = None  # show the sharded one
                if regrouped is None or mesh is None or not regrouped.saved:
                    continue
                param.make_regrouped(regrouped.locals[i], mesh, regrouped.layout.slots[i])
        self._plan_registration()

    def versions(self) -> int:
        """Grows whenever somebody writes into a sharded parameter, except through ``.data``."""
        return sum(map(_version, self._versioned))

    def is_stale(self) -> bool:
        """Whether the shards were written after the last gather began."""
        return self.versions() != self._versions

    # -- gradients --------------------------------------------------------------------------

    def take_gradients(self, *, direct_only: bool = False) -> list[dict[int, torch.Tensor]]:
        """Remove the gradients from the unsharded parameters: per bucket, index -> gradient.

        Args:
            direct_only: only of parameters that are not packed.
        """
        may_sum_late = self.late_sums.allowed
        taken = []
        for bucket in self.buckets:
            grads: dict[int, torch.Tensor] = {}
            for i, unsharded in bucket.unsharded_direct if direct_only else bucket.unsharded:
                grad = unsharded.grad
                if grad is not None:
                    unsharded.grad = None
                    if type(grad) is not torch.Tensor or grad.is_sparse or not grad.is_contiguous():
                        param = bucket.params[i]
                        may_wait = may_sum_late and not bucket.is_reducing(i)
                        grad = self.late_sums.local_gradient(param, grad, may_wait=may_wait)
                    grads[i] = grad
            if self.accumulated:
                self._add_accumulated(bucket, grads)
            taken.append(grads)
        return taken

    def _add_accumulated(self, bucket: Bucket, grads: dict[int, torch.Tensor]) -> None:
        """What backwards without sync have left, in the dtype of the reduction."""
        for i, param in enumerate(bucket.params):
            earlier = self.accumulated.pop(id(param), None)
            if earlier is not None:
                grads[i] = earlier.add_(grads[i]) if i in grads else earlier

    def accumulate_gradients(self) -> None:
        """Without sync: keep gradients unsharded, in the dtype of the reduction."""
        for bucket in self.buckets:
            if bucket.reduce_dtype == bucket.gather_dtype:
                continue  # autograd accumulates in .grad, in the right dtype
            for param in bucket.params:
                grad = param.unsharded.grad  # type: ignore[union-attr]
                if grad is None:
                    continue
                param.unsharded.grad = None  # type: ignore[union-attr]
                grad = param.local_gradient(grad)
                if id(param) in self.accumulated:
                    self.accumulated[id(param)].add_(grad)
                else:
                    self.accumulated[id(param)] = grad.to(bucket.reduce_dtype)

    def drop_gradients(self) -> None:
        """Forget unsharded gradients, of a backward that failed."""
        self.accumulated.clear()
        self.late_sums.forget()
        for param in self.params:
            if param.unsharded is not None:
                param.unsharded.grad = None
        for bucket in self.buckets:
            bucket.partial = None
            bucket.partial_present.clear()

    def make_reductions(
        self, taken: list[dict[int, torch.Tensor]], *, final: bool, fill_unused: bool = False
    ) -> list[Reduction]:
        """One `Reduction` per bucket that has gradients.

        Args:
            final: the last one of this backward; sums that wait for an all-reduce are due, also
                of parameters that have no gradient now.
            fill_unused: reduce zeros for trained parameters without a gradient.
        """
        reductions = []
        tag = self._tag
        for index, (bucket, grads) in enumerate(zip(self.buckets, taken, strict=True)):
            tag += self._tags_per_bucket
            if fill_unused:
                self._fill_unused(bucket, grads)
            present: Collection[int] = grads.keys()
            if final and self.all_reduce_grads and bucket.partial_present:
                if not grads:
                    present = bucket.partial_present  # nothing new: only the all-reduce is due
                for i in bucket.partial_present - set(present):
                    shape = bucket.params[i].full_shape
                    grads[i] = torch.zeros(shape, dtype=bucket.reduce_dtype, device=self.device)
            if not present:
                continue
            reductions.append(
                self.reduction_type(
                    bucket,
                    self._reduce_plan(index, bucket, present),
                    [grads.get(i) for i in range(len(bucket.params))],
                    links=self.links[index],
                    all_reduce=self.all_reduce_grads,
                    factor=self.divide_factor,
                    hook=self.all_reduce_hook,
                    hook_stream=self.all_reduce_stream,
                    tag=tag - self._tags_per_bucket // 2,
                )
            )
        return reductions

    def _fill_unused(self, bucket: Bucket, grads: dict[int, torch.Tensor]) -> None:
        """Zeros for parameters that this rank did not use: others may have, and wait for us."""
        dtype = next(iter(grads.values())).dtype if grads else bucket.gather_dtype
        for i, param in enumerate(bucket.params):
            if i not in grads and param.sharded.requires_grad:
                grads[i] = torch.zeros(param.full_shape, dtype=dtype, device=self.device)

    def _reduce_plan(self, index: int, bucket: Bucket, present: Collection[int]) -> ReducePlan:
        key = (index, tuple(present))
        plan = self._reduce_plans.get(key)
        if plan is None:
            scatter = self.links[index].scatter
            stageable = () if scatter is None else scatter.stageable(bucket)
            plan = ReducePlan(bucket.layout, sorted(present), stageable)
            self._reduce_plans[key] = plan
        return plan

    @property
    def keeps_only_for_backward(self) -> bool:
        """Whether what forward leaves gathered is there for its backward only."""
        return self.reshard_policy is None and self.reshard_after_backward

    def lacks_gradients(self) -> bool:
        """Whether backward went through the unit and left no gradient."""
        return any(self._requires_grad) and not self.has_whole_gradients()

    def has_whole_gradients(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        return any(map(_has_grad, self._unsharded_list)) or bool(self.accumulated)

    def has_gradients(self) -> bool:
        """Whether anything is left to reduce."""
        if self.has_whole_gradients():
            return True
        return any(bucket.partial_present for bucket in self.buckets)

    def release_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.release_gradients()


def _has_grad(param: torch.Tensor | None) -> bool:
    return param is not None and param.grad is not None
