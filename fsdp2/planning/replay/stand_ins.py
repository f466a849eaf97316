"""Units, buckets and reductions without tensors: the library's own classes, with counted memory.

All decisions (when to gather and free, what is written in place, what is held and for how long) are
inherited; only code that touches memory is replaced. When the real code drops a reference to a
tensor, a `HeldBytes` dies here, at the same line.
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
from ...policy import CommPolicy, OffloadBeyond, compute_dtype, hops_of
from ...runtime.param_group import ParamGroup
from ...runtime.reduction import Reduction
from ...runtime.unit import Unit
from ...runtime.unit_config import UnitConfig
from ...runtime.unit_grads import UnitGrads
from ...sharding.bucket import FREE_MIN_BYTES, Bucket, SecondarySource
from ...sharding.mesh import DataParallelMesh
from ...sharding.param import ShardedParam
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
        # (A parameter that is replicated has a mesh of one rank; its dim says nothing.)
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


class CountedBucket(Bucket):
    """A bucket with byte counts in place of storages."""

    replay: ReplayState
    unit_name = ""

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
        self.offload_buffer: Any = None
        self.gathered = None
        self.secondary = secondary
        self._pieces: list[int] = []
        self._starts: list[int] = []
        self.held: list[HeldBytes | None] = []
        self._offload_held: HeldBytes | None = None
        if not self.aliases_shards:
            bounds = self._plan_gathered(split)
            size = self.gather_dtype.itemsize
            self._starts = bounds[:-1]
            self._pieces = [(stop - start) * size for start, stop in pairwise(bounds)]
            self.held = [None] * len(self._pieces)
            self.offload_buffer = True if self.shard_device != self.device else None
            self.plan: Any = CountedGather(self, self.layout, self.rank)
            self.fills_own_slices = self.offload_buffer is not None
        self.unsharded = list(enumerate(p.unsharded for p in self.params))  # type: ignore[misc]
        self.unsharded_direct = [self.unsharded[i] for i in self.layout.direct]

    @property
    @override
    def gathered_bytes(self) -> int:
        return sum(self._pieces)

    @override
    def allocate(self) -> None:
        for i, nbytes in enumerate(self._pieces):
            if self.held[i] is None:
                self.held[i] = HeldBytes(self.replay.account, "gathered parameters", nbytes)

    @override
    def free(self) -> None:
        if not self.keeps_storage:
            self.held = [None] * len(self._pieces)

    @override
    def free_pack(self) -> None:
        if self.held and not self.keeps_storage:
            self.held[-1] = None

    @override
    def fill_own_slices(self) -> None:
        self._offload_held = HeldBytes(self.replay.account, BUFFERS, self.shard_bytes)
        self.replay.copy("to device", self.shard_bytes, self.unit_name)

    @override
    def free_offload_buffer(self) -> None:
        self._offload_held = None

    def piece_of(self, i: int) -> int:
        """Which piece of memory one of ``own_pieces`` has."""
        return self._starts.index(self.layout.slots[i].full_offset)

    @override
    def new_partial(self, dtype: torch.dtype) -> Any:
        nbytes = self.layout.shard_numel * dtype.itemsize
        self.replay.kernel(nbytes, dtype)  # of zeros
        return HeldBytes(self.replay.account, "gradients", nbytes)

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
        counted = cast(CountedBucket, bucket)
        return counted.held[counted.piece_of(i)] is not None

    @override
    def free(self, bucket: Bucket, i: int) -> None:
        counted = cast(CountedBucket, bucket)
        counted.held[counted.piece_of(i)] = None


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


class CountedReduction(Reduction):
    """A reduction that only counts memory and traffic."""

    bucket: CountedBucket

    @override
    def _allocate_output(self) -> None:
        self.outs = [SimpleNamespace(dtype=self.dtype)]  # type: ignore[list-item]
        if not self.in_place:
            nbytes = self.bucket.layout.shard_numel * self.dtype.itemsize
            account = self.bucket.replay.account
            self.flat = HeldBytes(account, BUFFERS, nbytes)  # type: ignore[assignment]

    @override
    def _copy_to_output(self) -> None:
        self._allocate_output()

    @override
    def _ranges(self) -> list[Any]:
        size, kernel = self.dtype.itemsize, self.bucket.replay.kernel
        return [
            _Part(
                numel * size,
                self.bucket.unit_name,
                0 if i else len(self.plan.present),
                partial(kernel, numel * size, self.dtype),
            )
            for i, (_, numel) in enumerate(self.plan.ranges)
        ]

    @override
    def _parts(self) -> list[Any]:
        cut = getattr(self.replicate, "cut", None)
        return (cut and cut(self.bucket, self.plan, None)) or self._ranges()

    @override
    def _scale(self, by: float) -> None:
        pass

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
    def _add_to_partial(self) -> None:
        self._add_to_shards(self.dtype)
        self.bucket.partial_present.update(self.plan.present)

    @override
    def _take_partial(self) -> None:
        bucket = self.bucket
        if bucket.partial is None:
            return
        self._add_to_shards(self.dtype)
        bucket.partial_present.difference_update(self.plan.present)
        if not bucket.partial_present:
            self._held, bucket.partial = bucket.partial, None

    @override
    def _call_result_hooks(self) -> None:
        pass

    def _add_to_shards(self, dtype: torch.dtype) -> None:
        """The kernels that add what was reduced to other shards, of ``dtype``."""
        numel = sum(part.nbytes for part in self._ranges()) // self.dtype.itemsize
        self.bucket.replay.kernel(numel * (self.dtype.itemsize + 2 * dtype.itemsize), dtype)

    @override
    def _write_back(self) -> None:
        bucket = self.bucket
        if self.in_place:
            self._fresh = self.covered
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
        if isinstance(self._config.offload_policy, OffloadBeyond):  # as `ParamGroup.shard`
            self._config.offload_policy = self._config.offload_policy.for_unit(self._stored_bytes())
            self.make_buckets()
        for bucket in self.buckets:
            assert isinstance(bucket, CountedBucket)
            bucket.replay, bucket.unit_name = replay, unit_name

    @override
    def num_hosts(self, group: Any) -> int:
        """Of the ranks of the group with this name."""
        return 1 if group is None else self.replay.topology.ring(group).num_nodes

    @override
    def _make_transports(self) -> None:
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
        """Count a gradient that autograd has completed, in memory of its own, or in ``block``."""
        account = self.replay.account
        own = param.unsharded
        if own.grad is not None:
            account.touch("unreduced gradients", nbytes, allocates=False)
            account.free(block)
            self.replay.kernel(nbytes + 2 * own.grad.nbytes, own.grad.dtype, self.name)
            return
        numel = prod(param.full_shape)
        own.grad = CountedGradient(self.replay, nbytes, numel, dtype, block)
