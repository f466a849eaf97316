"""How long NCCL says that a batch of all-gathers takes: its scheduler and its model of a ring.

Nothing is measured here. The arithmetic is that of NCCL 2.30.x, ring algorithm and simple protocol:

- `deal` is `scheduleCollTasksToPlan` (src/enqueue.cc): the entries of a group call, small ones
  first, are dealt out to channels in cells of a few kilobytes, so that all channels get equal
  bytes. An entry that begins in the middle of a channel's part goes on in the next ones.
- `seconds` is the model of `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` (src/graph/tuning.cc): a
  ring takes a fixed time, a step per rank, and its bytes by the bandwidth; rings on one channel run
  one after the other ("numPipeOps"). Where NCCL estimates how many there are on a channel, this
  counts them. The group is over when its fullest channel is.

`sharding.layout.direct_limit` decides with a few of these numbers; `tests/core/test_batches.py`
compares what it chooses with everything packed and everything direct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_TRAFFIC = 32 * 1024  # bytes on a channel that are worth it (MinTrafficPerChannel)
MEMORY_BYTES_PER_S = 2.5e12  # read and written by copies on an H100


@dataclass(frozen=True)
class Links:
    """The ranks of a group, and what NCCL finds between them.

    Attributes:
        channels: rings that run side by side.
        bytes_per_s: that a rank sends, over all channels.
    """

    num_ranks: int
    num_hosts: int
    channels: int
    bytes_per_s: float

    @property
    def ring_s(self) -> float:
        """The time of a ring without its bytes: a fixed one, and of steps in and between hosts."""
        between = self.num_hosts - 1
        return 8.4e-6 + 3.4e-6 * (self.num_ranks - 1 - between) + 14e-6 * between


def h100(num_ranks: int) -> Links:
    """Hosts with 8 H100, and 400 Gb/s of network for each."""
    if num_ranks <= 8:
        return Links(num_ranks, 1, channels=24, bytes_per_s=360e9)
    return Links(num_ranks, num_ranks // 8, channels=16, bytes_per_s=45e9)


def deal(slices: Sequence[int], links: Links) -> list[list[int]]:
    """The bytes that a rank sends on each channel, of each entry that is dealt to it.

    Args:
        slices: bytes that a rank sends of each entry.
    """
    ranks, last = links.num_ranks, links.channels - 1
    traffic = [max(MIN_TRAFFIC, nbytes * ranks) for nbytes in slices]
    part = _up(sum(traffic) // links.channels, 16)  # of a channel
    cell = _up(-(-MIN_TRAFFIC // ranks), 16)
    cells_of_part = -(-part // (cell * ranks))
    dealt: list[list[int]] = [[] for _ in range(links.channels)]
    channel, filled = 0, 0  # the channel that is being filled, and its traffic so far
    for nbytes in sorted(slices):
        cells = -(-nbytes // cell)
        # What is left of this channel's part; then whole parts; then a rest. The last channel
        # takes what comes, and if there are too few channels, the others take more than a part.
        room = cells if channel == last else min(cells, -(-(part - filled) // (cell * ranks)))
        each = min(cells, cells_of_part)
        rest = cells - room
        pieces = [room, *[each] * (rest // each), *([rest % each] if rest % each else [])]
        if channel + len(pieces) > links.channels:
            more = last - channel
            each = rest // more
            pieces = [room, *[each] * (more - 1), each + rest % more]
        if not room:
            pieces, channel, filled = pieces[1:], channel + 1, 0
        for number, piece in enumerate(pieces):
            dealt[channel + number].append(piece * cell)
        channel += len(pieces) - 1
        filled = pieces[-1] * cell * ranks + (filled if len(pieces) == 1 else 0)
        if filled >= part and channel != last:
            channel, filled = channel + 1, 0
    return dealt


def seconds(slices: Sequence[int], links: Links) -> float:
    """The time of a group of all-gathers, of which a rank sends ``slices``."""
    per_channel = links.bytes_per_s / links.channels
    return max(
        sum(links.ring_s + (links.num_ranks - 1) * nbytes / per_channel for nbytes in entries)
        for entries in deal(slices, links)
    )


def copy_seconds(nbytes: int) -> float:
    """The time of copying ``nbytes`` on the device: read once, written once."""
    return 2 * nbytes / MEMORY_BYTES_PER_S


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
