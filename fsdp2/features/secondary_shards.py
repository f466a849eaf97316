"""``reshard_after_forward=int``: larger shards that are kept from forward to backward.

After forward, a unit is resharded to groups of ranks, for example the ranks of a node: every
parameter is split into as many slices as a group has ranks, and each rank keeps one. Backward then
gathers within the group, and no traffic crosses nodes. Evaluations, and units that backward does
not gather, keep no slices.

The slices are copied from the gathered parameters in their dtype or, with a `CommPolicy`, in the
form in which they will be sent. Meanwhile users see DTensors over the groups. Writes to these are
lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Self, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from typing_extensions import override

from ..comm.mesh_transports import MeshTransports, resharders
from ..dtensor.boxes import entries_per_part, strides
from ..runtime.events import TreePart, registry
from ..runtime.runtime import Runtime
from ..runtime.states import State
from ..runtime.unit import Unit
from ..sharding.bucket import Bucket
from ..sharding.gathered import GatherPlan, Segments, resize
from ..sharding.layout import ALIGN_BYTES, BucketLayout, Slot, finish_layout
from ..sharding.mesh import DataParallelMesh, device_of
from ..sharding.param import ShardedParam, TensorSpec
from ..sharding.process_groups import own_group
from ..transports.compressed.policy import CommPolicy
from ..transports.compressed.quantize import gather_row
from ..transports.compressed.transports import CompressedTransport

# -- where they lie ------------------------------------------------------------------------------


def secondary_layout(
    layout: BucketLayout, num_shards: int, *, itemsizes: Sequence[int]
) -> BucketLayout:
    """The same gathered storage split into fewer, larger shards.

    The slots keep their places in the gathered storage. If a slice can be whole rows, as in a
    DTensor, the slot has the shape of the parameter. Otherwise (uneven dims other than 0, 0-dim
    parameters) it is flat.

    Args:
        itemsizes: as of `plan_bucket`.

    Raises:
        ValueError: if ``num_shards`` does not divide the number of shards of ``layout``.
    """
    if layout.num_shards % num_shards != 0:
        raise ValueError(f"{num_shards} shards do not divide {layout.num_shards} shards")
    align = ALIGN_BYTES // min(ALIGN_BYTES, *itemsizes)
    shapes = [_cut_shape(slot, num_shards) for slot in layout.slots]
    chunks = [entries_per_part(shape[0], num_shards) for shape in shapes]
    numels = [chunk * prod(shape[1:]) for chunk, shape in zip(chunks, shapes, strict=True)]
    direct = [i for i in layout.direct if numels[i] % align == 0]
    slots: list[Slot | None] = [None] * len(numels)
    offset = 0
    for i in (*direct, *(i for i in range(len(numels)) if i not in direct)):
        slots[i] = Slot(
            shape=shapes[i],
            dim=0,
            chunk=chunks[i],
            shard_offset=offset,
            shard_numel=numels[i],
            # Its place stays: autograd has saved views of it, through which backward reads the
            # parameters gathered from the larger shards.
            full_offset=layout.slots[i].full_offset,
            full_numel=num_shards * numels[i],
            direct=i in direct,
        )
        offset += numels[i]
    return finish_layout(num_shards, slots, offset, layout.pack_full_offset, align)


def _cut_shape(slot: Slot, num_shards: int) -> tuple[int, ...]:
    """The shape whose rows are distributed; with padding they fit into the slot's place."""
    # They fit for dim 0 since the padding grows with the number of ranks, and fewer ranks share it
    # now. Other dims are stored as in the whole parameter, in row-major order: their rows can be
    # distributed if that needs no padding, else only elements can.
    whole_rows = slot.dim is not None and prod(slot.shape) == slot.full_numel
    if slot.dim == 0 or (whole_rows and slot.shape[0] % num_shards == 0):
        return slot.shape
    return (slot.full_numel,)


# -- the groups ----------------------------------------------------------------------------------

_MeshKey = tuple[int, tuple[int, ...]]
# Kept, since every mesh comes with separate process groups; by the group over all shards.
_group_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[_MeshKey, DeviceMesh]]
_group_meshes = WeakKeyDictionary()


def group_mesh(mesh: DataParallelMesh, size: int) -> DeviceMesh:
    """A mesh of consecutive groups of ``size`` ranks of ``mesh``.

    Collective over the ranks of the mesh at the first call for a size.
    """
    shards = mesh.shard_group
    assert shards is not None
    # Consecutive ranks share a node, and the gather in backward should stay within it.
    ranks = mesh.mesh.mesh.reshape(-1, size)
    made = _group_meshes.setdefault(shards, {})
    key = (size, tuple(ranks.flatten().tolist()))
    if key not in made:
        row, column = (ranks == dist.get_rank()).nonzero()[0].tolist()
        names = ("fsdp2_across", "fsdp2_within")
        device = device_of(mesh)
        # Nothing is ever sent across, since those ranks hold the same. But torch wants a group for
        # every dim of a mesh; without a communicator it costs no memory on the device.
        across = own_group(shards, device, names[0], ranks[:, column].tolist(), connect=False)
        within = own_group(shards, device, names[1], ranks[row].tolist())
        made[key] = DeviceMesh.from_group(
            [across, within], mesh.device_type, mesh=ranks, mesh_dim_names=names
        )
    return made[key]


def _fits(mesh: DataParallelMesh, size: int) -> bool:
    """Whether parameters on ``mesh`` are freed to groups of ``size`` ranks."""
    # A group must be smaller than all ranks; otherwise nothing is kept.
    return size < mesh.num_shards and mesh.num_shards % size == 0


# -- the slices ----------------------------------------------------------------------------------


class _InFull:
    """Slices of the gathered parameters of a bucket, as they are.

    Attributes:
        shards, storage: 1-D, and its memory.
        keep: the slices, as views of the gathered storage.
        locals: the parameters that are registered meanwhile: rows without padding.
    """

    def __init__(self, layout: BucketLayout, rank: int, gathered: Segments) -> None:
        self.shards = gathered.flats[0].new_empty(layout.shard_numel)
        self.storage = self.shards.untyped_storage()
        self.keep = [
            gathered.view(slot.full_offset + rank * slot.shard_numel, slot.shard_numel)
            for slot in layout.slots
        ]
        self._padded = [
            self.shards[slot.shard_offset : slot.shard_offset + slot.shard_numel]
            for slot in layout.slots
        ]
        self.locals = [
            padded[: slot.local_numel(rank)].view(slot.local_shape(rank))
            for padded, slot in zip(self._padded, layout.slots, strict=True)
        ]

    def save(self) -> None:
        torch._foreach_copy_(self._padded, self.keep)


class _AsSent:
    """The same slices as they will be sent under a `CommPolicy`, in fewer bytes.

    Meanwhile users see the sharded parameters, since these slices are no tensors.
    """

    def __init__(self, full: _InFull, plan: GatherPlan, policy: CommPolicy) -> None:
        assert policy.secondary is not None
        layout = self._layout = plan.layout
        self.locals: list[torch.Tensor] = []
        self._row = gather_row(layout, policy.secondary, policy.block)
        self.shards = torch.empty(self._row.nbytes, dtype=torch.uint8, device=full.shards.device)
        self.storage = self.shards.untyped_storage()
        resize(self.storage, 0)
        plan.encoded = self.shards
        self._dtype = full.shards.dtype
        self._direct = [full.keep[i] for i in layout.direct]
        self._packed = [
            (layout.slots[i].shard_offset - layout.pack_offset, full.keep[i]) for i in layout.packed
        ]

    def save(self) -> None:
        parts = list(self._direct)
        if self._layout.pack_numel:
            parts.append(self._pack())
        self._row.encode(parts, self.shards)

    def _pack(self) -> torch.Tensor:
        pack = torch.zeros(self._layout.pack_numel, dtype=self._dtype, device=self.shards.device)
        for offset, part in self._packed:
            pack[offset : offset + part.numel()] = part
        return pack


class SecondaryShards:
    """Larger shards of one bucket: a `SecondarySource`.

    Attributes:
        layout, plan: of the gather in a group.
        mesh: all groups, and the ranks of each.
        saved: whether they have memory now, and the next gather reads them.
    """

    plan: GatherPlan

    def __init__(self, bucket: Bucket, transports: MeshTransports, size: int) -> None:
        self.layout = secondary_layout(bucket.layout, size, itemsizes=bucket.itemsizes)
        self.mesh = group_mesh(bucket.mesh, size)
        self.saved = False
        self._rank = bucket.rank % size
        self._transports = transports

    def materialize(self, gathered: Segments) -> None:
        self._full = _InFull(self.layout, self._rank, gathered)
        self.plan = GatherPlan(self.layout, self._rank, self._full.shards, gathered)
        resize(self._full.storage, 0)
        self._form: _InFull | _AsSent = self._full
        self.follow(self._transports)

    def follow(self, transports: MeshTransports) -> None:
        self.plan.forget_transports()
        self._transports = transports
        gather, group = transports.secondary_gather, self.mesh.get_group(1)
        if gather is None or gather.group.size() != group.size():
            # The group was made when the module was sharded, and is looked up here.
            gather = transports.make(group, transports.device)
            gather = transports.wrapped(gather, "secondary all-gather")
            transports.secondary_gather = gather
        policy = transports.options.policy if isinstance(gather, CompressedTransport) else None
        narrows = policy is not None and policy.keeps(self._full.shards.dtype)
        if narrows or self._form is not self._full:
            # These cannot be sent in the form in which they were kept. Users may see them until the
            # next gather.
            self.saved = False
        self._form = self._full
        if policy is not None and narrows:
            self._form = _AsSent(self._full, self.plan, policy)

    @property
    def locals(self) -> list[torch.Tensor]:
        """For each slot the tensor that users may see, if there is one."""
        return self._form.locals

    @property
    def nbytes(self) -> int:
        """Bytes of their present memory."""
        return self._form.storage.nbytes()

    def save(self) -> None:
        """Copy this rank's slices out of the gathered storage, before that is freed."""
        # On compute's stream, so that users may read them at once. The gather in backward comes
        # after this copy, since every free begins with a wait for compute.
        self.saved = True
        resize(self._form.storage, self._form.shards.nbytes)
        self._form.save()

    def free(self) -> None:
        self.saved = False
        resize(self._form.storage, 0)
        if self._form is not self._full:
            resize(self._full.storage, 0)  # of before `follow`


class ReshardToGroups(TreePart):
    """Frees the units of a tree to their larger shards."""

    runtime: Runtime
    shards_type: type[SecondaryShards] = SecondaryShards

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        # By unit, the shards for which the parameters that users see were made.
        self._shown: dict[Unit, object] = {}

    @override
    @classmethod
    def of(cls, runtime: Runtime) -> Self | None:
        units = runtime.units
        return cls(runtime) if any(type(u.reshard_after_forward) is int for u in units) else None

    @staticmethod
    def groups(mesh: DataParallelMesh, size: int) -> Iterator[tuple[str, dist.ProcessGroup]]:
        """The groups over which parameters on ``mesh`` are gathered in backward."""
        if _fits(mesh, size):
            yield f"all-gather within {size} ranks", group_mesh(mesh, size).get_group(1)

    @classmethod
    def plan(cls, bucket: Bucket, transports: MeshTransports, size: int) -> SecondaryShards | None:
        """The larger shards of ``bucket`` in groups of ``size`` ranks, without memory."""
        fits = _fits(bucket.mesh, size)
        return cls.shards_type(bucket, transports, size) if fits else None

    @staticmethod
    def follow(bucket: Bucket, transports: MeshTransports) -> None:
        shards = shards_of(bucket)
        if shards is not None:
            shards.follow(transports)

    @override
    def before_reshard(self, unit: Unit, to_secondary: bool) -> None:
        # Parameters that were freed early cannot be copied. All ranks count them as freed, whether
        # they were or not, so they agree on the next gather.
        if to_secondary and unit.state is State.UNSHARDED:
            for bucket in unit.buckets:
                shards = shards_of(bucket)
                if shards is not None and not bucket.cache_valid:
                    shards.save()
        elif not to_secondary:
            free(unit)
            if unit.state is State.SECONDARY:
                unit.transition("drop_secondary")

    @override
    def resharded(self, unit: Unit) -> None:
        if unit.state is State.SHARDED and any(map(_is_saved, unit.buckets)):
            unit.transition("keep_secondary")
            self.show(unit)

    @override
    def gathered(self, unit: Unit) -> None:
        # Not before: compute, on whose stream they were allocated, must wait for their readers.
        free(unit)

    def show(self, unit: Unit) -> None:
        """Make the parameters that users see while larger shards are kept."""
        # This runs after every forward. A DTensor per parameter, and the lists that register them,
        # are made again only if the kept shards belong to other buckets now.
        group = unit.param_group
        found = [(bucket, shards_of(bucket)) for bucket in unit.buckets]
        seen = [each is not None and each.saved and bool(each.locals) for _, each in found]
        if self._shown.get(unit) == (group.generation, seen):
            return
        self._shown[unit] = (group.generation, seen)
        for (bucket, shards), is_seen in zip(found, seen, strict=True):
            for i, param in enumerate(bucket.params):
                param.secondary = None  # show the sharded one
                if shards is not None and is_seen:
                    _make_shown(param, shards.locals[i], shards.mesh, shards.layout.slots[i])
        group.plan_registration()


def shards_of(bucket: Bucket) -> SecondaryShards | None:
    """The larger shards of ``bucket``, if it is ever freed to any."""
    gathered = bucket.gathered
    # (There is no other such part.)
    return None if gathered is None else cast(SecondaryShards | None, gathered.secondary)


def _is_saved(bucket: Bucket) -> bool:
    shards = shards_of(bucket)
    return shards is not None and shards.saved


def free(unit: Unit) -> None:
    """Free the larger shards of ``unit``, if it has any."""
    for bucket in unit.buckets:
        shards = shards_of(bucket)
        if shards is not None:
            shards.free()


def _make_shown(param: ShardedParam, local: torch.Tensor, mesh: DeviceMesh, slot: Slot) -> None:
    """Make the DTensor that users see in place of ``param``."""
    # Not if the shards are not rows, which no placement could describe, and not for tensor-parallel
    # parameters, whose mesh is no part of ``mesh``. Then users see the sharded parameter.
    if slot.shape != param.full_shape or param.tensor_parallel is not None:
        return
    shape, trained = param.sharded_spec.shape, param.sharded.requires_grad
    spec = TensorSpec(mesh, (Replicate(), Shard(0)), shape, strides(shape))
    made = nn.Parameter(spec.wrap(local), requires_grad=trained and local.is_floating_point())
    param.secondary = made
    param.manage(made)


registry.add(ReshardToGroups)
resharders.append(ReshardToGroups)
