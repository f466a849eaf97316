"""`offload_optimizer`: the same steps, with the state in host memory or files in between."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import testdev
from fsdp2 import CPUOffloadPolicy, fully_shard, offload_optimizer
from fsdp2.checkpoint import Checkpointer
from fsdp2.offload.homes import FileHome, aligned_buffer
from fsdp2.optim import clip_grad_norm_, flat_step, local_step
from fsdp2.testing import check, recording
from harness import cached_mesh, ours_only, run_on, shared_folder

pytestmark = [
    ours_only("torch has no such optimizer"),
    pytest.mark.skipif(
        testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
    ),
]
SMALL: dict[str, Any] = {"min_bytes": 512, "chunk_bytes": 20_000}


class Model(nn.Module):
    """Dims that ranks do not divide; one layer has a gradient in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(37, 37)
        self.blocks = nn.ModuleList(nn.Linear(37, 37) for _ in range(4))

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.rare(x) if rare else x


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    mesh = cached_mesh(dist.get_world_size())
    for block in (*model.blocks, model.rare):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(5, 37, generator=generator, device="cpu")
        x = x.to(testdev.NAME) if torch.get_default_device().type == testdev.NAME else x
        model(x, step % 2 == 1).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def local(tensor: Any) -> Any:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.cpu() if isinstance(found, Tensor) else found


def assert_same(model: nn.Module, optimizer: Any, other: nn.Module, right: Any) -> None:
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        assert list(optimizer.state[a]) == list(right.state[b])
        for key, value in right.state[b].items():
            assert torch.equal(local(optimizer.state[a][key]), local(value)), key


def away(optimizer: Any) -> int:
    pager = vars(optimizer).get("_fsdp2_pager")
    return 0 if pager is None else pager.counts.away


def _steps(to: str) -> None:
    with shared_folder() as folder:
        where = "cpu" if to == "cpu" else Path(folder) / "state"
        for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
            right_model = sharded(**options)
            right = local_step(adam(right_model))
            train(right_model, right, range(6))
            total = None
            for limit in (0, 30_000) if not options else (0,):
                model = sharded(**options)
                optimizer = offload_optimizer(adam(model), where, max_device_bytes=limit, **SMALL)
                assert type(optimizer).__name__ == "OffloadedAdamW"
                train(model, optimizer, range(3))
                # Loaded state is taken over, from a copy and in place.
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                train(model, optimizer, range(3, 5))
                for state in optimizer.state.values():
                    local(state["exp_avg"])
                    state["exp_avg"].mul_(1)
                train(model, optimizer, range(5, 6))
                assert_same(model, optimizer, right_model, right)
                # The same order on all ranks, which checkpoints compare.
                groups = optimizer.param_groups
                in_groups = [id(p) for group in groups for p in group["params"]]
                assert [id(p) for p in optimizer.state] == in_groups
                counts = optimizer._fsdp2_pager.counts
                if options and to == "cpu":  # it is where it would be taken
                    assert counts.away == 0
                    continue
                total = total or counts.away
                assert counts.away + counts.kept == total
                assert (counts.kept > 0) == (limit > 0)
                assert counts.kept <= limit
                assert 0 < counts.back_peak <= 3 * SMALL["chunk_bytes"]
                assert counts.back == 0
        if to != "cpu":
            assert os.listdir(where) == []  # files have no names


@pytest.mark.parametrize("to", ["cpu", "files"])
def test_steps_are_the_same(to: str) -> None:
    run_on(2, _steps, to, device=testdev.NAME)


def _checkpoints(pairs: list[tuple[str, str]]) -> None:
    """Between optimizers whose state is elsewhere, and ones whose state is not."""
    with shared_folder() as folder:
        kinds = {
            "files": lambda o: offload_optimizer(o, Path(folder) / "state", **SMALL),
            "memory": lambda o: offload_optimizer(o, max_device_bytes=20_000, **SMALL),
            "device": local_step,
        }
        model = sharded()
        right = local_step(adam(model))
        train(model, right, range(4))
        for saving, loading in pairs:
            first, second = sharded(), sharded()
            optimizer, loaded = kinds[saving](adam(first)), kinds[loading](adam(second))
            train(first, optimizer, range(2))
            checkpoints = Checkpointer(Path(folder) / f"{saving}-{loading}")
            checkpoints.save(1, model=first, optimizer=optimizer)
            if loading == "memory":
                train(second, loaded, range(1))  # it has state already
            checkpoints.load("latest", model=second, optimizer=loaded)
            train(second, loaded, range(2, 4))
            assert_same(second, loaded, model, right)


def _numbers() -> None:
    model = sharded()
    make = lambda: offload_optimizer(adam(model), min_bytes=0, chunk_bytes=20_000)  # noqa: E731
    optimizer = make()
    train(model, optimizer, range(2))
    for parameter, state in optimizer.state.items():
        assert not isinstance(state["step"], DTensor)
        assert isinstance(state["exp_avg"], DTensor) == isinstance(parameter, DTensor)
    with shared_folder() as folder, Checkpointer(folder) as checkpoints:
        checkpoints.save(1, model=model, optimizer=optimizer).wait()
        dist.barrier()
        loaded = make()
        checkpoints.load(model=model, optimizer=loaded)
        assert_same(model, loaded, model, optimizer)


@pytest.mark.parametrize("device", ["cpu", testdev.NAME])
def test_numbers_in_the_state_have_no_layout(device: str) -> None:
    """However small ``min_bytes`` is: the count of steps went to checkpoints as whole tensors."""
    run_on(2, _numbers, device=device)


KINDS = ("files", "memory", "device")


@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([("files", "memory"), ("memory", "device"), ("device", "files")], id="some"),
        pytest.param(list(itertools.product(KINDS, KINDS)), id="all", marks=pytest.mark.long),
    ],
)
def test_checkpoints_do_not_depend_on_where_state_is(pairs: list[tuple[str, str]]) -> None:
    run_on(2, _checkpoints, pairs, device=testdev.NAME)


def test_copies_and_closures(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(40, 40), torch.randn(3, 40)
    plain = copy.deepcopy(model)
    right = adam(plain, fused=True)
    optimizer = offload_optimizer(adam(model, fused=True), tmp_path, **SMALL)
    calls = []
    for each, step in ((model, optimizer), (plain, right)):

        def closure(each: nn.Module = each, step: Any = step) -> Tensor:
            step.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            calls.append(each)
            return loss

        losses = [step.step(closure).item() for _ in range(3)]
        assert losses == sorted(losses, reverse=True)
    assert calls == [model] * 3 + [plain] * 3
    copied, own = copy.deepcopy((model, optimizer))
    for each, step in ((model, optimizer), (copied, own), (plain, right)):
        step.zero_grad()
        each(x).sum().backward()
        step.step()
    for a, b, c in zip(model.parameters(), copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, c)
    assert away(own) == away(optimizer) > 0


class Replacing(torch.optim.Optimizer):
    """Makes its state anew in each step, later in another dtype, with other keys."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            number = state["number"] = state.get("number", 0) + 1
            mean = state.get("mean", torch.zeros_like(p))
            state["mean"] = (mean * 0.5 + p.grad).to(torch.float64 if number > 2 else p.dtype)
            state.pop("old", None)
            if number % 2:
                state["old"] = mean.clone()
            p.sub_(0.1 * state["mean"])


@pytest.mark.parametrize("to", ["cpu", "files"])
def test_state_that_is_made_anew(to: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    plain = copy.deepcopy(model)
    right = Replacing(plain.parameters())
    where = "cpu" if to == "cpu" else tmp_path
    optimizer = offload_optimizer(Replacing(model.parameters()), where, elementwise=True, **SMALL)
    for _ in range(5):
        x = torch.randn(3, 40)
        for each, step in ((model, optimizer), (plain, right)):
            each.zero_grad()
            each(x).square().sum().backward()
            step.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
            assert optimizer.state[a].keys() == right.state[b].keys()
            for key, value in right.state[b].items():
                found = optimizer.state[a][key]
                assert torch.equal(found, value) if isinstance(value, Tensor) else found == value
    assert (away(optimizer) > 0) == (to == "files")


class Lazy(torch.optim.Optimizer):
    """Has nothing to remember at first, and notes that."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "mean" not in state:
                state["mean"] = None
            else:
                mean = state["mean"]
                state["mean"] = p.grad.clone() if mean is None else mean.lerp_(p.grad, 0.5)
                p.sub_(0.1 * state["mean"])


def _removed(number: int, optimizer: Any) -> None:
    """Parts of the state, or all of it: the optimizer begins anew there."""
    if number == 2:
        optimizer.state.pop(optimizer.param_groups[0]["params"][0])
    elif number == 4:
        optimizer.state.clear()
    elif number == 6:
        next(iter(optimizer.state.values())).clear()


MAKERS: dict[str, Any] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.1),
    "none at first": Lazy,
}


@pytest.mark.parametrize("limit", [0, 7_000])
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_state_that_is_removed_begins_anew(make: Any, limit: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    plain = copy.deepcopy(model)
    right, small = make(plain.parameters()), {**SMALL, "max_device_bytes": limit}
    optimizer = offload_optimizer(make(model.parameters()), tmp_path, elementwise=True, **small)
    for number in range(8):
        x = torch.randn(3, 40)
        for each, step in ((model, optimizer), (plain, right)):
            step.zero_grad()
            each(x).square().mean().backward()
            _removed(number, step)
            step.step()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)
            assert optimizer.state[a].keys() == right.state[b].keys()
    assert away(optimizer) > 0


class Counting(torch.optim.SGD):
    """Remembers a number in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5


def test_what_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(40, 40)
    with pytest.raises(ValueError, match="step of this FlatSGD has already been replaced"):
        offload_optimizer(flat_step(torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(ValueError, match="differentiable optimizer"):
        offload_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))
    with pytest.raises(TypeError, match="chunk_bytes must be an int"):
        offload_optimizer(torch.optim.SGD(model.parameters()), chunk_bytes=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_bytes must not be negative"):
        offload_optimizer(torch.optim.SGD(model.parameters()), min_bytes=-1)
    with pytest.raises(TypeError, match="Adafactor is not elementwise"):
        offload_optimizer(torch.optim.Adafactor(model.parameters()))
    optimizer = offload_optimizer(Counting(model.parameters(), lr=0.1, momentum=0.9), tmp_path)
    model(torch.randn(2, 40)).sum().backward()
    with pytest.raises(TypeError, match=r"Counting keeps .* outside .* \(lr\)"):
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_what_torch_notes_about_fused_steps_is_not_remembered(kind: Any) -> None:
    options = {"lr": 0.1, "fused": True} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    plain = copy.deepcopy(model)
    right = kind(plain.parameters(), **options)
    optimizer = offload_optimizer(kind(model.parameters(), **options), **SMALL)
    for _ in range(2):
        for each, stepping in ((model, optimizer), (plain, right)):
            each(torch.ones(2, 40)).square().sum().backward()
            stepping.step()
            stepping.zero_grad()
    assert_same(model, optimizer, plain, right)


def test_errors_of_the_disk_are_raised_in_the_step(tmp_path: Path) -> None:
    model = nn.Linear(40, 40)
    optimizer = offload_optimizer(torch.optim.Adam(model.parameters()), tmp_path, **SMALL)
    model(torch.randn(2, 40)).sum().backward()
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(OSError, match="space"):
        optimizer.step()
    optimizer.step()
    for call in ("preadv", "pwritev"):
        broken = OSError(errno.EIO, "Input/output error")
        with mock.patch(f"os.{call}", side_effect=broken), pytest.raises(OSError, match="Input"):
            optimizer.step()
    optimizer.step()


def test_a_step_that_was_interrupted_leaves_nothing_under_way(tmp_path: Path) -> None:
    """Ctrl-C while the host waits for the disk: the next step reads what this one has written."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    plain = copy.deepcopy(model)
    right = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload_optimizer(made, tmp_path, **SMALL)
    may_write = threading.Event()
    write, result, waits = FileHome.write, Future.result, itertools.count()

    def write_later(self: FileHome, buffer: Tensor) -> None:
        assert may_write.wait(60)
        write(self, buffer)

    def interrupted(self: Future[None], timeout: float | None = None) -> None:
        if next(waits) == 1:  # the first waits for what is read
            threading.Timer(0.3, may_write.set).start()
            raise KeyboardInterrupt
        result(self, timeout)

    for number in range(4):
        x = torch.randn(3, 40)
        for each, step in ((model, optimizer), (plain, right)):
            step.zero_grad()
            each(x).square().mean().backward()
            if number == 2 and step is optimizer:
                slow = mock.patch.object(FileHome, "write", write_later)
                once = mock.patch.object(Future, "result", interrupted)
                with slow, once, pytest.raises(KeyboardInterrupt):
                    step.step()
            else:
                step.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters())), number


class Interrupted(torch.optim.SGD):
    """Ctrl-C at the end of the sixth part of all steps."""

    parts = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        type(self).parts += 1
        if self.parts == 6:
            raise KeyboardInterrupt


def _interrupted_on_the_device() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    made = Interrupted(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = offload_optimizer(made, elementwise=True, min_bytes=512, chunk_bytes=0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    testdev.native().set_delays(0, 1.0, 50_000)
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        sums = [state["momentum_buffer"].sum().item() for state in optimizer.state.values()]
    finally:
        testdev.native().set_delays(0, 0.0, 0)
    # What the host reads at once, as for a last checkpoint.
    assert sums == pytest.approx([1.9 * 64 * 64] * 3)


def test_state_is_complete_after_an_interrupt() -> None:
    run_on(1, _interrupted_on_the_device, device=testdev.NAME)


def test_files_where_direct_io_is_refused(tmp_path: Path) -> None:
    direct = os.O_DIRECT

    def refuse(path: str, flags: int, *args: Any) -> int:
        if flags & direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *args)

    opened = os.open
    with mock.patch("os.open", side_effect=refuse):
        home = FileHome(tmp_path, 5000)
    assert not home.direct
    homes = [home, FileHome(tmp_path, 5000)]
    assert os.listdir(tmp_path) == []
    for each in homes:
        buffer = aligned_buffer(5000, pin=False)
        buffer.copy_(torch.arange(buffer.numel()) % 251)
        each.write(buffer)
        assert torch.equal(each.bytes, buffer[:5000])
        each.bytes.fill_(7)
        each.read(buffer)
        assert buffer[:5000].eq(7).all()


def test_order_of_streams() -> None:
    """Copies of one part run beside the step of another, by the trace of all of it."""
    with recording() as recorder:
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        optimizer = offload_optimizer(
            optimizer, min_bytes=512, chunk_bytes=10_000, pin_memory=False, elementwise=True
        )
        with mock.patch("fsdp2.offload.paging.is_on_host", return_value=False):
            for _ in range(3):
                model(torch.randn(4, 32)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert away(optimizer) > 0
    assert check(recorder.events) == []
