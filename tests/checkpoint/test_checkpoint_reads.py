"""Bytes are read once if an error can still change nothing, and verified while they are read."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from checkpoint_cases import Tied, adamw, assert_equal_bits, build, tokens, train, whole_state
from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CorruptCheckpoint,
    load_model,
    save_model,
)
from fsdp2.checkpoint.format.checksum import crc32
from fsdp2.checkpoint.format.header import TensorInfo
from fsdp2.checkpoint.format.manifest import Chunk
from fsdp2.checkpoint.format.tensors import DTYPES, NAMES
from fsdp2.checkpoint.loading import fill, reading, source, tasks
from fsdp2.checkpoint.loading.reading import Target, read_into, read_verified, verify_boxes
from fsdp2.checkpoint.loading.source import Extent, Source, Stored
from fsdp2.dtensor.boxes import Box
from fsdp2.guards.lost_writes import LostWrites
from fsdp2.runtime.registration import Registration
from harness import ours_only, run_on

pytestmark = ours_only("checkpoints")

# -- blocks -------------------------------------------------------------------------------------

BLOCK = 64  # bytes: many blocks of small tensors


def cut(tensor: Tensor, box: Box) -> Tensor:
    return reading._narrow(tensor, box)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (reading, tasks):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
        monkeypatch.setattr(module, "STAGE_BYTES", BLOCK * reading.PIECE_BLOCKS)
        monkeypatch.setattr(module, "MAX_PENDING", 7)
    monkeypatch.setattr(tasks, "STEP_BYTES", 3 * BLOCK // 8)
    monkeypatch.setattr(tasks, "cores_of_rank", lambda: 2)


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def checkpoint(folder: Path, whole: Tensor, boxes: list[Box], layout: str) -> tuple[Source, Stored]:
    """A tensor in files, as ranks that held ``boxes`` of it would have written it."""
    info = TensorInfo("weight", NAMES[whole.dtype], tuple(whole.shape))
    found, stored = Source(folder), Stored(info)
    for rank, box in enumerate(boxes):
        data = bytes_of(cut(whole, box))
        sums = tuple(crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))
        if layout == "shared":
            stored.chunks.append(Chunk(info, "shared", box, None, sums))
        elif data:
            (folder / f"rank-{rank}").write_bytes(b"header" + data)
            stored.extents.append(Extent(f"rank-{rank}", box, 6))
            stored.chunks.append(Chunk(info, f"rank-{rank}", box, 6, sums))
    if layout == "shared":
        (folder / "shared").write_bytes(b"header" + bytes_of(whole))
        stored.extents.append(Extent("shared", Box.whole(tuple(whole.shape)), 6))
    for extent in stored.extents:
        found._fds[extent.file] = os.open(folder / extent.file, os.O_RDONLY)
    return found, stored


def split(shape: tuple[int, ...], dim: int, num: int) -> list[Box]:
    """What ``num`` ranks hold; the last ones may hold nothing."""
    rows = -(-shape[dim] // num)
    boxes = []
    for rank in range(num):
        start = min(rank * rows, shape[dim])
        size = min(rows, shape[dim] - start)
        first = tuple(start if d == dim else 0 for d in range(len(shape)))
        boxes.append(Box(first, tuple(size if d == dim else n for d, n in enumerate(shape))))
    return [box for box in boxes if box.numel]


def some_box(generator: random.Random, shape: tuple[int, ...]) -> Box:
    start = tuple(generator.randrange(n) for n in shape)
    return Box(start, tuple(generator.randint(1, n - a) for n, a in zip(shape, start, strict=True)))


CASES = [
    ((37, 12), torch.float32),
    ((3, 200), torch.float32),
    ((5, 7, 9), torch.int16),
    ((400,), torch.bfloat16),
    ((2, 3, 4, 5), torch.float64),
]


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_any_box_of_any_sharding(
    tmp_path: Path, small_blocks: None, shape: Any, dtype: Any, layout: str, num_threads: int
) -> None:
    """Straight or through buffers, onto dtypes and strides of all kinds, beside other memory."""
    generator = random.Random(f"{shape}{layout}")
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        boxes = split(shape, generator.randrange(len(shape)), generator.randint(1, 5))
        generator.shuffle(boxes)
        found, stored = checkpoint(folder, whole, boxes, layout)
        with found:
            box = some_box(generator, shape) if number else Box.whole(shape)
            for target in (
                torch.full(box.shape, -1, dtype=dtype),
                torch.full(box.shape, -1, dtype=torch.float64),
                torch.full(box.shape[::-1], -1, dtype=dtype).permute(*reversed(range(len(shape)))),
            ):
                for read in (read_verified, read_into):
                    target.fill_(-1)
                    version = target._version
                    read(found, [Target("weight", stored, box, target)], num_threads)
                    assert torch.equal(target, cut(whole, box).to(target.dtype))
                    assert target._version > version


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_a_flipped_bit_is_found_in_every_block_that_is_read(
    tmp_path: Path, small_blocks: None, shape: Any, dtype: Any, layout: str
) -> None:
    """By the block's own name; and whatever else is damaged is none of this rank's business."""
    generator = random.Random(f"{shape}{layout}")
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    boxes = split(shape, 0, 3)
    found, stored = checkpoint(tmp_path, whole, boxes, layout)
    box = some_box(generator, shape)
    outcomes = set()
    with found:
        for chunk in stored.chunks:
            wanted = torch.zeros(chunk.box.shape, dtype=torch.bool)
            common = box.intersect(chunk.box)
            if common is not None:
                cut(wanted, common.relative_to(chunk.box)).fill_(True)
            start = 6 + (chunk.box.start[0] * whole[0].nbytes if layout == "shared" else 0)
            for block, of_block in enumerate(wanted.flatten().split(BLOCK // whole.itemsize)):
                place = start + block * BLOCK + generator.randrange(len(of_block) * whole.itemsize)
                target = Target("weight", stored, box, torch.zeros(box.shape, dtype=dtype))
                with damaged(tmp_path / chunk.file, place):
                    said = ""
                    try:
                        read_verified(found, [target])
                    except CorruptCheckpoint as error:
                        said = str(error)
                    if bool(of_block.any()):
                        assert f"'weight' is wrong in block {block} of" in said
                        with pytest.raises(CorruptCheckpoint, match=f"wrong in block {block} of"):
                            verify_boxes(found, [(stored, box)])
                    else:
                        assert not said
                        assert torch.equal(target.local, cut(whole, box))
                outcomes.add(bool(said))
    assert True in outcomes


@contextmanager
def damaged(path: Path, place: int) -> Iterator[None]:
    """A file with one bit flipped, for a while."""

    def flip() -> None:
        with open(path, "r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 4]))

    flip()
    yield
    flip()


def test_rows_that_no_checksum_covers_are_an_error(tmp_path: Path, small_blocks: None) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    found, stored = checkpoint(tmp_path, whole, split((6, 4), 0, 3), "shared")
    with found:
        del stored.chunks[1]
        with pytest.raises(CorruptCheckpoint, match="'weight' are of 16 elements, of the 24"):
            read_verified(found, [Target("weight", stored, Box.whole((6, 4)), torch.zeros(6, 4))])


def test_no_thread_goes_on_after_an_error_of_another() -> None:
    failed, ran = threading.Event(), []

    def fail(stream: reading.Stream) -> None:
        failed.set()
        raise CorruptCheckpoint("wrong")

    def go_on(stream: reading.Stream) -> None:
        assert failed.wait(60)
        time.sleep(0.01)
        ran.append(stream)

    every = [reading.ReadTask(1000, fail), *(reading.ReadTask(1, go_on) for _ in range(1000))]
    with pytest.raises(CorruptCheckpoint, match="wrong"):
        list(reading.in_threads(Source(Path()), every, 2))
    assert len(ran) < 1000


def test_reading_stops_after_an_error(tmp_path: Path, small_blocks: None) -> None:
    """A large checkpoint is not read to its end when its first block is wrong."""
    whole = torch.arange(40_000.0)
    found, stored = checkpoint(tmp_path, whole, [Box.whole((40_000,))], "shared")
    target = Target("weight", stored, Box.whole((40_000,)), torch.zeros(40_000))
    with found, damaged(tmp_path / "shared", 6), pytest.raises(CorruptCheckpoint, match="block 0"):
        read_verified(found, [target])
    assert found.bytes_read < whole.nbytes // 10


# -- how often ----------------------------------------------------------------------------------

WEIGHT = (1000, 700)  # 2.67 MiB: blocks that end within a tensor


class Two(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        for name in "ab":
            self.register_parameter(name, nn.Parameter(torch.full(WEIGHT, value)))


def two(kind: str, value: float) -> nn.Module:
    if kind == "meta":
        with torch.device("meta"):
            return fully_shard(Two())
    return fully_shard(Two(value))


def local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


KINDS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "meta": ("meta", 0, {}, 1),
    "few bytes": ("values", 32 << 20, {}, 1),
    "many bytes": ("values", 0, {}, 2),
    "not to be kept": ("values", 0, {"keep_on_error": False}, 1),
    "without checksums": ("values", 0, {"verify_checksums": False}, 1),
}


def count_reads(folder: str, layout: str) -> dict[str, float]:
    """How often each byte that a rank needs is read."""
    save_model(two("values", 3.0), f"{folder}/{layout}", layout=layout)
    times = {}
    for name, (kind, staged_bytes, options, _) in KINDS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fill, "STAGED_BYTES", staged_bytes)
            model = two(kind, 1.0)
            report = load_model(model, f"{folder}/{layout}", **options)
        assert report.verified == (name != "without checksums")
        values = [local(p.detach()) for p in model.parameters()]
        assert all(bool((value == 3).all()) for value in values)
        times[name] = report.bytes_read / sum(value.nbytes for value in values)
    return times


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_how_often_bytes_are_read(tmp_path: Path, layout: str) -> None:
    for times in run_on(2, count_reads, str(tmp_path), layout):
        assert times == {name: number for name, (*_, number) in KINDS.items()}


def count_reads_of_optimizers(folder: str) -> dict[str, float]:
    with torch.no_grad():
        model = two("values", 3.0)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model, optimizer=optimizer)
    size = sum(local(p.detach()).nbytes for p in model.parameters())
    times = {}
    for name, options in {"": {}, "not to be kept": {"keep_on_error": False}}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fill, "STAGED_BYTES", 0)
            other = two("values", 1.0)
            new = torch.optim.AdamW(other.parameters())
            for state in ("new state", "state"):
                loaded = checkpoints.load(model=other, optimizer=new, **options)
                times[f"{state}, {name}"] = loaded.bytes_read // size
        assert_equal_bits(whole_state(other, new), whole_state(model, optimizer))
    return times


def test_new_state_of_an_optimizer_is_read_once(tmp_path: Path) -> None:
    """Two moments as large as the model, which is read twice."""
    for times in run_on(2, count_reads_of_optimizers, str(tmp_path)):
        assert times == {
            "new state, ": 4,
            "state, ": 6,
            "new state, not to be kept": 3,
            "state, not to be kept": 3,
        }


# -- what an error leaves -----------------------------------------------------------------------


def flip_last_byte(folder: Path, pattern: str) -> None:
    (path,) = folder.glob(pattern)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def fail(load: Callable[[], object]) -> list[str]:
    """The error's notes."""
    with pytest.raises(CorruptCheckpoint, match="checksum") as caught:
        load()
    return getattr(caught.value, "__notes__", [])


def back_on_meta(good: str, bad: str, kind: str) -> None:
    with torch.device("meta"):
        model = build(kind, seed=1)
    before = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert fail(lambda: load_model(model, bad)) == []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.is_meta, name
        assert id(tensor) == before[name], name
    assert model.head.weight is model.embed.weight
    load_model(model, good)
    assert model.head.weight is model.embed.weight
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with torch.random.fork_rng():
        expected = build(kind, seed=0)
    assert_equal_bits(whole_state(model), whole_state(expected))
    with torch.no_grad():  # a root would stay gathered for backward, and no optimizer takes that
        assert torch.equal(model(tokens(0)), expected(tokens(0)))
    train(model, adamw(model), range(1))


def save_good_and_bad(folder: str, kind: str) -> None:
    model = build(kind)
    for name in ("good", "bad"):
        save_model(model, f"{folder}/{name}")
    dist.barrier()
    if dist.get_rank() == 0:
        spoil(Path(folder, "bad"), "bn.num_batches_tracked")
    dist.barrier()


def spoil(folder: Path, name: str) -> None:
    """Flip a bit of a small tensor, of which every rank has all."""
    kind = "optim" if name.startswith("optim") else "model"
    (path,) = folder.glob(f"{kind}.safetensors")
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    first, _ = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + first] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["1d", "torch", "plain", "tp"])
def test_after_an_error_a_model_is_on_the_meta_device_again(tmp_path: Path, kind: str) -> None:
    """The same objects; and another load makes it whole."""
    num_ranks = 4 if kind == "tp" else 2
    run_on(num_ranks, save_good_and_bad, str(tmp_path), kind)
    run_on(num_ranks, back_on_meta, f"{tmp_path}/good", f"{tmp_path}/bad", kind)


def test_a_model_that_is_partly_on_the_meta_device(tmp_path: Path) -> None:
    """What has values keeps them after an error, whether it is staged or read twice."""
    save_model(Tied(), tmp_path / "good")
    save_model(Tied(), tmp_path / "bad")
    spoil(tmp_path / "bad", "bn.num_batches_tracked")
    for staged_bytes in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fill, "STAGED_BYTES", staged_bytes)
            model = Tied()
            model.blocks.to("meta")
            before = [(id(t), t.is_meta or t.clone()) for t in model.state_dict().values()]
            objects = [id(t) for t in (*model.parameters(), *model.buffers())]
            assert fail(lambda model=model: load_model(model, tmp_path / "bad")) == []
            assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
            for (_, value), now in zip(before, model.state_dict().values(), strict=True):
                assert now.is_meta if value is True else torch.equal(now, value)
            load_model(model, tmp_path / "good")
        load_model(other := Tied(), tmp_path / "good")
        assert_equal_bits(dict(model.state_dict()), dict(other.state_dict()))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A model with values, and a checkpoint of others whose last block is damaged."""
    save_model(Two(3.0), tmp_path / "weights")
    flip_last_byte(tmp_path / "weights", "*.safetensors")
    return Two(1.0), tmp_path / "weights"


def test_values_that_are_not_to_be_kept(pair: tuple[nn.Module, Path]) -> None:
    """The error says that the model holds part of the checkpoint, which it does."""
    model, path = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "STAGED_BYTES", 0)
        assert fail(lambda: load_model(model, path)) == []
        assert all(bool((p == 1).all()) for p in model.parameters())
    version = model.a._version
    (note,) = fail(lambda: load_model(model, path, keep_on_error=False))
    assert "holds part of the checkpoint" in note
    assert bool((model.a == 3).all())
    assert model.a._version > version


def test_a_block_that_changes_after_it_was_compared(
    pair: tuple[nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that are read twice are compared twice: what was loaded is what was verified."""
    model, path = pair
    monkeypatch.setattr(fill, "STAGED_BYTES", 0)
    compared = []
    monkeypatch.setattr(fill, "verify_boxes", lambda *args: compared.append(args))
    (note,) = fail(lambda: load_model(model, path))
    assert len(compared) == 1
    assert "holds part of the checkpoint" in note


def optimizer_after_an_error(folder: str) -> None:
    model = build("1d")
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, model=model, optimizer=optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        spoil(Path(folder, "step-000001"), "optim.step.scale")
    dist.barrier()
    expected = whole_state(model, optimizer)
    for each in (optimizer, adamw(model)):
        states = {id(p): {k: id(v) for k, v in s.items()} for p, s in each.state.items()}
        with pytest.raises(CorruptCheckpoint, match=r"optim\."):
            checkpoints.load(model=model, optimizer=each)
        found = {id(p): {k: id(v) for k, v in s.items()} for p, s in each.state.items()}
        assert found == states
    dist.barrier()
    assert_equal_bits(whole_state(model, optimizer), expected)


def test_state_of_an_optimizer_after_an_error(tmp_path: Path) -> None:
    """What it had it has; what it did not have it does not have."""
    run_on(2, optimizer_after_an_error, str(tmp_path))


def test_tensors_that_a_hook_derives_from_the_meta_device(tmp_path: Path) -> None:
    save_model(nn.Linear(3, 2), tmp_path / "weights")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model.register_state_dict_post_hook(
        lambda module, state, *_: state.update(weight=state["weight"] * 1)
    )
    with pytest.raises(CheckpointError, match=r"not parameters or buffers of the model: 'weight'"):
        load_model(model, tmp_path / "weights")
    assert model.weight.is_meta


def test_every_stretch_has_a_descriptor_of_its_own(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the file, all of it once, and all are closed."""
    whole = torch.arange(4000.0)
    found, stored = checkpoint(tmp_path, whole, [Box.whole((4000,))], "shared")
    target = Target("weight", stored, Box.whole((4000,)), torch.zeros(4000))
    reads: dict[int, list[tuple[int, int]]] = {}
    monkeypatch.setattr(tasks, "MAX_PENDING", 1000)
    monkeypatch.setattr(tasks, "STEP_BYTES", BLOCK)
    original = source.read_exactly

    def recording(fd: int, out: memoryview, offset: int) -> int:
        reads.setdefault(fd, []).append((offset, len(out)))
        return original(fd, out, offset)

    monkeypatch.setattr(source, "read_exactly", recording)
    with found:
        own = set(found._fds.values())
        before = len(os.listdir("/proc/self/fd"))
        read_verified(found, [target], 1)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not own & reads.keys()
    (only,) = reads.values()
    assert only == [(6 + i, min(BLOCK, 16_000 - i)) for i in range(0, 16_000, BLOCK)]
    parts = tasks._stretches([reading.ReadTask(n, print) for n in (5, 1, 1, 1, 4, 4)], 4)
    assert [[task.num_bytes for task in part] for part in parts] == [[5], [1, 1, 1], [4], [4]]
    assert DTYPES[stored.info.dtype] == whole.dtype


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("num_cached", [0, 5, None])
def test_with_one_core_threads_only_wait_for_the_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_blocks: None,
    num_cached: int | None,
    verified: bool,
) -> None:
    """What is in the page cache is read by the caller, up to the first task that is not."""
    monkeypatch.setattr(tasks, "cores_of_rank", lambda: 1)
    whole = torch.arange(4000.0)
    found, stored = checkpoint(tmp_path, whole, [Box.whole((4000,))], "shared")
    target = Target("weight", stored, Box.whole((4000,)), torch.zeros(4000))
    asked: list[tuple[str, int]] = []
    by_caller: list[int] = []

    def is_cached(source: Source, file: str, offset: int) -> bool:
        asked.append((file, offset))
        return num_cached is None or len(asked) <= num_cached

    def recording(fd: int, out: memoryview, offset: int) -> int:
        if threading.current_thread() is threading.main_thread():
            by_caller.append(len(out))
        return original(fd, out, offset)

    original = source.read_exactly
    monkeypatch.setattr(Source, "is_cached", is_cached)
    monkeypatch.setattr(source, "read_exactly", recording)
    with found:
        (read_verified if verified else read_into)(found, [target])
    assert torch.equal(target.local, whole)
    of_task = reading.PIECE_BLOCKS * BLOCK
    places = [("shared", 6 + i) for i in range(0, 16_000, of_task)]
    assert asked == places[: None if num_cached is None else num_cached + 1]
    assert sum(by_caller) == (16_000 if num_cached is None else num_cached * of_task)


def test_the_page_cache_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = checkpoint(tmp_path, torch.arange(64.0), [Box.whole((64,))], "shared")
    with found:
        assert not found.is_cached("shared", 10_000)  # after its end
        monkeypatch.setattr(os, "preadv", lambda *_: 1)
        assert found.is_cached("shared", 6) == hasattr(os, "RWF_NOWAIT")
        found.fetch["shared"] = lambda memory, offset: len(memory)
        assert not found.is_cached("shared", 6)
        found.fetch.clear()
        monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
        assert not found.is_cached("shared", 6)


@pytest.mark.parametrize(("cores", "local", "each"), [(8, "4", 2), (2, "2", 1), (1, "4", 0)])
def test_cores_are_shared_by_the_ranks_of_a_host(
    monkeypatch: pytest.MonkeyPatch, cores: int, local: str, each: int
) -> None:
    monkeypatch.setattr(tasks, "num_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert tasks.cores_of_rank() == each


# -- what does not grow with the number of tensors ------------------------------------------------


class Layers(nn.Module):
    """Equal layers in one unit: many tensors of two shapes."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 16) for _ in range(num))


def count_per_tensor(folder: str, num_layers: int) -> dict[str, int]:
    """Calls of one load and one save that looked at all tensors for each of them."""
    model = fully_shard(Layers(num_layers))
    save_model(model, folder)
    counts: dict[str, int] = {}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        counts[name] = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (reading._Layout, "__init__"),
            (Registration, "plan"),
            (Registration, "register"),
            (LostWrites, "check"),
            (DeviceMesh, "mesh"),
        ):
            before = getattr(owner, name)
            if isinstance(before, property):
                assert before.fget is not None
                replaced: Any = property(counting(f"{owner.__name__}.{name}", before.fget))
            else:
                replaced = counting(f"{owner.__name__}.{name}", before)
            patch.setattr(owner, name, replaced)
        load_model(model, folder)
        # The shapes differ: rows and biases are read, not copied from a layout of the others.
        counts["layouts"] = counts.pop("_Layout.__init__")
        save_model(model, f"{folder}-again")
    return counts


def test_equal_layers_are_planned_once(tmp_path: Path) -> None:
    """A load takes no longer per tensor with more of them: a unit of 576 once took a second."""
    few, many = (run_on(2, count_per_tensor, f"{tmp_path}/{n}", n)[0] for n in (4, 16))
    assert few["layouts"] == 2  # of weights and of biases; the other rank's chunks are not planned
    assert few == many


def many(folder: Path, num: int) -> tuple[Source, list[Stored]]:
    """Tensors of 12 bytes, each written by two ranks, one after the other in one file."""
    whole = torch.arange(3 * num, dtype=torch.float32)
    folder.mkdir()
    found, _ = checkpoint(folder, whole, [Box.whole((3 * num,))], "shared")
    tensors = []
    for i in range(num):
        info = TensorInfo(f"t{i}", "F32", (3,))
        extent = Extent("shared", Box.whole((3,)), 6 + 12 * i)
        boxes = [Box((0,), (2,)), Box((2,), (1,))]
        data = bytes_of(whole[3 * i : 3 * i + 3])
        sums = [crc32(data[:8]), crc32(data[8:])]
        chunks = [Chunk(info, "shared", b, None, (s,)) for b, s in zip(boxes, sums, strict=True)]
        tensors.append(Stored(info, [extent], chunks))
    return found, tensors


def test_a_task_reads_many_small_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a task costs is not paid for each tensor, and each is still compared by itself."""
    num = 3 * reading.MAX_SMALL
    made = []
    original = reading.in_threads

    def counting(source: Source, given: Any, num_threads: int) -> Any:
        made.extend(given := list(given))
        return original(source, given, num_threads)

    monkeypatch.setattr(reading, "in_threads", counting)
    found, tensors = many(tmp_path / "right", num)
    expected = torch.arange(3.0 * num).view(num, 3)
    whole = Box.whole((3,))
    with found:
        into = torch.zeros(num, 3)
        targets = [Target(t.info.name, t, whole, into[i]) for i, t in enumerate(tensors)]
        read_verified(found, targets)
        assert torch.equal(into, expected)
        assert len(made) == 6
        made.clear()
        assert verify_boxes(found, [(t, whole) for t in tensors]) == 12 * num
        assert len(made) == 6
        # One that is not to be filled as a whole, in the middle of the others.
        part = torch.zeros(2)
        targets[70] = Target("t70", tensors[70], Box((1,), (2,)), part)
        into.fill_(-1)
        read_verified(found, targets)
        assert part.tolist() == [211, 212]
        assert torch.equal(into[:70], expected[:70])
        assert torch.equal(into[71:], expected[71:])
        with damaged(tmp_path / "right" / "shared", 6 + 12 * 100 + 9):
            for read in (
                lambda: read_verified(found, targets),
                lambda: verify_boxes(found, [(t, whole) for t in tensors]),
            ):
                with pytest.raises(
                    CorruptCheckpoint, match=r"tensor 't100' is wrong in block 0 of 1"
                ):
                    read()
