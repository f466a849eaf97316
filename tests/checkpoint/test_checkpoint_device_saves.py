"""Asynchronous saves of what is on a device: exact whatever is written next; the host goes on.

On the test device, and on a GPU. Expected values are copies that the device makes before the save;
what was saved is read from the files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import harness
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointError, MemorySnapshots, load_model, save_model
from fsdp2.checkpoint.saving import staging
from fsdp2.common import pinned
from fsdp2.common.copies import CopyStream
from harness import cached_mesh, ours_only, run_on

pytestmark = ours_only("checkpoints")

WIDTH = 64
EVERYTHING = 1 << 30
on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
each_device = pytest.mark.parametrize("device", ["testdev", pytest.param("cuda", marks=on_cuda)])
# Nothing, a part and all of what is saved is copied on the device first.
each_limit = pytest.mark.parametrize("limit", [0, 40_000, EVERYTHING])


def device_module() -> Any:
    return torch.get_device_module(harness.DEVICE)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class Run:
    """A model with buffers, its optimizer, and what both hold."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)]
        self.model = nn.Sequential(*layers)
        for child in self.model:
            fully_shard(child, mesh=cached_mesh(1), **options)
        fully_shard(self.model, mesh=cached_mesh(1), **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        # A tensor that is not contiguous, and one of which no other rank knows.
        self.backward()
        self.optimizer.step()
        weight = self.model[0].weight
        self.optimizer.state[weight]["turned"] = torch.randn(5, 3).t()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.model(torch.randn(8, WIDTH)).square().sum().backward()

    def tensors(self) -> dict[str, Tensor]:
        found = {name: local(tensor) for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optim.{key}.{name}"] = local(value)
        return found

    def copy(self) -> dict[str, Tensor]:
        """Enqueued now, as the copies of a save have to be."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}


def check_saved(path: Path, expected: dict[str, Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for file in sorted(path.rglob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.cpu()), name


def occupy() -> Any:
    """Give the current stream work for longer than a save takes; returns the event of its end."""
    module = device_module()
    if harness.DEVICE == "cuda":
        torch.cuda._sleep(1_000_000_000)
    else:
        tensor = torch.ones(1024, 1024)
        for _ in range(4):
            tensor = tensor @ tensor / 1024
    event = module.Event()
    event.record(module.current_stream())
    return event


@contextmanager
def busy(stream: Any) -> Iterator[Any]:
    """A stream that is busy to the end of the block (on CUDA: for half a second at least); yields
    the event of its end."""
    module = device_module()
    with module.stream(stream):
        if harness.DEVICE == "cuda":
            event, end = occupy(), lambda: None
        else:
            end = module.native.hold()
            event = module.Event()
            event.record(stream)
    patience = threading.Timer(20, end)  # a test that waits for it fails, and does not hang
    patience.start()
    try:
        yield event
    finally:
        patience.cancel()
        end()


class LateCopies:
    """Saves whose copies begin late: their stream has something else to do before."""

    def __init__(self) -> None:
        self.streams: list[CopyStream] = []
        self.ends: list[Any] = []

    @contextmanager
    def patched(self) -> Iterator[LateCopies]:
        make = staging._copy_stream

        def making(device: torch.device) -> CopyStream | None:
            made = make(device)
            assert made is not None
            self.streams.append(made)
            self.delay()
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(staging, "_copy_stream", making)
            yield self

    def delay(self) -> None:
        """Before each save; the first one does it when it makes the stream."""
        for copies in self.streams:
            with device_module().stream(copies._stream):
                self.ends.append(occupy())


@contextmanager
def held_back(checkpoints: Checkpointer) -> Iterator[None]:
    """The thread that writes waits at its beginning until the end of the block."""
    gate, fill = threading.Event(), checkpoints._staging.fill

    def filling(captured: Any) -> Any:
        staged = fill(captured)

        def waiting(*args: Any) -> Any:
            gate.wait()
            return staged(*args)

        return waiting

    checkpoints._staging.fill = filling  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.set()
        checkpoints._staging.fill = fill  # type: ignore[method-assign]


# -- what is written next --------------------------------------------------------------------------


def step(run: Run) -> None:
    run.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()


def data(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.mul_(-3.0)


def locals_by_hand(run: Run) -> None:
    for tensor in run.tensors().values():
        if tensor.device.type != "cpu":
            tensor.fill_(5)


def another_state(run: Run) -> None:
    state = {name: torch.full_like(t, 6) for name, t in run.model.state_dict().items()}
    run.model.load_state_dict(state)


def freed_and_used_again(run: Run) -> None:
    sizes = [tensor.numel() for tensor in run.tensors().values()]
    run.optimizer.state.clear()
    run.reused = [torch.full((size,), 7.0) for size in sizes]  # type: ignore[attr-defined]


WRITES: list[Callable[[Run], None]] = [
    step,
    data,
    locals_by_hand,
    another_state,
    freed_and_used_again,
]


def _every_write(folder: str, limit: int) -> None:
    for write in WRITES:
        root, late = Path(folder) / write.__name__, LateCopies()
        with late.patched(), Checkpointer(root, max_device_bytes=limit) as checkpoints:
            run = Run()
            for number in range(3):
                if number == 1:  # what was written before the save is late
                    occupy()
                    data(run)
                else:
                    late.delay()
                expected = run.copy()
                handle = checkpoints.save(number, **run.state, blocking=False)
                write(run)
                handle.wait_committed()
                check_saved(handle.path, expected)


@each_device
@each_limit
def test_a_save_has_the_values_of_its_moment(tmp_path: Path, limit: int, device: str) -> None:
    """Whatever is done with the model and the state while its copies are still on their way."""
    run_on(1, _every_write, str(tmp_path), limit, device=device)


def _random_delays(folder: str, seed: int) -> None:
    native = device_module().native
    native.set_delays(seed=seed, probability=0.3, max_us=3000)
    run = Run()
    saves: list[tuple[Path, dict[str, Tensor]]] = []
    limit = (0, 20_000, 60_000, EVERYTHING)[seed % 4]
    try:
        with Checkpointer(Path(folder) / str(seed), max_device_bytes=limit) as checkpoints:
            for number in range(12):
                expected = run.copy()
                # The next save waits for this one.
                handle = checkpoints.save(number, **run.state, blocking=False)
                saves.append((handle.path, expected))
                WRITES[(number * 7 + seed) % 4](run)
                step(run)
        for path, expected in saves:
            check_saved(path, expected)
    finally:
        native.set_delays(seed=0, **harness.DELAYS)


@pytest.mark.parametrize("seed", range(4))
def test_saves_in_a_row_with_random_delays(tmp_path: Path, seed: int) -> None:
    run_on(1, _random_delays, str(tmp_path), seed, device="testdev")


def _memory_of_another_stream(folder: str, limit: int) -> None:
    module, late, run = device_module(), LateCopies(), Run()
    side = module.Stream()
    with module.stream(side):
        for parameter in run.model.parameters():
            state = run.optimizer.state[parameter]
            state["side"] = torch.full((WIDTH * WIDTH,), 3.0)
    module.current_stream().wait_stream(side)
    with late.patched(), Checkpointer(folder, max_device_bytes=limit) as checkpoints:
        expected = run.copy()
        handle = checkpoints.save(1, **run.state, blocking=False)
        sizes = [state.pop("side").numel() for state in run.optimizer.state.values()]
        with module.stream(side):  # which has waited for nothing
            others = [torch.full((size,), 7.0) for size in sizes]
        handle.wait_committed()
        check_saved(handle.path, expected)
        assert all(other.min().item() == 7.0 for other in others)


@each_device
@pytest.mark.parametrize("limit", [0, EVERYTHING])
def test_memory_of_another_stream_is_kept_until_it_is_copied(
    tmp_path: Path, limit: int, device: str
) -> None:
    run_on(1, _memory_of_another_stream, str(tmp_path), limit, device=device)


# -- who waits -------------------------------------------------------------------------------------


def _the_host_goes_on(folder: str, limit: int) -> None:
    module, run = device_module(), Run()
    side = module.Stream()
    with Checkpointer(folder, max_device_bytes=limit) as checkpoints:
        for number in range(2):
            expected = run.copy()
            with (
                held_back(checkpoints),
                busy(side) as beside,
                busy(module.current_stream()) as here,
            ):
                waits = module.native.host_waits() if harness.DEVICE == "testdev" else 0
                handle = checkpoints.save(number, **run.state, blocking=False)
                data(run)
                # The first one makes memory, for which CUDA may wait for the device.
                if number or harness.DEVICE == "testdev":
                    assert not beside.query()
                    assert not here.query()
                if harness.DEVICE == "testdev":
                    assert module.native.host_waits() == waits
            handle.wait_committed()
            check_saved(handle.path, expected)


@each_device
@each_limit
def test_the_host_does_not_wait_for_the_device(tmp_path: Path, limit: int, device: str) -> None:
    """Neither for what is queued on the stream of the save, nor for another stream."""
    run_on(1, _the_host_goes_on, str(tmp_path), limit, device=device)


def _other_streams_go_on(folder: str) -> None:
    module, late, run = device_module(), LateCopies(), Run()
    other = module.Stream()
    with late.patched(), Checkpointer(folder) as checkpoints:
        checkpoints.save(1, **run.state, blocking=False).wait_committed()
        with busy(late.streams[0]._stream) as copies:
            handle = checkpoints.save(2, **run.state, blocking=False)
            event = module.Event()
            event.record(other)
            event.synchronize()
            assert not copies.query()
        handle.wait_committed()


@each_device
def test_other_streams_do_not_wait_for_the_copies(tmp_path: Path, device: str) -> None:
    run_on(1, _other_streams_go_on, str(tmp_path), device=device)


def _compute_and_the_copies(folder: str, limit: int) -> None:
    module, late, run = device_module(), LateCopies(), Run()
    with late.patched(), Checkpointer(folder, max_device_bytes=limit) as checkpoints:
        checkpoints.save(1, **run.state, blocking=False).wait_committed()
        with busy(late.streams[0]._stream) as copies:
            handle = checkpoints.save(2, **run.state, blocking=False)
            step(run)
            event = module.Event()
            event.record(module.current_stream())
            if limit == EVERYTHING:
                event.synchronize()
            else:
                time.sleep(0.1)
                assert not event.query()
            assert not copies.query()
        handle.wait_committed()


@each_device
@each_limit
def test_a_step_runs_beside_the_copies_if_all_was_copied_on_the_device(
    tmp_path: Path, limit: int, device: str
) -> None:
    """And else behind them."""
    run_on(1, _compute_and_the_copies, str(tmp_path), limit, device=device)


def _who_makes_memory(folder: str, limit: int) -> list[set[str]]:
    made: list[set[str]] = []
    empty = pinned.torch.empty

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("pin_memory"):
            made[-1].add(threading.current_thread().name)
        return empty(*args, **kwargs)

    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", recording)
        with Checkpointer(folder, max_device_bytes=limit) as checkpoints:
            for number in range(2):
                made.append(set())
                checkpoints.save(number, **run.state, blocking=False).wait_committed()
    return made


@each_device
def test_the_thread_that_writes_page_locks_for_what_was_copied_on_the_device(
    tmp_path: Path, device: str
) -> None:
    threads = {
        0: {"MainThread"},
        EVERYTHING: {"fsdp2-checkpoint"},
    }
    for limit, names in threads.items():
        found = run_on(1, _who_makes_memory, f"{tmp_path}/{limit}", limit, device=device)
        assert found == [[names, set()]], limit


def _device_memory(folder: str) -> None:
    module, run = device_module(), Run()
    with Checkpointer(folder, max_device_bytes=EVERYTHING) as checkpoints:
        before = module.memory_allocated()
        with held_back(checkpoints):
            handle = checkpoints.save(1, **run.state, blocking=False)
            saved = sum(t.nbytes for t in run.tensors().values() if t.device.type != "cpu")
            assert module.memory_allocated() - before >= saved
        handle.wait_committed()
        checkpoints._thread.join()  # type: ignore[union-attr]
        assert module.memory_allocated() == before


@each_device
def test_device_memory_is_free_again_after_a_save(tmp_path: Path, device: str) -> None:
    run_on(1, _device_memory, str(tmp_path), device=device)


# -- where it differs ------------------------------------------------------------------------------


def _shards_in_host_memory(folder: str) -> None:
    run = Run(offload_policy=CPUOffloadPolicy())
    with Checkpointer(folder) as checkpoints:
        for number in range(2):
            expected = run.copy()
            handle = checkpoints.save(number, **run.state, blocking=False)
            data(run)
            step(run)
            handle.wait_committed()
            check_saved(handle.path, expected)
        areas = {device.type: area for device, (area, _) in checkpoints._staging._areas.items()}
        pins = {kind: next(area.bytes.pieces(0, 1)).is_pinned() for kind, area in areas.items()}
    # The buffers of batch norm are on the device.
    assert pins == {"cpu": False, harness.DEVICE: True}


@each_device
def test_shards_in_host_memory_are_copied_by_the_host(tmp_path: Path, device: str) -> None:
    """And the memory that they are copied to is not page-locked."""
    run_on(1, _shards_in_host_memory, str(tmp_path), device=device)


def _buffers_of_each_rank(folder: str) -> None:
    rank = torch.distributed.get_rank()
    for limit in (0, EVERYTHING):
        norm = nn.BatchNorm1d(WIDTH)
        norm.running_mean.fill_(rank + 1)
        root = Path(folder) / str(limit)
        late = LateCopies()
        with late.patched(), Checkpointer(root, max_device_bytes=limit) as checkpoints:
            for number in range(2):
                late.delay()
                expected = {name: buffer.clone() for name, buffer in norm.named_buffers()}
                handle = checkpoints.save(number, model=norm, blocking=False)
                norm.running_mean.mul_(10)
                norm.num_batches_tracked += 1
                handle.wait_committed()
                if rank:
                    found = load_file(handle.path / ".fsdp2" / f"own-{rank:05d}.safetensors")
                    assert found.keys() == expected.keys()
                    assert all(torch.equal(found[n], t.cpu()) for n, t in expected.items())


def test_each_rank_saves_its_own_buffers_of_the_moment(tmp_path: Path) -> None:
    run_on(2, _buffers_of_each_rank, str(tmp_path), device="testdev")


def _without_streams(folder: str) -> None:
    run = Run()
    with pytest.MonkeyPatch.context() as patch, Checkpointer(folder) as checkpoints:
        patch.setattr(staging, "_copy_stream", lambda device: None)
        for number in range(2):
            expected = run.copy()
            handle = checkpoints.save(number, **run.state, blocking=False)
            data(run)
            handle.wait_committed()
            check_saved(handle.path, expected)


def test_a_device_without_streams_is_waited_for(tmp_path: Path) -> None:
    run_on(1, _without_streams, str(tmp_path), device="testdev")


def _while_a_graph_is_captured(folder: str) -> None:
    run = Run()
    with pytest.MonkeyPatch.context() as patch, Checkpointer(folder) as checkpoints:
        patch.setattr(device_module(), "is_current_stream_capturing", lambda: True)
        with pytest.raises(CheckpointError, match="A graph is being captured"):
            checkpoints.save(1, **run.state, blocking=False)
        patch.undo()
        checkpoints.save(2, **run.state, blocking=False).wait_committed()
        assert checkpoints.steps() == [2]
        assert not list(Path(folder).glob(".step-000001*"))


def test_a_save_while_a_graph_is_captured_is_refused(tmp_path: Path) -> None:
    run_on(1, _while_a_graph_is_captured, str(tmp_path), device="testdev")


def _errors(folder: str, limit: int) -> None:
    """In the middle of the copies, by the caller and by the thread: the next save is right."""
    run, copy = Run(), staging._copy
    with Checkpointer(folder, max_device_bytes=limit) as checkpoints:
        for number in range(4):
            expected = run.copy()
            with pytest.MonkeyPatch.context() as patch:
                if number % 2 == 0:
                    patch.setattr(torch, "_foreach_copy_", lambda *args, **kwargs: 1 // 0)
                    if limit:
                        held = staging._Area._to_host
                        patch.undo()
                        patch.setattr(staging._Area, "_to_host", _failing_in_the_thread(held))
                try:
                    handle = checkpoints.save(number, **run.state, blocking=False)
                    data(run)
                    handle.wait_committed()
                    assert number % 2
                    check_saved(handle.path, expected)
                except ZeroDivisionError:
                    assert number % 2 == 0
                    if limit:  # raised by the thread, and again by the next call
                        with pytest.raises(ZeroDivisionError):
                            checkpoints.load(model=run.model)
        assert checkpoints.steps() == [1, 3]
    assert staging._copy is copy


def _failing_in_the_thread(to_host: Any) -> Any:
    def failing(self: Any, runs: Any, sources: Any) -> None:
        to_host(self, runs, sources)
        if threading.current_thread().name == "fsdp2-checkpoint":
            raise ZeroDivisionError

    return failing


@pytest.mark.parametrize("limit", [0, EVERYTHING])
def test_the_save_after_one_that_failed_is_right(tmp_path: Path, limit: int) -> None:
    run_on(1, _errors, str(tmp_path), limit, device="testdev")


def _loading_on_another_stream(folder: str) -> None:
    module, late, run = device_module(), LateCopies(), Run()
    save_model(Run().model, Path(folder) / "weights")
    with late.patched(), Checkpointer(Path(folder) / "steps") as checkpoints:
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            data(run)
            expected = run.copy()
            handle = checkpoints.save(1, **run.state, blocking=False)
            load_model(run.model, Path(folder) / "weights", keep_on_error=False)
        handle.wait_committed()
        module.synchronize()
        check_saved(handle.path, expected)


@each_device
def test_loading_waits_for_the_copies_of_a_save(tmp_path: Path, device: str) -> None:
    """Its threads write on streams of their own."""
    run_on(1, _loading_on_another_stream, str(tmp_path), device=device)


def _snapshots(folder: str, limit: int) -> None:
    late, run = LateCopies(), Run()
    with pytest.warns(UserWarning, match="one host only"):
        taken = MemorySnapshots("run", every=1, directory=folder, max_device_bytes=limit)
    with late.patched(), taken as snapshots:
        for number in range(3):
            late.delay()
            expected = run.copy()
            assert snapshots.after_step(number, **run.state)
            WRITES[number](run)
            assert snapshots.wait()
            check_saved(next(Path(folder).glob(f"*/*-{number:09d}-*/")), expected)


@pytest.mark.parametrize("limit", [0, EVERYTHING])
def test_snapshots_in_memory_have_the_values_of_their_moment(tmp_path: Path, limit: int) -> None:
    run_on(1, _snapshots, str(tmp_path), limit, device="testdev")


def test_the_limit_is_a_number_of_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_device_bytes must not be negative, got -1"):
        Checkpointer(tmp_path, max_device_bytes=-1)
    with pytest.raises(TypeError, match="max_device_bytes must be an int"):
        MemorySnapshots("run", every=1, max_device_bytes=1.5)  # type: ignore[arg-type]
