"""`fsdp2.testing.SimulatedGroup`: what its collectives do, and that they take the link's time.

Times are only ever compared from below: a machine that is busy makes everything slower, never
faster.
"""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fsdp2 import CommPolicy, explain, fully_shard
from fsdp2.testing import Link, SimulatedGroup, Transfer, simulated_mesh
from fsdp2.testing import link as link_module
from fsdp2.testing.simulated import tile_rows

KB = 1000
SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def reduce_options(op: Any) -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    return options


def all_reduce_options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


# -------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", ["all_gather_single_coalesced", "allgather_into_tensor_coalesced"])
def test_all_gather_puts_the_own_bytes_in_every_slot(name: str) -> None:
    group = SimulatedGroup(4, rank=2)
    inputs = [torch.arange(3.0), torch.tensor([7, 8])]
    outputs = [torch.full((12,), -1.0), torch.full((4, 2), -1)]
    getattr(group, name)(outputs, inputs).wait()
    assert torch.equal(outputs[0], torch.arange(3.0).repeat(4))
    assert torch.equal(outputs[1], torch.tensor([[7, 8]]).expand(4, 2))


@pytest.mark.parametrize("name", ["all_to_all_single", "alltoall_base"])
def test_all_to_all_gives_what_every_rank_would_send_here(name: str) -> None:
    group = SimulatedGroup(4, rank=2)
    output = torch.full((8,), -1.0)
    with group.recording() as log:
        getattr(group, name)(output, torch.arange(8.0), [], []).wait()
    assert torch.equal(output, torch.tensor([4.0, 5.0]).repeat(4))
    assert [transfer.wire_bytes for transfer in log] == [24]
    with pytest.raises(NotImplementedError, match="equal parts"):
        getattr(group, name)(output, torch.arange(8.0), [8], [8])


def test_a_link_carries_the_bytes_that_explain_tells_of_a_comm_policy() -> None:
    policy = CommPolicy(gather=torch.int8, reduce=torch.int8, block=64)
    with simulated_mesh(8) as mesh:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
        for module in (model[0], model):
            fully_shard(module, mesh=mesh, comm_policy=policy, direct_min_bytes=0)
        group = mesh.get_group()
        for _ in range(2):
            with group.recording() as log:
                model(torch.ones(2, 64)).sum().backward()
        told = explain(model).totals
        sent = {kind: sum(t.wire_bytes for t in log if kind in t.name) for kind in ("gather", "to")}
    assert sent == {"gather": told.sent_by_gathers, "to": told.sent_by_reduction}


def test_all_gather_in_place_and_into_a_list() -> None:
    group = SimulatedGroup(3, rank=1)
    whole = torch.tensor([0.0, 0.0, 5.0, 6.0, 0.0, 0.0])
    group.all_gather_single(whole, whole[2:4]).wait()
    assert whole.tolist() == [5, 6, 5, 6, 5, 6]
    outputs = [torch.zeros(2) for _ in range(3)]
    group.allgather([outputs], [torch.ones(2)]).wait()
    assert all(output.tolist() == [1, 1] for output in outputs)


@pytest.mark.parametrize(
    "name", ["reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"]
)
@pytest.mark.parametrize(("op", "factor"), [(SUM, 4), (AVG, 1), (MAX, 1)])
def test_reduce_scatter_gives_the_own_slot(name: str, op: Any, factor: int) -> None:
    group = SimulatedGroup(4, rank=1)
    whole, out = torch.arange(8.0), torch.empty(2)
    getattr(group, name)([out], [whole], reduce_options(op)).wait()
    assert out.tolist() == [2 * factor, 3 * factor]
    assert torch.equal(whole, torch.arange(8.0))


@pytest.mark.parametrize(("op", "factor"), [(SUM, 4), (AVG, 1), (MAX, 1)])
def test_all_reduce_gives_n_equal_terms(op: Any, factor: int) -> None:
    tensors = [torch.ones(3), torch.arange(2.0)]
    SimulatedGroup(4).allreduce(tensors, all_reduce_options(op)).wait()
    assert tensors[0].tolist() == [factor] * 3
    assert tensors[1].tolist() == [0, factor]


def test_reduced_shards_gathered_again_are_the_sum() -> None:
    """An all-reduce is a reduce-scatter and an all-gather, in the simulation too."""
    group = SimulatedGroup(2)
    gradient = torch.tensor([1.0, 2.0, 1.0, 2.0])  # rows repeat, as a model's here
    part, whole = torch.empty(2), torch.empty(4)
    group.reduce_scatter_single(part, gradient).wait()
    group.all_gather_single(whole, part).wait()
    group.allreduce([gradient]).wait()
    assert torch.equal(whole, gradient)


def test_a_failure_inside_a_transfer_comes_out_of_wait() -> None:
    group = SimulatedGroup(4)
    work = group.allreduce([torch.ones(2, dtype=torch.bool)])
    with pytest.raises(RuntimeError, match="can't be cast"):
        work.wait()
    after = torch.ones(2)
    group.allreduce([after]).wait()
    assert after.tolist() == [4, 4]


# ---------------------------------------------------------------------------------- time


def collectives(group: SimulatedGroup) -> dict[str, Callable[[], dist.Work]]:
    """Each of 8 KB in all."""
    whole, part = torch.ones(2 * KB), torch.ones(2 * KB // group.size())
    wholes, parts = [torch.ones(KB) for _ in range(2)], [torch.ones(KB // 4) for _ in range(2)]
    return {
        "all-gather": lambda: group.all_gather_single(whole, part),
        "all-gather, coalesced": lambda: group.all_gather_single_coalesced(wholes, parts),
        "reduce-scatter": lambda: group.reduce_scatter_single(part, whole),
        "reduce-scatter, coalesced": lambda: group.reduce_scatter_single_coalesced(parts, wholes),
        "all-reduce": lambda: group.allreduce([whole]),
        "broadcast": lambda: group.broadcast([whole]),
        "barrier": lambda: group.barrier(),
    }


WIRE_BYTES = {
    "all-gather": 6 * KB,
    "all-gather, coalesced": 6 * KB,
    "reduce-scatter": 6 * KB,
    "reduce-scatter, coalesced": 6 * KB,
    "all-reduce": 12 * KB,
    "broadcast": 8 * KB,
    "barrier": 0,
}


@pytest.mark.parametrize("name", WIRE_BYTES)
def test_a_collective_takes_its_formula_and_never_less(name: str) -> None:
    group = SimulatedGroup(4, bandwidth=400 * KB, latency=0.005)
    call = collectives(group)[name]
    seconds = 0.005 + WIRE_BYTES[name] / (400 * KB)
    with group.recording() as transfers:
        begin = time.perf_counter()
        call().wait()
        elapsed = time.perf_counter() - begin
    (transfer,) = transfers
    assert transfer.seconds == pytest.approx(seconds)
    assert transfer.wire_bytes == WIRE_BYTES[name]
    assert elapsed >= seconds
    assert transfer.end - transfer.begin >= seconds


def test_a_call_returns_before_the_time_is_over() -> None:
    group = SimulatedGroup(2, bandwidth=math.inf, latency=0.5)
    tensor = torch.ones(1)
    work = group.allreduce([tensor])
    assert not work.is_completed()
    work.wait()
    assert work.is_completed()
    assert tensor.item() == 2


def assert_one_after_the_other(transfers: list[Transfer]) -> None:
    for before, after in pairwise(transfers):
        assert after.begin >= before.begin + before.seconds


def test_collectives_of_one_group_queue() -> None:
    group = SimulatedGroup(4, bandwidth=math.inf, latency=0.01)
    tensors = [torch.full((2,), float(i)) for i in range(4)]
    with group.recording() as transfers:
        begin = time.perf_counter()
        works = [group.allreduce([tensor]) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        elapsed = time.perf_counter() - begin
    assert elapsed >= 4 * 0.01
    assert_one_after_the_other(transfers)
    assert [tensor[0].item() for tensor in tensors] == [0, 4, 8, 12]


def test_groups_of_the_same_ranks_share_a_link_and_others_do_not() -> None:
    with simulated_mesh((2, 4), [1e6, 2e6], 0.001, mesh_dim_names=("rep", "shard")) as mesh:
        rep, shard = mesh.get_group("rep"), mesh.get_group("shard")
        again = dist.new_group(dist.get_process_group_ranks(shard))
        assert again is not shard
        assert again.link is shard.link
        assert rep.link is not shard.link
        assert (rep.link.bandwidth, shard.link.bandwidth) == (1e6, 2e6)
        assert dist.group.WORLD.link.bandwidth == 1e6  # the whole is as fast as its slowest part


def test_a_link_holds_no_tensors_once_wait_returns() -> None:
    group = SimulatedGroup(2)
    for _ in range(50):  # it could only happen to hold one
        whole, part = torch.ones(8), torch.ones(4)
        references = [weakref.ref(whole), weakref.ref(part)]
        group.all_gather_single(whole, part).wait()
        del whole, part
        assert [reference() for reference in references] == [None, None]


# ---------------------------------------------------------------- CUDA, played by a fake


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(f"{self.name} waits for stream {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.calls.append(f"{self.name} waits for {event.after}")


class FakeEvent:
    after = "nothing"

    def record(self, stream: FakeStream) -> None:
        self.after = f"event {len(stream.cuda.calls)} of {stream.name}"


class FakeCuda:
    """As much of `torch.cuda` as a link uses; `calls` says what went to which stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = FakeStream(self, "compute")
        self.capturing = False
        self.Event = FakeEvent

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        return FakeStream(self, "own")

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def _sleep(self, cycles: int) -> None:
        self.calls.append(f"{self.current.name} spins {cycles}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(link_module.torch, "cuda", fake)
    monkeypatch.setitem(link_module._rates, None, 1e9)  # a clock of 1 GHz
    return fake


def enqueue(link: Link, cuda: FakeCuda, *, own: bool = False) -> dist.Work:
    def move() -> None:
        cuda.calls.append(f"{cuda.current.name} copies")

    return link.enqueue("simulated::all_gather", 3000, move, [torch.ones(1)], own)


def test_on_cuda_spin_and_copies_are_on_the_current_stream_one_after_the_other(
    cuda: FakeCuda,
) -> None:
    link = Link(bandwidth=1e9, latency=1e-6)
    enqueue(link, cuda).wait()
    assert cuda.calls == ["compute spins 4000", "compute copies"]
    cuda.calls.clear()
    cuda.current = FakeStream(cuda, "side")
    enqueue(link, cuda).wait()
    assert cuda.calls == ["side waits for event 2 of compute", "side spins 4000", "side copies"]


def test_on_cuda_an_asynchronous_collective_has_a_stream_of_its_own(cuda: FakeCuda) -> None:
    link = Link(bandwidth=1e9)
    work = enqueue(link, cuda, own=True)
    assert cuda.calls == ["own waits for stream compute", "own spins 3000", "own copies"]
    work.wait()
    assert cuda.calls[-1] == "compute waits for event 3 of own"


def test_a_captured_graph_does_not_wait_for_what_was_before_it(cuda: FakeCuda) -> None:
    link = Link(bandwidth=1e9)
    enqueue(link, cuda)
    cuda.calls.clear()
    cuda.capturing = True
    enqueue(link, cuda)
    cuda.capturing = False
    enqueue(link, cuda)
    assert cuda.calls == ["compute spins 3000", "compute copies"] * 2


def test_the_clock_is_not_measured_inside_a_capture(cuda: FakeCuda) -> None:
    link_module._rates.clear()
    cuda.capturing = True
    with pytest.raises(RuntimeError, match="run a step before the capture"):
        enqueue(Link(bandwidth=1e9), cuda)


# ------------------------------------------------------------------------------ training


def build() -> nn.Sequential:
    """Rows divide neither by 4 nor, all of them, by 2."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 13), nn.ReLU(), nn.Linear(13, 7), nn.ReLU(), nn.Linear(7, 5))


def tiled(model: nn.Module, num_shards: int) -> nn.Module:
    """What `model` becomes if every rank has rank 0's rows."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(tile_rows(p, num_shards))
    return model


def steps(model: nn.Module, num_steps: int = 3) -> list[float]:
    """Training of `model`; gradients of the last step are left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        if step + 1 < num_steps:
            optimizer.step()
    return losses


@pytest.mark.parametrize("library", [torch_fully_shard, fully_shard])
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), (3, 4)])
def test_training_is_that_of_a_model_whose_rows_repeat(
    library: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    num_shards = shape[-1]
    plain = tiled(build(), num_shards)
    expected = []
    for step in range(3):  # by hand: only rank 0's rows are trained, all others follow
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        loss = (plain(x) - 1).square().mean()
        loss.backward()
        expected.append(loss.item())
        if step < 2:
            with torch.no_grad():
                for p in plain.parameters():
                    p.sub_(p.grad, alpha=0.1)
            tiled(plain, num_shards)
    names = ("rep", "shard")[-len(shape) :]
    with simulated_mesh(shape, 1e9, 1e-5, mesh_dim_names=names) as mesh:
        model = build()
        for layer in model[::2]:
            library(layer, mesh=mesh)
        library(model, mesh=mesh)
        assert steps(model) == pytest.approx(expected, rel=1e-6)
        for p, reference in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(p.grad, DTensor)
            mine = p.grad.to_local()
            torch.testing.assert_close(mine, reference.grad[: mine.shape[0]])


def test_clipping_sees_the_norm_of_the_model_whose_rows_repeat() -> None:
    plain = tiled(nn.Linear(6, 8), 4)
    with simulated_mesh(4) as mesh:
        model = copy.deepcopy(plain)
        fully_shard(model, mesh=mesh)
        for each in (plain, model):
            each(torch.ones(2, 6)).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert isinstance(norm, DTensor)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        torch.testing.assert_close(norm.full_tensor(), expected)


# -------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimulatedGroup(0), "world_size must be at least 1, got 0"),
        (lambda: SimulatedGroup(4, rank=4), "rank must be from 0 to 3, got 4"),
        (lambda: SimulatedGroup(4, bandwidth=0), "bandwidth must be above 0"),
        (lambda: SimulatedGroup(4, bandwidth=math.nan), "bandwidth must be above 0"),
        (lambda: Link(1e9, latency=-1e-6), "latency must be 0 or more"),
        (lambda: Link(1e9, latency=math.inf), "latency must be 0 or more"),
        (lambda: simulated_mesh((2, 0)).__enter__(), "shape must consist of positive numbers"),
        (lambda: simulated_mesh((2, 2), [1e9]).__enter__(), "1 bandwidths for a mesh of 2 dims"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("part", "whole", "message"),
    [
        (torch.ones(3), torch.ones(8), "a part has 3 elements and the whole 8"),
        (torch.ones(2), torch.ones(8).double(), "a part is torch.float32"),
        (torch.ones(2), torch.ones(4, 4)[:, :2], "must be contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    part: torch.Tensor, whole: torch.Tensor, message: str
) -> None:
    group = SimulatedGroup(4)
    with pytest.raises(ValueError, match=message):
        group.all_gather_single(whole, part)
    with pytest.raises(ValueError, match=message):
        group.reduce_scatter_single(part, whole)


def test_what_it_cannot_do_is_said() -> None:
    group = SimulatedGroup(4)
    with pytest.raises(NotImplementedError, match="SimulatedGroup has no send"):
        group.send([torch.ones(1)], 1, 0)
    with pytest.raises(NotImplementedError, match="SUM, AVG, MIN and MAX"):
        group.allreduce([torch.ones(1)], all_reduce_options(dist.ReduceOp.PRODUCT))


def test_one_default_group_at_a_time_and_none_left_behind() -> None:
    with simulated_mesh(2), pytest.raises(RuntimeError, match="there already is one"):
        simulated_mesh(2).__enter__()
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"is for fsdp2\.testing"):
        dist.init_process_group("simulated", store=dist.HashStore(), rank=0, world_size=2)
    with pytest.raises(ZeroDivisionError), simulated_mesh(2):
        raise ZeroDivisionError
    with simulated_mesh(3) as mesh:
        assert mesh.size() == 3


def test_groups_for_resharding_are_made_anew_after_the_old_ones_were_destroyed() -> None:
    """The second mesh equals the first, the process groups of which are gone."""
    for _ in range(2):
        with simulated_mesh(4) as mesh:
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            fully_shard(model, mesh=mesh, reshard_after_forward=2)
            model(torch.ones(1, 4)).sum().backward()
