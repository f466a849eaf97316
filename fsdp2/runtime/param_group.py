"""The contents of a unit: parameters, the buckets that store them, and their transports.

All of it is planned when the unit takes over its parameters, and again whenever a user replaces
one. Nothing here depends on whether the unit is gathered; `unit` keeps track of that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from ..comm.mesh_transports import MeshTransports, make_groups, resharder
from ..comm.transports import release_tags, reserve_tags
from ..dtensor.from_local import local_of
from ..dtensor.subclasses import inner_tensors
from ..policy import MixedPrecisionPolicy, param_dtype_of, sum_dtype
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherBatch, GatherPlan
from ..sharding.gradients import ReducePlan
from ..sharding.mesh import DataParallelMesh
from ..sharding.param import ShardedParam
from ..sharding.process_groups import num_hosts
from .registration import Registration
from .unit_config import UnitConfig

# Parameters of one bucket share the mesh, the dtypes of computation, shards and gradients, and
# whether they are trained. A parameter with an extension has its own bucket.
_Grad = tuple[bool, torch.dtype | None]
_Kind = tuple[DataParallelMesh, torch.dtype, torch.dtype, bool, _Grad, ShardedParam | None]

# Classes of buckets with a single extension; the last one is used.
own_buckets: list[type[Bucket]] = []

requires_grad_of = attrgetter("requires_grad")
_version = attrgetter("_version")


class Freezing:
    """Which parameters of a unit are trained.

    Users freeze and thaw either form of a parameter: the sharded one, or the one in the modules.

    Attributes:
        shown: all objects that may be frozen.
        trains: whether each of them was trained when they were last brought into agreement.
        in_graph: the unsharded parameters that are trained in the current forwards.
    """

    def __init__(self) -> None:
        self.shown: list[nn.Parameter] = []
        self.trains: tuple[bool, ...] = ()
        self.in_graph: list[nn.Parameter] = []
        self._params: list[tuple[ShardedParam, bool]] = []

    def adopt(self) -> bool:
        """Freeze and thaw sharded parameters as users did with the parameters in the modules.

        Returns:
            Whether users have frozen or thawed either form; a `show` must follow.
        """
        # (All in one list: one comparison, however many kinds there are.)
        if tuple(map(requires_grad_of, self.shown)) == self.trains:
            return False
        for param, was_trained in self._params:
            for other in _shown_instead(param):
                if other.requires_grad != was_trained:
                    param.sharded.requires_grad_(not was_trained)
        return True

    def show(self, params: Iterable[ShardedParam]) -> None:
        """Freeze and thaw the parameters in the modules like the sharded ones, and remember it.

        All of them at once: one that was left out would count as frozen or thawed by the user.
        """
        self._params = [(param, param.sharded.requires_grad) for param in params]
        self.shown, self.in_graph = [param.sharded for param, _ in self._params], []
        for param, is_trained in self._params:
            for other in _shown_instead(param):
                self.shown.append(other)
                if other.requires_grad != is_trained:
                    other.requires_grad_(is_trained)
            if is_trained and param.unsharded is not None and param.unsharded.requires_grad:
                self.in_graph.append(param.unsharded)
        self.trains = tuple(map(requires_grad_of, self.shown))


def _shown_instead(param: ShardedParam) -> list[nn.Parameter]:
    """Trainable parameters that modules may hold instead of a sharded parameter."""
    others = [other for other in (param.unsharded, param.secondary) if other is not None]
    return [other for other in others if other.is_floating_point() or other.is_complex()]


class ParamGroup:
    """The parameters of one unit and their storages.

    Attributes:
        params: all parameters of the unit.
        buckets: their storages, one for all parameters that share dtypes and a mesh.
        transports: one per bucket; buckets on the same mesh share theirs.
        gather_tags, reduce_tags: the first message tag of each bucket.
        unsharded: the parameters that compute, in the order of ``params``; None before the first
            gather.
        freezing: which of ``params`` are trained.
        dirty: sharded parameters were replaced: plan again before the next use.
        materialized: whether everything that a gather needs has been made.
        num_plans: how often it was made: graphs refer to the storages of one plan.
        incomplete: whether the next gather makes unsharded parameters (of tensor subclasses).
        generation: a counter that grows when unsharded parameters are made, frozen or thawed.
        reduce_plans: the plans that backwards have needed so far; each key begins with the index
            of the bucket.
    """

    bucket_type: type[Bucket] = Bucket  # `fsdp2.planning` has one without memory
    transports_type: type[MeshTransports] = MeshTransports
    num_hosts = staticmethod(num_hosts)  # also replaced there, for planned groups
    resharder = staticmethod(resharder)  # also replaced there

    def __init__(
        self,
        mesh: DataParallelMesh,
        device: torch.device,
        config: UnitConfig,
        registration: Registration,
    ) -> None:
        self.mesh = mesh
        self.device = device
        self._config = config
        self._registration = registration
        self.params: list[ShardedParam] = []
        self.buckets: list[Bucket] = []
        self.transports: list[MeshTransports] = []
        self.gather_tags: list[int] = []
        self.reduce_tags: list[int] = []
        self.unsharded: list[nn.Parameter | None] = []
        self.freezing = Freezing()
        self.dirty = False
        self.materialized = False
        self.num_plans = 0
        self.incomplete = False
        self.generation = 0
        self.reduce_plans: dict[tuple[int, bool, torch.dtype, tuple[int, ...]], ReducePlan] = {}
        self._gather_batches: dict[tuple[GatherPlan, ...], GatherBatch] = {}
        self._reserved_tags = (-1, 0)  # the first one, and how many each bucket has
        self._sharded: list[nn.Parameter] = []
        self._versioned: list[torch.Tensor] = []

    # -- planning ---------------------------------------------------------------------------

    def shard(self, params: list[ShardedParam]) -> None:
        """Take over whole parameters: plan the buckets and keep this rank's shards."""
        self.params = params
        policy = self._config.mp_policy
        cast_frozen = getattr(policy, "cast_frozen_params", False)
        for param in params:
            param.param_dtype = param_dtype_of(policy, param.sharded)
            if cast_frozen and not param.sharded.requires_grad and not param.extension:
                param.dtype = param.compute_dtype
        self.make_buckets()
        self.choose_offload()
        for bucket in self.buckets:
            # Apart from tensor parallelism they are whole.
            whole = [local_of(param.sharded.detach()) for param in bucket.params]
            bucket.shard_from(whole, whole=True)
        self.register_sharded()

    def choose_offload(self) -> None:
        """Ask an offload policy that depends on the size of the unit (`shard_model`)."""
        # Now that sizes are known, and before there is memory: a parameter whose shard moves to
        # another device has to be another object.
        choose = getattr(self._config.offload_policy, "for_unit", None)
        if choose is not None:
            self._config.offload_policy = choose(self.buckets)
            self.make_buckets()

    def reshard_storage(self, *, renumber: bool = False) -> None:
        """Plan again from the sharded parameters as they are now.

        Needed after their local tensors were replaced: by a move to another device, a cast, or
        ``load_state_dict(assign=True)``. The Parameter objects stay.

        Args:
            renumber: take new message tags, as all ranks do: these are other parameters.
        """
        self.dirty = False
        if renumber:
            self._reserved_tags = (-1, 0)
        for param in self.params:
            param.dtype = param.local.dtype
        # Before the new buckets attach other local tensors in their place.
        locals_ = {id(p): p.local for p in self.params}
        # The forward that needs it may be an evaluation: see `materialize`.
        with torch.inference_mode(False), torch.no_grad():
            self.make_buckets()
            for bucket in self.buckets:
                bucket.shard_from([locals_[id(p)] for p in bucket.params], whole=False)
            self.register_sharded()

    def give_up(self, param: ShardedParam) -> None:
        """Leave a tied parameter to the unit of a module that contains both its owners."""
        self.params.remove(param)
        self.reshard_storage()

    def make_buckets(self) -> None:
        """Plan where every parameter lies; the buckets have no storage yet."""
        config, policy = self._config, self._config.mp_policy
        batches = self.device.type != "cpu" and not config.comm_options.gathers_flat
        groups: dict[_Kind, list[ShardedParam]] = {}
        for param in self.params:
            # The class decides which tensors are gathered in its place, and how many.
            alone = param if param.extension else None
            # Frozen ones apart: their gradients are not stored or reduced, and they may be kept.
            trained = param.sharded.requires_grad
            # By gradient dtype: a reduction sums in one dtype (gloo corrupts mixed ones). So the
            # first parameter of a bucket stands for all of them.
            grad = (param.grad_dtype_is_set, param.grad_dtype)
            key = (param.mesh, param.compute_dtype, param.dtype, trained, grad, alone)
            groups.setdefault(key, []).append(param)
        partial = {p: part for bucket in self.buckets for p, part in bucket.partial.rows()}
        self.buckets = [
            (_own_bucket(alone) if alone else self.bucket_type)(
                params,
                mesh,
                mp_policy=_policy_for(params[0], policy),
                gather_dtype=gather_dtype,
                reduce_dtype=self._reduce_dtype_of(params[0]),
                grad_dtype=self._grad_dtype_of(params[0]),
                device=self.device,
                shard_device=torch.device("cpu") if config.offload else self.device,
                pin_memory=config.pins_memory(self.device),
                direct_min_bytes=config.direct_min_bytes,
                num_hosts=self.num_hosts(mesh.shard_group) if batches else None,
            )
            for (mesh, gather_dtype, _, _, _, alone), params in groups.items()
        ]
        for bucket in self.buckets if partial else ():
            bucket.partial.adopt(partial)
        self._forget_plans()

    def _reduce_dtype_of(self, param: ShardedParam) -> torch.dtype:
        """The policy's dtype; else one that can represent every gradient of the unit exactly."""
        chosen_dtype = self._config.mp_policy.reduce_dtype
        if chosen_dtype is not None:
            return sum_dtype(param.dtype, chosen_dtype)
        dtype = _own_grad_dtype(param)
        for other in self.params:
            chosen = other.grad_dtype_is_set or param.grad_dtype_is_set
            if chosen and other.dtype == param.dtype and other.sharded.requires_grad:
                dtype = torch.promote_types(dtype, _own_grad_dtype(other))
        return dtype

    def _grad_dtype_of(self, param: ShardedParam) -> torch.dtype:
        if param.grad_dtype_is_set and param.grad_dtype is None:
            return self._reduce_dtype_of(param)
        return _own_grad_dtype(param)

    def where_shards_are(self) -> list[object]:
        """Per parameter, an object that changes if and only if the parameter is moved or cast."""
        return [
            (id(p.sharded), p.local.dtype, t.untyped_storage()._cdata, t.storage_offset())
            for p in self.params
            for t in inner_tensors(p.local)
        ]

    def adopt_grad_dtypes(self) -> None:
        """Take over a ``grad_dtype`` that users set on sharded parameters before the first use."""
        before = [(p.grad_dtype_is_set, p.grad_dtype) for p in self.params]
        for param in self.params:
            param.adopt_grad_dtype(param.sharded)
        self.dirty |= before != [(p.grad_dtype_is_set, p.grad_dtype) for p in self.params]

    def detach_gradients(self) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Detach gradients whose dtype a user set: a cast of the parameters must not cast them."""
        found = []
        for param in self.params:
            grad = param.sharded.grad
            if grad is not None and param.grad_dtype_is_set:
                found.append((param, grad))
                param.sharded.grad = None
        return found

    def attach_gradients(self, found: list[tuple[ShardedParam, torch.Tensor]]) -> None:
        """After a cast or move, which loses them: restore each ``grad_dtype``, and ``found``."""
        for param in self.params:
            param.set_grad_dtype(param.sharded)
        for param, grad in found:
            param.sharded.grad = grad.to(device=param.local.device)

    def keep_storage(self, keep: bool) -> None:
        """Set whether gathered storages keep their memory when they are freed."""
        for bucket in self.buckets:
            if bucket.gathered is not None:
                bucket.gathered.keeps_memory = keep

    def make_groups(self, meshes: Iterable[DataParallelMesh]) -> None:
        """Make the process groups that gathers and reductions over ``meshes`` will use.

        Raises:
            ValueError: if a group of ``meshes`` cannot communicate tensors of the device.
        """
        config = self._config
        make_groups(meshes, self.device, config.comm_options, config.reshard_after_forward)

    def _forget_plans(self) -> None:
        self.materialized = False
        self.reduce_plans.clear()
        self._gather_batches.clear()
        if self._config.comm_options.policy is not None:
            # They keep the rounding errors of gradients, laid out as the buckets were.
            self.transports.clear()

    def gather_batch(self, plans: Sequence[GatherPlan]) -> GatherBatch:
        """The gathers of several buckets over the same ranks, as one batch that is made once."""
        # The set of plans varies: a cached bucket is not gathered, and a `SecondarySource` has its
        # own plan.
        key = tuple(plans)
        batch = self._gather_batches.get(key)
        if batch is None:
            batch = self._gather_batches[key] = GatherBatch(plans)
        return batch

    def reduce_plan(self, index: int, present: Collection[int], *, sums: bool) -> ReducePlan:
        """How to reduce the gradients of bucket ``index`` that are ``present``.

        Args:
            sums: whether they may be sums of micro-batches, already in the dtype of the reduction.
        """
        bucket = self.buckets[index]
        # With the dtype, which gradients that are wider than any before them change.
        key = (index, sums, bucket.reduce_dtype, tuple(present))
        plan = self.reduce_plans.get(key)
        if plan is None:
            scatter = self.transports[index].scatter
            must_copy_in = () if scatter is None else scatter.must_copy_in(bucket)
            casts = scatter is not None and not sums and scatter.casts(bucket)
            plan = ReducePlan(bucket.layout, sorted(present), must_copy_in, casts=casts, sums=sums)
            self.reduce_plans[key] = plan
        return plan

    # -- what the first gather needs --------------------------------------------------------

    def apply_pending_changes(self) -> None:
        """Plan again after changes that users made since the buckets were made."""
        self.adopt_grad_dtypes()
        if self.dirty or _mixes_frozen(self.buckets):
            self.reshard_storage()

    def materialize(self, *, reshard_to: bool | int, split: bool) -> None:
        """Make everything that the first gather needs: transports, gathered storages, views.

        After `apply_pending_changes`.

        Args:
            reshard_to: as of ``reshard_after_forward``: a number of ranks, or all of them.
            split: give large parameters separate memory.

        Raises:
            RuntimeError: if parameters are still on the meta device.
        """
        self._check_materialized()
        # The first forward may be an evaluation in inference mode: parameters that are made there
        # could never be trained.
        with torch.inference_mode(False), torch.no_grad():
            self.make_transports()
            for bucket, transports in zip(self.buckets, self.transports, strict=True):
                secondary = None
                if type(reshard_to) is int:
                    secondary = self.resharder(reshard_to).plan(bucket, transports, reshard_to)
                bucket.materialize(secondary=secondary, split=split)
                bucket.choose_grad_dtypes()
        self.keep_storage(self._config.keep_unsharded_storage)
        self.materialized = True
        self.num_plans += 1
        self.incomplete = not all(bucket.is_made for bucket in self.buckets)
        self._follow_unsharded()

    def complete(self) -> None:
        """After the first gather, which made the unsharded parameters of tensor subclasses."""
        self.incomplete = False
        self._follow_unsharded()

    def _follow_unsharded(self) -> None:
        self.plan_registration()
        self.generation += 1

    def _check_materialized(self) -> None:
        if any(bucket.is_meta for bucket in self.buckets):
            names = [p.fqn for p in self.params if p.local.is_meta]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {names} (unit "
                f"'{self._registration.unit_name}'). Call model.to_empty(device=...) and "
                "initialize them, or load a checkpoint with load_state_dict(..., assign=True)"
            )

    def make_transports(self) -> None:
        made = {transports.mesh: transports for transports in self.transports}
        for mesh in dict.fromkeys(bucket.mesh for bucket in self.buckets):
            if mesh not in made:
                made[mesh] = self.transports_type(mesh, self.device, self._config.comm_options)
        self.transports = [made[bucket.mesh] for bucket in self.buckets]
        if self._reserved_tags[0] < 0:
            # Every bucket has two tags per tensor (gather, reduce) and two for its pack. As many
            # buckets as parameters are provided for: a replan makes more of them after a freeze,
            # and new tags would have to be taken by all ranks together.
            kinds = (_own_bucket(p) if p.extension else Bucket for p in self.params)
            count = 2 + 2 * sum(kind.max_messages for kind in kinds)
            first = reserve_tags(self._groups(), count * max(1, len(self.params)), self)
            self._reserved_tags = (first, count)
        first, count = self._reserved_tags
        self.gather_tags = [first + count * i for i in range(len(self.buckets))]
        self.reduce_tags = [tag + count // 2 for tag in self.gather_tags]

    def release_tags(self) -> None:
        """Return the message tags, as if there had been no gather; the next takes new ones."""
        if self._reserved_tags[0] >= 0:
            release_tags(self._groups(), self._reserved_tags[0])
        self._reserved_tags = (-1, 0)
        self.materialized = False

    def _groups(self) -> list[dist.ProcessGroup]:
        meshes = dict.fromkeys((self.mesh, *(bucket.mesh for bucket in self.buckets)))
        return [g for m in meshes for g in (m.shard_group, m.replicate_group) if g is not None]

    # -- the parameters in the modules ------------------------------------------------------

    def plan_registration(self) -> None:
        """Make the lists over the present parameters, here and in the registration."""
        if self.freezing.adopt():
            self.generation += 1
        self._registration.plan(self.params)
        self._sharded = [p.sharded for p in self.params]
        self.unsharded = [p.unsharded for p in self.params]
        locals_ = [p.local for p in self.params if p.is_sharded]
        # A wrapper subclass can be written through its inner tensors: its own counter stays then.
        inner = [t for p in self.params if p.extension for t in inner_tensors(p.local)]
        self._versioned = [*locals_, *inner]
        self.freezing.show(self.params)

    def register_sharded(self) -> None:
        """Register sharded parameters that were made again or have other owners now."""
        self.plan_registration()
        self._registration.register("sharded")

    def show_freezing(self, *, midway: bool = False) -> None:
        """Freeze and thaw the other forms of parameters as the sharded ones are.

        Args:
            midway: between a forward and its backward: autograd gives no gradients to parameters
                that are frozen then.
        """
        freezing = self.freezing
        in_graph = freezing.in_graph
        freezing.show(self.params)
        # Hooks are on the parameters that were trained before, so they must be registered again.
        # Not now, as the graph is still the former one: the next forward sees the change.
        if midway:
            freezing.trains, freezing.in_graph = (), in_graph
        else:
            self.generation += 1

    def versions(self) -> tuple[int, int]:
        """Counters of writes to the sharded parameters: to this rank's rows, and by operators on
        the DTensors, which all ranks call. Writes through ``.data`` do not count."""
        # Counters only grow, so their sum changes if any of them does: one comparison per unit.
        return sum(map(_version, self._versioned)), sum(map(_version, self._sharded))


def _own_bucket(param: ShardedParam) -> type[Bucket]:
    if not own_buckets:
        raise ValueError(
            f"Parameter '{param.fqn}' is a tensor subclass: only its class knows how it is "
            "gathered, and the part of fsdp2 that asks it is not registered (see fsdp2/parts.py). "
            "Pass the parameter in ignored_params"
        )
    return own_buckets[-1]


def _own_grad_dtype(param: ShardedParam) -> torch.dtype:
    """The dtype of its gradient before the sum over ranks: as set, or the parameter's dtype."""
    if not param.grad_dtype_is_set:
        return param.dtype
    return param.compute_dtype if param.grad_dtype is None else param.grad_dtype


def _policy_for(param: ShardedParam, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``policy`` with the dtype chosen for ``param``, to pass to an extension."""
    if param.param_dtype == policy.param_dtype:
        return policy
    return replace(policy, param_dtype=param.param_dtype)


def _mixes_frozen(buckets: Sequence[Bucket]) -> bool:
    """Whether a bucket has frozen and trained parameters: some were frozen or thawed since."""
    # Buckets that are planned again lose the sums that wait in them for an all-reduce.
    if any(bucket.partial.present for bucket in buckets):
        return False
    kinds = ({p.sharded.requires_grad for p in bucket.params} for bucket in buckets)
    return any(len(kind) > 1 for kind in kinds)
