"""Maps ranks to the boxes of a tensor that they hold, according to its DTensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ..dtensor.boxes import Box
from ..dtensor.placement import box_of, slices_like
from .p2p import P2PBatch


@dataclass(frozen=True)
class Spread:
    """How a tensor is split over ranks: an array of ranks, a dim per mesh dim, and their boxes.

    Attributes:
        shape: shape of the whole tensor.
        ranks: global ranks.
        placements: one per dim of ``ranks``.
        boxes: the box at each coordinate of ``ranks``.
        name: the tensor's name, for messages.
    """

    shape: tuple[int, ...]
    ranks: Tensor
    placements: tuple[Placement, ...]
    boxes: list[tuple[tuple[int, ...], Box]]
    name: str

    def parts(self, rank: int) -> list[tuple[int, Box]]:
        """(sender, box) pairs that give ``rank`` the whole tensor, from the nearest replicas."""
        mine = self._coordinate(rank)
        replicated = [d for d, p in enumerate(self.placements) if isinstance(p, Replicate)]
        return [
            (int(self.ranks[c]), box)
            for c, box in self.boxes
            if box.numel and all(c[d] == mine[d] for d in replicated)
        ]

    @cached_property
    def holders(self) -> list[tuple[Box, list[int]]]:
        """Every box with the ranks that hold it."""
        found: dict[Box, list[int]] = {}
        for c, box in self.boxes:
            if box.numel:
                found.setdefault(box, []).append(int(self.ranks[c]))
        return list(found.items())

    def of_rows(self, shape: tuple[int, ...]) -> Spread:
        """The spread of a tensor subclass's inner tensor that scales with the rows of the whole.
        It is cut where its class cuts it, which is not always where `torch.chunk` would.

        Raises:
            ValueError: if a shard boundary falls inside a row of the inner tensor.
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
        """The spread of an inner tensor that is the same on all ranks."""
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


def spread_of(tensor: DTensor, name: str, p2p: P2PBatch, made: dict[Any, Spread]) -> Spread:
    """The spread of ``tensor`` over the ranks of ``p2p``; ``made`` caches earlier results."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    key = (mesh, placements, tensor.shape)
    if key not in made:
        # The other slices of a larger mesh hold the same values.
        ranks, dims = slices_like(mesh, p2p.ranks), (*placements, Replicate())
        shape = tuple(tensor.shape)
        made[key] = Spread(shape, ranks, dims, _boxes(shape, ranks, dims, name), name)
    return made[key]


def _boxes(
    shape: tuple[int, ...], ranks: Tensor, placements: tuple[Placement, ...], name: str
) -> list[tuple[tuple[int, ...], Box]]:
    mesh = tuple(ranks.shape)
    return [(c, box_of(shape, mesh, placements, c, name)) for c in product(*map(range, mesh))]
