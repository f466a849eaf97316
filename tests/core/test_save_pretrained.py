"""`save_pretrained` of sharded models, as libraries define it: replicas of what their code does.

The libraries themselves are in `tests/ecosystem`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import full_state_dict, fully_shard
from harness import distributed, ours_only, shared_folder
from impatient import impatient_mesh

pytestmark = [ours_only("torch's raises, or writes shards")]


class Layers(nn.Module):
    """Two layers, tied or not, with a buffer, and uneven shards."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        self.last = nn.Linear(3, 5)
        if tied:
            self.last.weight = self.inner[0].weight  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.last(x)


class OnRankZero(Layers):
    """transformers 5.23, of a model that it did not shard: rank 0 alone writes, without ties."""

    def save_pretrained(self, folder: str, state_dict: dict | None = None, **kwargs: Any) -> str:
        state = self.state_dict() if state_dict is None else state_dict
        names: dict[int, str] = {}
        if dist.get_rank() == 0:
            for name, value in state.items():
                names.setdefault(value.untyped_storage().data_ptr(), name)
            kept = {name: state[name].contiguous() for name in names.values()}
            save_file(kept, Path(folder, "model.safetensors"))
        return "saved"


class OnEveryRank(Layers):
    """diffusers 0.42 and peft 0.21 with ``safe_serialization=False``: each rank writes the file."""

    def save_pretrained(self, folder: str, **kwargs: Any) -> str:
        torch.save(dict(self.state_dict()), Path(folder, "model.bin"))
        return "saved"


class Part(nn.Linear):
    def save(self, folder: str, name: str) -> None:
        Path(folder, f"{name}.json").write_text(type(self).__name__)
        save_file(dict(self.state_dict()), Path(folder, f"{name}.safetensors"))


class PartOfALibrary(Part):
    def save_pretrained(self, folder: str) -> None:
        self.save(folder, "third")


class OfParts(nn.Module):
    """sentence-transformers 6.2: each of its modules saves itself; one is a model of transformers.

    One is no unit, one is a unit, one is a unit with a ``save_pretrained`` of its own.
    """

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Part(3, 5), Part(5, 5), PartOfALibrary(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)))

    def save_pretrained(self, folder: str) -> str:
        self.third.save_pretrained(folder)
        self.first.save(folder, "first")
        self.second.save(folder, "second")
        return "saved"


class Gathering(Layers):
    """transformers 5.23, of a model that it sharded: it gathers on all ranks, and rank 0 writes."""

    seen: str = ""

    def save_pretrained(self, folder: str, distributed_checkpoint: bool = False) -> str:
        state = {}
        for name, value in self.state_dict().items():
            Gathering.seen += "d" if isinstance(value, DTensor) else "t"
            state[name] = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            torch.save(state, Path(folder, "model.bin"))
        dist.barrier()
        return "saved"


def files(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in Path(folder).iterdir():
        found[path.name] = torch.load(path) if path.suffix == ".bin" else path.read_bytes()
    return found


def assert_same_files(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, content in expected.items():
        if isinstance(content, bytes):
            assert actual[name] == content, name
            continue
        assert actual[name].keys() == content.keys()
        for key, value in content.items():
            assert type(actual[name][key]) is Tensor
            assert torch.equal(actual[name][key], value), key


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [OnRankZero, OnEveryRank, OfParts, Gathering])
@distributed(2, 3)
def test_files_are_those_of_a_plain_model(kind: Any, tied: bool) -> None:
    """After a step, and while the root is still gathered."""
    plain, model = kind(tied).double(), kind(tied).double()
    for name in ("inner", "second", "third"):
        if hasattr(model, name) and not tied:
            fully_shard(getattr(model, name))
    fully_shard(model)
    x = torch.ones(4, 3, dtype=torch.float64)
    for each in (model, plain):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        each(x)
    with shared_folder() as ours, shared_folder() as theirs:
        assert model.save_pretrained(ours) == ("saved" if own_rank_saves(kind) else None)
        written = files(ours)
        dist.barrier()
        if dist.get_rank() == 0:
            (OnEveryRank if kind is Gathering else kind).save_pretrained(plain, theirs)
            assert_same_files(written, files(theirs))
    assert all(type(module.state_dict).__name__ == "method" for module in model.modules())
    assert any(isinstance(value, DTensor) for value in model.state_dict().values())
    model(x).sum().backward()


def own_rank_saves(kind: Any) -> bool:
    return kind is Gathering or dist.get_rank() == 0


@distributed(2)
def test_a_library_that_can_is_left_alone() -> None:
    """It is called once, on all ranks, with DTensors."""
    model = fully_shard(Gathering())
    Gathering.seen = ""
    with shared_folder() as folder:
        model.save_pretrained(folder, distributed_checkpoint=True)
        names = [name for name, _ in model.state_dict().items()]
        assert Gathering.seen == "".join("d" if is_param(name) else "t" for name in names)


def is_param(name: str) -> bool:
    return name.endswith(("weight", "bias"))


@distributed(2)
def test_whole_tensors_may_be_given_on_one_rank() -> None:
    model = fully_shard(OnRankZero())
    state = full_state_dict(model)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            assert model.save_pretrained(folder, state_dict=state) == "saved"
            assert model.save_pretrained(folder, state) == "saved"
            assert "model.safetensors" in files(folder)


class FullDisk(OnRankZero):
    def save_pretrained(self, folder: str, **kwargs: Any) -> str:
        if dist.get_rank() == 0:
            raise OSError("No space left on device")
        return "saved"


@distributed(2)
def test_what_rank_0_cannot_write_is_an_error_on_all_ranks() -> None:
    model = fully_shard(FullDisk())
    if dist.get_rank() == 0:
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained("")
    else:
        with pytest.raises(RuntimeError, match=r"Rank 0 failed to call FullDisk.save_pretrained"):
            model.save_pretrained("")
    model(torch.ones(2, 3)).sum().backward()


@distributed(2)
def test_a_rank_that_saves_alone_is_told_who_is_missing() -> None:
    model = fully_shard(OnEveryRank(), mesh=impatient_mesh())
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            text = (
                r"OnEveryRank.save_pretrained, as all ranks have to.*rank 1 did not come within 1"
            )
            with pytest.raises(RuntimeError, match=text):
                model.save_pretrained(folder)
        dist.barrier()
        if dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match="the others have given up"):
                model.save_pretrained(folder)
        dist.barrier()
        assert not files(folder)
        model.save_pretrained(folder)
        assert "model.bin" in files(folder)
