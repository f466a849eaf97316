"""Which rank has which box of a tensor, as its DTensor says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ..comm.wire import Wire
from ..dtensor.boxes import Box
from ..dtensor.placement import box_of, slices_like


@dataclass(frozen=True)
class Spread:
    """The ranks that hold a tensor, as an array with a dim per mesh dim, and how it is cut.

    Attributes:
        shape: of the whole tensor.
        ranks: global ranks.
        placements: one per dim of ``ranks``.
        boxes: the box at each coordinate of ``ranks``.
        name: of the tensor, for messages.
    """

    shape: tuple[int, ...]
    ranks: Tensor
    placements: tuple[Placement, ...]
    boxes: list[tuple[tuple[int, ...], Box]]
    name: str

    def parts(self, rank: int) -> list[tuple[int, Box]]:
        """Which rank sends which box, so that ``rank`` gets all: the nearest replicas."""
        mine = self._coordinate(rank)
        replicated = [d for d, p in enumerate(self.placements) if isinstance(p, Replicate)]
        return [
            (int(self.ranks[c]), box)
            for c, box in self.boxes
            if box.numel and all(c[d] == mine[d] for d in replicated)
        ]

    @cached_property
    def holders(self) -> list[tuple[Box, list[int]]]:
        """Every box, and the ranks that hold it."""
        found: dict[Box, list[int]] = {}
        for c, box in self.boxes:
            if box.numel:
                found.setdefault(box, []).append(int(self.ranks[c]))
        return list(found.items())

    def of_rows(self, shape: tuple[int, ...]) -> Spread:
        """Of an inner tensor of a tensor subclass, which has as many rows for each row of the
        whole: where its class cuts it, which is not always where `torch.chunk` would.

        Raises:
            ValueError: if a part of the whole does not end where a row of it does.
        """
        rows = self.shape[0]

        def scaled(row: int) -> int:
            if row * shape[0] % rows:
                raise ValueError(f"its blocks do not end at row {row}, where a shard begins")
            return row * shape[0] // rows

        boxes = []
        for c, box in self.boxes:
            start, stop = scaled(box.start[0]), scaled(box.start[0] + box.shape[0])
            rest = shape[1:]
            boxes.append((c, Box((start, *(0 for _ in rest)), (stop - start, *rest))))
        return replace(self, shape=shape, boxes=boxes)

    def of_copies(self, shape: tuple[int, ...]) -> Spread:
        """Of an inner tensor that is the same on all ranks."""
        placements = tuple(Replicate() for _ in self.placements)
        boxes = [(c, Box.whole(shape)) for c, _ in self.boxes]
        return replace(self, shape=shape, placements=placements, boxes=boxes)

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        found = (self.ranks == rank).nonzero()
        if not len(found):
            raise ValueError(
                f"Rank {rank} has no part of '{self.name}', which is on ranks "
                f"{sorted(self.ranks.flatten().tolist())}: choose one of these, and pass group=... "
                "if not all ranks share this model"
            )
        return tuple(found[0].tolist())


def spread_of(tensor: DTensor, name: str, wire: Wire, made: dict[Any, Spread]) -> Spread:
    """Where ``tensor`` is among the ranks of ``wire``; ``made``: what was found for others."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    key = (mesh, placements, tensor.shape)
    if key not in made:
        ranks, dims = mesh.mesh, placements
        if slices_like(mesh, wire.ranks)[1] > 1:
            # On a slice of a larger mesh, whose other slices hold the same.
            ranks, num = _with_other_slices(mesh, wire.ranks)
            dims = (*[Replicate()] * num, *placements)
        shape = tuple(tensor.shape)
        made[key] = Spread(shape, ranks, dims, _boxes(shape, ranks, dims, name), name)
    return made[key]


def _boxes(
    shape: tuple[int, ...], ranks: Tensor, placements: tuple[Placement, ...], name: str
) -> list[tuple[tuple[int, ...], Box]]:
    mesh = tuple(ranks.shape)
    return [(c, box_of(shape, mesh, placements, c, name)) for c in product(*map(range, mesh))]


def _with_other_slices(mesh: Any, ranks: tuple[int, ...]) -> tuple[Tensor, int]:
    """The ranks of all slices like ``mesh``: dims across the slices first, and their number."""
    whole = mesh._get_root_mesh()
    names, coordinate = whole.mesh_dim_names, whole.get_coordinate()
    array, kept = whole.mesh, list(names)
    for name in names:
        if name in mesh.mesh_dim_names:
            continue
        dim = kept.index(name)
        line = whole.mesh[
            tuple(slice(None) if n == name else coordinate[i] for i, n in enumerate(names))
        ]
        if not set(line.tolist()) <= set(ranks):  # another model: a stage of a pipeline
            array = array.select(dim, coordinate[names.index(name)])
            kept.remove(name)
    across = [n for n in kept if n not in mesh.mesh_dim_names]
    order = [kept.index(n) for n in (*across, *mesh.mesh_dim_names)]
    return array.permute(order), len(across)
