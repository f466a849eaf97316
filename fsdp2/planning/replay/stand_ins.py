"""Units, buckets and reductions without tensors: the library's own classes, with counted memory.

All decisions (when to gather and free, what is written in place, what is held and for how long) are
inherited; only code that touches memory is replaced. Where the real code drops a reference to a
tensor, a `HeldBytes` is dropped here, at the same line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from typing_extensions import override

from ...comm.mesh_transports import Resharder
from ...features.early_free.early_free import EarlyFree
from ...features.secondary_shards import ReshardToGroups, SecondaryShards, secondary_layout
from ...policy import compute_dtype
from ...runtime.param_group import ParamGroup
from ...runtime.reduction import Reduction
from ...runtime.unit import Unit
from ...runtime.unit_config import UnitConfig
from ...runtime.unit_grads import UnitGrads
from ...sharding.bucket import Bucket
from ...sharding.gathered import GatheredStorage, SecondarySource
from ...sharding.gradients import FREE_MIN_BYTES, PartialSums, ReducePlan, ReductionOutput
from ...sharding.mesh import DataParallelMesh
from ...sharding.param import ShardedParam
from ...transports.compressed.policy import CommPolicy, hops_of
from ...transports.compressed.quantize import gather_row
from ..trace.account import HeldBytes
from ..trace.allocator import Block
from ..trace.events import ParamInfo
from .counted_transports import (
    BUFFERS,
    CountedGather,
    CountedGatherBatch,
    CountingPolicy,
    make_counting_transport,
)
from .device import ReplayState
from .setups import Setup, shard_of

_EMBEDDING = nn.Embedding.__new__(nn.Embedding)
_OTHER = nn.Module()


class CountedGradient(HeldBytes):
    """A gradient that is not reduced yet."""

    requires_grad = False  # as without create_graph

    def __init__(
        self,
        replay: ReplayState,
        nbytes: int,
        numel: int,
        dtype: torch.dtype,
        block: Block | None = None,
    ) -> None:
        super().__init__(replay.account, "unreduced gradients", nbytes, block)
        self._world = replay
        self.numel = numel
        self.dtype = dtype

    def detach(self) -> CountedGradient:
        return self

    def to(self, dtype: torch.dtype) -> CountedGradient:
        if dtype == self.dtype:
            return self
        nbytes = self.numel * dtype.itemsize
        self._world.kernel(self.nbytes + nbytes, dtype)
        return CountedGradient(self._world, nbytes, self.numel, dtype)

    def add_(self, other: Any) -> CountedGradient:
        self._world.kernel(2 * self.nbytes + other.nbytes, self.dtype)
        return self

    def attach(self) -> CountedGradient:
        """Count it as the gradient of a parameter that is not sharded."""
        self.recount("gradients")
        return self


class CountedParam:
    """The attributes of a parameter that a unit and its buckets use."""

    def __init__(self, info: ParamInfo, mesh: DataParallelMesh, setup: Setup) -> None:
        below = 0 if info.num_experts is not None else setup.sharding.replicate_below
        if mesh.num_shards > 1 and info.made_bytes < below:
            mesh = _whole(mesh)
        dim, granularity = shard_of(info, setup)[1], setup.granularity.get(info.name, 1)
        self.fqn = info.name
        self.info = info
        self.mesh = mesh
        self.dtype = info.dtype
        self.param_dtype = info.param_dtype
        self.compute_dtype = compute_dtype(info.dtype, info.param_dtype)
        self.grad_dtype_is_set = False
        self.grad_dtype = None
        self.extension = False
        self.full_shape = info.shape
        # (A replicated parameter has a mesh of one rank; its dim does not matter.)
        self.dim = (dim or 0) if info.shape else None
        self.granularity = 1 if self.dim is None or mesh.num_shards == 1 else granularity
        self.owners = [(_EMBEDDING if info.is_embedding else _OTHER, info.name)]
        self.sharded = SimpleNamespace(
            grad=None, requires_grad=info.requires_grad, _post_accumulate_grad_hooks=None
        )
        self.unsharded = SimpleNamespace(grad=None)
        self.tensor_parallel = None
        self.annotations = None

    def local_gradient(self, grad: Any) -> Any:
        return grad


def _whole(mesh: DataParallelMesh) -> DataParallelMesh:
    """Like `mesh.replicated`: every rank holds the whole, gradients are averaged over all ranks."""
    all_ranks: Any = "all"
    return replace(
        mesh,
        shard_group=None,
        shard_rank=0,
        num_shards=1,
        replicate_group=all_ranks,
        num_replicas=mesh.size,
    )


class _GradientStore:
    """The sharded gradients of a bucket."""

    def __init__(self, replay: ReplayState, bucket: CountedBucket) -> None:
        self._world = replay
        self.bucket = bucket
        self._nbytes = bucket.layout.shard_numel * bucket.grad_dtype.itemsize
        self._on_host = bucket.shard_device != bucket.device
        self._held: HeldBytes | None = None
        self.dtensors = [object()] * len(bucket.params)
        self.flat = None

    @property
    def is_free(self) -> bool:
        return self._held is None

    def referenced_outside(self, detached: Any = None, *, idle: bool = True) -> bool:
        return False

    def allocate(self) -> None:
        if self._held is not None:
            return
        account = self._world.account
        if self._on_host:
            account.host["gradients"] = account.host.get("gradients", 0) + self._nbytes
        self._held = HeldBytes(account, "gradients", 0 if self._on_host else self._nbytes)

    def free(self) -> None:
        # As `GradientStore.free`.
        if self._nbytes < FREE_MIN_BYTES * len(self.dtensors):
            return
        if self._on_host and self._held is not None:
            self._world.account.host["gradients"] -= self._nbytes
        self._held = None


class _GatheredStorage(GatheredStorage):
    """The gathered storage of a bucket."""

    def __init__(
        self, bucket: CountedBucket, secondary: SecondarySource | None, split: bool
    ) -> None:
        self.secondary = secondary
        size = bucket.gather_dtype.itemsize
        bounds = self._plan_pieces(bucket.layout, size, split)
        self.starts = bounds[:-1]
        self.sizes = [(stop - start) * size for start, stop in pairwise(bounds)]
        self.nbytes = sum(self.sizes)
        self.held: list[HeldBytes | None] = [None] * len(self.sizes)
        self.fills_own_slices = bucket.shard_device != bucket.device
        self.offload_buffer: Any = True if self.fills_own_slices else None
        self.plan: Any = CountedGather(bucket, bucket.layout, bucket.rank)
        self._bucket = bucket
        self._offload_held: HeldBytes | None = None

    @override
    def allocate(self) -> None:
        for i, nbytes in enumerate(self.sizes):
            if self.held[i] is None:
                account = self._bucket.replay.account
                self.held[i] = HeldBytes(account, "gathered parameters", nbytes)

    @override
    def free(self) -> None:
        if not self.keeps_memory:
            self.held = [None] * len(self.sizes)

    @override
    def free_pack(self) -> None:
        if not self.keeps_memory:
            self.held[-1] = None

    @override
    def fill_own_slices(self) -> None:
        bucket = self._bucket
        self._offload_held = HeldBytes(bucket.replay.account, BUFFERS, bucket.shard_bytes)
        bucket.replay.copy("to device", bucket.shard_bytes, bucket.unit_name)

    @override
    def free_offload_buffer(self) -> None:
        self._offload_held = None

    def piece_of(self, i: int) -> int:
        """The piece of memory of one of `own_pieces`."""
        return self.starts.index(self._bucket.layout.slots[i].full_offset)


class _PartialSums(PartialSums):
    """Sums over shards that wait for an all-reduce."""

    def __init__(self, bucket: CountedBucket) -> None:
        super().__init__(bucket.params, bucket.layout, bucket.rank, bucket.device)
        self._replay = bucket.replay

    @override
    def allocate(self, dtype: torch.dtype) -> None:
        if self.flat is None:
            nbytes = self._layout.shard_numel * dtype.itemsize
            self._replay.kernel(nbytes, dtype)  # of zeros
            flat: Any = HeldBytes(self._replay.account, "gradients", nbytes)
            self.flat = flat

    @override
    def add(self, sums: Any, plan: ReducePlan) -> None:
        self.present.update(plan.present)

    @override
    def move_to(self, sums: Any, plan: ReducePlan) -> Any:
        self.present.difference_update(plan.present)
        if self.present:
            return None
        flat, self.flat = self.flat, None
        return flat


class CountedBucket(Bucket):
    """A bucket with byte counts in place of storages."""

    replay: ReplayState
    unit_name = ""
    gathered: _GatheredStorage | None

    @property
    @override
    def is_meta(self) -> bool:
        return False

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's sharded parameters."""
        return self.layout.shard_numel * self.orig_dtype.itemsize

    @override
    def materialize(self, *, secondary: SecondarySource | None = None, split: bool = False) -> None:
        self.gathered = None
        if not self.aliases_shards:
            self.gathered = _GatheredStorage(self, secondary, split)
        self.unsharded = list(enumerate(p.unsharded for p in self.params))  # type: ignore[misc]
        self.unsharded_direct = [self.unsharded[i] for i in self.layout.direct]

    @override
    def gradient_store(self, detached: Any) -> Any:
        if self.grads is None:
            self.grads = _GradientStore(self.replay, self)  # type: ignore[assignment]
        self.grads.allocate()  # type: ignore[union-attr]
        return self.grads


class CountedEarlyFree(EarlyFree):
    """Frees pieces of counted memory, to which no references remain."""

    @override
    def stand_in(self, unit: Unit, param: ShardedParam) -> None:
        pass

    @override
    def count_own(self, bucket: Bucket) -> None:
        pass

    @override
    def has_memory(self, bucket: Bucket, i: int) -> bool:
        gathered = cast(_GatheredStorage, bucket.gathered)
        return gathered.held[gathered.piece_of(i)] is not None

    @override
    def free(self, bucket: Bucket, i: int) -> None:
        gathered = cast(_GatheredStorage, bucket.gathered)
        gathered.held[gathered.piece_of(i)] = None


class _Secondary(SecondaryShards):
    """The larger shards that stay after forward with ``reshard_after_forward=int``."""

    def __init__(self, bucket: Any, transports: Any, size: int) -> None:
        transports.make_secondary(size)
        policy = transports.policy
        self.layout = secondary_layout(bucket.layout, size, itemsizes=bucket.itemsizes)
        self.plan: Any = CountedGather(bucket, self.layout, bucket.rank % size)
        self._nbytes = self.layout.shard_numel * bucket.gather_dtype.itemsize
        if policy is not None and policy.keeps(bucket.gather_dtype):
            self._nbytes = gather_row(self.layout, policy.secondary, policy.block).nbytes
        self._bucket = bucket
        self._held: HeldBytes | None = None

    @property
    @override
    def saved(self) -> bool:  # type: ignore[override]
        return self._held is not None

    @override
    def save(self) -> None:
        self._held = HeldBytes(self._bucket.replay.account, "secondary shards", self._nbytes)

    @override
    def free(self) -> None:
        self._held = None


class CountedReshardToGroups(ReshardToGroups):
    """Frees units to larger shards that only count."""

    shards_type = _Secondary

    @override
    def show(self, unit: Unit) -> None:
        pass


class _Part(NamedTuple):
    """A contiguous part of the reduced gradients.

    Args:
        params: number of parameters whose gradients begin with it.
        zero: counts the kernel that fills it with zeros.
    """

    nbytes: int
    unit: str
    params: int
    zero_: Callable[[], None]


class _Output(ReductionOutput):
    """The output of a reduction."""

    store: Any

    @override
    def allocate(self, plan: ReducePlan, device: torch.device) -> None:
        self.views = [SimpleNamespace(dtype=self.dtype)]  # type: ignore[list-item]
        if not self.in_place:
            bucket = self.store.bucket
            nbytes = bucket.layout.shard_numel * self.dtype.itemsize
            flat: Any = HeldBytes(bucket.replay.account, BUFFERS, nbytes)
            self.flat = flat

    @override
    def ranges(self, plan: ReducePlan) -> list[Any]:
        bucket, size = self.store.bucket, self.dtype.itemsize
        return [
            _Part(
                numel * size,
                bucket.unit_name,
                0 if i else len(plan.present),
                partial(bucket.replay.kernel, numel * size, self.dtype),
            )
            for i, (_, numel) in enumerate(plan.ranges)
        ]

    @override
    def copy_from(self, grads: Any, plan: ReducePlan, layout: Any) -> None:
        pass

    @override
    def scale(self, plan: ReducePlan, by: float) -> None:
        pass


class CountedReduction(Reduction):
    """A reduction that only counts memory and traffic."""

    bucket: CountedBucket
    output_type = _Output

    @override
    def _parts(self) -> list[Any]:
        cut = getattr(self.replicate, "cut", None)
        return (cut and cut(self.bucket, self.plan, None)) or self.output.ranges(self.plan)

    @override
    def _adopt(self) -> None:
        dtype = self.bucket.grad_dtype
        present = self.plan.present
        dtensors: Any = {}
        for i in present:
            earlier: Any = self.bucket.params[i].sharded.grad
            grad = cast(CountedGradient, self.grads[i]).to(dtype)
            if earlier is None:
                dtensors[i] = grad.attach()
            else:
                earlier.add_(grad)
        self.dtensors = dtensors
        self._fresh = dtensors.keys()

    @override
    def _reduce_over_replicas(self) -> None:
        if self.waits or (self.replicate is not None and self.bucket.partial.flat is not None):
            self._add_to_shards(self.output.dtype)  # to or of the partial sums
        super()._reduce_over_replicas()

    @override
    def _call_result_hooks(self) -> None:
        pass

    def _add_to_shards(self, dtype: torch.dtype) -> None:
        """The kernels that add the reduced gradients to existing shards of ``dtype``."""
        numel, size = sum(numel for _, numel in self.plan.ranges), self.output.dtype.itemsize
        self.bucket.replay.kernel(numel * (size + 2 * dtype.itemsize), dtype)

    @override
    def _write_back(self) -> None:
        bucket = self.bucket
        if self.output.in_place:
            self._fresh = self.plan.covered
            return
        present = self.plan.present
        self._fresh = {i for i in present if bucket.params[i].sharded.grad is None}
        if bucket.shard_device != bucket.device:
            bucket.replay.copy("to host", bucket.shard_bytes, bucket.unit_name)
            if len(self._fresh) < len(present):  # the host adds, so it waits for the copy
                bucket.replay.wait_on_host()
        else:
            self._add_to_shards(bucket.grad_dtype)


# -- units ---------------------------------------------------------------------------------------


class _Transports:
    """The transports of a mesh."""

    allocating = None

    def __init__(
        self,
        replay: ReplayState,
        mesh: DataParallelMesh,
        device: torch.device,
        policy: CommPolicy | None,
    ) -> None:
        self.mesh = mesh
        self.policy = policy
        self._world, self._device = replay, device
        self.gather: Any = None
        self.scatter: Any = None
        self.replicate: Any = None
        self.secondary_gather: Any = None
        if mesh.num_shards > 1:
            self.gather = self.scatter = self._transport(mesh.num_shards, str(mesh.shard_group))
            if policy is not None:
                node = hops_of(policy, mesh.num_shards)
                self.gather = self.scatter = CountingPolicy(self.gather, policy, node=node)
        if mesh.num_replicas > 1:
            self.replicate = self._transport(mesh.num_replicas, str(mesh.replicate_group))
            if policy is not None:
                self.replicate = CountingPolicy(self.replicate, policy)

    def _transport(self, size: int, group: str) -> Any:
        return make_counting_transport(self._world, self._device, size, group)

    def make_secondary(self, size: int) -> None:
        """Gathers within groups of ``size`` ranks."""
        self.secondary_gather = self._transport(size, "secondary")
        if self.policy is not None and self.policy.secondary is not None:
            policy = replace(self.policy, gather=self.policy.secondary)
            self.secondary_gather = CountingPolicy(self.secondary_gather, policy)


class CountedParamGroup(ParamGroup):
    """Parameters, buckets and transports without tensors or process groups."""

    bucket_type = CountedBucket
    replay: ReplayState

    def take(
        self, replay: ReplayState, unit_name: str, params: Sequence[ParamInfo], setup: Setup
    ) -> None:
        """Plan the buckets of these parameters."""
        self.replay = replay
        made = [CountedParam(info, self.mesh, setup) for info in params]
        self.params = made  # type: ignore[assignment]
        self.unsharded = [p.unsharded for p in made]  # type: ignore[misc]
        self.make_buckets()
        self.choose_offload()
        for bucket in self.buckets:
            assert isinstance(bucket, CountedBucket)
            bucket.replay, bucket.unit_name = replay, unit_name
            bucket.partial = _PartialSums(bucket)

    @override
    def num_hosts(self, group: Any) -> int:
        """Number of hosts of the group with this name."""
        return 1 if group is None else self.replay.topology.ring(group).num_nodes

    @override
    def make_transports(self) -> None:
        policy = self._config.comm_options.policy
        made = {b.mesh: _Transports(self.replay, b.mesh, self.device, policy) for b in self.buckets}
        self.transports = [made[bucket.mesh] for bucket in self.buckets]  # type: ignore[misc]
        self.gather_tags = self.reduce_tags = [0] * len(self.buckets)

    @override
    @staticmethod
    def resharder(size: int) -> Resharder:
        return CountedReshardToGroups

    @override
    def gather_batch(self, plans: Sequence[Any]) -> Any:
        return CountedGatherBatch(plans)

    @override
    def adopt_grad_dtypes(self) -> None:
        pass

    @override
    def plan_registration(self) -> None:
        pass


class CountedUnitGrads(UnitGrads):
    """Gradients as byte counts."""

    reduction_type = CountedReduction


class CountedUnit(Unit):
    """A unit of a model that is not sharded.

    Attributes:
        watching: whether no input of the current forward needs a gradient, so that backward of this
            unit ends with its last gradient.
        num_accumulated: number of gradients that this backward has completed.
    """

    param_group_type = CountedParamGroup
    grads_type = CountedUnitGrads
    param_group: CountedParamGroup

    def __init__(
        self,
        replay: ReplayState,
        name: str,
        num_modules: int,
        mesh: Any,
        device: Any,
        config: UnitConfig,
    ) -> None:
        super().__init__((_OTHER,) * num_modules, mesh, device, config)
        self.replay = replay
        self.name = name
        self.registration: Any = SimpleNamespace(
            registered="sharded",
            register=self._show,
            check=lambda follower: None,
            check_is_due=False,
            is_current=lambda: True,
            given_by_others=list,
        )
        self.watching = False
        self.num_accumulated = 0

    def _show(self, kind: str, *, for_forward: bool = True) -> None:
        self.registration.registered = kind

    def take(self, params: Sequence[ParamInfo], setup: Setup) -> None:
        """Plan the buckets of these parameters."""
        self.param_group.take(self.replay, self.name, params, setup)
        self.num_trained = sum(info.requires_grad for info in params)

    def gradient(
        self, param: CountedParam, nbytes: int, dtype: torch.dtype, block: Block | None = None
    ) -> None:
        """Count a gradient that autograd has completed, in new memory or in ``block``."""
        account = self.replay.account
        own = param.unsharded
        if own.grad is not None:
            account.touch("unreduced gradients", nbytes, allocates=False)
            account.free(block)
            self.replay.kernel(nbytes + 2 * own.grad.nbytes, own.grad.dtype, self.name)
            return
        numel = prod(param.full_shape)
        own.grad = CountedGradient(self.replay, nbytes, numel, dtype, block)
