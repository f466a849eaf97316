"""Every collective that the library calls, on a group of one rank with the backend of a device.

One GPU is enough to find out what NCCL takes: which calls there are, dtypes, that a call returns
before the device is done. The same bodies run on the test device and, over gloo, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import testdev
from fsdp2.comm.means import mean_over
from fsdp2.comm.streams import wait_for
from fsdp2.comm.transports import GroupTransport, separate_group
from fsdp2.features.partial_gradients import sum_together
from fsdp2.sharding.gathered import GatherBatch, GatherPlan, Segments
from fsdp2.sharding.gradients import ReducePlan
from fsdp2.sharding.layout import BucketLayout, plan_bucket
from fsdp2.sharding.process_groups import num_hosts, own_group, timeout_of
from fsdp2.transports.custom import (
    SymmetricTransport,
    allocating_symmetric,
    choose_symmetric_backend,
)
from harness import ours_only, run_on

pytestmark = ours_only("calls its transports")

SHAPES = [(5,), (300, 8), (64, 3)]
GATHERED = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
    torch.int64,
    torch.complex64,
    torch.bool,
    torch.float8_e4m3fn,
]
REDUCED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def layout_for(dtype: torch.dtype) -> BucketLayout:
    """Of one rank: all parameters are direct."""
    return plan_bucket(SHAPES, [0, 0, 0], 1, itemsizes=[dtype.itemsize] * 3)


def numbers(numel: int, dtype: torch.dtype, device: str) -> Tensor:
    return (torch.arange(numel, device="cpu") % 13).to(dtype).to(device)


def gather_plan(
    dtype: torch.dtype,
    device: str,
    source: torch.dtype | None = None,
    allocating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[GatherPlan, Callable[[], None]]:
    """A plan, and what checks that it was carried out.

    Arguments:
        allocating: makes the context in which the gathered storage gets its memory.
    """
    layout = layout_for(dtype)
    shards = numbers(layout.shard_numel, source or dtype, device)
    with allocating():
        gathered = Segments([0, layout.gathered_numel], dtype, torch.device(device))
    plan = GatherPlan(layout, 0, shards, gathered)
    if plan.cast:
        torch._foreach_copy_(plan.own, plan.source)

    def check() -> None:
        for slot in layout.slots:
            part = shards[slot.shard_offset : slot.shard_offset + slot.local_numel(0)]
            whole = gathered.view(slot.full_offset, slot.local_numel(0))
            assert whole.cpu().tolist() == part.cpu().to(dtype).tolist()

    return plan, check


def finish(done: Callable[[], None] | None) -> None:
    if done is not None:
        done()


def gathers(device: str) -> None:
    transport = GroupTransport(dist.group.WORLD, torch.device(device))
    for dtype in GATHERED:
        plan, check = gather_plan(dtype, device)
        finish(transport.all_gather(plan, 0))
        check()
    plan, check = gather_plan(torch.bfloat16, device, torch.float32)
    finish(transport.all_gather(plan, 0))
    check()
    plans, checks = zip(*(gather_plan(dtype, device) for dtype in GATHERED), strict=True)
    finish(transport.all_gather(GatherBatch(plans), 0))
    for check in checks:
        check()


def reductions(device: str) -> None:
    """Those of one rank, and all that those of many ranks call: AVG, sums that are divided
    afterwards, halves that are divided before, too. (With one rank AVG changes nothing.)"""
    for num_ranks, hosts in ((1, None), (6, None), (8, 1), (16, 16)):
        transport = GroupTransport(dist.group.WORLD, torch.device(device))
        for dtype in REDUCED:
            mean = mean_over(num_ranks, dtype, sum_only=False, num_hosts=hosts)
            by = 1 if mean.operation == dist.ReduceOp.AVG else num_ranks
            assert (by == 1) == (num_ranks == 1 or (hosts != 1 and dtype != torch.float16))
            transport._mean = lambda _, mean=mean: mean  # type: ignore[misc]
            for num_staged in (0, 1, 2):  # of the last ones, which have no padding
                reduce_once(transport, num_staged, dtype, by, device)
            tensors = [numbers(numel, dtype, device) for numel in (7, 4096)]
            finish(transport.all_reduce(tensors, 0))
            for tensor in tensors:
                torch.testing.assert_close(tensor.cpu(), numbers(len(tensor), dtype, "cpu") / by)
    mixed = [numbers(5, dtype, device) for dtype in REDUCED]
    sum_together(dist.group.WORLD, mixed)
    for tensor in mixed:
        assert torch.equal(tensor.cpu(), numbers(5, tensor.dtype, "cpu"))


def reduce_once(
    transport: GroupTransport, num_staged: int, dtype: torch.dtype, divided_by: int, device: str
) -> None:
    layout = layout_for(dtype)
    bucket: Any = SimpleNamespace(layout=layout, reduce_dtype=dtype, widens=False)
    everything = range(len(SHAPES))
    plan = ReducePlan(layout, everything, everything[len(SHAPES) - num_staged :])
    grads = [numbers(prod(shape), dtype, device).view(shape) for shape in SHAPES]
    flat = torch.zeros(layout.shard_numel, dtype=dtype, device=device)
    finish(transport.reduce_scatter(bucket, plan, grads, plan.outputs(flat), 0))
    for slot, grad in zip(layout.slots, grads, strict=True):
        got = flat[slot.shard_offset : slot.shard_offset + grad.numel()]
        expected = numbers(grad.numel(), dtype, "cpu")
        assert torch.equal(grad.flatten().cpu(), expected), "what autograd made is not ours"
        torch.testing.assert_close(got.cpu(), expected / divided_by)


def slices_in_place(device: str) -> None:
    """What each of three ranks sends and receives of its own, in place and in one call: several
    entries that begin in the middle of the gathered storage. Then what is packed is taken out."""
    transport = GroupTransport(dist.group.WORLD, torch.device(device))
    for dtype, source, direct_min_bytes in (
        (torch.bfloat16, torch.float32, 0),
        (torch.float16, torch.float32, 100),
        (torch.float32, torch.float64, 0),
        (torch.float64, torch.float32, 10**9),
        (torch.int64, torch.int32, 100),
    ):
        layout = plan_bucket(
            SHAPES,
            [0, 0, 0],
            3,
            itemsizes=[dtype.itemsize, source.itemsize, dtype.itemsize],
            direct_min_bytes=direct_min_bytes,
        )
        assert bool(layout.direct) == (direct_min_bytes < 10**9)
        assert layout.packed
        wholes = [numbers(prod(s), source, device).view(s) for s in SHAPES]
        gathered = Segments([0, layout.gathered_numel], dtype, torch.device(device))
        for rank in range(3):
            shards = torch.zeros(layout.shard_numel, dtype=source, device=device)
            for slot, whole in zip(layout.slots, wholes, strict=True):
                start, stop = slot.span(rank)
                rows = whole[start:stop].flatten()
                shards[slot.shard_offset : slot.shard_offset + rows.numel()] = rows
            plan = GatherPlan(layout, rank, shards, gathered)
            assert plan.inputs is plan.own, "in place, since there is a cast"
            torch._foreach_copy_(plan.own, plan.source)
            work = transport._gather(plan.own, plan.inputs, transport._gather_options)
            wait_for([work])
        plan.unpack()
        for slot, whole in zip(layout.slots, wholes, strict=True):
            got = gathered.view(slot.full_offset, whole.numel())
            assert got.cpu().tolist() == whole.flatten().cpu().to(dtype).tolist()


def groups(device: str) -> None:
    """Groups beside the mesh's are made, serve the device, and have its timeout."""
    world = dist.group.WORLD
    assert world is not None
    target = torch.device(device)
    made = own_group(world, target, "beside")
    assert made is not world
    assert num_hosts(made) == 1
    assert timeout_of(made, target) == timeout_of(world, target)
    apart = separate_group(world, target, True)
    assert separate_group(world, target, True) is apart
    for group in (made, apart):
        value = numbers(5, torch.float32, device)
        dist.all_reduce(value, group=group)
        assert torch.equal(value.cpu(), numbers(5, torch.float32, "cpu"))


BODIES = {body.__name__: body for body in (gathers, slices_in_place, reductions, groups)}


def run_body(name: str, device: str) -> None:
    BODIES[name](device)


each_body = pytest.mark.parametrize("name", BODIES)


@each_body
def test_gloo(name: str) -> None:
    run_on(1, run_body, name, "cpu")


@pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or "")
@each_body
def test_device_of_threads(name: str) -> None:
    run_on(1, run_body, name, testdev.NAME, device=testdev.NAME)


# ------------------------------------------------------------------------------------ on a GPU


@pytest.fixture(scope="module")
def nccl() -> Iterator[None]:
    """The default group of this process: one rank."""
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@on_cuda
@pytest.mark.cuda
@each_body
def test_nccl(name: str, nccl: None) -> None:
    run_body(name, "cuda")


@on_cuda
@pytest.mark.cuda
def test_nccl_does_not_wait_on_the_host(nccl: None) -> None:
    """``asyncOp=False``: on the current stream, in its order; the call returns at once."""
    transport = GroupTransport(dist.group.WORLD, torch.device("cuda"))
    plan, check = gather_plan(torch.float32, "cuda")
    finish(transport.all_gather(plan, 0))  # kernels are loaded, the communicator is there
    for own in plan.outputs:
        own.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        before = torch.cuda.Event()
        torch.cuda._sleep(200_000_000)
        before.record()
        finish(transport.all_gather(plan, 0))
        assert not before.query()
    torch.cuda.synchronize()
    check()


@on_cuda
@pytest.mark.cuda
def test_gathered_storages_take_turns_in_symmetric_memory(nccl: None) -> None:
    """What one has freed another one gets, and nothing else: not at once, nor ever."""
    device = torch.device("cuda", torch.cuda.current_device())
    choose_symmetric_backend(device)
    one, other = (Segments([0, 2**20], torch.float32, device) for _ in range(2))
    addresses = []
    for segments in (one, other, one):
        segments.free()  # what it was made with is ordinary memory
        with allocating_symmetric(device):
            segments.allocate()
        addresses.append(segments.storages[0].data_ptr())
        segments.free()
        usual = torch.empty(2**20, device=device)
        assert usual.data_ptr() != addresses[-1]
    assert len(set(addresses)) == 1


@on_cuda
@pytest.mark.cuda
def test_nccl_gathers_into_symmetric_memory(nccl: None) -> None:
    """Registered at the first gather, known at the second; shards are in other memory."""
    device = torch.device("cuda", torch.cuda.current_device())
    choose_symmetric_backend(device)
    transport = SymmetricTransport(dist.group.WORLD, device)
    make = partial(gather_plan, allocating=partial(allocating_symmetric, device))
    kinds = [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.float8_e4m3fn, None)]
    for dtype, source in kinds:
        plan, check = make(dtype, str(device), source)
        for _ in range(2):
            finish(transport.all_gather(plan, 0))
            check()
            if source is None:
                for output in plan.outputs:
                    output.view(torch.uint8).zero_()
    plans, checks = zip(*(make(dtype, str(device), source) for dtype, source in kinds), strict=True)
    finish(transport.all_gather(GatherBatch(plans), 0))
    for check in checks:
        check()
