"""Checkpoints of tensor subclasses: weights, and the state of optimizers over them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from test_tensor_subclasses import adam, batch, layers, shard
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import harness
from fsdp2 import checkpoint, full_state_dict, fully_shard
from fsdp2.checkpoint.loading.restore import _like_before
from harness import cached_mesh
from subclasses import (
    OfMesh,
    Scaled,
    plain_values,
    two_tensor_methods,
    with_scaled,
    with_two_tensors,
)

TABLE = [0.5, 0.25, 0.125]


class Table(OfMesh):
    """A scale for each pair of rows, and a table for all: as quantized tensors have them."""

    style = "returns plain copies"
    table_: Tensor

    @classmethod
    def of(cls, data: Tensor, factor: float = 1.0) -> Table:
        return cls.made(data * 2, torch.full((data.shape[0] // 2,), 2.0), factor)

    @classmethod
    def made(cls, data: Tensor, pairs: Tensor, factor: float = 1.0) -> Table:
        made = Scaled.__new__(cls, data, pairs)
        made.table_ = torch.tensor(TABLE) * factor
        return made  # type: ignore[return-value]

    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale_", "table_"], {"shape": tuple(self.shape)}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Table:
        assert context["shape"] == tuple(size)
        made = cls.made(inner["data_"], inner["scale_"])
        made.table_ = inner["table_"]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, first = func.overloadpacket.__name__, kwargs or {}, args[0]
        if name in ("detach", "view", "as_strided", "clone"):
            return cls.like(first, first.data_, first.scale_)
        if name == "slice":
            _, dim, start, end = args
            assert dim == 0
            end = min(end, first.shape[0])
            if start % 2 or end % 2:
                raise ValueError("not where a pair of rows begins")
            return cls.like(first, first.data_[start:end], first.scale_[start // 2 : end // 2])
        if name == "split":
            return [first[i : i + args[1]] for i in range(0, first.shape[0], args[1])]
        if name in ("new_zeros", "empty_like"):
            rows = args[1][0] if name == "new_zeros" else first.shape[0]
            data = first.data_.new_zeros(rows, *first.shape[1:])
            return cls.like(first, data, first.scale_.new_zeros(rows // 2))
        assert name == "copy_", name
        first.data_.copy_(args[1].data_)
        first.scale_.copy_(args[1].scale_)
        return first

    @classmethod
    def like(cls, other: Table, data: Tensor, pairs: Tensor) -> Table:
        made = cls.made(data, pairs)
        made.table_ = other.table_
        return made


class Prepared(Table):
    """With a number for the whole weight, once somebody computed it: torchao's float8 has such a
    scale, and every operator leaves it out."""

    number_: Tensor | None = None

    def __tensor_flatten__(self) -> Any:
        names, context = super().__tensor_flatten__()
        return [*names, "number_"] if self.number_ is not None else names, context


def model_of(kind: str, hidden: int = 12) -> nn.Module:
    if kind == "two":
        return with_two_tensors(layers(hidden))
    layer = nn.Linear(3, hidden)
    weight = torch.arange(hidden * 3.0).view(hidden, 3)
    layer.weight = nn.Parameter(Table.of(weight), requires_grad=False)
    return nn.Sequential(layer)


def values(tensor: Any) -> Any:
    """The whole values, on every rank."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(local, TwoTensor):
        local = plain_values(local)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local.detach())
    is_sharded = isinstance(tensor, DTensor) and tensor.placements[-1].is_shard()
    if not is_sharded:
        return local.detach().tolist()
    num = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    return torch.cat(parts[:num]).tolist()


def state_of(model: nn.Module, optimizer: Any) -> Any:
    found = {name: values(param) for name, param in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            found[f"{key} {number}"] = values(value)
    return found


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    (model(batch(number, 0)) - 1).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_two_tensors(mesh: tuple[int, ...], hidden: int) -> tuple[nn.Module, Any]:
    options = {"mesh": cached_mesh(*mesh, names=("r", "s"))} if mesh else {}
    model = shard(model_of("two", hidden), **options)
    return model, adam(model)


def save_two_tensors(folder: str, mesh: tuple[int, ...] = (), hidden: int = 12) -> Any:
    with two_tensor_methods():
        model, optimizer = sharded_two_tensors(mesh, hidden)
        for number in range(2):
            step(model, optimizer, number)
        checkpoints = checkpoint.Checkpointer(folder)
        handle = checkpoints.save(2, model=model, optimizer=optimizer, blocking=False)
        found = state_of(model, optimizer)
        handle.wait_committed(60)
        return found


def load_two_tensors(
    folder: str, *, stepped: bool, mesh: tuple[int, ...] = (), hidden: int = 12
) -> Any:
    with two_tensor_methods():
        model, optimizer = sharded_two_tensors(mesh, hidden)
        if stepped:  # there are tensors to load into
            step(model, optimizer, 5)
        checkpoint.Checkpointer(folder).load(model=model, optimizer=optimizer)
        return state_of(model, optimizer)


@pytest.mark.parametrize("stepped", [False, True], ids=["new state", "state that is there"])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long), 3])
def test_weights_and_state_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, ranks: int, stepped: bool
) -> None:
    for hidden in (12, 7):
        folder = str(tmp_path / str(hidden))
        Path(folder).mkdir()
        saved = harness.run_on(2, save_two_tensors, folder, hidden=hidden)[0]
        loaded = harness.run_on(ranks, load_two_tensors, folder, stepped=stepped, hidden=hidden)
        assert all(found == saved for found in loaded)


def batch_of_all(number: int) -> Tensor:
    """The same on any number of ranks."""
    return (torch.arange(24, dtype=torch.float64).view(4, 6) * 0.1 + 0.7 * number).sin()


def train_two_tensors(
    folder: str, first: int, last: int, mesh: tuple[int, ...] = (), hidden: int = 7
) -> list[float]:
    """Losses of the steps from ``first`` to ``last``, with the same batch on all ranks; begins with
    the checkpoint of the step before, if there is one, and saves in the end."""
    with two_tensor_methods():
        model, optimizer = sharded_two_tensors(mesh, hidden)
        checkpoints = checkpoint.Checkpointer(folder)
        if first:
            assert checkpoints.load(model=model, optimizer=optimizer).step == first
        losses = []
        for number in range(first, last):
            loss = (model(batch_of_all(number)) - 1).square().mean()
            losses.append(float(loss.a))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(last, model=model, optimizer=optimizer)
        return losses


LAYOUTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "one rank": (1, ()),
    "two ranks": (2, ()),
    "three ranks": (3, ()),
    "two replicas": (4, (2, 2)),
}


@pytest.mark.long
@pytest.mark.parametrize("later", [*LAYOUTS])
@pytest.mark.parametrize("earlier", [*LAYOUTS])
def test_any_layout_goes_on_from_any_other(tmp_path: Path, earlier: str, later: str) -> None:
    """Losses and checkpoints are those of one process that was never interrupted."""
    never, resumed = str(tmp_path / "never"), str(tmp_path / "resumed")
    wanted = harness.run_on(1, train_two_tensors, never, 0, 4)[0]
    found = []
    for (ranks, mesh), steps in ((LAYOUTS[earlier], (0, 2)), (LAYOUTS[later], (2, 4))):
        every = harness.run_on(ranks, train_two_tensors, resumed, *steps, mesh=mesh)
        assert all(losses == every[0] for losses in every)
        found += every[0]
    assert found == pytest.approx(wanted, rel=1e-12)
    assert len(set(found)) == 4  # it learns
    states = [
        harness.run_on(1, load_two_tensors, f, stepped=False, hidden=7) for f in (never, resumed)
    ]
    for name, value in states[0][0].items():
        assert torch.allclose(torch.tensor(states[1][0][name]), torch.tensor(value), rtol=1e-10), (
            name
        )


@pytest.mark.long
def test_replicas_write_each_shard_once(tmp_path: Path) -> None:
    saved = harness.run_on(4, save_two_tensors, str(tmp_path), mesh=(2, 2))[0]
    names = [name for _, _, name in entries(tmp_path / "step-2")]
    assert len(names) == len(set(names))
    assert harness.run_on(2, load_two_tensors, str(tmp_path), stepped=True)[0] == saved
    found = harness.run_on(4, load_two_tensors, str(tmp_path), stepped=True, mesh=(2, 2))
    assert all(each == saved for each in found)


def entries(folder: Path) -> list[tuple[str, Any, str]]:
    """File, tensor and name of all that is in the files."""
    found = []
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found += [(file.name, opened.get_tensor(name), name) for name in opened.keys()]  # noqa: SIM118
    return found


def test_inner_tensors_are_ordinary_entries_with_a_description(tmp_path: Path) -> None:
    harness.run_on(2, save_two_tensors, str(tmp_path))
    (folder,) = tmp_path.iterdir()
    found = {name: tensor for _, tensor, name in entries(folder)}
    assert found["0.weight.rows-0-6.a"].shape == (6, 6)
    assert torch.equal(found["0.weight.rows-6-12.a"], found["0.weight.rows-6-12.b"])
    description = json.loads(bytes(found["optim.exp_avg.0.weight.rows-6-12.subclass"].tolist()))
    assert description["kind"] == "torch.testing._internal.two_tensor.TwoTensor"
    assert description["shape"] == [12, 6]
    assert description["follows"] == {"a": True, "b": True}


def train_scaled(folder: str, steps: int, *, resume: bool = False) -> Any:
    """Adam's state of `Scaled` weights is of plain tensors."""
    model = shard(with_scaled(layers(), OfMesh, "replaces an attribute"))
    optimizer = adam(model)
    checkpoints = checkpoint.Checkpointer(folder)
    if resume:
        checkpoints.load(model=model, optimizer=optimizer)
    for number in range(2 if resume else 0, steps):
        step(model, optimizer, number)
    if not resume:
        checkpoints.save(steps, model=model, optimizer=optimizer)
    return [plain_of(value) for value in (*model.parameters(), *moments(optimizer))]


def moments(optimizer: Any) -> list[Any]:
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def plain_of(tensor: Any) -> list[float]:
    local = tensor.detach()._local_tensor
    return (local.data_ / local.scale_ if isinstance(local, Scaled) else local).tolist()


def test_plain_state_of_a_subclass_is_loaded_into_plain_tensors(tmp_path: Path) -> None:
    """It was read into the memory of a subclass, which has none: Bad address."""
    never, folder = str(tmp_path / "never"), str(tmp_path / "folder")
    wanted = harness.run_on(2, train_scaled, never, 4)
    harness.run_on(2, train_scaled, folder, 2)
    assert harness.run_on(2, train_scaled, folder, 4, resume=True) == wanted


def test_state_of_a_subclass_is_no_place_for_plain_state() -> None:
    stored: Any = SimpleNamespace(info=SimpleNamespace(shape=(4, 3), dtype="F32"))
    plain = torch.zeros(4, 3)
    assert _like_before(plain, stored) is plain
    assert _like_before(Scaled(plain, torch.ones(())), stored) is None


# -- blocks of rows, and a table for all ------------------------------------------------------


def save_blocks(folder: str, hidden: int, differing: bool = False) -> None:
    model = model_of("table", hidden)
    fully_shard(model)
    if differing:
        model[0].weight._local_tensor.table_ *= 1 + dist.get_rank()  # type: ignore[index,union-attr]
    checkpoint.save_model(model, folder)


def load_blocks(folder: str, hidden: int) -> Any:
    model = model_of("table", hidden)
    wanted = model[0].weight.data_.clone()  # type: ignore[index,union-attr]
    fully_shard(model)
    weight: Any = model[0].weight._local_tensor  # type: ignore[index,union-attr]
    for inner in (weight.data_, weight.scale_, weight.table_):
        inner.zero_()
    try:
        checkpoint.load_model(model, folder)
    except checkpoint.CheckpointMismatch as error:
        assert not weight.data_.any()
        return str(error)
    assert weight.scale_.tolist() == [2] * (weight.shape[0] // 2)
    assert weight.table_.tolist() == TABLE
    return values(weight.data_) and torch.equal(torch.cat(_gathered(weight.data_)), wanted)


def _gathered(tensor: Tensor) -> list[Tensor]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


def test_blocks_that_end_where_shards_do_and_blocks_that_do_not(tmp_path: Path) -> None:
    harness.run_on(2, save_blocks, str(tmp_path / "twelve"), 12)
    assert harness.run_on(2, load_blocks, str(tmp_path / "twelve"), 12) == [True, True]
    assert harness.run_on(3, load_blocks, str(tmp_path / "twelve"), 12) == [True] * 3
    assert harness.run_on(1, load_blocks, str(tmp_path / "twelve"), 12) == [True]


def test_a_table_that_differs_between_shards_is_not_mixed(tmp_path: Path) -> None:
    harness.run_on(2, save_blocks, str(tmp_path / "own"), 12, differing=True)
    (error,) = harness.run_on(1, load_blocks, str(tmp_path / "own"), 12)
    assert "'table_' of '0.weight'" in error
    assert "is not the same in all shards" in error


def prepared(number: float | None) -> tuple[nn.Module, Any]:
    """A sharded model, and the shard of its weight with ``number``."""
    layer = nn.Linear(3, 12)
    whole = Prepared.of(torch.arange(36.0).view(12, 3))
    layer.weight = nn.Parameter(whole, requires_grad=False)
    model = fully_shard(nn.Sequential(layer))
    local: Any = model[0].weight._local_tensor  # type: ignore[index,union-attr]
    local.number_ = None if number is None else torch.tensor(number)
    return model, local


def save_prepared(folder: str, number: float | None) -> None:
    model, _ = prepared(number)
    checkpoint.save_model(model, folder)
    whole: Any = full_state_dict(model, ranks=range(dist.get_world_size()))["0.weight"]
    assert torch.equal(whole.data_, torch.arange(36.0).view(12, 3) * 2)


def load_prepared(folder: str, number: float | None) -> Any:
    model, local = prepared(number)
    local.data_.zero_()
    try:
        checkpoint.load_model(model, folder)
    except checkpoint.CheckpointMismatch as error:
        return str(error)
    assert (
        torch.cat(_gathered(local.data_)).tolist() == (torch.arange(36.0) * 2).view(12, 3).tolist()
    )
    return None if local.number_ is None else local.number_.item()


def test_a_number_for_all_shards_that_is_there_sometimes(tmp_path: Path) -> None:
    """Its class leaves it out of what it cuts, and it has no rows."""
    with_it, without = str(tmp_path / "with"), str(tmp_path / "without")
    harness.run_on(2, save_prepared, with_it, 3.0)
    harness.run_on(2, save_prepared, without, None)
    for ranks in (2, 3):
        assert harness.run_on(ranks, load_prepared, with_it, 4.0) == [3.0] * ranks
        assert harness.run_on(ranks, load_prepared, with_it, None) == [None] * ranks
        assert harness.run_on(ranks, load_prepared, without, None) == [None] * ranks
        errors = harness.run_on(ranks, load_prepared, without, 4.0)
        assert all("'number_' of '0.weight' is not in the checkpoint" in e for e in errors)


def load_into_plain(folder: str) -> str:
    model = fully_shard(nn.Sequential(nn.Linear(3, 12)))
    with pytest.raises(checkpoint.CheckpointMismatch) as raised:
        checkpoint.load_model(model, folder)
    return str(raised.value)


def load_plain_into_subclass(folder: str) -> str:
    plain = nn.Sequential(nn.Linear(3, 12))
    checkpoint.save_model(plain, folder)
    model = fully_shard(model_of("table"))
    with pytest.raises(checkpoint.CheckpointMismatch) as raised:
        checkpoint.load_model(model, folder)
    return str(raised.value)


def test_a_plain_model_and_a_converted_one_are_told_apart(tmp_path: Path) -> None:
    harness.run_on(2, save_blocks, str(tmp_path / "blocks"), 12)
    assert (
        "'0.weight' was saved as test_subclass_checkpoints.Table and is a torch.Tensor here"
        in (harness.run_on(2, load_into_plain, str(tmp_path / "blocks"))[0])
    )
    assert (
        "'0.weight' is a plain tensor in the checkpoint and a Table here"
        in (harness.run_on(2, load_plain_into_subclass, str(tmp_path / "plain"))[0])
    )
