"""Models whose parts live on different ranks: pipeline stages, experts, mixed meshes."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from checkpoint_cases import assert_equal_bits, whole
from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    load_model,
    save_model,
)
from harness import cached_mesh, ours_only, run_on

pytestmark = ours_only("checkpoints")


class Stages(nn.Module):
    """Pipeline stages, by names that say which ones they are."""

    def __init__(self, numbers: list[int], seed: int) -> None:
        super().__init__()
        self.stages = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(seed + number)
            self.stages[str(number)] = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.stages.values():
            x = each(x)
        return x


def stage(number: int, seed: int) -> Stages:
    return Stages([number], seed)


def sharded_stage(number: int, seed: int) -> nn.Module:
    """Sharded over the data-parallel ranks of the stage that this rank belongs to."""
    mesh = cached_mesh(2, dist.get_world_size() // 2, names=("pp", "dp"))
    assert mesh.get_local_rank("pp") == number
    return fully_shard(stage(number, seed), mesh=mesh["dp"])


def own_stage() -> int:
    return dist.get_rank() * 2 // dist.get_world_size()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(t) for name, t in model.state_dict().items()}


def step_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 0.1 + len(name) / 100)
    optimizer.step()
    return optimizer


def save_stages(folder: str) -> tuple[int, dict[str, Tensor]]:
    model = sharded_stage(own_stage(), seed=0)
    optimizer = step_of(model)
    Checkpointer(folder).save(1, model=model, optimizer=optimizer)
    return own_stage(), state_of(model)


def load_stages(folder: str, expected: dict[int, dict[str, Tensor]]) -> None:
    model = sharded_stage(own_stage(), seed=50)
    optimizer = torch.optim.AdamW(model.parameters())
    # A stage is a part of what is there; the names of others are not an error.
    loaded = Checkpointer(folder).load(model=model, optimizer=optimizer, strict=False)
    assert not loaded.missing
    assert_equal_bits(state_of(model), expected[own_stage()])
    assert all(len(s) == 3 for s in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 0.01


def load_all_stages(path: str, expected: dict[int, dict[str, Tensor]]) -> None:
    """Both stages in one model, on other ranks."""
    model = Stages([0, 1], 9)
    fully_shard(model, mesh=cached_mesh(dist.get_world_size()))
    load_model(model, path)
    assert_equal_bits(state_of(model), {**expected[0], **expected[1]})


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pipeline_stages(tmp_path: Path, num_ranks: int) -> None:
    """One set of files per stage, one index over all of them."""
    folder = tmp_path / "run"
    expected = dict(run_on(num_ranks, save_stages, str(folder)))
    step = folder / "step-000001"
    index = json.loads((step / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == expected[0].keys() | expected[1].keys()
    for stage_number in (0, 1):
        assert len({index[name] for name in expected[stage_number]}) == 1
    files = {file: load_file(step / file) for file in set(index.values())}
    found = {name: files[file][name] for name, file in index.items()}
    assert_equal_bits(found, {**expected[0], **expected[1]})
    run_on(num_ranks, load_stages, str(folder), expected)
    run_on(3, load_all_stages, str(step), expected)


class Experts(nn.Module):
    """A shared matrix, and this rank's experts only."""

    def __init__(self, rank: int, num_ranks: int, per_rank: int = 2) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        numbers = range(rank * per_rank, (rank + 1) * per_rank)
        self.experts = nn.ModuleDict({str(i): nn.Linear(4, 3) for i in numbers})
        for i in numbers:
            nn.init.constant_(self.experts[str(i)].weight, i)


def local_experts(name: str) -> bool:
    return name.startswith("experts.")


def experts_model() -> Experts:
    torch.manual_seed(0)
    model = Experts(dist.get_rank(), dist.get_world_size())
    fully_shard(model.shared, mesh=cached_mesh(dist.get_world_size()))
    return model


def save_experts(path: str, named: bool) -> dict[str, Tensor]:
    model = experts_model()
    if not named:
        # The rank that finds it first tells the others.
        found = r"disagree on the names.*rank_local"
        with pytest.raises(CheckpointError, match=rf"{found}|rank \d gave up") as caught:
            save_model(model, path)
        return {"found": torch.ones(())} if re.search(found, str(caught.value)) else {}
    save_model(model, path, rank_local=local_experts)
    return state_of(model)


def load_experts(path: str) -> None:
    model = experts_model()
    expected = state_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    report = load_model(model, path, strict=False)
    assert not report.missing
    assert len(report.unexpected) == 2 * 2 * (dist.get_world_size() - 1)
    assert_equal_bits(state_of(model), expected)


def load_whole(path: str) -> None:
    model = Experts(0, 1, per_rank=6)
    load_model(model, path)
    for i in range(6):
        assert bool((model.experts[str(i)].weight == i).all())


def test_experts_that_only_their_rank_has(tmp_path: Path) -> None:
    path = str(tmp_path / "weights")
    run_on(3, save_experts, path, True)
    run_on(3, load_experts, path)
    run_on(1, load_whole, path)


def test_ranks_with_different_names_are_refused(tmp_path: Path) -> None:
    assert any(run_on(2, save_experts, str(tmp_path / "weights"), False))
    assert not (tmp_path / "weights").exists()
    assert not list(tmp_path.iterdir()), "leftovers"


class Scalar(torch.optim.Optimizer):
    """Keeps a vector per parameter that follows no sharding."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("history", torch.zeros(9))[dist.get_rank()] += 1
                state["note"] = ("kept", float("inf"))


def save_odd_state(folder: str) -> None:
    model = fully_shard(stage(0, 0), mesh=cached_mesh(dist.get_world_size()))
    optimizer = Scalar(model.parameters())
    optimizer.step()
    Checkpointer(folder).save(1, model=model, optimizer=optimizer)


def load_odd_state(folder: str, same: bool) -> None:
    model = fully_shard(stage(0, 0), mesh=cached_mesh(dist.get_world_size()))
    optimizer = Scalar(model.parameters())
    checkpoints = Checkpointer(folder)
    if not same:
        with pytest.raises(CheckpointMismatch, match=r"optim\.history\..*saved per rank"):
            checkpoints.load(model=model, optimizer=optimizer)
        return
    checkpoints.load(model=model, optimizer=optimizer)
    for state in optimizer.state.values():
        assert state["history"].tolist() == [float(i == dist.get_rank()) for i in range(9)]
        assert state["note"] == ("kept", float("inf"))


def test_optimizer_state_without_a_sharding(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    run_on(2, save_odd_state, folder)
    run_on(2, load_odd_state, folder, True)
    run_on(3, load_odd_state, folder, False)


def save_twice(folder: str) -> None:
    """Only rank 0 saves a model that it holds whole."""
    if dist.get_rank() == 0:
        for name in ("a", "b"):
            save_model(stage(0, 0), f"{folder}/{name}", ranks=[0])
    dist.barrier()
    other = stage(0, 1)
    load_model(other, f"{folder}/b")
    assert_equal_bits(state_of(other), state_of(stage(0, 0)))


def test_one_rank_saves_alone(tmp_path: Path) -> None:
    run_on(2, save_twice, str(tmp_path))


def save_in_two_groups(folder: str) -> None:
    """Two groups of ranks save to one folder, the second when the first is done; then all do."""
    mine = (0, 1) if dist.get_rank() < 2 else (2, 3)
    model = nn.Linear(4, 4)
    if mine == (0, 1):
        save_model(model, f"{folder}/{mine}", ranks=mine)
    dist.barrier()
    if mine == (2, 3):
        if dist.get_rank() == 2:
            time.sleep(0.3)  # what the others asked before must not be its answer
        save_model(model, f"{folder}/{mine}", ranks=mine)
    dist.barrier()
    save_model(model, f"{folder}/all")
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["(0, 1)", "(2, 3)", "all"]
    dist.barrier()
    # Where some of them have saved before.
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/{mine}")
    dist.barrier()
    save_model(model, f"{folder}/(0, 1)")
    dist.barrier()
    load_model(model, f"{folder}/(0, 1)")


def test_groups_of_ranks_may_save_to_one_folder(tmp_path: Path) -> None:
    run_on(4, save_in_two_groups, str(tmp_path))
