"""The storages of a bucket, and every view of them that the steps of training need.

A bucket owns three storages: the shards, the gathered parameters (`gathered`) and the gradients of
the shards (`gradients`). All views are made once. A storage is freed and allocated by resizing it,
so views, saved tensors of autograd and the unsharded parameters stay valid; only the memory behind
them comes and goes. The slices that users get (sharded parameters, gradients) keep their memory
alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..common.pinned import pinned_arena
from ..dtensor.boxes import strides
from ..dtensor.memory import record_gathered, with_own_storage
from ..policy import MixedPrecisionPolicy, wire_dtype
from .gathered import GatheredStorage, SecondarySource
from .gradients import GradientStore, PartialSums, ReducePlan, SharedMemory
from .layout import plan_bucket
from .mesh import DataParallelMesh
from .param import ShardedParam, own_rows, slice_with_own_storage

# Before 2.15, torch lets autograd round gradients to the dtype of the unsharded parameter.
KEEPS_DTYPES = hasattr(torch.Tensor, "_has_grad_dtype_override")


class Bucket:
    """The parameters of a unit that share dtypes and a mesh, with their storages.

    Attributes:
        shards: 1-D, original dtype, on the device where shards live.
        reduce_dtype, grad_dtype: dtypes of the sum over ranks, and of ``.grad``.
        gathered: in the compute dtype; None before the first gather, and with one shard and no
            cast, where computation uses ``shards`` themselves.
        sums_plain: whether plain gradients must be summed over tensor-parallel ranks
            (`annotations`).
        in_flight: slots that reductions in flight write.
        partial: sums that wait for a later all-reduce.
        cached: whether to leave it gathered when its unit is freed.
        cache_valid: whether it is still gathered, so that a gather of the unit can skip it.
    """

    max_messages = 1  # of a gather, for each parameter: each message needs a separate tag
    is_made = True  # else the first gather makes the unsharded parameters

    def __init__(
        self,
        params: Sequence[ShardedParam],
        mesh: DataParallelMesh,
        *,
        mp_policy: MixedPrecisionPolicy,
        gather_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        shard_device: torch.device,
        pin_memory: bool,
        direct_min_bytes: int | None,
        num_hosts: int | None,
    ) -> None:
        self.params = tuple(params)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.orig_dtype = params[0].dtype
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.grad_dtype = grad_dtype
        self.device = device
        self.shard_device = shard_device
        self.pin_memory = pin_memory
        self.layout = plan_bucket(
            [p.full_shape for p in params],
            [p.dim for p in params],
            mesh.num_shards,
            itemsizes=self.itemsizes,
            direct_min_bytes=direct_min_bytes,
            num_hosts=num_hosts,
            granularities=[p.granularity for p in params],
        )
        self.sums_plain = any(p.annotations is not None and p.annotations.is_summed for p in params)
        self.unsharded: list[tuple[int, torch.Tensor]] = []
        self.unsharded_direct: list[tuple[int, torch.Tensor]] = []
        self.gathered: GatheredStorage | None = None
        self.grads: GradientStore | None = None
        self.in_flight: set[int] = set()
        self.partial = PartialSums(self.params, self.layout, mesh.shard_rank, device)
        self.cached = False
        self.cache_valid = False
        self.place: SharedMemory | None = None  # with other buckets, if an optimizer asked for it

    @property
    def rank(self) -> int:
        return self.mesh.shard_rank

    @property
    def itemsizes(self) -> tuple[int, int, int]:
        """Bytes per element as gathered, as stored and as reduced."""
        return self.gather_dtype.itemsize, self.orig_dtype.itemsize, self.reduce_dtype.itemsize

    @property
    def widens(self) -> bool:
        """Whether gradients are reduced in a wider dtype than the compute dtype."""
        return self.gather_dtype.itemsize < self.reduce_dtype.itemsize

    @property
    def keeps_dtypes(self) -> bool:
        """Whether gradients keep the dtype that autograd makes, as they are widened anyway."""
        # Norms on the CPU compute the gradient of a bfloat16 weight in float32. Rounded to bfloat16
        # and widened again it would lose 16 bits for nothing, and differ from torch's since 2.15.
        return self.widens and KEEPS_DTYPES and not self.params[0].grad_dtype_is_set

    @property
    def aliases_shards(self) -> bool:
        """Whether gathering is the identity.

        Then parameters compute on the shards themselves: there is no second copy, and the
        optimizer's writes are visible without a gather.
        """
        return (
            self.mesh.num_shards == 1
            and self.gather_dtype == self.orig_dtype
            and self.shard_device == self.device
        )

    # -- sharding ---------------------------------------------------------------------------

    def shard_from(self, sources: Sequence[torch.Tensor], *, whole: bool) -> None:
        """Fill a new sharded storage and attach its slices to the parameters.

        Args:
            sources: for each parameter, on any device, the whole tensor (``whole=True``) or the
                local tensor of the sharded one.
        """
        meta = any(source.is_meta for source in sources)
        if self.pin_memory and not meta:
            shards = pinned_arena(self.device).zeros(self.layout.shard_numel, self.orig_dtype)
        else:
            device = torch.device("meta") if meta else self.shard_device
            shards = torch.zeros(self.layout.shard_numel, dtype=self.orig_dtype, device=device)
        for param, slot, source in zip(self.params, self.layout.slots, sources, strict=True):
            local = slice_with_own_storage(shards, slot, self.rank)
            if not meta:
                local.copy_(own_rows(source, slot, self.rank) if whole else source)
            param.attach(local)
        self.shards = shards

    @property
    def is_meta(self) -> bool:
        return self.shards.is_meta

    def materialize(self, *, secondary: SecondarySource | None = None, split: bool = False) -> None:
        """Make the gathered storage (without memory) and the unsharded parameters.

        Args:
            secondary: another source to plan a gather from.
            split: give each large parameter a separate piece of memory.
        """
        self.gathered = None
        if self.aliases_shards:
            record_gathered([self.shards.untyped_storage()])
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                param.make_unsharded(_alias(self.shards, slot.shard_offset, slot.shape))
        else:
            self.gathered = gathered = GatheredStorage(
                self.layout,
                self.rank,
                self.shards,
                self.gather_dtype,
                self.device,
                secondary=secondary,
                split=split,
            )
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                param.make_unsharded(
                    _alias(gathered.view(slot.full_offset, slot.full_numel), 0, slot.shape)
                )
            if secondary is not None:
                secondary.materialize(gathered)
            gathered.free_offload_buffer()
            gathered.free()  # views could be made only while there was memory
        self._record_unsharded()

    def _record_unsharded(self) -> None:
        self.unsharded = []
        for i, param in enumerate(self.params):
            param.secondary = None
            if param.unsharded is not None:
                self.unsharded.append((i, param.unsharded))
        self.unsharded_direct = [self.unsharded[i] for i in self.layout.direct if self.unsharded]

    # -- memory -----------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        return 0 if self.gathered is None else self.gathered.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the gathered storage that have memory now."""
        return 0 if self.gathered is None else sum(s.size() for s in self.gathered.storages)

    def free(self) -> None:
        if self.gathered is not None:
            self.gathered.free()

    def versions(self) -> tuple[int, int]:
        """Counters of writes to this rank's rows, and of operators that wrote to the DTensors."""
        params = self.params
        return sum(p.local._version for p in params), sum(p.sharded._version for p in params)

    def wire_dtype(self, plan: ReducePlan) -> torch.dtype:
        """The dtype that direct gradients travel in, where a transport widens them on arrival."""
        # Sums of earlier micro-batches are in the reduce dtype already: rounding them for the
        # transfer would defeat its purpose. And if a user sets ``grad_dtype``, autograd makes that
        # dtype, which need not be the compute dtype.
        if plan.sums or self.params[0].grad_dtype_is_set:
            return self.reduce_dtype
        return wire_dtype(self.gather_dtype, self.reduce_dtype)

    def choose_grad_dtypes(self) -> None:
        """Set the dtypes in which autograd makes gradients, where they differ from the default."""
        # A user sets the dtype of the result. Micro-batches are added up in the reduce dtype, if
        # the policy names one: rounding each of them would defeat its purpose.
        is_set = self.params[0].grad_dtype_is_set
        sums_wider = is_set and self.mp_policy.reduce_dtype is not None
        if self.keeps_dtypes or sums_wider:
            for _, unsharded in self.unsharded:
                unsharded.grad_dtype = self.reduce_dtype if sums_wider else None

    def widen(self, grads: Collection[torch.Tensor]) -> None:
        """Reduce in the widest dtype of ``grads``: with ``grad_dtype`` None they have any."""
        wide = self.reduce_dtype
        for grad in grads:
            wide = torch.promote_types(wide, grad.dtype)
        if wide != self.reduce_dtype:
            self.reduce_dtype = self.grad_dtype = wide
            self.grads = None  # it has the former dtype; attached gradients keep it alive

    def has_gradients(self) -> bool:
        """Whether any sharded parameter has a gradient, ours or not."""
        # A loop: this runs in every forward and backward, and a generator costs a frame per item.
        for param in self.params:  # noqa: SIM110
            if param.sharded.grad is not None:
                return True
        return False

    def gradient_store(self, detached: Collection[int] | None) -> GradientStore:
        """The store of sharded gradients, with memory, safe to write where no ``.grad`` is.

        Args:
            detached: the parameters that will be written and have no ``.grad``; None: no
                parameter has one.
        """
        grads = self.grads
        # If nothing is written in place, kept gradients are safe: sums are added to ``.grad``.
        write = detached is None or len(detached) > 0
        if grads is None or (write and grads.referenced_outside(detached, idle=not self.in_flight)):
            numel, dtype = self.layout.shard_numel, self.grad_dtype
            place = self.place
            flat = None if place is None else place.gradients(dtype)
            if flat is not None:
                pass  # next to gradients of other buckets
            elif self.pin_memory:
                # A separate storage, as the block is shared: references to it are counted here.
                flat = with_own_storage(pinned_arena(self.device).zeros(numel, dtype))
            else:
                flat, place = torch.zeros(numel, dtype=dtype, device=self.shard_device), None
            grads = self.grads = GradientStore(self.layout, self.rank, self.params, flat, place)
        grads.allocate()
        return grads

    def release_gradients(self, *, attached: bool = False) -> None:
        """Free the memory of gradients that ``zero_grad(set_to_none=True)`` dropped.

        Args:
            attached: also if another tensor is attached in their place.
        """
        # Not while a reduction writes there: its stream still uses the memory, regardless of the
        # reference counts.
        grads = self.grads
        if grads is None or self.in_flight or (not attached and self.has_gradients()):
            return
        if grads.referenced_outside():
            self.grads = None
        else:
            grads.free()


def _alias(tensor: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the storage of ``tensor``, from its element ``offset`` on, with a separate
    version counter."""
    # A view would share the counter. Gathers write through other tensors on the same storage, and
    # autograd would take the gather in backward for a change of the weights it saved in forward.
    start = tensor.storage_offset() + offset
    return tensor.new_empty(0).set_(tensor.untyped_storage(), start, shape, strides(shape))
