"""What training waits for in an asynchronous save: copies into buffers that are there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer
from fsdp2.checkpoint.saving import capture, job
from harness import ours_only, run_on

pytestmark = ours_only("checkpoints")


def trained(num_layers: int = 3, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_buffers_and_places_are_kept_from_save_to_save(tmp_path: Path) -> None:
    """And are made anew for another model; each step has its own values."""
    checkpoints = Checkpointer(tmp_path)
    model, optimizer = trained()
    expected, addresses, targets = {}, [], []
    for number in range(1, 4):
        step(model, optimizer)
        handle = checkpoints.save(number, model=model, optimizer=optimizer, blocking=False)
        expected[number] = values(model)
        step(model, optimizer)  # while it is written
        staging = checkpoints._staging
        ((area, _),) = staging._areas.values()
        addresses.append([piece.data_ptr() for piece in area.bytes.pieces(0, 1 << 40)])
        targets.append([id(t) for run in area._direct for t in run.into or ()])
        handle.wait_committed()
    assert addresses[0] == addresses[1] == addresses[2]
    assert targets[0] == targets[1] == targets[2]
    for width, number in ((32, 4), (4, 5), (8, 6)):  # more bytes, fewer, other shapes
        other, _ = trained(5, width)
        checkpoints.save(number, model=other, blocking=False).wait_committed()
        expected[number] = values(other)
        assert len(checkpoints._staging._places) == 10
    other.double()  # of the same names and shapes
    checkpoints.save(7, model=other, blocking=False).wait_committed()
    expected[7] = values(other)
    for number, wanted in expected.items():
        into, _ = trained(len(wanted) // 2, wanted["0.weight"].shape[1])
        checkpoints.load(number, model=into.to(wanted["0.weight"].dtype))
        for name, value in into.state_dict().items():
            assert torch.equal(value, wanted[name]), (number, name)
    checkpoints.close()
    assert not checkpoints._staging._areas
    assert not checkpoints._staging._places


def test_the_thread_that_writes_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there is that of the save, and nothing is committed."""
    planned_by: list[str] = []
    plan = job.plan_save

    def planning(*args: Any, **kwargs: Any) -> Any:
        planned_by.append(threading.current_thread().name)
        return plan(*args, **kwargs)

    monkeypatch.setattr(job, "plan_save", planning)
    model, optimizer = trained()
    step(model, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        handle = checkpoints.save(1, model=model, optimizer=optimizer, blocking=False)
        handle.wait_committed()
        assert planned_by == ["fsdp2-checkpoint"]
        assert handle.written_bytes == handle.total_bytes == 3 * (3 * 4 * (64 + 8)) + 6 * 4
        checkpoints.save(2, model=model, optimizer=optimizer, blocking=False).wait_committed()
        assert len(planned_by) == 1  # the same is saved
        monkeypatch.setattr(job, "plan_save", lambda *args, **kwargs: 1 // 0)
        optimizer.state.clear()
        handle = checkpoints.save(3, model=model, optimizer=optimizer, blocking=False)
        with pytest.raises(ZeroDivisionError):
            handle.wait()
        with pytest.raises(ZeroDivisionError):
            checkpoints.save(4, model=model)
        assert checkpoints.steps() == [1, 2]
        assert not list(tmp_path.glob(".step-000003*"))


def holdings_found(folder: str, num_layers: int) -> int:
    """How often a save works out which part of a tensor this rank has."""
    model, _ = trained(num_layers)
    optimizer = torch.optim.AdamW(fully_shard(model).parameters())
    step(model, optimizer)
    count = 0
    holding = capture.holding

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return holding(*args)

    with pytest.MonkeyPatch.context() as patch, Checkpointer(folder) as checkpoints:
        patch.setattr(capture, "holding", counting)
        checkpoints.save(1, model=model, optimizer=optimizer, blocking=False).wait_committed()
    return count


def test_parts_are_found_once_for_equal_layers(tmp_path: Path) -> None:
    for num_layers in (3, 9):
        # Weights and biases, in the model and in the state, and the plain step counts.
        assert run_on(2, holdings_found, f"{tmp_path}/{num_layers}", num_layers) == [5, 5]
