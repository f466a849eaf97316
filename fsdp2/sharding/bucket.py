"""The storages of a bucket, and every view of them that the steps of training need.

All views are made once, here. A storage is freed and allocated by resizing it, so views, saved
tensors of autograd and the unsharded parameters stay valid; all that changes is whether there is
memory behind them. The bucket owns all three storages. The slices that users get (sharded
parameters, gradients) keep their memory alive by themselves.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from ..common.pinned import pinned_arena
from ..dtensor.boxes import strides
from ..dtensor.memory import Pack, record_gathered, storage_slice, with_own_storage
from ..policy import MixedPrecisionPolicy, wire_dtype
from .layout import BucketLayout, Slot, plan_bucket
from .mesh import DataParallelMesh
from .param import ShardedParam, own_rows
from .plans import GatherPlan, ReducePlan

# Before 2.15, torch lets autograd round gradients to the dtype of the unsharded parameter.
KEEPS_DTYPES = hasattr(torch.Tensor, "_has_grad_dtype_override")

# In units that enclose others, parameters of at least this size have memory of their own. So has a
# pack of this size, which is freed once it has been copied out.
OWN_PIECE_MIN_BYTES = 1024 * 1024
# Gradients that are smaller on average keep their memory between steps if new memory turned out to
# have another address: to follow it costs about 3 us a parameter.
FREE_MIN_BYTES = 16 * 1024


# The last of these changes the size of every storage; `fsdp2.testing` adds one that records it.
resizers: list[Callable[[torch.UntypedStorage, int], object]] = [torch.UntypedStorage.resize_]


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give ``storage`` memory, of the current stream, or (0) take it away."""
    resizers[-1](storage, nbytes)


class Segments:
    """The gathered storage of a bucket, as one or several pieces of memory.

    One piece for all parameters, unless the unit encloses others (a root): there each large one has
    a piece, which is freed as soon as nothing refers to it any more. A large pack has one too,
    since nothing reads it after the gather.
    """

    def __init__(self, bounds: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Pieces between consecutive ``bounds`` (elements), with memory."""
        self.dtype = dtype
        self.starts = list(bounds[:-1])
        self.flats = [
            torch.empty(stop - start, dtype=dtype, device=device)
            for start, stop in pairwise(bounds)
        ]
        self.storages = [flat.untyped_storage() for flat in self.flats]
        record_gathered(self.storages)
        self.sizes = [flat.nbytes for flat in self.flats]
        self.nbytes = sum(self.sizes)

    def view(self, offset: int, numel: int) -> torch.Tensor:
        """Elements ``offset`` to ``offset + numel``, which lie in one piece."""
        piece = self.piece(offset)
        start = offset - self.starts[piece]
        return self.flats[piece][start : start + numel]

    def piece(self, offset: int) -> int:
        return bisect_right(self.starts, offset) - 1

    def allocate(self) -> None:
        for storage, size in zip(self.storages, self.sizes, strict=True):
            # Parts may have memory: those that were not freed early, and all with `keeps_storage`.
            # `resize_` to the size that it has would still take new memory, and copy.
            if storage.nbytes() != size:
                resize(storage, size)

    def free(self) -> None:
        for storage in self.storages:
            resize(storage, 0)


class SharedMemory(Protocol):
    """Memory that the shards of a bucket share with those of other buckets."""

    def gradients(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for its gradients, with a storage of its own; None: it needs some by itself."""

    def adopt(self, dtensors: Sequence[torch.Tensor]) -> None:
        """Take the gradients of which that is the memory."""


class SecondarySource(Protocol):
    """What a bucket may be gathered from in the place of the shards of all ranks, for a while.

    Attributes:
        layout, plan: of that gather, which has a transport of its own.
        saved: whether the next gather is that one.
    """

    layout: BucketLayout
    plan: GatherPlan
    saved: bool

    def materialize(self, gathered: Segments) -> None:
        """``gathered`` has memory now: make views of it."""


class GradientStore(Pack):
    """The sharded gradients of a bucket: one flat tensor, one DTensor per parameter, made once.

    Reductions write to ``flat``. Each local gradient is a slice of it with a storage of its own:
    torch.compile, pickle and `copy.deepcopy` need a DTensor and its local tensor to have the same
    storage offset, and a DTensor, which has no data itself, has offset 0.

    [Note: gradients that users keep]
    A gradient that a user kept across ``zero_grad`` must not change, and nothing tells the library
    that it was kept: ``.grad`` is an attribute like any other. So before the storage is written
    again with no ``.grad`` attached, the references to it are counted. If there are others than
    ours, the old storage is left to them and a new one is made.

    - Three counts for each gradient, since each sees what the others miss: another name holds the
      DTensor, ``to_local()`` the local tensor, and a view of the local tensor only the storage.
    - How many references are ours depends on the lists and views here, and on torch. They are
      counted once, before any other can exist. That baseline is private to the store, which must
      adjust it whenever it makes a view (`outputs`).
    - Reductions in flight hold views of the flat tensor, so the number of uses of its storage means
      something only while there are none.
    - What a rank finds decides about its own memory alone, never about a collective: users may keep
      a gradient on one rank.
    """

    def __init__(
        self,
        layout: BucketLayout,
        rank: int,
        params: Sequence[ShardedParam],
        flat: torch.Tensor,
        place: SharedMemory | None = None,
    ) -> None:
        self.params = params
        self.flat = flat
        self.storage = flat.untyped_storage()
        self._address = self.storage.data_ptr()
        self._moves = False  # whether new memory has ever had another address
        self.is_free = False
        self.locals = [_slice_with_own_storage(flat, slot, rank) for slot in layout.slots]
        self._parts = [local.untyped_storage() for local in self.locals]
        spans = [(part.data_ptr() - self._address, part.nbytes()) for part in self._parts]
        self._spans = [(i, start, start + size) for i, (start, size) in enumerate(spans) if size]
        self.dtensors = [
            p.sharded_spec.wrap(local) for p, local in zip(params, self.locals, strict=True)
        ]
        self._outputs: dict[ReducePlan, list[torch.Tensor]] = {}
        if place is None:
            self.publish()
        else:  # one pack, of all neighbours; before references to the gradients are counted
            place.adopt(self.dtensors)
        self._baseline = self._references(range(len(self.locals)))
        self._storage_uses = self._count_storage_uses()

    def _references(self, which: Collection[int]) -> list[tuple[int, int, int]]:
        """How often the DTensors, the local tensors and their storages are referred to."""
        # The same expressions for the baseline and for every later count, so that references held
        # by the evaluation itself (arguments, loop variables) are the same in both.
        dtensors, tensors, parts = self.dtensors, self.locals, self._parts
        count, uses = sys.getrefcount, torch._C._storage_Use_Count
        return [(count(dtensors[i]), count(tensors[i]), uses(parts[i]._cdata)) for i in which]

    def _count_storage_uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)

    def outputs(self, plan: ReducePlan) -> list[torch.Tensor]:
        """Views for a reduction that writes in place, made once per plan."""
        outs = self._outputs.get(plan)
        if outs is None:
            outs = self._outputs[plan] = plan.outputs(self.flat)
            self._storage_uses += len(outs)
        return outs

    def referenced_outside(
        self, detached: Collection[int] | None = None, *, idle: bool = True
    ) -> bool:
        """Whether anything but the library refers to a gradient of ours that is not attached.

        Args:
            detached: the parameters to look at, which have no ``.grad``; None: no parameter has.
            idle: no reduction that writes here is in flight, holding views of its own.
        """
        if self.is_free:
            return False  # it was freed without references, and none can be taken since
        if idle and self._count_storage_uses() != self._storage_uses:
            return True
        if hasattr(self.storage, "is_recorded"):  # streams of the user's may use it still
            return True
        if detached is None:
            return self._references(range(len(self.locals))) != self._baseline
        return self._references(detached) != [self._baseline[i] for i in detached]

    def allocate(self) -> None:
        """Give it memory, for a reduction: what is attached after that may be kept by users."""
        self.is_free = False
        nbytes = self.flat.nbytes
        if self.storage.nbytes() != nbytes:
            resize(self.storage, nbytes)
            if self.storage.data_ptr() != self._address:
                self._follow()

    def _follow(self) -> None:
        """Point the local gradients, which only the library refers to, at the new memory."""
        # Their storages are slices, which keep the address they were made with. The tensor objects
        # stay: the DTensors hold them, and the baseline counts them.
        self._address = self.storage.data_ptr()
        self._moves = True
        with torch.no_grad():
            for i, start, stop in self._spans:
                local, part = self.locals[i], storage_slice(self.storage, start, stop)
                self._parts[i] = part
                local.set_(part, 0, local.shape, local.stride())

    def free(self) -> None:
        """Free it, where that pays; to be called while nothing outside refers to a gradient."""
        self.is_free = True
        if not self.storage.resizable():
            return  # in a block with others; if page-locked, to lock it again exceeds a step
        if self._moves and self.flat.nbytes < FREE_MIN_BYTES * len(self.locals):
            return  # following a new address takes longer than these few bytes are worth
        resize(self.storage, 0)


class Bucket:
    """The parameters of a unit that share dtypes and a mesh, with their storages.

    Attributes:
        shards: 1-D, original dtype, on the device where shards live.
        reduce_dtype, grad_dtype: dtypes of the sum over ranks, and of ``.grad``.
        widens: whether ``reduce_dtype`` is wider than the dtype of computation.
        gathered: dtype of computation; None with one shard and no cast, where computation uses
            ``shards`` themselves.
        plan: of the gather over all shards.
        secondary: what else it may be gathered from, if a part has anything.
        own_pieces: direct slots with a piece of ``gathered`` each.
        cached: whether to leave it gathered when its unit is freed.
        cache_valid: whether it is, so that a gather of the unit need not gather it.
    """

    max_messages = 1  # of a gather, for each parameter: each needs a tag of its own

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
        self.rank = mesh.shard_rank
        self.orig_dtype = params[0].dtype
        self.gather_dtype = gather_dtype
        self.reduce_dtype = reduce_dtype
        self.grad_dtype = grad_dtype
        self.keeps_dtypes = False
        self.widens = gather_dtype.itemsize < reduce_dtype.itemsize
        self.device = device
        self.shard_device = shard_device
        self.pin_memory = pin_memory
        self.itemsizes = (gather_dtype.itemsize, self.orig_dtype.itemsize, reduce_dtype.itemsize)
        self.layout = plan_bucket(
            [p.full_shape for p in params],
            [p.dim for p in params],
            mesh.num_shards,
            itemsizes=self.itemsizes,
            direct_min_bytes=direct_min_bytes,
            num_hosts=num_hosts,
            granularities=[p.granularity for p in params],
        )
        # Whether gathering is the identity. Then parameters compute on the shards themselves: there
        # is no second copy, and what the optimizer writes needs no gather to be seen.
        self.aliases_shards = (
            mesh.num_shards == 1 and gather_dtype == self.orig_dtype and shard_device == device
        )
        self.fills_own_slices = False  # whether something is copied before the gather
        # Whether plain gradients are tensor parallelism's, to be summed (`annotations`).
        self.sums_plain = any(p.annotations is not None and p.annotations.is_summed for p in params)
        self.unsharded: list[tuple[int, torch.Tensor]] = []
        self.unsharded_direct: list[tuple[int, torch.Tensor]] = []
        self.grads: GradientStore | None = None
        self.is_made = True  # else the first gather makes the unsharded parameters
        self.in_flight: set[int] = set()  # slots that reductions in flight write
        # HSDP without all-reduce: sums over shards that wait for a later all-reduce, of which
        # slots.
        self.partial: torch.Tensor | None = None
        self.partial_present: set[int] = set()
        self.gathered: Segments | None = None
        self.own_pieces: frozenset[int] = frozenset()
        self.has_own_pack = False  # whether the pack has a piece of its own, too
        self.secondary: SecondarySource | None = None
        self.keeps_storage = False  # whether addresses must stay: captured graphs contain them
        self.cached = False
        self.cache_valid = False
        self.place: SharedMemory | None = None  # with other buckets, if an optimizer asked for it

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
            local = _slice_with_own_storage(shards, slot, self.rank)
            if not meta:
                local.copy_(own_rows(source, slot, self.rank) if whole else source)
            param.attach(local)
        self.shards = shards

    @property
    def is_meta(self) -> bool:
        return self.shards.is_meta

    def materialize(self, *, secondary: SecondarySource | None = None, split: bool = False) -> None:
        """Make the gathered storage (without memory), the unsharded parameters and the plan.

        Args:
            secondary: what else to plan a gather from.
            split: give large parameters a piece of memory of their own.
        """
        self.offload_buffer: torch.Tensor | None = None
        self.gathered = None
        self.secondary = secondary
        if self.aliases_shards:
            record_gathered([self.shards.untyped_storage()])
            for param, slot in zip(self.params, self.layout.slots, strict=True):
                param.make_unsharded(_alias(self.shards, slot.shard_offset, slot.shape))
        else:
            self._materialize_gathered(split)
        self._note_unsharded()

    def _note_unsharded(self) -> None:
        self.unsharded = []
        for i, param in enumerate(self.params):
            param.secondary = None
            if param.unsharded is not None:
                self.unsharded.append((i, param.unsharded))
        self.unsharded_direct = [self.unsharded[i] for i in self.layout.direct if self.unsharded]

    def _materialize_gathered(self, split: bool) -> None:
        bounds = self._plan_gathered(split)
        self.gathered = Segments(bounds, self.gather_dtype, self.device)
        source = self.shards
        if self.shard_device != self.device:  # offloaded: gathers read a copy on the device
            self.offload_buffer = source = torch.empty_like(self.shards, device=self.device)
        self.plan = GatherPlan(self.layout, self.rank, source, self.gathered)
        # One shard is here since it is cast or offloaded: the "gather" is then that copy alone.
        self.fills_own_slices = (
            self.offload_buffer is not None or self.plan.cast or self.layout.num_shards == 1
        )
        for param, slot in zip(self.params, self.layout.slots, strict=True):
            param.make_unsharded(
                _alias(self.gathered.view(slot.full_offset, slot.full_numel), 0, slot.shape)
            )
        if self.secondary is not None:
            self.secondary.materialize(self.gathered)
        self.free_offload_buffer()
        self.free()  # views could be made only while there was memory

    def _plan_gathered(self, split: bool) -> list[int]:
        """The bounds (elements) of the pieces of the gathered storage."""
        layout, enough = self.layout, OWN_PIECE_MIN_BYTES // self.itemsizes[0]
        end = layout.gathered_numel
        if self.secondary is not None:
            # Its pack is at the same place, and may be larger: slices that were aligned over all
            # ranks may not be over fewer, and are packed then.
            end = max(end, self.secondary.layout.gathered_numel)
        bounds = {0, end}
        self.has_own_pack = end - layout.pack_full_offset >= enough
        if self.has_own_pack:
            bounds.add(layout.pack_full_offset)
        direct = layout.direct if split else ()
        own = frozenset(i for i in direct if layout.slots[i].full_numel >= enough)
        for i in own:
            slot = layout.slots[i]
            bounds |= {slot.full_offset, slot.full_offset + slot.full_numel}
        self.own_pieces = own
        # Parameters without elements only: one piece without elements, of which there are views.
        return sorted(bounds) if end else [0, 0]

    # -- memory -----------------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        return 0 if self.gathered is None else self.gathered.nbytes

    @property
    def allocated_bytes(self) -> int:
        """Of the gathered storage, what has memory now."""
        return 0 if self.gathered is None else sum(s.size() for s in self.gathered.storages)

    def allocate(self) -> None:
        if self.gathered is not None:
            self.gathered.allocate()

    def free(self) -> None:
        if self.gathered is not None and not self.keeps_storage:
            self.gathered.free()

    def free_pack(self) -> None:
        """Free the pack, which has a piece of its own, once it was copied out."""
        # Parameters are then not held twice while they compute. It has memory again at the next
        # `allocate`; until then only views refer to it, which nothing reads.
        if self.gathered is not None and not self.keeps_storage:
            resize(self.gathered.storages[-1], 0)

    def versions(self) -> tuple[int, int]:
        """Counters of writes to this rank's rows, and of operators that wrote to the DTensors."""
        params = self.params
        return sum(p.local._version for p in params), sum(p.sharded._version for p in params)

    def fill_own_slices(self) -> None:
        """Before a gather: copy offloaded shards to the device, cast into the own slices."""
        # On the stream of gathers, which orders all of it: the buffer's memory, the copies here,
        # the gather that reads them, and `free_offload_buffer`, which is called when that is
        # enqueued.
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), self.shards.nbytes)
            self.offload_buffer.copy_(self.shards, non_blocking=True)
        if self.plan.cast or self.layout.num_shards == 1:
            torch._foreach_copy_(self.plan.own, self.plan.source)

    def forget_transports(self) -> None:
        """Other transports are going to gather it: they keep nothing yet with the plans."""
        if self.gathered is not None:
            self.plan.forget_transports()

    def free_offload_buffer(self) -> None:
        if self.offload_buffer is not None:
            resize(self.offload_buffer.untyped_storage(), 0)

    def own_piece(self, i: int) -> torch.UntypedStorage:
        """The memory of one of the `own_pieces`."""
        assert self.gathered is not None
        return self.gathered.storages[self.gathered.piece(self.layout.slots[i].full_offset)]

    def free_piece(self, i: int) -> None:
        """Free one of the `own_pieces`; the next `allocate` gives it memory again."""
        resize(self.own_piece(i), 0)

    def wire_dtype(self, plan: ReducePlan) -> torch.dtype:
        """The dtype that direct gradients travel in, where a transport widens them on arrival."""
        # Sums of earlier micro-batches are in the dtype of the reduction already: rounding them for
        # the way would undo what it is for. And where a user sets ``grad_dtype``, autograd makes
        # that dtype, which need not be the one of computation.
        if plan.sums or self.params[0].grad_dtype_is_set:
            return self.reduce_dtype
        return wire_dtype(self.gather_dtype, self.reduce_dtype)

    def keep_dtypes(self) -> None:
        """Take gradients in the dtype that autograd makes, as they are widened anyway."""
        # Norms on the CPU compute the gradient of a bfloat16 weight in float32. Rounded to bfloat16
        # and widened again it would lose 16 bits for nothing, and differ from torch's since 2.15.
        is_set = self.params[0].grad_dtype_is_set
        self.keeps_dtypes = self.widens and KEEPS_DTYPES and not is_set
        # What a user set is the dtype of the result. Micro-batches are added up in that of the
        # reduction, if the policy names one: to round each of them would lose what it is for.
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
            self.widens = self.gather_dtype.itemsize < wide.itemsize
            self.grads = None  # it has the former dtype; gradients that are attached keep it alive

    def partial_parts(self) -> Iterator[tuple[ShardedParam, torch.Tensor]]:
        """The sums that wait for an all-reduce: this rank's rows of each parameter, 1-D."""
        if self.partial is not None:
            for i in self.partial_present:
                slot = self.layout.slots[i]
                yield (
                    self.params[i],
                    self.partial.narrow(0, slot.shard_offset, slot.local_numel(self.rank)),
                )

    def new_partial(self, dtype: torch.dtype) -> torch.Tensor:
        """For sums that are to wait for an all-reduce; on compute's stream."""
        return torch.zeros(self.layout.shard_numel, dtype=dtype, device=self.device)

    def adopt_partial(self, parts: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Wait on with such sums of buckets in whose place this one is."""
        for i, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            part = parts.get(param)
            if part is None:
                continue
            if self.partial is None:
                self.partial = self.new_partial(part.dtype)
            self.partial.narrow(0, slot.shard_offset, len(part)).copy_(part)
            self.partial_present.add(i)

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
        # With nothing to write in place, a kept gradient is in no danger: sums are added to
        # ``.grad``.
        write = detached is None or len(detached) > 0
        if grads is None or (write and grads.referenced_outside(detached, idle=not self.in_flight)):
            numel, dtype = self.layout.shard_numel, self.grad_dtype
            place = self.place
            flat = None if place is None else place.gradients(dtype)
            if flat is not None:
                pass  # next to those of other buckets
            elif self.pin_memory:
                # A storage of its own, as the block is shared: references to it are counted here.
                flat = with_own_storage(pinned_arena(self.device).zeros(numel, dtype))
            else:
                flat, place = torch.zeros(numel, dtype=dtype, device=self.shard_device), None
            grads = self.grads = GradientStore(self.layout, self.rank, self.params, flat, place)
        grads.allocate()
        return grads

    def release_gradients(self, *, attached: bool = False) -> None:
        """Free the memory of gradients that ``zero_grad(set_to_none=True)`` dropped.

        Args:
            attached: also where something else is attached, which stands for them.
        """
        # Not while a reduction writes there: its stream still uses the memory, whatever the counts
        # of references say.
        grads = self.grads
        if grads is None or self.in_flight or (not attached and self.has_gradients()):
            return
        if grads.referenced_outside():
            self.grads = None
        else:
            grads.free()


def _alias(tensor: torch.Tensor, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the storage of ``tensor``, from its element ``offset`` on, with a version
    counter of its own."""
    # A view would share the counter. Gathers write through other tensors on the same storage, and
    # autograd would take the gather in backward for a change of the weights it saved in forward.
    start = tensor.storage_offset() + offset
    return tensor.new_empty(0).set_(tensor.untyped_storage(), start, shape, strides(shape))


def shard_of(flat: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's shard of a parameter, as a view of ``flat``."""
    stop = slot.shard_offset + slot.local_numel(rank)
    return flat[slot.shard_offset : stop].view(slot.local_shape(rank))


def _slice_with_own_storage(flat: torch.Tensor, slot: Slot, rank: int) -> torch.Tensor:
    """This rank's shard of a parameter, with a storage of just these bytes of ``flat``."""
    # ``torch.save`` writes whole storages: of a plain view it would write the whole unit.
    shard = shard_of(flat, slot, rank)
    if shard.numel() == 0:
        return flat.new_empty(shard.shape)
    return shard if flat.is_meta else with_own_storage(shard)
