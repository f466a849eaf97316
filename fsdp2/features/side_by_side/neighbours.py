"""Small buckets whose shards lie side by side in one block of memory, and their gradients likewise.

This is for optimizers that treat contiguous parameters as one tensor and have asked for it
(`dtensor.memory.ask_side_by_side`). Others would gain nothing, and the gradients in a common block
cannot be freed one bucket at a time. They keep their memory between steps, as gradients so small do
anyway once new memory had another address (`gradients.FREE_MIN_BYTES`).

A block has up to `NEIGHBOURS_BYTES`. A larger one would not stay in a core's cache from one
operation of an optimizer to the next, and a loop over operations would take twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from ...dtensor.memory import Pack, with_own_storage

NEIGHBOURS_BYTES = 512 * 1024


class Neighbours(Pack):
    """The memory of several buckets. As a pack: of their gradients.

    Args:
        numels: elements of the sharded storage of each bucket.
        counts: parameters of each bucket.
        dtype, grad_dtype: of all of them.
        device: where shards live.
    """

    def __init__(
        self,
        numels: Sequence[int],
        counts: Sequence[int],
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._bounds = list(pairwise(accumulate(numels, initial=0)))
        self._places = list(pairwise(accumulate(counts, initial=0)))
        self._shards = torch.zeros(sum(numels), dtype=dtype, device=device)
        self._grad_dtype = grad_dtype
        self._grads: torch.Tensor | None = None
        self._taken: set[int] = set()
        # Of buckets that have none yet, `_NONE`.
        self.dtensors = [_NONE] * sum(counts)

    def shards(self, i: int) -> torch.Tensor:
        """The memory for the shards of bucket ``i``."""
        start, stop = self._bounds[i]
        return with_own_storage(self._shards[start:stop])

    def gradients(self, i: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The memory for its gradients; None if it was left to a user, or they have other dtypes.

        The storage is separate, as references to it are counted.
        """
        if i in self._taken or dtype != self._grad_dtype:
            return None
        self._taken.add(i)
        if self._grads is None:
            self._grads = torch.zeros_like(self._shards, dtype=dtype)
            self.storage = self._grads.untyped_storage()
            self.publish()
        start, stop = self._bounds[i]
        return with_own_storage(self._grads[start:stop])

    def adopt(self, i: int, dtensors: Sequence[torch.Tensor]) -> None:
        """Take the gradients of bucket ``i``; kept even when they are left to a user.

        (Others identify them by their ids, which must not be reused.)
        """
        start, stop = self._places[i]
        self.dtensors[start:stop] = dtensors


class Place(NamedTuple):
    """Which of the neighbours a bucket is."""

    neighbours: Neighbours
    i: int

    def shards(self) -> torch.Tensor:
        return self.neighbours.shards(self.i)

    def gradients(self, dtype: torch.dtype) -> torch.Tensor | None:
        return self.neighbours.gradients(self.i, dtype)

    def adopt(self, dtensors: Sequence[torch.Tensor]) -> None:
        self.neighbours.adopt(self.i, dtensors)


_NONE = torch.empty(0, device="meta")


def is_held(local: torch.Tensor) -> bool:
    """Whether anything but ``local`` itself, which has a separate storage, uses its memory."""
    return _uses(local) != _uses(with_own_storage(torch.empty(1, device="cpu")))


def _uses(local: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(local.untyped_storage()._cdata)
