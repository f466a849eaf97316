"""`offload_activations`: gradients are the same bit for bit, whatever is where.

Most bodies run on the test device, whose memory the host cannot touch, whose streams are threads,
and where memory that is freed too early holds NaNs. On the CPU nothing is offloaded.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import testdev
from fsdp2 import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    offload_activations,
    replicate,
)
from fsdp2.comm.streams import copy_stream_for
from fsdp2.dtensor.memory import is_gathered
from fsdp2.offload.activations import _Away, _Packed
from fsdp2.offload.saved_memory import SavedMemory
from fsdp2.testing import check, recording
from harness import cached_mesh, ours_only, run_on
from subclasses import two_tensor_methods, with_two_tensors

pytestmark = [
    ours_only("torch has no such context"),
    pytest.mark.skipif(
        testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
    ),
]

WIDTH, ROWS = 32, 24
SAVED = WIDTH * ROWS * 4  # bytes of one activation


class Block(nn.Module):
    """Saves inputs twice, views, halves of one tensor, a mask and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH).repeat(ROWS, 1))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        hidden = (gate.sigmoid() * value).masked_fill(value > 2, 0.0)
        return x + self.down(hidden) * self.scale.to(x.dtype)


class Model(nn.Module):
    """Blocks, the last of which runs twice; some under checkpoints."""

    def __init__(self, checkpointed: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate((*self.blocks, self.blocks[-1])):
            again = i in self.checkpointed
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x).tanh()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    mesh = cached_mesh(dist.get_world_size())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator, device="cpu").to(testdev.NAME)


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [p.grad for p in model.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in found]
    return [None if g is None else g.cpu() for g in local]


Program = Callable[[nn.Module, AbstractContextManager[Any]], None]
LIMITS = (0, 5 * SAVED, 1 << 30)


def compare(
    program: Program, build: Callable[[], nn.Module], limits: tuple[int, ...] = LIMITS
) -> Iterator[offload_activations]:
    """Run it without offload, then within each limit, and compare gradients."""
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    program(plain, nullcontext())
    expected = gradients(plain)
    assert any(g is not None for g in expected)
    for limit in limits:
        each = copy.deepcopy(model)
        offload = offload_activations(each, max_device_bytes=limit, min_bytes=1024)
        program(each, offload)
        for found, right in zip(gradients(each), expected, strict=True):
            assert (found is None) == (right is None)
            assert found is None or torch.equal(found, right)
        gc.collect()
        left = offload.bytes
        assert (left.device, left.host) == (0, 0), left
        assert left.to_device > 0 or limit > SAVED
        yield offload


def train(model: nn.Module, offload: AbstractContextManager[Any], steps: int = 2) -> None:
    for step in range(steps):
        with offload:
            loss = model(batch(step)).square().mean()
        loss.backward()


def accumulate_out_of_order(model: nn.Module, offload: AbstractContextManager[Any]) -> None:
    """Two forwards, then their backwards, the first one first."""
    losses = []
    for step in range(3):
        with offload:
            losses.append(model(batch(step)).square().mean())
    for i in (0, 2, 1):
        losses[i].backward()


def keep_graph(model: nn.Module, offload: AbstractContextManager[Any]) -> None:
    with offload:
        loss = model(batch(0)).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()


def fail_and_go_on(model: nn.Module, offload: AbstractContextManager[Any]) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"), offload:
        model(batch(0))
    handle.remove()
    with offload:
        output = model(batch(1))
    handle = output.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        output.sum().backward()
    handle.remove()
    del output
    train(model, offload)


def some_outputs(model: nn.Module, offload: AbstractContextManager[Any]) -> None:
    """A graph that is dropped, one that is dropped in the middle, and one that is used."""
    with offload:
        dropped = model(batch(0))
        hidden = model.blocks[0](batch(1))
        used = model(batch(2))
    del dropped
    hidden.square().sum().backward()
    used.square().mean().backward()


def _programs() -> None:
    for program in (train, accumulate_out_of_order, keep_graph, fail_and_go_on, some_outputs):
        for _ in compare(program, lambda: sharded(Model())):
            pass


def test_programs() -> None:
    run_on(2, _programs, device=testdev.NAME)


def lora() -> nn.Module:
    model = Model()
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    return sharded(model)


class ParallelBlock(nn.Module):
    """What is between its layers is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        assert isinstance(hidden, DTensor)
        return x + self.down(hidden.sigmoid() * hidden)


def parallel() -> nn.Module:
    """Tensor-parallel blocks, sharded over one rank."""
    model = Model()
    model.blocks = nn.ModuleList(ParallelBlock() for _ in range(4))
    mesh = cached_mesh(1, 2, names=("data", "tensor"))
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "checkpoints": lambda: sharded(Model(checkpointed=(1, 2, 4))),
    "kept gathered": lambda: sharded(Model(), reshard_after_forward=False),
    "bf16": lambda: sharded(Model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "shards on the CPU": lambda: sharded(Model(), offload_policy=CPUOffloadPolicy()),
    "frozen": lora,
    "replicated": lambda: replicate(Model(), mesh=cached_mesh(dist.get_world_size())),
    "plain": Model,
}


def _extension() -> None:
    """Parameters that are tensor subclasses: their inner tensors are gathered memory too."""
    seen = []

    def look(module: Any, *_: Any) -> None:
        inner = module.weight.a, module.weight.b
        seen.append([is_gathered(t.untyped_storage()) for t in inner])

    def build() -> nn.Module:
        model = Model()
        model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        model = sharded(with_two_tensors(model, ("weight",)))
        model.blocks[1].register_forward_pre_hook(look)
        return model

    with two_tensor_methods():
        model = build()
        offload = offload_activations(model, min_bytes=1024)
        for step in range(2):
            with offload:
                loss = model(batch(step)).square().mean()
            loss.backward()
    assert seen == [[True, True]] * 2
    assert offload.bytes.to_host > 0


def _builds() -> None:
    _extension()
    for build in BUILDS.values():
        for _ in compare(train, build, LIMITS[:2]):
            pass


def test_builds() -> None:
    run_on(2, _builds, device=testdev.NAME)


def _bytes() -> None:
    """What is copied: every activation once, no parameter, and no more than asked for stays."""
    before = testdev.native().pinned_bytes()
    all_of_it, some, none = compare(lambda m, o: train(m, o, 1), lambda: sharded(Model()))
    assert none.bytes.to_host == none.bytes.host_peak == 0
    kept = none.bytes.device_peak
    assert all_of_it.bytes.to_host == all_of_it.bytes.host_peak == kept
    assert all_of_it.bytes.device_peak <= 8 * SAVED  # what is used, what is next: at most 4 each
    assert some.bytes.device_peak <= max(LIMITS[1], 8 * SAVED)
    assert 0 < some.bytes.to_host < kept
    assert some.bytes.to_device == some.bytes.to_host
    # What save_on_cpu copies: tensor by tensor, parameters too.
    model = sharded(Model())
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(batch(0)).square().mean()
    assert all_of_it.bytes.to_host < 0.75 * total, (all_of_it.bytes, total)
    assert testdev.native().pinned_bytes() - before < 3 * 1.25 * kept


def test_every_activation_is_copied_once_and_no_parameter_is() -> None:
    run_on(2, _bytes, device=testdev.NAME, restart=True)


def _changed_in_place() -> None:
    for limit in (0, 1 << 30):
        model = sharded(Model())
        x = batch(0).requires_grad_()
        offload = offload_activations(model, max_device_bytes=limit, min_bytes=1024)
        with offload:
            hidden = x * 2
            output = model(hidden.sigmoid()).sum() + (hidden * hidden).sum()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of"):
            output.backward()
        # After the save but before anything else was: what was changed is saved as it is then.
        with offload:
            hidden = batch(0) * x
            first = hidden.exp()
            hidden.add_(1)
            second = hidden.square()
        (first.sum() + second.sum()).backward()
        value = (batch(0) * x).detach()
        right = batch(0) * value.exp() + batch(0) * 2 * (value + 1)
        torch.testing.assert_close(x.grad, right)


def test_changes_in_place_are_errors_as_without() -> None:
    run_on(1, _changed_in_place, device=testdev.NAME)


def _data_is_shared() -> None:
    """Tensors on one storage with counters of their own, written in between."""
    x = batch(0).requires_grad_()
    offload = offload_activations(nn.Identity(), min_bytes=1024)
    with offload:
        hidden = x * 2
        first = (hidden * hidden).sum()
        alias = hidden.data
        alias.mul_(3)
        second = (x * alias).sum()
    second.backward()
    torch.testing.assert_close(x.grad, batch(0) * 6)
    del first


def _second_derivatives() -> None:
    for limit in (0, 1 << 30):
        results = []
        for offload in (
            nullcontext(),
            offload_activations(nn.Identity(), max_device_bytes=limit, min_bytes=1024),
        ):
            x = batch(0).requires_grad_()
            torch.manual_seed(0)
            block = Block().to(testdev.NAME)
            with offload:
                y = block(x).tanh().square().sum()
                (grad,) = torch.autograd.grad(y, x, create_graph=True)
                grad.square().sum().backward()
            results.append([x.grad.cpu(), *(p.grad.cpu() for p in block.parameters())])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


def _strides_and_dtypes() -> None:
    """What comes back lies as it lay."""
    offload = offload_activations(nn.Identity(), min_bytes=256)
    many = torch.arange(12 * 16 * 20, device=testdev.NAME, dtype=torch.float32).view(12, 16, 20)
    tensors = [
        many.transpose(0, 2),
        many[3:4],
        many[:, 2:, ::3],
        many[0].expand(5, 16, 20),
        many.to(torch.bfloat16)[5],
        many > 7,
        many.to(torch.complex64).view(12 * 16, 20),
        many.to(torch.complex64).conj(),
        many[2:2],
    ]
    for tensor in tensors:
        packed = offload._pack(tensor)
        assert isinstance(packed, _Packed)
        copied = isinstance(packed.part, _Away)
        assert copied == (tensor.numel() > 0 and not tensor.is_conj())
        restored = packed.tensor()
        assert restored.stride() == tensor.stride()
        assert restored.dtype == tensor.dtype
        assert torch.equal(restored.cpu(), tensor.cpu())
    del packed, restored
    assert offload.bytes.device == 0


def _compiled() -> None:
    x = batch(0).requires_grad_()
    torch.manual_seed(0)
    block = Block().to(testdev.NAME)
    block(x).square().sum().backward()
    expected, x.grad = x.grad, None
    compiled = torch.compile(block, backend="aot_eager")
    offload = offload_activations(block, min_bytes=1024)
    with offload:
        loss = compiled(x).square().sum()
    loss.backward()
    assert torch.equal(x.grad.cpu(), expected.cpu())
    assert offload.bytes.to_host > 0


def _address_is_used_again() -> None:
    """Of a tensor that is gone, by another one with the same memory, but other content."""
    both = torch.zeros(2, ROWS, WIDTH, device=testdev.NAME)
    weight = torch.ones(ROWS, WIDTH, device=testdev.NAME, requires_grad=True)
    offload = offload_activations(nn.Identity(), min_bytes=1024)
    with offload:
        first = both.data
        address = first._cdata
        loss = (weight * first[0]).sum()
        del first
        tries = [both.data for _ in range(1000)]
        second = next((t for t in tries if t._cdata == address), tries[0])
        for _ in range(3):  # to the host with the first
            loss = loss + (weight * torch.ones_like(weight)).sum()
        both[1] += 5  # not what was saved
        loss = loss + (weight * second[1]).sum()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad.cpu(), torch.full((ROWS, WIDTH), 8.0, device="cpu"))


class Streams:
    """A program on two streams; each operator's backward is on the stream of its forward."""

    def __init__(self) -> None:
        self.device = torch.get_device_module(testdev.NAME)
        self.main, self.side = self.device.current_stream(), self.device.Stream()
        self.weight = torch.ones(ROWS, WIDTH, device=testdev.NAME, requires_grad=True)
        self.losses: list[Tensor] = []
        self.right = 0.0
        self.shared = self.full(2.0)

    def on_side(self) -> AbstractContextManager[None]:
        return self.device.stream(self.side)

    def full(self, value: float) -> Tensor:
        return torch.full((ROWS, WIDTH), value, device=testdev.NAME)

    def save(self, tensor: Tensor, value: float) -> None:
        self.losses.append((self.weight * tensor).sum())
        self.right += value

    def push(self) -> None:
        """To the host with what was saved before."""
        for _ in range(8):
            self.save(self.full(1.0), 1.0)


def slowly(tensor: Tensor) -> Tensor:
    for _ in range(30):
        tensor = tensor * 1
    return tensor


def _side_is_late(streams: Streams) -> None:
    """The main stream begins the copy of what the other one has yet to compute."""
    with streams.on_side():
        streams.save(slowly(streams.full(3.0)), 3.0)
    streams.push()


def _both_use_it(streams: Streams) -> None:
    """What comes back has memory of one of them."""
    streams.side.wait_stream(streams.main)
    for number in range(6):
        with streams.on_side():
            streams.save(streams.shared * (number + 1), 2.0 * (number + 1))
            streams.save(streams.shared, 2.0)
        streams.save(streams.shared, 2.0)
        streams.save(streams.full(3.0), 3.0)


def _side_is_first(streams: Streams) -> None:
    """The main stream reads what has just come back for the other one."""
    own = streams.full(3.0)
    own.record_stream(streams.side)
    streams.side.wait_stream(streams.main)
    with streams.on_side():
        streams.save(own, 3.0)
    streams.save(own, 3.0)
    with streams.on_side():
        streams.save(own, 3.0)
    streams.push()


def _several_streams(seeds: int = 2) -> None:
    for program in (_side_is_late, _both_use_it, _side_is_first):
        for seed, limit in itertools.product(range(seeds), (1 << 30, 0, 4 * SAVED)):
            testdev.native().set_delays(seed, 0.3, 4000)
            streams = Streams()
            offload = offload_activations(nn.Identity(), max_device_bytes=limit, min_bytes=1024)
            with offload:
                program(streams)
                streams.main.wait_stream(streams.side)
                loss = torch.stack(streams.losses).sum()
            loss.backward()
            streams.device.synchronize()
            testdev.native().set_delays(0, 0.0, 0)
            assert streams.weight.grad is not None
            found = streams.weight.grad.cpu()
            right = torch.full_like(found, streams.right)
            assert torch.equal(found, right), (program, limit, found.unique(), streams.right)
            assert (offload.bytes.to_host > 0) == (limit < 1 << 30)


def busy() -> Tensor:
    """Work that the current stream has for longer than the host needs to go on."""
    tensor = torch.ones(1024, 1024, device=testdev.NAME)
    for _ in range(4):
        tensor = tensor @ tensor / 1024
    return tensor


class Returning:
    """Memory that one stream saved, and that another one needs when it is in host memory."""

    def __init__(self) -> None:
        module = torch.get_device_module(testdev.NAME)
        self.side, self.late, self.stream = module.Stream(), module.Stream(), module.stream
        device = torch.device(testdev.NAME, 0)
        copies = copy_stream_for(device)
        assert copies is not None
        self.copies = copies._stream
        self.memory = SavedMemory(device, limit=0, pin=False, copies=copies)
        with self.stream(self.side):
            self.entry, self.number = self.save(3.0)
            self.save(4.0)  # for which the first one goes
        assert self.entry is not None
        assert self.entry.storage is None

    def save(self, value: float) -> tuple[Any, int]:
        tensor = torch.full((ROWS, WIDTH), value, device=testdev.NAME)
        return self.memory.save(tensor.untyped_storage(), 0, SAVED, value, tensor)

    def read(self) -> Tensor:
        storage, start = self.memory.use(self.entry, self.number)
        shape = torch.Size([ROWS, WIDTH])
        return self.memory.view(storage, start, torch.float32, shape, (WIDTH, 1))


def _another_stream_waits_for_the_copy_back() -> None:
    returning = Returning()
    with returning.stream(returning.late):
        busy()
    returning.copies.wait_stream(returning.late)
    found = returning.read().clone()
    assert torch.equal(found.cpu(), torch.full((ROWS, WIDTH), 3.0, device="cpu")), found.cpu()


def _memory_is_not_given_away_while_another_stream_reads_it() -> None:
    returning = Returning()
    view = returning.read()
    busy()
    found = view.clone()
    del view
    returning.entry = None
    with returning.stream(returning.side):
        others = [torch.full((ROWS, WIDTH), 7.0, device=testdev.NAME) for _ in range(8)]
    assert torch.equal(found.cpu(), torch.full((ROWS, WIDTH), 3.0, device="cpu")), found.cpu()
    assert all(other.sum().item() == 7.0 * ROWS * WIDTH for other in others)


@pytest.mark.parametrize(
    "body",
    [
        _data_is_shared,
        _second_derivatives,
        _strides_and_dtypes,
        _compiled,
        _address_is_used_again,
        _several_streams,
        _another_stream_waits_for_the_copy_back,
        _memory_is_not_given_away_while_another_stream_reads_it,
    ],
)
def test_tensors(body: Callable[[], None]) -> None:
    run_on(1, body, device=testdev.NAME)


@pytest.mark.long
def test_several_streams_with_many_delays() -> None:
    run_on(1, _several_streams, 20, device=testdev.NAME)


def _tensor_parallel() -> None:
    moved = [offload.bytes.to_host for offload in compare(train, parallel)]
    assert moved[0] > moved[1] > moved[2] == 0
    # In each block and step: x, hidden and the product twice as wide as it, on each of two ranks;
    # sigmoid's output.
    assert moved[0] >= 2 * 5 * (1 + 3 * 2) * SAVED
    model = parallel()
    offload = offload_activations(model, min_bytes=1024)
    hidden: list[Tensor] = []
    model.blocks[0].up.register_forward_hook(lambda module, args, out: hidden.append(out))
    with offload:
        output = model(batch(0))
    hidden[0].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation: a tensor of class DTensor"):
        output.sum().backward()


def test_dtensors() -> None:
    run_on(2, _tensor_parallel, device=testdev.NAME)


@pytest.mark.parametrize("limit", [0, 4 * SAVED, 12 * SAVED])
@pytest.mark.parametrize("keep", [False, True])
def test_order_of_streams(limit: int, keep: bool) -> None:
    """No copy reads or writes memory that others use, by the trace of all of it."""
    with recording() as recorder:
        model = Model()
        offload = offload_activations(
            model, max_device_bytes=limit, min_bytes=1024, pin_memory=False
        )
        for step in range(3):
            with offload:
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            if step != 1:  # that graph is dropped
                loss.backward(retain_graph=keep)
            if keep and step == 0:
                loss.backward()
    assert offload.bytes.to_host > 0
    assert check(recorder.events) == []


def test_on_the_cpu_it_does_nothing() -> None:
    model = Model()
    x = torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    offload = offload_activations(model, min_bytes=0)
    with offload:
        loss = model(x).sum()
    loss.backward()
    assert all(map(torch.equal, gradients(model), expected))
    assert offload.bytes.to_host == offload.bytes.device_peak == 0


def test_arguments() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        offload_activations([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_device_bytes must be an int"):
        offload_activations(model, max_device_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes must not be negative, got -1"):
        offload_activations(model, min_bytes=-1)
