"""The arithmetic of layouts, against what it is meant to describe: slices of real tensors."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.features.secondary_shards import secondary_layout
from fsdp2.sharding.gradients import ReducePlan, copy_in
from fsdp2.sharding.layout import (
    ALIGN_BYTES,
    MAX_DIRECT,
    BucketLayout,
    plan_bucket,
)

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
ITEMSIZES = [(4, 4, 4), (2, 4, 4), (8, 8, 8), (1, 1, 1), (2, 2, 4)]


@st.composite
def buckets(draw: st.DrawFn, granularities: tuple[int, ...] = (1, 2, 3, 5)) -> BucketLayout:
    sizes = draw(st.lists(shapes, min_size=1, max_size=6))
    dims = [draw(st.integers(0, len(s) - 1)) if s else None for s in sizes]
    return plan_bucket(
        sizes,
        dims,
        draw(st.integers(1, 5)),
        itemsizes=draw(st.sampled_from(ITEMSIZES)),
        direct_min_bytes=draw(st.sampled_from([0, 64, 10**9])),
        granularities=[draw(st.sampled_from(granularities)) for _ in sizes],
    )


def ranges_overlap(ranges: list[tuple[int, int]]) -> bool:
    ends = 0
    for start, numel in sorted(r for r in ranges if r[1]):
        if start < ends:
            return True
        ends = start + numel
    return False


@settings(max_examples=300, deadline=None)
@given(buckets())
def test_nothing_overlaps_and_everything_is_inside(layout: BucketLayout) -> None:
    shards = [(s.shard_offset, s.shard_numel) for s in layout.slots]
    full = [(s.full_offset, s.full_numel) for s in layout.slots]
    pack = (layout.pack_full_offset, layout.num_shards * layout.pack_numel)
    assert not ranges_overlap(shards)
    assert not ranges_overlap([*full, pack])
    assert all(sum(r) <= layout.shard_numel for r in shards)
    assert all(sum(r) <= layout.gathered_numel for r in [*full, pack])


@settings(max_examples=300, deadline=None)
@given(buckets((3,)))
def test_shards_end_where_blocks_do(layout: BucketLayout) -> None:
    """And where the parameter does; the first ranks have equally many blocks."""
    for slot in layout.slots:
        if slot.dim is None:
            continue
        size = slot.shape[slot.dim]
        spans = [slot.span(rank) for rank in range(layout.num_shards)]
        ends = [0, *(stop for _, stop in spans)]
        assert [start for start, _ in spans] == ends[:-1]
        assert ends[-1] == size
        assert all(end % 3 == 0 or end == size for end in ends)
        assert {stop - start for start, stop in spans if stop < size} <= {slot.chunk}
        num_blocks = ceil(ceil(size / 3) / layout.num_shards)
        assert slot.chunk == min(3 * num_blocks, size)


@settings(max_examples=300, deadline=None)
@given(buckets((1,)))
def test_ranks_hold_what_torch_chunk_gives_them(layout: BucketLayout) -> None:
    for slot in layout.slots:
        whole = torch.arange(prod(slot.shape)).view(slot.shape)
        if slot.dim is None:
            assert slot.local_shape(0) == slot.shape
            continue
        chunks = list(whole.chunk(layout.num_shards, dim=slot.dim)) if whole.numel() else []
        for rank in range(layout.num_shards):
            start, stop = slot.span(rank)
            mine = whole.narrow(slot.dim, start, stop - start)
            assert tuple(mine.shape) == slot.local_shape(rank)
            if rank < len(chunks):
                assert torch.equal(mine, chunks[rank])
            else:
                assert mine.numel() == 0


@settings(max_examples=300, deadline=None)
@given(buckets(), st.integers(0, 4))
def test_direct_slices_are_aligned_and_have_no_gaps(layout: BucketLayout, which: int) -> None:
    if layout.num_shards == 1:
        return
    end = 0
    for i in layout.direct:
        slot = layout.slots[i]
        assert slot.dim == 0
        assert slot.shard_offset == end
        assert slot.shard_numel % (ALIGN_BYTES // 8) == 0
        end += slot.shard_numel
    assert end == layout.pack_offset


@settings(max_examples=300, deadline=None)
@given(buckets(), st.integers(1, 5))
def test_regrouping_keeps_every_place(layout: BucketLayout, num_shards: int) -> None:
    if layout.num_shards % num_shards:
        with pytest.raises(ValueError, match="do not divide"):
            secondary_layout(layout, num_shards, itemsizes=(4, 4, 4))
        return
    fewer = secondary_layout(layout, num_shards, itemsizes=(4, 4, 4))
    for old, new in zip(layout.slots, fewer.slots, strict=True):
        assert new.full_offset == old.full_offset
        # All that is no padding; no more padding than there is room for.
        assert prod(old.shape) <= new.full_numel <= old.full_numel
        assert new.shard_numel * num_shards == new.full_numel
        assert new.shape in (old.shape, (old.full_numel,))
    assert not ranges_overlap([(s.shard_offset, s.shard_numel) for s in fewer.slots])


@pytest.mark.parametrize(("rows", "world_size"), [(1, 8), (7, 8), (9, 8), (1000, 7)])
def test_padding_is_less_than_a_row_per_rank(rows: int, world_size: int) -> None:
    layout = plan_bucket([(rows, 4)], [0], world_size, itemsizes=(4,), direct_min_bytes=0)
    padding = sum(slot.full_numel - prod(slot.shape) for slot in layout.slots)
    assert padding < 4 * world_size


def test_what_is_uneven_only_by_its_blocks_is_reduced_with_the_pack() -> None:
    layout = plan_bucket(
        [(12, 4), (12, 4)], [0, 0], 2, itemsizes=(4,), direct_min_bytes=0, granularities=[4, 1]
    )
    assert layout.direct == (1, 0)
    assert layout.tail == (0,)


def test_small_and_unaligned_parameters_are_packed() -> None:
    layout = plan_bucket(
        [(64, 64), (8,), (64, 1), (4, 3)], [0] * 4, 4, itemsizes=(4,), direct_min_bytes=256
    )
    assert layout.direct == (0,)
    everything = plan_bucket(
        [(64, 64), (8,), (64, 1), (4, 3)], [0] * 4, 4, itemsizes=(4,), direct_min_bytes=0
    )
    assert everything.direct == (0, 2)  # 8 bytes of (8,) and 12 of (4, 3) are no multiple of 16


@pytest.mark.parametrize(("world_size", "is_direct"), [(1, True), (16, True), (17, False)])
def test_what_is_direct_depends_on_the_slice_of_a_rank(world_size: int, is_direct: bool) -> None:
    layout = plan_bucket([(512, 512)], [0], world_size, itemsizes=(4,), direct_min_bytes=64 * 1024)
    assert layout.slots[0].direct == is_direct  # 1 MiB: 64 KiB on each of 16 ranks


def test_of_many_large_parameters_the_largest_are_direct() -> None:
    small, large = (8, 8), (8, 16)
    shapes = [small, large] * MAX_DIRECT
    layout = plan_bucket(shapes, [0] * len(shapes), 4, itemsizes=(4,), direct_min_bytes=0)
    assert layout.direct == tuple(range(1, 2 * MAX_DIRECT, 2))
    shapes = [small, large, small, small] * (MAX_DIRECT // 2)
    layout = plan_bucket(shapes, [0] * len(shapes), 4, itemsizes=(4,), direct_min_bytes=0)
    large_ones = set(range(1, len(shapes), 4))
    assert len(layout.direct) == MAX_DIRECT
    assert large_ones < set(layout.direct)
    assert set(layout.direct) - large_ones == set(sorted({*range(len(shapes))} - large_ones)[:64])
    alone = plan_bucket(shapes, [0] * len(shapes), 1, itemsizes=(4,), direct_min_bytes=0)
    assert len(alone.direct) == len(shapes), "nothing is gathered"


BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)] + 3 * [(14336, 4096)] + [(4096,)]


def direct_of(shapes: list[tuple[int, ...]], num_ranks: int, **options: Any) -> tuple[int, ...]:
    """The direct ones, in bfloat16."""
    dims = [0] * len(shapes)
    return plan_bucket(shapes, dims, num_ranks, itemsizes=(2, 4, 4), **options).direct


def test_without_a_batch_of_nccl_the_limit_is_64_kib() -> None:
    for num_ranks in (2, 8, 64, 512):
        limited = direct_of(BLOCK, num_ranks, direct_min_bytes=64 * 1024)
        assert direct_of(BLOCK, num_ranks) == limited
        assert direct_of(BLOCK, num_ranks, num_hosts=None) == limited


@pytest.mark.parametrize(("num_ranks", "num_hosts"), [(8, 1), (64, 8), (64, 64), (512, 64)])
def test_a_limit_of_the_user_holds_on_any_number_of_hosts(num_ranks: int, num_hosts: int) -> None:
    for least in (0, 64 * 1024, 10**6, 10**12):
        chosen = direct_of(BLOCK, num_ranks, direct_min_bytes=least, num_hosts=num_hosts)
        assert chosen == direct_of(BLOCK, num_ranks, direct_min_bytes=least)


def test_small_entries_that_share_a_channel_are_packed() -> None:
    assert direct_of(BLOCK, 8, num_hosts=1) == (0, 3, 4, 5, 6), "k and v are 4 % of the block"
    equal = [(1024, 1024)] * 20
    assert direct_of(equal, 8, num_hosts=1) == tuple(range(20)), "none is smaller than the others"
    for size in range(1, 200, 7):  # those of one size are all direct, or all packed
        shapes = [(8 * size, 4096)] * 3 + [(8 * 100, 4096)] * 5
        assert {0, 1, 2} & {*direct_of(shapes, 8, num_hosts=1)} in ({0, 1, 2}, set())


def test_between_many_hosts_everything_is_packed() -> None:
    hosts = {num_ranks: num_ranks // 8 for num_ranks in (8, 16, 32, 64, 128, 512, 4096)}
    counts = [len(direct_of(BLOCK, n, num_hosts=hosts[n])) for n in hosts]
    assert counts == [5, 5, 5, 5, 0, 0, 0]
    experts = [(768, 2048)] * 256 + [(2048, 768)] * 128
    counts = [len(direct_of(experts, n, num_hosts=hosts[n])) for n in hosts]
    assert counts == [MAX_DIRECT, 0, 0, 0, 0, 0, 0]
    # One parameter is one ring, packed or not.
    assert direct_of([(4096, 4096)], 512, num_hosts=64) == (0,)
    # Steps between hosts take longest: with a GPU on each, a ring costs more.
    assert direct_of(BLOCK, 32, num_hosts=4)
    assert not direct_of(BLOCK, 32, num_hosts=32)


def test_gradients_that_are_cast_join_the_stage() -> None:
    shapes = [(8, 4), (8, 4), (8, 4), (2,)]
    layout = plan_bucket(shapes, [0] * 4, 2, itemsizes=(2, 4, 4), direct_min_bytes=32)
    assert layout.direct == (0, 1, 2)

    def spans(present: list[int], *, casts: bool) -> list[tuple[int, int]]:
        return ReducePlan(layout, present, layout.tail, casts=casts).spans

    pack = (48, 8)
    assert spans([0, 1, 2, 3], casts=False) == [(0, 16), (16, 16), (32, 16), pack]
    assert spans([0, 1, 2, 3], casts=True) == [(0, 56)]
    assert spans([0, 2, 3], casts=True) == [(0, 16), (32, 24)], "those without a gradient stay out"
    assert spans([0, 1, 3], casts=True) == [(0, 16), (16, 16), pack]
    assert spans([0, 1], casts=True) == [(0, 16), (16, 16)], "so does a stage without any"


@settings(max_examples=200, deadline=None)
@given(buckets(), st.integers(0, 63), st.booleans())
def test_staged_gradients_reach_the_rank_that_owns_the_rows(
    layout: BucketLayout, absent: int, casts: bool
) -> None:
    if layout.num_shards == 1:
        return
    present = [i for i in range(len(layout.slots)) if not absent >> i & 1]
    grads = [
        torch.rand(slot.shape) if i in present else None for i, slot in enumerate(layout.slots)
    ]
    plan = ReducePlan(layout, present, layout.tail, casts=casts)
    if not plan.copied_in:
        assert not any(layout.slots[i].shard_numel for i in set(present) & set(layout.tail))
        return
    assert set(plan.direct) | set(plan.copied_in) >= set(present)
    assert sum(numel for _, numel in plan.spans) == sum(numel for _, numel in plan.ranges)
    rows = copy_in(layout, plan, grads, torch.float32, torch.device("cpu"))
    for i in plan.copied_in:
        slot, grad = layout.slots[i], grads[i]
        for rank in range(layout.num_shards):
            start = slot.shard_offset - plan.stage_offset
            part = rows[rank, start : start + slot.local_numel(rank)].view(slot.local_shape(rank))
            if grad is None:
                assert not part.any()
            elif slot.dim is None:
                assert torch.equal(part, grad)
            else:
                begin, stop = slot.span(rank)
                assert torch.equal(part, grad.narrow(slot.dim, begin, stop - begin))


def test_ranges_of_a_reduction_are_merged() -> None:
    layout = plan_bucket([(4, 4)] * 3, [0] * 3, 2, itemsizes=(4,), direct_min_bytes=0)
    assert ReducePlan(layout, [0, 1, 2], layout.tail).ranges == [(0, 24)]
    assert ReducePlan(layout, [0, 2], layout.tail).ranges == [(0, 8), (16, 8)]
