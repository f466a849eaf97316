"""Saving tensors on a device: copied piece by piece, and the file holds their values.

There is no device here: CPU tensors are treated as if their memory could not be read in place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp2.checkpoint.format.tensors as tensors_module
from fsdp2.checkpoint import Checkpointer, save_model
from fsdp2.checkpoint.format.manifest import TensorPart
from fsdp2.checkpoint.format.tensors import LocalBytes, describe
from fsdp2.checkpoint.saving.writing import PIECE_BYTES
from fsdp2.dtensor.boxes import Box


@pytest.fixture
def nothing_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors_module, "on_host", lambda tensor: False)


class Mixed(nn.Module):
    """More than one piece, several dtypes, sizes that no piece divides."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.large = nn.Parameter(torch.randn(3, PIECE_BYTES // 4 + 7, generator=generator))
        self.small = nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(2.5, dtype=torch.float64))
        self.transposed = nn.Parameter(torch.randn(7, 9, generator=generator).t())
        self.counts: Tensor
        self.register_buffer("counts", torch.arange(1001, dtype=torch.int16))


@pytest.mark.usefixtures("nothing_is_on_the_host")
@pytest.mark.parametrize("layout", ["shared", "per-rank"])
def test_the_file_has_what_the_tensors_have(tmp_path: Path, layout: str) -> None:
    model = Mixed()
    save_model(model, tmp_path / "model", layout=layout)
    found = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        found |= load_file(file)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.usefixtures("nothing_is_on_the_host")
def test_a_checkpoint_of_training_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(300, 700)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 300)).square().sum().backward()
    optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    moments = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
                optimizer.state[parameter]["exp_avg"].zero_()
        checkpointer.load(model=model, optimizer=optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter, moment in zip(model.parameters(), moments, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment)


@pytest.mark.usefixtures("nothing_is_on_the_host")
def test_a_view_stays_valid_until_the_next_call() -> None:
    """Memory that is allocated and filled in between does not show in it."""
    tensor = torch.full((1 << 20,), 7.0)
    info = describe("x", tensor)
    box = Box.whole(info.shape)
    part = TensorPart("model", info, box, box, (0,), True)
    read = LocalBytes({("model", "x"): tensor})
    for _ in range(8):
        view = read(part, 0, tensor.nbytes)
        others = [torch.full((1 << 20,), -1.0) for _ in range(4)]
        assert torch.equal(torch.frombuffer(view, dtype=torch.float32), tensor)
        del others
