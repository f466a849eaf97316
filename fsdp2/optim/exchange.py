"""Assembles whole tensors, each on one rank, and scatters them again.

A tensor that is sharded over several mesh dims is assembled one mesh dim after the other, in the
process groups of the mesh. First, along the last dim, all ranks of a line send what they hold to
the rank of that line that has the owner's coordinate; then these do the same along the dim before,
and so on. A dim that replicates the tensor needs no message. The way back is the reverse, where
dims that replicate the tensor receive copies. All tensors of a batch travel together: one
all-to-all per mesh dim and dtype each way, regardless of the owners.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ..common.failures import explained
from ..common.memory import current_device
from ..dtensor.boxes import Box
from ..dtensor.from_local import dtensor_over
from ..dtensor.placement import box_of

Coordinate = tuple[int, ...]
_CALL = "an optimizer's exchange of whole tensors (Muon, whole_step, run_whole)"


@dataclass(frozen=True)
class Layout:
    """How a tensor is sharded over a mesh; without a ``mesh``, every rank holds it whole.

    Attributes:
        mesh, placements: as in a DTensor, without partial sums.
        shape, dtype: shape and dtype of the whole tensor.
    """

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor, dtype: torch.dtype | None = None) -> Layout:
        """The layout of a DTensor or plain tensor, in its own dtype or another.

        Raises:
            ValueError: if the tensor is a partial sum.
        """
        shape, dtype = tuple(tensor.shape), dtype or tensor.dtype
        if not isinstance(tensor, DTensor):
            return Layout(None, (), shape, dtype)
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(
                f"A DTensor with placements {tensor.placements} is a partial sum: redistribute it"
            )
        return Layout(tensor.device_mesh, tuple(tensor.placements), shape, dtype)

    @property
    def cut(self) -> MeshCut:
        """Which rank holds which box."""
        mesh_shape = () if self.mesh is None else tuple(self.mesh.shape)
        return cut_of(self.shape, mesh_shape, self.placements)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        if self.mesh is None:
            return self.shape
        return self.cut.box(tuple(self.mesh.get_coordinate() or ())).shape

    def wrap(self, local: Tensor) -> Tensor:
        """A DTensor of this layout over this rank's part; without a mesh, the part itself."""
        if self.mesh is None:
            return local
        strides = tuple(prod(self.shape[d + 1 :]) for d in range(len(self.shape)))
        return dtensor_over(local, self.mesh, self.placements, self.shape, strides)


class MeshCut:
    """The boxes of one tensor that the ranks of a mesh hold."""

    def __init__(
        self, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
    ) -> None:
        self.mesh_shape = mesh_shape
        self.cuts = tuple(not isinstance(p, Replicate) for p in placements)  # for each mesh dim
        coordinates = product(*map(range, mesh_shape))
        self._boxes = {c: box_of(shape, mesh_shape, placements, c) for c in coordinates}
        self._collected: dict[tuple[Coordinate, tuple[int, ...]], list[Coordinate]] = {}

    def box(self, coordinate: Coordinate) -> Box:
        return self._boxes[coordinate]

    @property
    def boxes(self) -> list[Box]:
        """The different boxes, without empty ones."""
        return [box for box in dict.fromkeys(self._boxes.values()) if box.numel]

    def origins(self, coordinate: Coordinate, dims: tuple[int, ...]) -> list[Coordinate]:
        """Whose parts a rank has, in order, after it received those along ``dims``."""
        if not dims:
            return [coordinate]
        key = (coordinate, dims)
        if key not in self._collected:
            *before, dim = dims
            if self.cuts[dim]:
                lines = [at(coordinate, dim, i) for i in range(self.mesh_shape[dim])]
            else:
                lines = [coordinate]
            self._collected[key] = [o for c in lines for o in self.origins(c, tuple(before))]
        return self._collected[key]

    def numels(self, coordinate: Coordinate, dims: tuple[int, ...]) -> list[int]:
        """The sizes of these parts."""
        return [self._boxes[origin].numel for origin in self.origins(coordinate, dims)]


# A model has only a handful of different cuts.
cut_of = functools.lru_cache(maxsize=1024)(MeshCut)


def at(coordinate: Coordinate, dim: int, index: int) -> Coordinate:
    return (*coordinate[:dim], index, *coordinate[dim + 1 :])


def part_of(tensor: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


@dataclass(frozen=True)
class Item:
    """A tensor to move: its layout and the mesh coordinate of its owner."""

    layout: Layout
    owner: Coordinate


Pieces = list[Tensor]  # flat, in the order of `MeshCut.origins`


class OwnerExchange:
    """Moves tensors of one mesh between their owners and the ranks that hold parts of them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """
        Raises:
            ValueError: if this rank is not part of the mesh.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"Rank {dist.get_rank()} is not part of {mesh}")
        self.mesh = mesh
        self.coordinate = tuple(coordinate)
        # In the order in which tensors are assembled.
        self.dims = tuple(d for d in reversed(range(mesh.ndim)) if mesh.size(d) > 1)
        self.device = current_device(mesh.device_type)

    def gather(self, items: Sequence[Item], locals_: Sequence[Tensor]) -> list[Tensor | None]:
        """Assemble tensors on their owners; returns those that this rank owns, else None.

        Args:
            items: the same on all ranks of the mesh.
            locals_: this rank's part of each.
        """
        whole: list[Tensor | None] = [None] * len(items)
        for dtype in dict.fromkeys(item.layout.dtype for item in items):
            chosen = [i for i, item in enumerate(items) if item.layout.dtype == dtype]
            here = [items[i] for i in chosen]
            pieces: list[Pieces | None] = [
                [locals_[i].to(self.device, non_blocking=True).reshape(-1)] for i in chosen
            ]
            for position, dim in enumerate(self.dims):
                pieces = self._collect(here, pieces, dim, self.dims[:position], dtype)
            for i, item, found in zip(chosen, here, pieces, strict=True):
                if found is not None:
                    whole[i] = self._assemble(item.layout, found)
        return whole

    def _collect(
        self,
        items: Sequence[Item],
        pieces: Sequence[Pieces | None],
        dim: int,
        before: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Pieces | None]:
        """Send what this rank has along one mesh dim to the rank with the owner's coordinate."""
        mine, size = self.coordinate[dim], self.mesh.size(dim)
        cuts = [item.layout.cut.cuts[dim] for item in items]
        stays = [
            found is not None and item.owner[dim] == mine
            for item, found in zip(items, pieces, strict=True)
        ]
        if not any(cuts):
            return [found if stay else None for found, stay in zip(pieces, stays, strict=True)]
        sends: list[Pieces] = [[] for _ in range(size)]
        for item, found, cut in zip(items, pieces, cuts, strict=True):
            if found is not None and cut:
                sends[item.owner[dim]] += found
        expected = [
            [
                items[i].layout.cut.numels(at(self.coordinate, dim, peer), before)
                for i in range(len(items))
                if stays[i] and cuts[i]
            ]
            for peer in range(size)
        ]
        received = self._all_to_all(dim, sends, expected, dtype)
        result: list[Pieces | None] = []
        arrived = 0
        for found, stay, cut in zip(pieces, stays, cuts, strict=True):
            if stay and cut:
                result.append([piece for peer in received for piece in peer[arrived]])
                arrived += 1
            else:
                result.append(found if stay else None)
        return result

    def scatter(self, items: Sequence[Item], whole: Sequence[Tensor | None]) -> list[Tensor]:
        """Scatter whole tensors from their owners; returns this rank's parts.

        Args:
            items: the same on all ranks of the mesh.
            whole: the tensors that this rank owns; None for the others.
        """
        parts: list[Tensor | None] = [None] * len(items)
        for dtype in dict.fromkeys(item.layout.dtype for item in items):
            chosen = [i for i, item in enumerate(items) if item.layout.dtype == dtype]
            here = [items[i] for i in chosen]
            pieces = [self._take_apart(items[i].layout, whole[i]) for i in chosen]
            for position in reversed(range(len(self.dims))):
                dim, before = self.dims[position], self.dims[:position]
                pieces = self._hand_out(here, pieces, dim, before, dtype)
            for i, item, found in zip(chosen, here, pieces, strict=True):
                assert found is not None
                parts[i] = found[0].view(item.layout.local_shape)
        return [part for part in parts if part is not None]

    def _hand_out(
        self,
        items: Sequence[Item],
        pieces: Sequence[Pieces | None],
        dim: int,
        before: tuple[int, ...],
        dtype: torch.dtype,
    ) -> list[Pieces | None]:
        """The reverse of `_collect`; if the dim replicates a tensor, all its ranks get a copy."""
        size = self.mesh.size(dim)
        sends: list[Pieces] = [[] for _ in range(size)]
        expected: list[list[list[int]]] = [[] for _ in range(size)]
        takes_part = []
        for item, found in zip(items, pieces, strict=True):
            cut = item.layout.cut
            if found is not None:
                share = len(found) // size
                for peer in range(size):
                    theirs = found[peer * share : (peer + 1) * share] if cut.cuts[dim] else found
                    sends[peer] += theirs
            takes_part.append(all(self.coordinate[d] == item.owner[d] for d in before))
            if takes_part[-1]:
                expected[item.owner[dim]].append(cut.numels(self.coordinate, before))
        received = [iter(peer) for peer in self._all_to_all(dim, sends, expected, dtype)]
        return [
            next(received[item.owner[dim]]) if takes else None
            for item, takes in zip(items, takes_part, strict=True)
        ]

    def _all_to_all(
        self,
        dim: int,
        sends: Sequence[Pieces],
        expected: Sequence[Sequence[Sequence[int]]],
        dtype: torch.dtype,
    ) -> list[list[Pieces]]:
        """One exchange among the ranks of a mesh dim.

        Args:
            dim: the mesh dim.
            sends: for each of these ranks, the pieces that go to it.
            expected: for each of these ranks, the sizes of the pieces of each item that it sends.
            dtype: the dtype of all pieces.

        Returns:
            For each of these ranks, the pieces of each item that it sent.
        """
        flat = [piece for peer in sends for piece in peer]
        source = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self.device)
        out_numels = [sum(map(sum, peer)) for peer in expected]
        target = torch.empty(sum(out_numels), dtype=dtype, device=self.device)
        in_numels = [sum(piece.numel() for piece in peer) for peer in sends]
        group = self.mesh.get_group(dim)
        sent, received = source, target
        if dtype.is_floating_point and dtype.itemsize == 1:  # gloo does not support float8
            sent, received = source.view(torch.uint8), target.view(torch.uint8)
        with explained(_CALL, group):
            dist.all_to_all_single(received, sent, out_numels, in_numels, group=group)
        pieces = iter(target.split([n for peer in expected for item in peer for n in item]))
        return [[[next(pieces) for _ in item] for item in peer] for peer in expected]

    def _assemble(self, layout: Layout, pieces: Iterable[Tensor]) -> Tensor:
        cut = layout.cut
        whole = torch.empty(layout.shape, dtype=layout.dtype, device=self.device)
        origins = cut.origins(self.coordinate, self.dims)
        for origin, piece in zip(origins, pieces, strict=True):
            box = cut.box(origin)
            part_of(whole, box).copy_(piece.view(box.shape))
        return whole

    def _take_apart(self, layout: Layout, whole: Tensor | None) -> Pieces | None:
        if whole is None:
            return None
        if tuple(whole.shape) != layout.shape:
            raise ValueError(f"Expected a tensor of shape {layout.shape}, got {whole.shape}")
        whole = whole.to(self.device, layout.dtype)
        cut = layout.cut
        origins = cut.origins(self.coordinate, self.dims)
        return [part_of(whole, cut.box(origin)).reshape(-1) for origin in origins]
