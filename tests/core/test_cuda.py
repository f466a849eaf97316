"""What CUDA adds: streams, the caching allocator, graphs, pinned memory. One GPU is enough.

Whatever means something on the CPU too runs there with the same body, on a `SimulatedGroup`; the
variants marked `cuda` are skipped where there is no GPU.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import timeline
from benchmarks.ledger import Ledger
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, profile
from fsdp2.testing import SimulatedGroup, simulated_mesh
from fsdp2.testing.simulated import tile_rows
from harness import fork_context

on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]
each_device = pytest.mark.parametrize("device", DEVICES)
_barrier: Any = None  # of a process that trains beside another one
cuda_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """No TF32: plain and sharded models may use kernels of different shapes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def matrices(num: int, width: int) -> nn.Sequential:
    """Linears without bias; each will be a unit."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num)))


def mlp() -> nn.Sequential:
    """Rows that divide by 4 and rows that do not, directly gathered and packed ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 512), nn.GELU(), nn.Linear(512, 257), nn.LayerNorm(257), nn.Linear(257, 64)
    )


def shard(
    model: nn.Module, library: Callable[..., Any] = fully_shard, **options: Any
) -> FSDPModule:
    """Shards every child that has parameters, then the rest."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            library(child, **options)
    return library(model, **options)


def batch(step: int, width: int, device: str) -> torch.Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(step)).to(device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


# -------------------------------------------------------------------------------- parity


def train_plain(num_shards: int, dtype: torch.dtype, device: str) -> tuple[nn.Module, list[float]]:
    """Three steps of the plain model whose rows are those of rank 0; gradients of the last."""
    model = mlp().to(device)
    losses: list[float] = []
    for step in range(3):
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
                p.copy_(tile_rows(p, num_shards))
        model.zero_grad()
        low = copy.deepcopy(model).to(dtype)
        loss = (low(batch(step, 96, device).to(dtype)) - 1).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        for p, q in zip(model.parameters(), low.parameters(), strict=True):
            p.grad = q.grad.float()
    return model, losses


def train_sharded(model: nn.Module, device: str) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.step()  # of the step before; nothing in the first
        optimizer.zero_grad()
        loss = (model(batch(step, 96, device)) - 1).float().square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def assert_trained_alike(model: nn.Module, plain: nn.Module, tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        mine = local(p.grad)
        expected = q.grad[: mine.shape[0]].to(mine.device)
        difference = (mine - expected).abs().max().item()
        assert difference <= tolerance * q.grad.abs().max().item(), name


@each_device
@pytest.mark.parametrize("library", [fully_shard, torch_fully_shard])
@pytest.mark.parametrize("shape", [(4,), (64,), (2, 4)])
def test_parity_in_fp32(shape: tuple[int, ...], library: Callable[..., Any], device: str) -> None:
    plain, expected = train_plain(shape[-1], torch.float32, device)
    names = ("rep", "shard")[-len(shape) :]
    with simulated_mesh(shape, 1e9, 1e-5, device_type=device, mesh_dim_names=names) as mesh:
        model = mlp().to(device)
        shard(model, library, mesh=mesh)
        assert train_sharded(model, device) == pytest.approx(expected, rel=1e-5)
        assert_trained_alike(model, plain, 1e-5)


def set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def train_beside_another(device: str) -> tuple[list[float], list[list[float]]]:
    """Losses and this rank's parameters, of a process that begins to train with the other one."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    with simulated_mesh(4, 1e9, 1e-5, device_type=device) as mesh:
        model = mlp().to(device)
        shard(model, mesh=mesh)
        _barrier.wait(60)
        losses = train_sharded(model, device)
        return losses, [local(param).flatten().tolist() for param in model.parameters()]


@each_device
def test_two_processes_on_one_device(device: str) -> None:
    """NCCL refuses to have two ranks on one GPU; a `SimulatedGroup` in each has no objection."""
    _, expected = train_plain(4, torch.float32, device)
    context = fork_context()
    barrier = context.Barrier(2)
    with context.Pool(2, set_barrier, (barrier,)) as pool:
        pending = [pool.apply_async(train_beside_another, (device,)) for _ in range(2)]
        (losses, params), (other_losses, other_params) = (each.get(120) for each in pending)
    assert losses == other_losses
    assert params == other_params
    assert losses == pytest.approx(expected, rel=1e-5)


@each_device
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_parity_in_bf16_with_fp32_reduction(shape: tuple[int, ...], device: str) -> None:
    plain, expected = train_plain(shape[-1], torch.bfloat16, device)
    with simulated_mesh(shape, 1e9, 1e-5, device_type=device) as mesh:
        model = mlp().to(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mesh=mesh, mp_policy=policy)
        assert train_sharded(model, device) == pytest.approx(expected, rel=1e-2)
        assert_trained_alike(model, plain, 2e-2)


@each_device
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_parity_with_shards_on_the_host(shape: tuple[int, ...], device: str) -> None:
    plain, expected = train_plain(shape[-1], torch.float32, device)
    with simulated_mesh(shape, 1e9, 1e-5, device_type=device) as mesh:
        model = mlp()
        shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        assert train_sharded(model, device) == pytest.approx(expected, rel=1e-5)
        assert_trained_alike(model, plain, 1e-5)
        for p in model.parameters():
            assert p.grad is not None
            for tensor in (local(p.detach()), local(p.grad)):
                assert tensor.device.type == "cpu"
                assert tensor.is_pinned() == (device == "cuda")


# ------------------------------------------------------------------------------- overlap


def overlap_shares(library: Callable[..., Any], device: str) -> dict[str, list[float]]:
    """Of each kind of collective, the share of its time in which compute ran too, in five steps.

    A busy machine shifts single steps either way. What a library does shows in the best one, what
    it never does in the worst.
    """
    with simulated_mesh(8, latency=1e-3, device_type=device) as mesh:
        width, rows = (768, 512) if device == "cpu" else (4096, 8192)
        model = matrices(6, width).to(device)
        shard(model, library, mesh=mesh)
        x = torch.randn(rows, width, device=device)
        group = mesh.get_group()
        assert isinstance(group, SimulatedGroup)

        def step() -> None:
            model.zero_grad()
            model(x).square().mean().backward()
            if device == "cuda":
                torch.cuda.synchronize()

        for _ in range(3):
            step()
        seen = [timeline.record(step, torch.device(device), group).lanes for _ in range(5)]

    def share(name: str, lanes: dict[str, list[timeline.Interval]]) -> float:
        both_s = timeline.overlap_s(lanes[name], lanes[timeline.COMPUTE])
        return both_s / timeline.busy_s(lanes[name])

    return {
        name: [share(name, lanes) for lanes in seen] for name in ("all_gather", "reduce_scatter")
    }


@each_device
def test_communication_runs_beside_compute(device: str) -> None:
    shares = overlap_shares(fully_shard, device)
    # The first gather and the last reduction have nothing to hide behind.
    assert max(shares["all_gather"]) > 0.4
    assert max(shares["reduce_scatter"]) > 0.4


def test_overlap_is_seen_to_be_missing() -> None:
    """The control: torch's FSDP2 waits for every collective on the CPU."""
    shares = overlap_shares(torch_fully_shard, "cpu")
    assert min(shares["all_gather"]) < 0.2
    assert min(shares["reduce_scatter"]) < 0.2


# -------------------------------------------------------------------------------- memory


class Meter:
    """Bytes of live tensors: of the allocator on CUDA, of a ledger on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.ledger = Ledger(every_operation=False)
        self.base = 0

    def __enter__(self) -> Meter:
        if self.device == "cuda":
            warm = torch.ones(64, 64, device="cuda", requires_grad=True)
            (warm @ warm).sum().backward()  # brings up the workspace of the library
            del warm
            gc.collect()
            self.base = torch.cuda.memory_allocated()
        else:
            self.ledger.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device == "cpu":
            self.ledger.__exit__(*error)

    def now(self) -> int:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated() - self.base
        self.ledger.sample("now")
        return self.ledger.live_bytes[-1]

    def peak(self, step: Callable[[], None]) -> int:
        """Highest number during `step`."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step()
            return torch.cuda.max_memory_allocated() - self.base
        first = len(self.ledger.live_bytes)
        self.ledger.every_operation = True
        step()
        self.ledger.every_operation = False
        return max(self.ledger.live_bytes[first:])


def predicted_peak_bytes(model: nn.Module) -> int:
    """Of a model whose units are alike and whose activations are nothing, from the plan.

    The peak is in the backward of the second unit, the last that has another one gathered beside
    it. Then there are all sharded parameters; the sharded gradients of all units but these two;
    these two, gathered; the gradients being made, and those that may be on their way.
    """
    units = [vars(m)["_fsdp2_unit"] for m in model.modules() if isinstance(m, FSDPModule)]
    units = [unit for unit in units if unit.params]
    shard_bytes = [sum(bucket.shards.nbytes for bucket in unit.buckets) for unit in units]
    unit_bytes = units[0].gathered_bytes
    state = sum(shard_bytes) + sum(shard_bytes[2:])
    return state + 2 * unit_bytes + unit_bytes + units[0].runtime.reductions.max_bytes


@each_device
def test_peak_memory_is_what_the_plan_predicts(device: str) -> None:
    width = 512 if device == "cpu" else 4096
    with Meter(device) as meter, simulated_mesh(8, device_type=device) as mesh:
        model = matrices(6, width).to(device)
        shard(model, mesh=mesh)
        x = torch.randn(1, width, device=device)

        def step() -> None:
            model.zero_grad()
            model(x).sum().backward()

        for _ in range(3):
            step()
        peak = meter.peak(step)
        assert peak == pytest.approx(predicted_peak_bytes(model), rel=0.02)


@each_device
def test_memory_does_not_grow_over_60_steps(device: str) -> None:
    with Meter(device) as meter, simulated_mesh((2, 4), device_type=device) as mesh:
        model = mlp().to(device)
        shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = batch(0, 96, device)
        seen, peaks = [], []
        for step in range(1, 61):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step in (20, 60):
                seen.append(meter.now())
                peaks.append(meter.peak(lambda: model(x).square().mean().backward()))
        assert seen[0] == seen[1]
        assert peaks[0] == peaks[1]
        if device == "cuda":
            assert torch.cuda.memory_stats()["num_alloc_retries"] == 0


# ------------------------------------------------------------------------------ CUDA only


@cuda_only
@pytest.mark.parametrize("warm_up_on", ["a side stream", "the default stream"])
def test_cuda_graph_of_forward_and_backward_replays(warm_up_on: str, device: str) -> None:
    """A node of autograd that outlives the warm-up would run on its stream: no capture allows that
    of the default one."""
    with simulated_mesh(4, 50e9, 1e-5, device_type=device) as mesh:
        model = mlp().to(device)
        shard(model, mesh=mesh)
        x = batch(0, 96, device)
        current = torch.cuda.current_stream()
        warm_up = torch.cuda.Stream() if warm_up_on == "a side stream" else current
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                model.zero_grad()
                model(x).square().mean().backward()
        current.wait_stream(warm_up)
        model.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = model(x).square().mean()
            loss.backward()
        x.copy_(batch(1, 96, device))
        graph.replay()
        replayed = [loss.item(), *(local(p.grad).clone() for p in model.parameters())]
        model.zero_grad()
        eager = model(x).square().mean()
        eager.backward()
        assert replayed[0] == pytest.approx(eager.item(), rel=1e-5)
        for mine, p in zip(replayed[1:], model.parameters(), strict=True):
            torch.testing.assert_close(mine, local(p.grad))


def overwrite_what_is_free(like: torch.Tensor) -> list[torch.Tensor]:
    """Takes memory of this size from the allocator, for the current stream, and makes it NaN."""
    return [torch.full_like(like, float("nan")) for _ in range(8)]


@cuda_only
@pytest.mark.parametrize("recorded", [True, False])
def test_memory_of_gradients_waits_for_streams_that_were_recorded(
    recorded: bool, device: str
) -> None:
    """The control shows that the memory is given out again otherwise."""
    with simulated_mesh(4, 50e9, 1e-5, device_type=device) as mesh:
        model = matrices(1, 4096).to(device)
        shard(model, mesh=mesh)
        model(batch(0, 4096, device)).square().mean().backward()
        gradient = local(model[0].weight.grad)
        expected = gradient.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copied = torch.empty_like(gradient)
            torch.cuda._sleep(100_000_000)  # cycles, about 50 ms
            copied.copy_(gradient)
        if recorded:
            gradient.record_stream(side)
        del gradient
        model.zero_grad()
        taken = overwrite_what_is_free(expected)
        torch.cuda.synchronize()
        assert torch.equal(copied, expected) == recorded
        del taken


@cuda_only
def test_backward_on_another_stream_frees_nothing_that_is_being_reduced(device: str) -> None:
    """The reduction takes longer than the host needs to overwrite what backward has freed."""
    with simulated_mesh(4, 1e9, 50e-3, device_type=device) as mesh:
        model = matrices(2, 4096).to(device)
        shard(model, mesh=mesh)
        x, whole = batch(0, 4096, device), torch.empty(4096, 4096, device=device)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()

        def gradients(stream: torch.cuda.Stream) -> list[torch.Tensor]:
            model.zero_grad()
            loss = model(x).square().mean()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                loss.backward()
            taken = overwrite_what_is_free(whole)
            current.wait_stream(stream)
            torch.cuda.synchronize()
            del taken
            return [local(param.grad).clone() for param in model.parameters()]

        assert all(map(torch.equal, gradients(side), gradients(current)))


@cuda_only
def test_a_spin_takes_the_time_of_the_link(device: str) -> None:
    group = SimulatedGroup(4, bandwidth=1e9, latency=1e-3)
    whole, part = torch.empty(4_000_000, device=device), torch.ones(1_000_000, device=device)
    group.all_gather_single(whole, part).wait()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    group.all_gather_single(whole, part).wait()
    end.record()
    end.synchronize()
    # 12 MB at 1 GB/s and the latency; the clock may run 10 % faster than when it was measured.
    assert begin.elapsed_time(end) >= 0.9 * 13


@each_device
def test_a_profile_sees_the_time_of_the_link(device: str) -> None:
    """From below: whatever is busy makes things slower, never faster."""
    seconds = 2e-3
    with simulated_mesh(4, latency=seconds, device_type=device) as mesh:
        model = shard(matrices(3, 256).to(device), mesh=mesh)
        for i in range(2):
            model(batch(i, 256, device)).sum().backward()
        with profile(model) as p:
            model(batch(2, 256, device)).sum().backward()
    assert p.measures.host_timed == (device == "cpu")
    for unit in p.units[1:]:
        for traffic in (unit.gather, unit.reduce_scatter):
            assert traffic.count >= 1
            assert traffic.seconds > 0.9 * seconds * traffic.count
    assert p.measures.total.exposed_s > 0.9 * seconds  # of the first gather
    assert all(sample.total for sample in p.recording.memory)


@each_device
def test_an_asynchronous_collective_is_over_after_wait(device: str) -> None:
    with simulated_mesh(4, latency=5e-3, device_type=device):
        tensor = torch.ones(8, device=device)
        dist.all_reduce(tensor, async_op=True).wait()
        assert tensor.tolist() == [4.0] * 8
