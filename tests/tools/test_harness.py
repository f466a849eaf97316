"""The harness itself: results, failures, hangs and deaths of ranks are reported."""

from __future__ import annotations

import os
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
import harness
from harness import RankError, distributed, run_on


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for one that failed are given up soon."""
    monkeypatch.setattr(harness, "_GRACE_S", 0.2)


@distributed(1, 2, 3, 4)
def test_every_rank_runs_the_body() -> None:
    total = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    assert total.item() == world_size * (world_size + 1) / 2


@pytest.mark.parametrize("word", ["a", "b"])
@distributed(2)
def test_parameters_reach_the_body(word: str) -> None:
    words: list[str] = ["", ""]
    dist.all_gather_object(words, word)
    assert words == [word, word]


@pytest.mark.parametrize("call", [1, 2])
@distributed(2)
def test_a_job_starts_from_a_clean_state(call: int) -> None:
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert torch.initial_seed() == 0
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(call)


def process_and_sum() -> tuple[int, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on_rank_one(number: int) -> None:
    if dist.get_rank() == 1:
        assert number == 3, "not three"
    dist.barrier()


def leave_rank_one_behind() -> None:
    if dist.get_rank() == 0:
        return
    while True:
        time.sleep(0.05)


def die_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        os.abort()
    dist.barrier()


def print_and_fail() -> None:
    print("words before the failure", flush=True)
    raise ValueError("it failed")


def test_ranks_are_reused() -> None:
    first = run_on(2, process_and_sum)
    assert run_on(2, process_and_sum) == first
    assert [total for _, total in first] == [2.0, 2.0]


@pytest.mark.usefixtures("short_grace")
def test_a_failure_names_the_rank_and_has_its_traceback_and_variables() -> None:
    with pytest.raises(RankError) as caught:
        run_on(2, fail_on_rank_one, 7)
    text = str(caught.value)
    assert "rank 1" in text
    assert "not three" in text
    assert "fail_on_rank_one" in text
    assert "number = 7" in text
    assert "ranks [0] did not answer" in text


def test_a_failure_shows_what_the_rank_printed() -> None:
    with pytest.raises(RankError, match="words before the failure"):
        run_on(1, print_and_fail)


def test_a_hang_is_detected_and_its_stack_shown() -> None:
    with pytest.raises(RankError) as caught:
        run_on(2, leave_rank_one_behind, timeout_s=1.0)
    text = str(caught.value)
    assert "rank 1 hangs" in text
    assert "in leave_rank_one_behind" in text


def test_no_job_has_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "JOB_LIMIT_S", 1.0)
    with pytest.raises(RankError, match="rank 1 hangs: no answer in 1 s"):
        run_on(2, leave_rank_one_behind, timeout_s=1000.0)


def draw_for_another_device() -> None:
    """On "meta" as on CUDA: a generator of the CPU is asked for numbers of another device."""
    harness.draw_on_the_host()
    drawn, expected = (torch.Generator().manual_seed(1) for _ in range(2))
    weights = torch.randn(4, generator=drawn, device="meta", requires_grad=True)
    assert weights.device.type == "meta"
    assert weights.is_leaf
    assert weights.requires_grad
    torch.randn(4, generator=expected)
    assert torch.equal(torch.rand(3, generator=drawn), torch.rand(3, generator=expected))


def test_a_generator_of_the_cpu_draws_for_any_device() -> None:
    run_on(1, draw_for_another_device, restart=True)


def train_with_chaos() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for module in (*model, model):
            fsdp2.fully_shard(module)
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(3):
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    import chaos  # of this package's own parts
    from fsdp2.sharding import gathered

    before = losses()
    chaos.install(seed=0)
    assert losses() == before
    memory = torch.zeros(0)
    gathered.resize(memory.untyped_storage(), 16)
    assert torch.empty(0).set_(memory.untyped_storage(), 0, (4,)).isnan().all()


@harness.ours_only("its storages")
def test_chaos_fills_all_memory_and_changes_no_number() -> None:
    run_on(2, train_with_chaos, restart=True)


@pytest.mark.usefixtures("short_grace")
def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RankError) as caught:
        run_on(2, die_on_rank_zero)
    text = str(caught.value)
    assert "rank 0" in text
    assert "ended with code -6" in text
    assert "in die_on_rank_zero" in text


@pytest.mark.usefixtures("short_grace")
def test_ranks_are_fresh_after_a_failure() -> None:
    before = run_on(2, process_and_sum)
    with pytest.raises(RankError):
        run_on(2, fail_on_rank_one, 0)
    after = run_on(2, process_and_sum)
    assert {pid for pid, _ in before}.isdisjoint(pid for pid, _ in after)
    assert [total for _, total in after] == [2.0, 2.0]


def test_restart_gives_the_next_job_fresh_ranks() -> None:
    before = run_on(1, process_and_sum, restart=True)
    assert run_on(1, process_and_sum)[0][0] != before[0][0]


kept: list[DeviceMesh] = []  # of a rank


def keep_a_mesh_and_import_something() -> None:
    kept.append(init_device_mesh("cpu", (2, 1)))
    sys.modules["something"] = types.ModuleType("something")


def make_many_groups() -> None:
    for _ in range(harness.MANY_GROUPS):
        dist.new_group([0, 1])


def count_groups_and_use_the_mesh() -> int:
    dist.all_reduce(torch.ones(1), group=kept.pop().get_group(1))
    del sys.modules["something"]
    return len(dist.distributed_c10d._world.pg_map)


def test_only_groups_of_meshes_that_live_on_are_kept() -> None:
    """Also where an import has hidden the mesh from the garbage collector."""
    run_on(2, keep_a_mesh_and_import_something)
    run_on(2, make_many_groups)
    assert max(run_on(2, count_groups_and_use_the_mesh)) <= harness.MANY_GROUPS
