"""Sizes of page-locked blocks: how much of powers of two is wasted."""

from __future__ import annotations

import random

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its allocation of host memory", allow_module_level=True)

from fsdp2.common.pinned import CHUNK_BYTES, SMALLEST_BYTES, chunk_sizes, power_of_two, slab_bytes

MIB, GIB = 1 << 20, 1 << 30


def test_bytes_that_may_be_cut_waste_less_than_one_smallest_chunk() -> None:
    drawn = random.Random(0)
    chosen = (1, 64, MIB - 1, MIB, MIB + 1, 17 * GIB)
    for nbytes in (*chosen, *(drawn.randrange(1, GIB) for _ in range(99))):
        sizes = chunk_sizes(nbytes)
        assert 0 <= sum(sizes) - nbytes < SMALLEST_BYTES
        assert all(size == power_of_two(size) <= CHUNK_BYTES for size in sizes)
        assert sizes == sorted(sizes, reverse=True)
    assert chunk_sizes(0) == []


def reserved(sizes: list[int]) -> int:
    """Bytes of the blocks for tensors of one size each, put one after the other."""
    total = room = 0
    for nbytes in sizes:
        if room < nbytes:
            room = slab_bytes(nbytes)
            total += room
        room -= nbytes
    return total


@pytest.mark.parametrize(("least", "most", "share"), [(1, 16, 1 / 8), (16, 4096, 1 / 3)])
def test_tensors_of_one_size_waste_little_beside_the_last_block(
    least: int, most: int, share: float
) -> None:
    """Of at most 16 MiB an eighth, of larger ones a third; rounding each up wastes up to half."""
    drawn = random.Random(1)
    for _ in range(200):
        nbytes = drawn.randrange(least * MIB, most * MIB)
        slab = slab_bytes(nbytes)
        assert slab == power_of_two(slab)
        wasted = slab - nbytes * (slab // nbytes)
        assert wasted <= slab * share
        assert reserved([nbytes] * 200) - 200 * nbytes <= share * 200 * nbytes / (1 - share) + slab
        # Never more than twice what one tensor would take, for the gradient has the same size.
        assert slab <= max(CHUNK_BYTES, 2 * power_of_two(nbytes))
