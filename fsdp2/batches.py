"""How to divide a batch among ranks of different speeds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isfinite


def split_batch(global_batch: int, speeds: Sequence[float]) -> list[int]:
    """Divide a batch among ranks so that the last rank finishes as early as possible.

    Each sample goes to the rank that would finish it first. Each rank gets at least one sample,
    since all ranks must run the same number of forwards and backwards.

    If the loss is a mean over the rank's samples, multiply it by ``sizes[rank] * len(sizes) /
    global_batch`` before backward. The mean of gradients over ranks is then the gradient of the
    mean over the whole batch.

    Args:
        global_batch: total number of samples of all ranks.
        speeds: the speed of each data-parallel rank in any unit, for example samples per second.
            Must be equal on all ranks.

    Returns:
        The number of samples of each rank; their sum is ``global_batch``. With equal speeds, sizes
        differ by at most one, and the first ranks get the larger ones.

    Raises:
        TypeError: if ``global_batch`` is not an int.
        ValueError: if there are no ranks, or fewer samples than ranks; or for a speed that is not
            positive and finite.

    Example:
        >>> split_batch(12, [1.0, 1.0, 0.5, 0.5])  # two hosts, one at half the speed
        [4, 4, 2, 2]
    """
    if isinstance(global_batch, bool) or not isinstance(global_batch, int):
        raise TypeError(f"global_batch must be an int, got {global_batch!r}")
    if not speeds:
        raise ValueError("speeds is empty: it has one number for each rank")
    for rank, speed in enumerate(speeds):
        if not (speed > 0 and isfinite(speed)):
            raise ValueError(f"speeds[{rank}] must be positive and finite, got {speed}")
    if global_batch < len(speeds):
        raise ValueError(
            f"A batch of {global_batch} samples is too small for {len(speeds)} ranks: each of them "
            "needs one. Use a larger batch or fewer ranks"
        )
    sizes = [1] * len(speeds)
    ends = [(2 / speed, rank) for rank, speed in enumerate(speeds)]  # with one sample more
    heapq.heapify(ends)
    for _ in range(global_batch - len(speeds)):
        rank = ends[0][1]
        sizes[rank] += 1
        heapq.heapreplace(ends, ((sizes[rank] + 1) / speeds[rank], rank))
    return sizes
