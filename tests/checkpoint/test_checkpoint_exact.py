"""Loads are exact bit for bit, also after a stop; loads that do not fit; code that never runs."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint_cases import Tied, adamw, assert_equal_bits, build, train, whole_state
from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    load_model,
    save_model,
)
from fsdp2.checkpoint.format.tensors import DTYPES
from harness import cached_mesh, distributed, ours_only, run_on

pytestmark = ours_only("checkpoints")

# Quiet and signalling NaNs with payloads, infinities, -0.0, and denormals.
F32_BITS = [0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x807FFFFF]


def bits_of(dtype: torch.dtype, num: int) -> Tensor:
    """All kinds of bit patterns."""
    size = torch.empty(0, dtype=dtype).element_size()
    if dtype == torch.float32:
        return torch.tensor(F32_BITS * num, dtype=torch.uint32)[:num].view(torch.float32)
    generator = torch.Generator("cpu").manual_seed(size)
    raw = torch.randint(0, 256, (num * size,), generator=generator, device="cpu")
    bits = (raw % 2 if dtype == torch.bool else raw).to(torch.uint8).view(dtype)
    return bits.to(torch.get_default_device())


class Everything(nn.Module):
    """Every dtype: 0-dim, without elements, and not; and parameters of odd bits."""

    def __init__(self, filled: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 3))
        self.small = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        for dtype in DTYPES.values():
            for shape in [(), (3,), (0, 2), (4, 5)]:
                name = f"{dtype}_{len(shape)}_{sum(shape)}".removeprefix("torch.")
                num = torch.Size(shape).numel()
                value = bits_of(dtype, num) if filled else torch.zeros(num, dtype=dtype)
                self.register_buffer(f"b_{name}", value.reshape(shape))
        if filled:
            with torch.no_grad():
                self.weight.copy_(bits_of(torch.float32, 27).reshape(9, 3))
                self.small.copy_(bits_of(torch.bfloat16, 5))


def test_all_bits_come_back(tmp_path: Path) -> None:
    """And safetensors reads the same."""
    model, other = Everything(True), Everything(False)
    save_model(model, tmp_path / "weights")
    load_model(other, tmp_path / "weights")
    assert_equal_bits(dict(other.state_dict()), dict(model.state_dict()))
    assert other.weight.detach().view(torch.int32)[0].tolist() == [0x7FC00001, 0x7F800001, -1]
    read = load_file(tmp_path / "weights" / "model.safetensors")
    assert_equal_bits(read, dict(model.state_dict()))


@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_all_bits_come_back_to_other_ranks(tmp_path: Path, layout: str) -> None:
    run_on(3, save_everything, str(tmp_path), layout)
    run_on(2, load_everything, str(tmp_path))
    load_everything(str(tmp_path))


def save_everything(folder: str, layout: str) -> None:
    model = Everything(True)
    fully_shard(model, mesh=cached_mesh(3))
    save_model(model, f"{folder}/weights", layout=layout)


def load_everything(folder: str) -> None:
    model: Any = Everything(False)
    if dist.is_initialized():
        fully_shard(model, mesh=cached_mesh(2))
    load_model(model, f"{folder}/weights")
    for name, expected in Everything(True).state_dict().items():
        actual = model.state_dict()[name]
        if hasattr(actual, "to_local"):
            # Gathered by this test as integers, which no arithmetic can change.
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, actual.to_local().view(torch.uint8))
            actual = torch.cat(parts).view(expected.dtype)
        assert_equal_bits({name: actual}, {name: expected})


class Buffer(nn.Module):
    def __init__(self, value: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.value: Tensor
        self.register_buffer("value", value, persistent)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "'value' has dtype torch.complex128, which"),
        (
            torch.eye(3, device="cpu").to_sparse(),
            "'value' has layout torch.sparse_coo: only dense tensors",
        ),
        (torch.ones(2, device="meta"), "'value' is on the meta device: it has no values to save"),
    ],
    ids=["complex128", "sparse", "meta"],
)
def test_tensors_that_files_cannot_hold(tmp_path: Path, value: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_model(Buffer(value), tmp_path / "weights")
    with Checkpointer(tmp_path / "run") as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.save(0, model=Buffer(value))
        assert checkpoints.steps() == []
    assert not (tmp_path / "weights").exists()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.tensor(3.0).expand(2, 3),
    ],
    ids=["conjugated", "negated", "transposed", "strided", "expanded"],
)
def test_tensors_that_are_not_laid_out_plainly(tmp_path: Path, value: Tensor) -> None:
    """Their values are saved, and loaded into tensors of the same kind."""
    save_model(Buffer(value), tmp_path / "weights")
    plain = Buffer(torch.zeros(value.shape, dtype=value.dtype))
    load_model(plain, tmp_path / "weights")
    assert plain.value.tolist() == value.tolist()
    if value.stride() != (0, 0):
        expected = value.tolist()
        same = Buffer(value)
        with torch.no_grad():
            same.value.mul_(5)
        load_model(same, tmp_path / "weights")
        assert same.value.tolist() == expected


def test_buffers_on_the_meta_device_that_are_not_saved(tmp_path: Path) -> None:
    save_model(Buffer(torch.ones(3), persistent=False), tmp_path / "weights")
    with torch.device("meta"):
        model = Buffer(torch.ones(3), persistent=False)
    with pytest.raises(CheckpointError, match=r"without values: 'value'\. Buffers that"):
        load_model(model, tmp_path / "weights")
    assert model.weight.is_meta
    model.value = torch.ones(3)
    load_model(model, tmp_path / "weights")
    assert torch.equal(model.weight, torch.ones(2, 2))


class Listing(nn.Module):
    """Has a parameter that only `named_parameters` shows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.unlisted = [nn.Parameter(torch.ones(3, device="meta"))]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().named_parameters(*args, **kwargs)
        yield "unlisted.0", self.unlisted[0]


def test_parameters_on_the_meta_device_that_only_an_overridden_method_shows(tmp_path: Path) -> None:
    model = Listing()
    save_model(model, tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"without values: 'unlisted\.0'"):
        load_model(model, tmp_path / "weights")
    model.unlisted[0] = nn.Parameter(torch.ones(3))
    load_model(model, tmp_path / "weights")


class ExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"scale": (1, float("inf"))}, torch.tensor([1.0, -0.0])])
def test_extra_state_of_modules(tmp_path: Path, extra: Any) -> None:
    """Also where it is a tensor, which modules make anew each time they are asked."""
    checkpoints = Checkpointer(tmp_path / "run")
    checkpoints.save(0, model=nn.Sequential(ExtraState(extra)))
    other = nn.Sequential(ExtraState(None))
    checkpoints.load(model=other)
    assert repr(other[0].extra) == repr(extra)


# -- loads that do not fit ----------------------------------------------------------------------


def refused(load: Callable[[], Any], model: nn.Module, error: type[Exception], *facts: str) -> None:
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(error) as caught:
        load()
    assert all(fact in str(caught.value) for fact in facts), caught.value
    assert_equal_bits(dict(model.state_dict()), before)


def linear(*sizes: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(sizes[i], sizes[i + 1], **options) for i in range(len(sizes) - 1))
    )


def test_shapes_and_dtypes_have_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_model(linear(3, 4), path)
    for other in (linear(4, 3), linear(3, 5)):
        facts = "shapes differ", "'0.weight': (4, 3) in the checkpoint"
        for cast in (False, True):
            refused(
                lambda o=other, c=cast: load_model(o, path, cast=c),
                other,
                CheckpointMismatch,
                *facts,
            )
    model = linear(3, 4, dtype=torch.float64)
    facts = "dtypes differ", "'0.bias': F32 in the checkpoint, torch.float64 here", "cast=True"
    refused(lambda: load_model(model, path), model, CheckpointMismatch, *facts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    """Converts as `Tensor.to` does."""
    model, other = linear(30, 40), linear(30, 40, dtype=dtype)
    save_model(model, tmp_path / "weights")
    assert load_model(other, tmp_path / "weights", cast=True).verified
    expected = {name: t.to(dtype) for name, t in model.state_dict().items()}
    assert_equal_bits(dict(other.state_dict()), expected)


def test_names_that_only_one_has(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    save_model(linear(3, 4, 2), path)
    model = linear(3, 4, 2, 5)
    del model[1].bias
    facts = (
        "missing in the checkpoint: ['2.weight', '2.bias']",
        "unexpected, not in the model: ['1.bias']",
    )
    refused(lambda: load_model(model, path), model, CheckpointMismatch, *facts, "strict=False")
    before = model[2].weight.detach().clone()
    report = load_model(model, path, strict=False)
    assert (report.missing, report.unexpected) == (["2.weight", "2.bias"], ["1.bias"])
    assert torch.equal(model[2].weight, before)
    assert torch.equal(model[0].weight, load_file(path / "model.safetensors")["0.weight"])


def test_names_may_be_translated(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    model = nn.ModuleDict({"inner": linear(3, 4)})
    save_model(model, path)
    for names in (
        {"0.weight": "inner.0.weight", "0.bias": "inner.0.bias"},
        lambda name: f"inner.{name}",
    ):
        other = linear(3, 4)
        report = load_model(other, path, names=names)
        assert report.missing == report.unexpected == []
        assert torch.equal(other[0].weight, model["inner"][0].weight)
    other = linear(3, 4)
    facts = "'0.bias'", "'inner.0.bias', 'inner.0.weight'"
    refused(
        lambda: load_model(other, path, names={"0.weight": "x"}), other, CheckpointMismatch, *facts
    )


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """A checkpoint of step 1, and of step 0 before any step was taken."""
    model = Tied()
    optimizer = adamw(model)
    checkpoints = Checkpointer(tmp_path / "run")
    checkpoints.save(0, model=model, optimizer=optimizer)
    train(model, optimizer, range(2))
    checkpoints.save(1, model=model, optimizer=optimizer)
    checkpoints.save(2, model=model)
    return checkpoints, whole_state(model, optimizer)


def test_optimizers_have_to_fit(trained: Any) -> None:
    checkpoints, _ = trained
    model = Tied()
    first, *rest = model.parameters()
    foreign = nn.Parameter(torch.ones(2))

    def refuse(optimizer: torch.optim.Optimizer, step: int, *facts: str, error: Any = None) -> None:
        def load() -> None:
            checkpoints.load(step, model=model, optimizer=optimizer)

        groups = repr(optimizer.param_groups)
        refused(load, model, error or CheckpointMismatch, *facts)
        assert not optimizer.state
        assert repr(optimizer.param_groups) == groups

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    refuse(sgd, 1, "was saved with AdamW, and SGD is to be loaded", "'betas'", "'momentum'")
    refuse(torch.optim.Adamax(model.parameters()), 1, "with AdamW, and Adamax is to be loaded")
    facts = ("parameters of one group of AdamW were saved in groups with different options",)
    refuse(torch.optim.AdamW(model.parameters()), 1, *facts)
    refuse(adamw(model), 2, "was saved without an optimizer")
    refuse(torch.optim.AdamW([foreign]), 1, "Parameter 0 of group 0", "(2,)", error=CheckpointError)
    with pytest.raises(ValueError, match="pass the model"):
        checkpoints.load(1, optimizer=adamw(model))
    # Each in a group of its own, in another order, and by a relative of AdamW: this fits.
    groups = [{"params": [p]} for p in (*reversed(rest), first)]
    checkpoints.load(1, model=model, optimizer=torch.optim.Adam(groups))


def test_parameters_without_state_in_the_checkpoint(trained: Any, tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "other")
    model = linear(2, 3)
    checkpoints.save(0, model=model, optimizer=torch.optim.AdamW([model[0].bias]))
    optimizer = torch.optim.AdamW(model.parameters())
    facts = ("has no optimizer state of '0.weight'",)
    refused(
        lambda: checkpoints.load(0, model=model, optimizer=optimizer),
        model,
        CheckpointMismatch,
        *facts,
    )


def test_going_back_to_before_the_first_step_drops_state(trained: Any) -> None:
    """What came back is the state as saved, without what the optimizer had learned since."""
    checkpoints, expected = trained
    model = Tied()
    optimizer = adamw(model)
    checkpoints.load(1, model=model, optimizer=optimizer)
    assert_equal_bits(whole_state(model, optimizer), expected)
    checkpoints.load(0, model=model, optimizer=optimizer)
    assert not optimizer.state
    train(model, optimizer, range(2))
    assert_equal_bits(whole_state(model, optimizer), expected)


def test_options_and_schedulers_come_back(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "run")

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = Tied()
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)

    model, optimizer, scheduler = make()
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    checkpoints.save(3, model=model, optimizer=optimizer, scheduler=scheduler)
    other, other_optimizer, other_scheduler = make()
    facts = ("has 1 schedulers, 2 are to be loaded",)
    two = [other_scheduler, other_scheduler]
    refused(lambda: checkpoints.load(model=other, scheduler=two), other, CheckpointMismatch, *facts)
    checkpoints.load(model=other, optimizer=other_optimizer, scheduler=other_scheduler)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    for a, b in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        assert {k: v for k, v in a.items() if k != "params"} == {
            k: v for k, v in b.items() if k != "params"
        }


# -- calls --------------------------------------------------------------------------------------


def test_wrong_calls(tmp_path: Path, trained: Any) -> None:
    checkpoints, _ = trained
    model = Tied()
    for step in (-1, True, 1.0, "1", None):
        with pytest.raises(ValueError, match="step must be an integer of at least 0, got "):
            checkpoints.save(step, model=model)
    with pytest.raises(CheckpointNotFound, match="no committed step 7; the last ones: 0, 1, 2"):
        checkpoints.load(7, model=model)
    with pytest.raises(CheckpointNotFound, match="has no committed checkpoint"):
        Checkpointer(tmp_path / "empty").load(model=model)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Checkpointer(tmp_path / "x", keep=0)
    with pytest.raises(ValueError, match="layout must be one of"):
        Checkpointer(tmp_path / "x", layout="both")
    with pytest.raises(ValueError, match=r"Rank 0 is not in ranks=\(1, 2\)"):
        Checkpointer(tmp_path / "x", ranks=[2, 1])
    with pytest.raises(ValueError, match=r"Rank 0 called save_model but is not in ranks=\(1,\)"):
        save_model(model, tmp_path / "x", ranks=[1])
    assert not (tmp_path / "x").exists()


def test_names_that_are_taken_and_folders_that_are_missing(tmp_path: Path, trained: Any) -> None:
    checkpoints, _ = trained
    model = linear(2, 3)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(CheckpointExists, match=f"{name} exists already"):
            save_model(model, tmp_path / name)
    with pytest.raises(CheckpointExists, match="step-000001 exists already"):
        checkpoints.save(1, model=model)
    assert checkpoints.load(1, model=Tied()).verified
    with pytest.raises(CheckpointError, match="file is a file, not a folder"):
        save_model(model, tmp_path / "file" / "weights")
    with pytest.raises(CheckpointError, match="run cannot be made: Not a directory"):
        Checkpointer(tmp_path / "file" / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "run"]


def test_extra_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path / "run")
    with pytest.raises(TypeError, match=r"extra\['data'\]\[1\] is a builtins.object"):
        checkpoints.save(0, model=linear(2, 2), extra={"data": [1, object()]})
    assert list((tmp_path / "run").iterdir()) == []
    extra = {"position": (3, 4), "loss": float("nan"), "rng": torch.arange(3), 5: b"x"}
    checkpoints.save(0, model=linear(2, 2), extra=extra)
    assert repr(checkpoints.load().extra) == repr(extra)


def make_two(root: str) -> list[str]:
    if dist.get_rank():
        dist.barrier()
    for _ in range(2):
        Checkpointer(root)
    if not dist.get_rank():
        dist.barrier()
    dist.barrier()
    return [path.name for path in Path(root).iterdir()]


def test_the_first_rank_may_be_ahead_when_folders_are_looked_at(tmp_path: Path) -> None:
    """It has made its second `Checkpointer` when others make their first; nothing is left over."""
    assert run_on(2, make_two, str(tmp_path)) == [[], []]


def test_keep(tmp_path: Path) -> None:
    """The newest; a failed save counts for nothing."""
    model = linear(2, 2)
    checkpoints = Checkpointer(tmp_path / "run", keep=2)
    for step in (5, 3, 10):
        checkpoints.save(step, model=model)
    with pytest.raises(CheckpointExists):
        checkpoints.save(10, model=model)
    assert checkpoints.steps() == [5, 10]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"step-000005", "step-000010"}
    assert checkpoints.load(model=model).step == 10


# -- random numbers, and going on ---------------------------------------------------------------


def test_random_states_come_back(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        gauss = random.gauss(0, 1), np.random.standard_normal()  # both keep a second number
        return [*gauss, random.random(), np.random.random(), torch.rand(3).tolist()]

    checkpoints = Checkpointer(tmp_path / "run")
    draw()
    checkpoints.save(0, model=linear(2, 2))
    expected = draw()
    draw()
    checkpoints.load()
    assert draw() == expected
    checkpoints.load(random_state=False)
    assert draw() != expected


class Dropping(Tied):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * F.dropout(torch.ones(37), 0.4)


def dropping(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Dropping()
    for block in model.blocks:
        fully_shard(block, mesh=cached_mesh(2))
    fully_shard(model, mesh=cached_mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    torch.manual_seed(100 * seed + dist.get_rank())
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


def resume(folder: str, stop: int, blocking: bool) -> None:
    """Batch norm makes buffers that differ per rank, as dropout and batches do."""
    generator = torch.Generator().manual_seed(7 + dist.get_rank())

    def go_on(parts: Any, steps: range) -> list[float]:
        model, optimizer, scheduler = parts
        losses = []
        for step in steps:
            if step == stop and parts is first:
                extra = generator.get_state()
                checkpoints.save(step, model=model, optimizer=optimizer, scheduler=scheduler,
                                 extra=extra, blocking=blocking)  # fmt: skip
            batch = torch.randint(0, 37, (4, 5), generator=generator)
            loss = F.cross_entropy(model(batch).flatten(0, -2), batch.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        return losses

    checkpoints = Checkpointer(folder)
    first = dropping(0)
    expected = go_on(first, range(8))
    checkpoints.wait()
    second = dropping(1)
    model, optimizer, scheduler = second
    loaded = checkpoints.load(stop, model=model, optimizer=optimizer, scheduler=scheduler)
    generator.set_state(loaded.extra)
    assert go_on(second, range(stop, 8)) == expected[stop:]
    assert_equal_bits(whole_state(model, optimizer), whole_state(first[0], first[1]))
    means: list[Any] = [None, None]
    dist.all_gather_object(means, model.bn.running_mean)
    assert not torch.equal(*means)
    checkpoints.close()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("stop", [0, random.Random(3).randrange(1, 7), 7])
def test_a_run_that_stopped_goes_on_as_if_it_had_not(
    tmp_path: Path, stop: int, blocking: bool
) -> None:
    run_on(2, resume, str(tmp_path / "run"), stop, blocking)


# -- what is never called -----------------------------------------------------------------------


def refuse_calls(patch: pytest.MonkeyPatch, owner: Any, names: Iterator[str] | list[str]) -> None:
    for name in names:

        def raises(*args: Any, _name: str = name, **kwargs: Any) -> None:
            raise AssertionError(f"{_name} was called")

        patch.setattr(owner, name, raises)


def test_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tied()
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    refuse_calls(monkeypatch, pickle, ["load", "loads", "dump", "dumps", "Pickler", "Unpickler"])
    refuse_calls(monkeypatch, torch, ["save", "load"])
    with Checkpointer(tmp_path / "run") as checkpoints:
        for step, blocking in enumerate([True, False]):
            checkpoints.save(step, model=model, optimizer=optimizer, blocking=blocking,
                             extra={"a": torch.ones(2)})  # fmt: skip
        checkpoints.wait()
        checkpoints.load(model=model, optimizer=optimizer)
    save_model(model, tmp_path / "weights")
    load_model(model, tmp_path / "weights")
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or path.suffix in (".safetensors", ".json", ".fsdp2")


class NoCollectives(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "c10d" not in func.name(), f"{func.name()} was called"
        return func(*args, **(kwargs or {}))


COLLECTIVE = (
    "all_", "allgather", "allreduce", "alltoall", "barrier", "broadcast", "gather", "reduce",
    "scatter", "send", "recv", "isend", "irecv", "batch_isend", "monitored_barrier", "_all_gather",
    "_allgather", "_reduce_scatter", "_start_coalescing", "_end_coalescing",
)  # fmt: skip


@distributed(2)
def test_no_collective(layout: str) -> None:
    """Neither torch.distributed's functions, nor a process group's, nor the functional ones."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = build("1d")
    optimizer = adamw(model)
    train(model, optimizer, range(1))
    with pytest.MonkeyPatch.context() as patch:
        for owner in (dist, distributed_c10d, dist.ProcessGroup):
            refuse_calls(patch, owner, [n for n in dir(owner) if n.startswith(COLLECTIVE)
                                        and callable(getattr(owner, n))])  # fmt: skip
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.group.WORLD.allreduce([torch.ones(1)]),
        ):
            with pytest.raises(AssertionError, match="was called"):
                call()
        with NoCollectives():
            with Checkpointer(f"{folder[0]}/run", layout=layout) as checkpoints:
                for step, blocking in enumerate([True, False]):
                    checkpoints.save(step, model=model, optimizer=optimizer, blocking=blocking)
                checkpoints.wait()
                checkpoints.load(model=model, optimizer=optimizer)
                assert checkpoints.load(0, model=model, optimizer=optimizer).verified
            save_model(model, f"{folder[0]}/weights", layout=layout)
            assert load_model(model, f"{folder[0]}/weights").verified


test_no_collective = pytest.mark.parametrize("layout", ["shared", "per-rank"])(test_no_collective)
