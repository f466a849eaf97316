"""What torch's allocator reserves for a step, and what plans make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: torch does not plan", allow_module_level=True)

from by_keywords import estimate, plan
from fsdp2.planning import find_hardware
from fsdp2.planning.trace.allocator import ALIGN, MIB, Allocator
from models import LinearBlocks

H100 = find_hardware("h100")


def reserved(*sizes: int, stream: str = "compute") -> int:
    memory = Allocator()
    for size in sizes:
        memory.allocate(size, stream)
    return memory.reserved


def test_segments_have_the_sizes_of_torch() -> None:
    assert reserved() == reserved(0) == 0
    assert reserved(1) == reserved(MIB) == 2 * MIB
    assert reserved(*[ALIGN] * 4096) == 2 * MIB
    assert reserved(*[ALIGN] * 4097) == 4 * MIB
    assert reserved(MIB + 1) == reserved(10 * MIB - ALIGN) == 20 * MIB
    assert reserved(10 * MIB) == 10 * MIB
    assert reserved(11 * MIB) == 12 * MIB
    assert reserved(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB) == 20 * MIB
    assert reserved(MIB, 2 * MIB) == 22 * MIB  # small and large ones are apart


def test_the_smallest_block_that_fits_is_taken_and_split() -> None:
    memory = Allocator()
    large, small = memory.allocate(64 * MIB), memory.allocate(32 * MIB)
    memory.free(large)
    memory.free(small)
    memory.allocate(30 * MIB)  # of the 32; 2 MiB are left
    memory.allocate(63 * MIB + 1)  # all 64: a remainder of up to 1 MiB is not split off
    assert memory.reserved == 96 * MIB
    assert memory.allocated == 94 * MIB
    memory.allocate(2 * MIB)
    assert memory.reserved == 96 * MIB
    memory.allocate(2 * MIB)
    assert memory.reserved == 116 * MIB


def test_free_neighbours_merge_and_others_do_not() -> None:
    memory = Allocator()
    memory.free(memory.allocate(40 * MIB))
    parts = [memory.allocate(10 * MIB) for _ in range(4)]
    assert memory.reserved == 40 * MIB
    memory.free(parts[0])
    memory.free(parts[2])
    memory.free(memory.allocate(20 * MIB))  # the holes are not one: fragmentation
    assert memory.reserved == 60 * MIB
    memory.free(parts[1])
    memory.free(parts[3])
    memory.allocate(40 * MIB)
    assert memory.reserved == 60 * MIB


def test_streams_keep_what_they_free() -> None:
    memory = Allocator()
    memory.free(memory.allocate(40 * MIB, "all-gather"))
    memory.allocate(40 * MIB, "compute")
    assert memory.reserved == 80 * MIB
    memory.allocate(40 * MIB, "all-gather")
    assert memory.reserved == 80 * MIB


def blocks() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return LinearBlocks(1024), torch.empty(512, 1024)


@pytest.mark.parametrize("options", [
    {},
    {"micro_batches": 3, "accumulation": "sharded"},
    {"micro_batches": 3, "accumulation": "unsharded", "activation_checkpointing": "full"},
    {"strategy": "none"},
], ids=str)  # fmt: skip
def test_at_least_what_lives_is_reserved(options: Any) -> None:
    model, batch = blocks()
    made = estimate(model, 4, batch, **options).worst
    assert made.reserved is not None
    assert made.peak.total <= made.reserved < 2.2 * made.peak.total
    assert made.reserved % (2 * MIB) == 0
    assert estimate(model, 4, batch, device_type="cpu", **options).worst.reserved is None


def test_estimates_print_what_is_reserved() -> None:
    model, batch = blocks()
    made = estimate(model, 4, batch)
    assert "reserved" in str(made)
    assert "reserved" not in str(estimate(model, 4, batch, device_type="cpu"))
    assert made.to_dict()["ranks"][0]["reserved"] == made.ranks[0].reserved


def test_a_plan_that_fits_has_room_for_its_libraries() -> None:
    model, batch = blocks()
    made = plan(model, batch, H100, 8)
    step = made.step
    communicators = 1
    assert step.libraries == H100.library_bytes(communicators)
    assert step.libraries == int(
        H100.context_bytes + H100.workspace_bytes + H100.channels * H100.channel_bytes
    )
    assert step.needed_bytes == step.reserved + step.libraries == made.chosen.needed_bytes
    assert made.memory_budget == H100.memory_bytes
    assert " allocated; " in str(made)
    assert " of libraries of 80.0 GiB" in str(made)
    exact = replace(H100, memory_bytes=made.chosen.needed_bytes)
    for hardware, fits in (
        (exact, True),
        (replace(exact, memory_bytes=exact.memory_bytes - 1), False),
        (replace(exact, context_bytes=exact.context_bytes + 1), False),
    ):
        outcomes = plan(model, batch, hardware, 8).outcomes
        found = [o.fits for o in outcomes if o.candidate == made.chosen.candidate]
        assert found in ([fits], [])  # some are not tried any more
        assert all(o.fits == (o.needed_bytes <= hardware.memory_bytes) for o in outcomes)
    with pytest.raises(ValueError, match=r"Nothing fits into .*: the minimum is"):
        plan(model, batch, replace(H100, memory_bytes=H100.library_bytes(1)), 8)


def test_memory_of_libraries_may_be_zero_and_not_less() -> None:
    none = replace(H100, context_bytes=0, workspace_bytes=0, channel_bytes=0)
    assert none.library_bytes(3) == 0
    with pytest.raises(ValueError, match="context_bytes must not be negative, got -1"):
        replace(H100, context_bytes=-1)
    model, batch = blocks()
    made = plan(model, batch, replace(none, caches_memory=False), 8)
    assert made.chosen.needed_bytes == made.chosen.peak_bytes


@pytest.mark.long
def test_published_reserves_are_predicted() -> None:
    from benchmarks.published import ROWS, predict

    rows = [row for row in ROWS if row.what == "GiB"]
    assert len(rows) == 4
    for row in rows:
        assert predict(row) == pytest.approx(row.published, rel=0.06)
