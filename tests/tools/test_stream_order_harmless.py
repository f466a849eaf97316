"""Three faults that no delay shows on the test device are harmless: what they touch is not read.

`stream_mutations_on_device` finds them to change nothing, which may be luck of the delays. So the
memory in question is made NaN, and parameters must still be what they are without the fault, bit
by bit. A control puts the same NaNs where they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import stream_mutations_on_device
import testdev
from fsdp2.comm.streams import DeviceStreams
from fsdp2.runtime.runtime import Runtime
from fsdp2.runtime.states import State
from fsdp2.runtime.unit import Forward, Unit
from harness import ours_only, run_on, stop_all
from stream_mutations import PLANS, Patch, _drop_in_flight, after, before, nothing, replace

pytestmark = [
    ours_only("breaks what this runtime does"),
    pytest.mark.long,
    pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or ""),
]
SEEDS = 5
_num_spoiled = 0


def spoil(unit: Unit) -> None:
    """Make what is being gathered NaN, in stream order after the gather."""
    global _num_spoiled
    with unit.runtime.streams.gathering(), torch.no_grad():
        for bucket in unit.buckets:
            for storage in () if bucket.gathered is None else bucket.gathered.storages:
                if storage.nbytes():
                    view = torch.empty(0, dtype=torch.uint8, device=unit.device).set_(storage)
                    view.fill_(255)
                    _num_spoiled += 1


def unused_prefetch() -> Patch:
    """A prefetch that forward does not use is not waited for, and gathers NaNs."""

    def free(unit: Unit, *_: Any, **__: Any) -> None:
        if unit.state is State.GATHERING:
            spoil(unit)
        _drop_in_flight(unit)

    return before(Unit, "reshard", free)


def prefetch_of_what_is_done() -> Patch:
    """Backward prefetches units that it has been through, and gathers NaNs."""
    follows = Forward.follows

    def follows_or_spoils(self: Forward, unit: Unit) -> bool:
        if follows(self, unit):
            return True
        if unit.state is State.SHARDED:
            unit.start_unshard(unit.runtime.streams)
            spoil(unit)
        return False

    return replace(Forward, "follows", follows_or_spoils)


def copies_of_a_failed_backward() -> Patch:
    """The host does not wait for copies of shards; while they are in flight, the shards are NaN."""
    reset = Runtime.reset

    def spoiled_reset(self: Runtime, **options: Any) -> None:
        global _num_spoiled
        with nothing(DeviceStreams, "synchronize"):
            reset(self, **options)
        shards = [bucket.shards for unit in self.units for bucket in unit.buckets]
        before = [shard.clone() for shard in shards]
        with torch.no_grad():
            for shard in shards:
                shard.fill_(float("nan"))
                _num_spoiled += 1
            for stream in (self.streams.gather, self.streams.reduce, self.streams.all_reduce):
                stream.synchronize()
            for shard, values in zip(shards, before, strict=True):
                shard.copy_(values)

    return replace(Runtime, "reset", spoiled_reset)


def every_gather() -> Patch:
    return after(Unit, "start_unshard", lambda unit, _: spoil(unit))


# By name: the fault, and the plan on which it shows to the checker of traces.
CASES: dict[str, tuple[Callable[[], Patch], str]] = {
    "mispredicted prefetch": (unused_prefetch, "mispredicts"),
    "units already through backward are prefetched": (prefetch_of_what_is_done, "in_backward"),
    "after a failed backward the host does not wait": (
        copies_of_a_failed_backward,
        "offload_fails",
    ),
    "control: what is gathered is used": (every_gather, "plain"),
}


def outcomes(name: str) -> list[tuple[int, bool]]:
    """For each seed: how often memory was made NaN, and whether parameters are as without that."""
    global _num_spoiled
    patch, plan = CASES[name]
    expected = stream_mutations_on_device.trained(PLANS[plan], seed=None)
    found = []
    for seed in range(SEEDS):
        _num_spoiled = 0
        with patch():
            values = stream_mutations_on_device.trained(PLANS[plan], seed)
        same = all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        found.append((_num_spoiled, same))
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_a_harmless_fault_touches_is_not_read(name: str) -> None:
    of_ranks = run_on(2, outcomes, name, device=testdev.NAME)
    stop_all()  # what was made NaN is not for the tests that follow
    is_harmless = not name.startswith("control")
    for num_spoiled, same in (seed for seeds in of_ranks for seed in seeds):
        assert num_spoiled > 0
        assert same == is_harmless
