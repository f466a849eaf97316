"""How to divide a batch among ranks of different speeds."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import isfinite


def split_batch(global_batch: int, speeds: Sequence[float]) -> list[int]:
    """Divide a batch among ranks so that the slowest of them ends as early as possible.

    Every sample goes to the rank that would end first with it. Each rank gets at least one: ranks
    have to run the same number of forwards and backwards, also those that are slow.

    With a mean loss over the rank's own samples, multiply it by ``sizes[rank] * len(sizes) /
    global_batch`` before backward: the mean of gradients over ranks is then the gradient of the
    mean over the whole batch.

    Args:
        global_batch: number of samples of all ranks together.
        speeds: of each data-parallel rank, in any unit: samples per second of equal steps, say.
            The same on all ranks.

    Returns:
        Samples of each rank; their sum is ``global_batch``. Equal speeds: sizes differ by one at
        most, and the first ranks have the larger ones.

    Raises:
        TypeError: if ``global_batch`` is not an int.
        ValueError: if there are fewer samples than ranks, no ranks, or a speed that is not
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
