"""Checkpoints of tensor subclasses: weights, and the state of optimizers over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import harness
from fsdp2 import checkpoint, fully_shard
from harness import cached_mesh
from subclasses import OfMesh, Scaled, plain_values, two_tensor_methods, with_two_tensors
from test_tensor_subclasses import adam, batch, layers, shard

TABLE = [0.5, 0.25, 0.125]


class Table(OfMesh):
    """A scale for each pair of rows, and a table for all: as quantized tensors have them."""

    style = "returns plain copies"
    table_: Tensor

    @staticmethod
    def of(data: Tensor, factor: float = 1.0) -> Table:
        return Table.made(data * 2, torch.full((data.shape[0] // 2,), 2.0), factor)

    @staticmethod
    def made(data: Tensor, pairs: Tensor, factor: float = 1.0) -> Table:
        made = Scaled.__new__(Table, data, pairs)
        made.table_ = torch.tensor(TABLE) * factor
        return made  # type: ignore[return-value]

    def __tensor_flatten__(self) -> Any:
        return ["data_", "scale_", "table_"], {"shape": tuple(self.shape)}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Table:
        assert context["shape"] == tuple(size)
        made = Table.made(inner["data_"], inner["scale_"])
        made.table_ = inner["table_"]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs, first = func.overloadpacket.__name__, kwargs or {}, args[0]
        if name in ("detach", "view", "as_strided", "clone"):
            return Table.like(first, first.data_, first.scale_)
        if name == "slice":
            _, dim, start, end = args
            assert dim == 0
            end = min(end, first.shape[0])
            if start % 2 or end % 2:
                raise ValueError("not where a pair of rows begins")
            return Table.like(first, first.data_[start:end], first.scale_[start // 2 : end // 2])
        if name == "split":
            return [first[i : i + args[1]] for i in range(0, first.shape[0], args[1])]
        if name in ("new_zeros", "empty_like"):
            rows = args[1][0] if name == "new_zeros" else first.shape[0]
            data = first.data_.new_zeros(rows, *first.shape[1:])
            return Table.like(first, data, first.scale_.new_zeros(rows // 2))
        assert name == "copy_", name
        first.data_.copy_(args[1].data_)
        first.scale_.copy_(args[1].scale_)
        return first

    @staticmethod
    def like(other: Table, data: Tensor, pairs: Tensor) -> Table:
        made = Table.made(data, pairs)
        made.table_ = other.table_
        return made


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


def save_two_tensors(folder: str, mesh: tuple[int, ...] = (), hidden: int = 12) -> Any:
    with two_tensor_methods():
        options = {"mesh": cached_mesh(*mesh, names=("r", "s"))} if mesh else {}
        model = shard(model_of("two", hidden), **options)
        optimizer = adam(model)
        for number in range(2):
            step(model, optimizer, number)
        checkpoints = checkpoint.Checkpointer(folder)
        handle = checkpoints.save(2, model=model, optimizer=optimizer, blocking=False)
        found = state_of(model, optimizer)
        handle.wait_committed(60)
        return found


def load_two_tensors(folder: str, *, stepped: bool, hidden: int = 12) -> Any:
    with two_tensor_methods():
        model = shard(model_of("two", hidden))
        optimizer = adam(model)
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


@pytest.mark.long
def test_replicas_write_each_shard_once(tmp_path: Path) -> None:
    saved = harness.run_on(4, save_two_tensors, str(tmp_path), mesh=(2, 2))[0]
    names = [name for _, _, name in entries(tmp_path / "step-2")]
    assert len(names) == len(set(names))
    assert harness.run_on(2, load_two_tensors, str(tmp_path), stepped=True)[0] == saved


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
