"""Parameters whose shards lie side by side, and the flat tensors over them.

A unit keeps the shards of its parameters side by side in one storage, and its gradients likewise. A
*block* is a list of parameters that lie side by side in both. Nothing here asks a unit how its
storage is laid out: addresses tell, so blocks end where there is padding, where a gradient is
missing, and where a user has put other memory.

A step has to find out where the gradients are now. What that costs is not arithmetic but memory:
every object that is looked at comes from far away. Therefore a block whose gradients are all in one
`Pack` compares their identities, and asks the pack for its address; others look at each address.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter, is_, itemgetter, sub
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dtensor.memory import Pack, at_address

Signature = tuple[Any, ...]
spec_of, local_of = attrgetter("_spec"), attrgetter("_local_tensor")
# What torch keeps in the ``__dict__`` of a DTensor.
OWN = {"_local_tensor", "_spec"}
# A flat tensor of more would not stay in the cache of a core from one operation to the next, and
# what a step allocates for its results would be larger.
MERGED_BYTES = 512 * 1024
_kind_of = attrgetter("__class__", "dtype", "device")


@dataclass
class History:
    """What the steps so far have shown about the parameters of a group.

    Attributes:
        joins: whether small blocks are copied together, which takes memory between steps.
        uses: of plans.
        misses: looks that found gradients outside of packs.
        apart: ids of parameters whose gradients were side by side by chance: separate blocks.
        alone: ids of parameters that had no gradient while others of their run had one: they may
            be one tensor with their block, not with others.
        firsts: ids of parameters where blocks begin, since only they or only those that lie before
            them had gradients in some step.
    """

    joins: bool = True
    uses: int = 0
    misses: int = 0
    apart: set[int] = field(default_factory=set)
    alone: set[int] = field(default_factory=set)
    firsts: set[int] = field(default_factory=set)

    def may_join(self, before: Tensor, own: Tensor) -> bool:
        """Whether two parameters may be in one block, if they lie side by side."""
        return id(own) not in self.firsts and self.apart.isdisjoint((id(before), id(own)))

    def note_missing(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Of a block: where gradients begin or end to be missing, blocks will begin."""
        # A unit of several that are side by side may take turns with them, as experts do.
        missing = [grad is None for grad in grads]
        changes = zip(params[1:], pairwise(missing), strict=True)
        self.firsts.update(id(param) for param, (before, own) in changes if before != own)


class FlatPiece:
    """A parameter with a gradient, as a part of a block that has yet to be found."""

    __slots__ = ("address", "grad", "grad_address", "grad_dtype", "local", "param", "signature")

    def __init__(self, param: DTensor, grad: DTensor, signature: Signature) -> None:
        self.param, self.grad = param, grad
        self.local = param._local_tensor
        self.address = self.local.data_ptr()
        self.grad_address = grad._local_tensor.data_ptr()
        self.grad_dtype = grad._local_tensor.dtype
        attached = tuple(
            (name, id(value)) for name, value in vars(param).items() if name not in OWN
        )
        kind = (
            self.local.device,
            self.local.dtype,
            self.grad_dtype,
            param.requires_grad,
            attached,
        )
        self.signature = (kind, signature)

    @property
    def numel(self) -> int:
        return self.local.numel()

    @property
    def end(self) -> int:
        return self.address + self.local.nbytes

    def follows(self, other: FlatPiece) -> bool:
        """Whether it lies right behind another piece, with its gradient."""
        ends = (
            other.end,
            other.grad_address + other.numel * other.grad_dtype.itemsize,
        )
        return (self.address, self.grad_address) == ends and self.signature == other.signature


class FlatBlock:
    """Parameters that lie side by side, with their gradients.

    Attributes:
        params: those without elements come last; they lie nowhere.
        numel: elements of all of them.
        grad_dtype: of the gradients.
        grad_address: where the gradients begin; None: there are none in this step.
        in_pack: whether a pack told.
        part_of_pack: takes the gradients from the DTensors of the pack.
    """

    def __init__(
        self, solid: Sequence[FlatPiece], empty: Sequence[FlatPiece], packs: Mapping[int, Pack]
    ) -> None:
        pieces = [*solid, *empty]
        self.params = [piece.param for piece in pieces]
        self.sources = [piece.local for piece in pieces]
        self.address = pieces[0].address
        ends = list(accumulate(piece.numel for piece in pieces))
        self.offsets, self.numel = [0, *ends[:-1]], ends[-1]
        self._like, self.grad_dtype = pieces[0].local, pieces[0].grad_dtype
        self._kind = (Tensor, self.grad_dtype, self._like.device)
        self._specs = [piece.grad._spec for piece in pieces]
        self._grad_offsets = [
            offset * self.grad_dtype.itemsize for offset in self.offsets[: len(solid)]
        ]
        self.grad_address: int | None = pieces[0].grad_address if solid else 0
        self._grad = torch.empty(0, dtype=self.grad_dtype, device=self._like.device)
        self._grad_at = -1
        self.in_pack = False
        self._grad_ids = array("Q")
        self.pack: weakref.ref[Pack] | None = None
        self.part_of_pack = _those_at([0])  # until one is found
        self.find_pack(array("Q", [id(piece.grad) for piece in pieces]), packs)

    def find_pack(self, ids: array[int], packs: Mapping[int, Pack]) -> None:
        """Find what the gradients, which are side by side, are part of.

        Args:
            ids: of the gradients.
            packs: by the ids of their DTensors.
        """
        self._grad_ids, self.pack = ids, None
        found = packs.get(ids[0])
        if found is None or any(packs.get(i) is not found for i in ids):
            return
        assert self.grad_address is not None
        offset = self.grad_address - found.storage.data_ptr()
        nbytes = self.numel * self.grad_dtype.itemsize
        if nbytes and not 0 <= offset <= found.storage.nbytes() - nbytes:
            return  # somebody has given these DTensors other memory
        # Weakly: the owner may have left its storage to a user who keeps gradients, and a reference
        # would keep it. While it lives, nothing else can have the ids.
        self.pack, self._offset = weakref.ref(found), offset
        places = {id(dtensor): place for place, dtensor in enumerate(found.dtensors)}
        self.part_of_pack = _those_at([places[i] for i in ids])

    @property
    def pack_address(self) -> int:
        """Where the pack was at the last look, which found the gradients in it."""
        assert self.grad_address is not None
        return self.grad_address - self._offset

    @property
    def nbytes(self) -> int:
        return self.numel * self._like.itemsize

    def values(self) -> Tensor:
        """The parameters as one tensor; the memory stays theirs."""
        return self._flat(self.address, self._like)

    def gradient(self) -> Tensor:
        """The gradients as one tensor; the memory stays theirs."""
        assert self.grad_address is not None
        if self._grad_at != self.grad_address:
            # Nothing may refer to gradients between steps: code that reuses their memory counts.
            self._grad = self._flat(self.grad_address, self._grad)
            self._grad_at = self.grad_address
        return self._grad

    def _flat(self, address: int, like: Tensor) -> Tensor:
        return at_address(address, self.numel, like) if self.numel else like.new_empty(0)

    def look(self, grads: Sequence[Tensor | None], ids: array[int]) -> bool:
        """Find out where the gradients are now.

        Args:
            grads, ids: of the parameters, what ``.grad`` is now.

        Returns:
            Whether all of them are side by side, or all are missing.
        """
        pack = self.pack() if self.pack is not None and ids == self._grad_ids else None
        self.in_pack = pack is not None
        if pack is not None:
            self.grad_address = pack.storage.data_ptr() + self._offset
            return True
        if not any(grad is not None for grad in grads):
            self.grad_address = None
            return True
        return self._look_at_addresses(grads)

    def _look_at_addresses(self, grads: Sequence[Any]) -> bool:
        try:
            if not all(map(is_, map(spec_of, grads), self._specs)):
                return False
        except AttributeError:  # missing, or a user's own that is not a DTensor
            return False
        parts = list(map(local_of, grads[: len(self._grad_offsets)]))
        if set(map(_kind_of, parts)) - {self._kind} or not all(map(Tensor.is_contiguous, parts)):
            return False
        begins = set(map(sub, map(Tensor.data_ptr, parts), self._grad_offsets))
        self.grad_address = begins.pop() if begins else 0
        return not begins


def _those_at(places: Sequence[int]) -> Callable[[list[Tensor]], Sequence[Tensor]]:
    """What takes the items at ``places`` from a list, in this order."""
    first, stop = places[0], places[0] + len(places)
    if places == list(range(first, stop)):
        return itemgetter(slice(first, stop))
    return itemgetter(*places)  # of one place it would return no sequence: above


def find_blocks(
    pieces: Sequence[FlatPiece], packs: Mapping[int, Pack], history: History
) -> list[tuple[Signature, FlatBlock]]:
    """The blocks of pieces, each with what must agree between the pieces of a run."""
    chains: list[list[FlatPiece]] = []
    for piece in sorted((p for p in pieces if p.numel), key=lambda p: p.address):
        last = chains[-1][-1] if chains else None
        if (
            last
            and history.may_join(last.param, piece.param)
            and piece.follows(last)
            and piece.end - chains[-1][0].address <= MERGED_BYTES
        ):
            chains[-1].append(piece)
        else:
            chains.append([piece])
    # Parameters without elements on this rank lie nowhere: they join any block that agrees.
    empty: dict[Signature, list[FlatPiece]] = {}
    for piece in pieces:
        if not piece.numel:
            empty.setdefault(piece.signature, []).append(piece)
    found = [
        (solid[0].signature, FlatBlock(solid, empty.pop(solid[0].signature, []), packs))
        for solid in chains
    ]
    return found + [(signature, FlatBlock([], rest, packs)) for signature, rest in empty.items()]
