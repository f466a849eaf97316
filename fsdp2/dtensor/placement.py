"""Which box of a tensor each rank holds, and which of several holders writes it.

Everything is arithmetic on the metadata of a DTensor, so every rank can compute the answer for
every other rank without communication.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .block_shard import granularity_of, is_block_shard
from .boxes import Box, split_evenly
from .from_local import dtensor_over


@dataclass(frozen=True)
class RankBoxes:
    """Which box of a tensor each rank holds.

    Attributes:
        name: the tensor's name, for messages.
        shape: shape of the whole tensor.
        ranks: an array of global ranks.
        placements: one per dim of ``ranks``.
    """

    name: str
    shape: tuple[int, ...]
    ranks: Tensor
    placements: tuple[Placement, ...]

    def held_by(self, rank: int) -> tuple[Box, int]:
        """The box of a rank, and the rank's index among the holders of this box.

        Raises:
            ValueError: as `holding`.
        """
        found = (self.ranks == rank).nonzero()
        if not len(found):
            raise ValueError(
                f"'{self.name}' is a DTensor on a mesh without this rank: {rank} is not in "
                f"{self.ranks.tolist()}"
            )
        coordinate = tuple(found[0].tolist())
        replica = 0
        for place, num, placement in zip(
            coordinate, self.ranks.shape, self.placements, strict=True
        ):
            if isinstance(placement, Replicate):
                replica = replica * num + place
        return self.box_at(coordinate), replica

    def box_at(self, coordinate: tuple[int, ...]) -> Box:
        """The box of the rank at ``coordinate`` of the array."""
        return box_of(self.shape, tuple(self.ranks.shape), self.placements, coordinate, self.name)

    @property
    def first_box(self) -> Box:
        """The box of the first rank; no box has more elements."""
        return self.box_at((0,) * self.ranks.ndim)

    @property
    def num_replicas(self) -> int:
        sizes = zip(self.placements, self.ranks.shape, strict=True)
        return prod(num for placement, num in sizes if isinstance(placement, Replicate))


@dataclass(frozen=True)
class Holding:
    """What this rank holds of a tensor.

    Attributes:
        boxes: what all ranks hold.
        box: this rank's part; the whole tensor if nothing is sharded.
        ranks: global ranks that hold a part, sorted.
        replica, num_replicas: index of this rank among the holders of its box, and their number.
        replicated_over: identifies the set of replicas; tensors with equal values share work.
    """

    boxes: RankBoxes
    box: Box
    ranks: tuple[int, ...]
    replica: int
    num_replicas: int
    replicated_over: tuple[object, ...]


def holding(tensor: Tensor, name: str, ranks: tuple[int, ...], rank: int) -> Holding:
    """Which part of ``tensor`` this rank holds.

    Args:
        tensor: a DTensor, or a plain tensor, which all of ``ranks`` hold whole.
        name: the tensor's name, for messages.
        ranks: global ranks that share this model; ``rank`` is this one. A DTensor on a mesh that
            is a slice of theirs (the data-parallel dim next to a tensor-parallel one) is also held
            by the other slices.

    Raises:
        ValueError: for DTensors that are partial sums or not laid out as a box.
    """
    shape, array, members = tuple(tensor.shape), torch.tensor(ranks, device="cpu"), ranks
    placements: tuple[Placement, ...] = (Replicate(),)
    over: tuple[object, ...] = ("plain", ranks)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        array, placements = slices_like(mesh, ranks), (*tensor.placements, Replicate())
        num_slices = array.shape[-1]
        members = ranks if num_slices > 1 else ranks_of(mesh)
        dims = tuple(d for d, p in enumerate(tensor.placements) if isinstance(p, Replicate))
        # By the mesh, not by its ranks: another mesh over the same ranks numbers replicas
        # differently, and has boxes of other sizes.
        over = (mesh, dims, num_slices)
    boxes = RankBoxes(name, shape, array, placements)
    box, replica = boxes.held_by(rank)
    return Holding(boxes, box, members, replica, boxes.num_replicas, over)


def own_box(tensor: Tensor, name: str) -> Box:
    """This rank's part of a DTensor, or all of a plain tensor.

    Raises:
        ValueError: as `holding`.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box.whole(shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"'{name}' is a DTensor on a mesh without this rank: {mesh}")
    return box_of(shape, tuple(mesh.shape), tuple(tensor.placements), tuple(coordinate), name)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """The global ranks of a mesh, sorted."""
    # Asked for every tensor of a checkpoint; a mesh makes a new tensor of its ranks each time.
    known = _ranks.get(mesh)
    if known is None:
        known = _ranks[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
    return known


_ranks: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()


def slices_like(mesh: DeviceMesh, ranks: tuple[int, ...]) -> Tensor:
    """The ranks of ``mesh`` and of the other slices of a larger mesh that are like it, if the
    slices together have the ``ranks``.

    Returns:
        Global ranks, with the dims of ``mesh`` and a last dim for the slices. The last dim has
        size 1 if ``mesh`` has all of ``ranks``, or is not a slice.
    """
    members, names, own = set(ranks_of(mesh)), mesh.mesh_dim_names, mesh.mesh
    alone = own.unsqueeze(-1)
    whole = mesh._get_root_mesh()
    if len(members) >= len(ranks) or not members < set(ranks) or names is None:
        return alone
    coordinate = whole.get_coordinate()
    if whole.mesh_dim_names is None or coordinate is None:
        return alone
    across = []
    for dim, name in enumerate(whole.mesh_dim_names):
        index_of_line: list[Any] = list(coordinate)
        index_of_line[dim] = slice(None)
        line = whole.mesh[tuple(index_of_line)].tolist()
        if name not in names and set(line) <= set(ranks) and not set(line) <= members:
            across.append(dim)
    num = prod(whole.mesh.shape[dim] for dim in across)
    if num * len(members) != len(ranks):
        return alone
    rest = [dim for dim in range(whole.mesh.ndim) if dim not in across]
    slices = whole.mesh.permute(*rest, *across).reshape(-1, num)
    place = {rank: number for number, line in enumerate(slices.tolist()) for rank in line}
    rows = torch.tensor([place[rank] for rank in own.flatten().tolist()], device="cpu")
    return slices[rows].view(*own.shape, num)


def box_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    name: str = "",
) -> Box:
    """The box that the rank at ``coordinate`` holds.

    Each tensor dim is split once per mesh dim that shards it, in the order in which the shardings
    were applied. This order is from left to right, except for `_StridedShard`: its split factor is
    the number of pieces that mesh dims to its right made before. (Tensor parallelism is applied
    before data parallelism, whose mesh dim comes first.) Each split is a `torch.chunk`, or is
    between blocks of rows.
    """
    start, size = [0] * len(shape), list(shape)
    for dim in range(len(shape)):
        for mesh_dim in _order(dim, mesh_shape, placements, name):
            first, size[dim] = split_evenly(
                size[dim],
                mesh_shape[mesh_dim],
                coordinate[mesh_dim],
                granularity_of(placements[mesh_dim]),
            )
            start[dim] += first
    for placement in placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard):
            raise ValueError(
                f"'{name}' has placement {placement}: only sharded and replicated tensors have a "
                "part on each rank; redistribute it first"
            )
    return Box(tuple(start), tuple(size))


def boxes_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> set[Box]:
    """The different boxes that the ranks of a mesh hold.

    Raises:
        ValueError: as `holding`.
    """
    cuts = [
        range(1 if isinstance(p, Replicate) else num)
        for num, p in zip(mesh_shape, placements, strict=True)
    ]
    return {box_of(shape, mesh_shape, placements, place) for place in product(*cuts)}


def own_part(whole: Tensor, like: DTensor) -> DTensor:
    """A DTensor laid out as ``like`` over a view of this rank's part of ``whole``."""
    mesh, placements = like.device_mesh, tuple(like.placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    box = box_of(tuple(whole.shape), tuple(mesh.shape), placements, tuple(coordinate))
    part = whole[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))]
    shape, stride = like.shape, like.stride()
    return dtensor_over(part.detach(), mesh, placements, shape, stride)


def _order(
    dim: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], name: str
) -> list[int]:
    """Mesh dims that shard tensor dim ``dim``, in the order of the splits."""
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim:
            continue
        before = getattr(placement, "split_factor", 1) if _is_strided(placement) else 1
        position = 0
        while prod(mesh_shape[d] for d in order[:position]) < before and position < len(order):
            position += 1
        if prod(mesh_shape[d] for d in order[:position]) != before:
            raise ValueError(
                f"'{name}' has placements {placements} on a mesh of shape {mesh_shape}: no order "
                f"of shardings gives split factor {before}"
            )
        order.insert(position, mesh_dim)
    return order


def _is_strided(placement: Placement) -> bool:
    return isinstance(placement, _StridedShard) and not is_block_shard(placement)


def is_gathered_part(part: DTensor, whole: DTensor) -> bool:
    """Whether ``part``, the result of a view operator on ``whole``, is in fact a gathered copy.

    This is so if it was taken on a sharded dim.
    """
    return any(
        new.is_replicate() and not old.is_replicate() and whole.device_mesh.size(mesh_dim) > 1
        for mesh_dim, (new, old) in enumerate(zip(part.placements, whole.placements, strict=True))
    )


def all_ranks() -> tuple[int, ...]:
    """The ranks of the default process group; (0,) without one."""
    if dist.is_available() and dist.is_initialized():
        return tuple(range(dist.get_world_size()))
    return (0,)


def this_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks_of_host() -> int:
    """How many ranks each host has, from torchrun's environment; without it, all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", len(all_ranks())))


UNIT_BYTES = 1 << 20


class Balance:
    """Distributes the writing of replicated tensors among their holders.

    The next tensor goes to the replica with the fewest bytes so far, counted in whole MiB. So small
    tensors (the steps of an optimizer) go to few ranks, and a load opens few files for them. Every
    rank counts the same tensors in the same order, so all get the same result.
    """

    def __init__(self) -> None:
        # Heaps of whole units, replica, and bytes.
        self._loads: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}

    def owner(self, holding: Holding, nbytes: int) -> int:
        """Which replica writes a tensor of ``nbytes`` bytes."""
        if holding.num_replicas == 1:
            return 0
        loads = self._loads.get(holding.replicated_over)
        if loads is None:
            loads = [(0, replica, 0) for replica in range(holding.num_replicas)]
            self._loads[holding.replicated_over] = loads
        _, owner, before = loads[0]
        heapreplace(loads, ((before + nbytes) // UNIT_BYTES, owner, before + nbytes))
        return owner
