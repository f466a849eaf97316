"""Whether what is still gathered is what the shards hold, as all ranks see it.

A forward that begins with gathered parameters (kept across micro-batches, across steps because they
are frozen, or gathered by hand) gathers those again that were written since. Version counters tell,
and each rank knows its own only: a write to the rows of one rank has to make all ranks gather, or
they would wait for each other in different collectives. So they ask each other, on the host: by an
all-reduce of a few bytes where the group has a backend for the CPU, otherwise through the store.
It is done only where something is gathered when a forward begins, which usually nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .failures import explained
from .groups import timeout_of
from .meeting import Meeting, can_meet
from .storage import Bucket
from .unit import State, Unit

_WHAT = "find out whether gathered parameters were written"
_meetings: WeakKeyDictionary[dist.ProcessGroup, Meeting] = WeakKeyDictionary()


def find_written(units: Sequence[Unit]) -> tuple[list[Unit], list[tuple[Unit, Bucket]]]:
    """A collective over the ranks that share what is gathered; of others it asks nothing.

    Returns:
        The units, and of those kept beyond their units' use the buckets, that some rank has written
        shards of since they were gathered.
    """
    gathered = [unit for unit in units if unit.state is not State.SHARDED]
    held = [(unit, bucket) for unit in units for bucket in unit.buckets if bucket.held]
    if not gathered and not held:
        return [], []
    written = [unit.is_stale() for unit in gathered] + [not bucket.holds() for _, bucket in held]
    concerned = [unit.buckets for unit in gathered] + [[bucket] for _, bucket in held]
    groups = dict.fromkeys(
        bucket.mesh.shard_group
        for buckets in concerned
        for bucket in buckets
        if bucket.mesh.shard_group is not None
    )
    for group in groups:
        which = [
            i
            for i, buckets in enumerate(concerned)
            if any(bucket.mesh.shard_group is group for bucket in buckets)
        ]
        device = concerned[which[0]][0].device
        found = _on_any_rank([written[i] for i in which], group, device)
        for i, anywhere in zip(which, found, strict=True):
            written[i] = anywhere
    num = len(gathered)
    return (
        [unit for unit, is_written in zip(gathered, written[:num], strict=True) if is_written],
        [pair for pair, is_written in zip(held, written[num:], strict=True) if is_written],
    )


def _on_any_rank(flags: list[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """For each flag whether it is set on any rank of ``group``."""
    if not isinstance(group, dist.ProcessGroup) or not can_meet(dist.get_backend(group)):
        return flags  # an estimate, or a world whose ranks are one program
    if any(device.type == "cpu" for device in group._device_types):
        found = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        with explained(_WHAT, group):
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found.bool().tolist()
    meeting = _meetings.get(group)
    if meeting is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        meeting = _meetings[group] = Meeting(
            "written", ranks, timeout_of(group, device).total_seconds()
        )
    said = {str(i): {"": str(flag)} for i, flag in enumerate(flags)}
    differ = meeting.compare(said, _WHAT)
    return [flag or str(i) in differ for i, flag in enumerate(flags)]
