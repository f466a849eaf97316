"""A load succeeds on all ranks or on none."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import fully_shard
from fsdp2.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    CorruptCheckpoint,
    agreement,
    checkpointer,
)
from harness import distributed, ours_only, run_on, shared_folder

pytestmark = ours_only("checkpoints")


def sharded(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.to_local().clone() for value in model.state_dict().values()]


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def two_steps() -> Iterator[tuple[Checkpointer, Path]]:
    with shared_folder() as folder:
        checkpoints = Checkpointer(folder)
        for step in (1, 2):
            checkpoints.save(step, model=sharded(step))
        yield checkpoints, Path(folder)


def damage_what_only_rank_1_reads(folder: Path) -> None:
    """The last rows of the last weight are in the shard of the last rank."""
    if dist.get_rank() == 0:
        path = folder / "step-000002" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-4] ^= 1
        path.write_bytes(data)
    dist.barrier()


@distributed(2)
@pytest.mark.parametrize("keep_on_error", [True, False])
def test_a_block_damaged_in_the_shard_of_one_rank_is_an_error_on_all(keep_on_error: bool) -> None:
    """The same error, so that all may go back to the step before."""
    with two_steps() as (checkpoints, folder):
        damage_what_only_rank_1_reads(folder)
        model = sharded()
        before = values(model)
        who = "" if dist.get_rank() == 1 else "Rank 1: "
        with pytest.raises(CorruptCheckpoint, match=f"^{who}.*checksum"):
            checkpoints.load(model=model, keep_on_error=keep_on_error)
        if keep_on_error:
            assert_equal(values(model), before)
        assert checkpoints.load(1, model=model).step == 1
        assert_equal(values(model), values(sharded(1)))


def another_model(checkpoints: Checkpointer) -> None:
    model = nn.Linear(3, 3)
    if dist.get_rank() == 0:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    before = [value.clone() for value in model.state_dict().values()]
    try:
        checkpoints.load(model=model)
    finally:
        assert_equal(list(model.state_dict().values()), before)


def refusing_scheduler(checkpoints: Checkpointer) -> None:
    class Refusing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if dist.get_rank() == 1:
                raise KeyError("last_epoch")

    checkpoints.save(3, model=sharded(), scheduler=Refusing())
    checkpoints.load(model=sharded(), scheduler=Refusing())


def different_steps(checkpoints: Checkpointer) -> None:
    checkpoints.load(1 + dist.get_rank(), model=sharded())


def no_step_on_one_rank(checkpoints: Checkpointer) -> None:
    checkpoints.load("latest" if dist.get_rank() == 0 else "lastest", model=sharded())


def missing_step(checkpoints: Checkpointer) -> None:
    checkpoints.load(7, model=sharded())


REFUSED = {
    another_model: (CheckpointMismatch, "does not fit the model"),
    refusing_scheduler: (CheckpointMismatch, "does not accept what was saved: KeyError"),
    different_steps: (CheckpointError, "Rank 1 loads step 2, and rank 0 step 1"),
    no_step_on_one_rank: (Exception, "step must be a whole number or 'latest', got 'lastest'"),
    missing_step: (CheckpointNotFound, "no committed step 7"),
}


@distributed(2)
@pytest.mark.parametrize("load", REFUSED)
def test_what_one_rank_refuses_is_an_error_on_all(load: Callable[[Any], None]) -> None:
    kind, words = REFUSED[load]
    with two_steps() as (checkpoints, _):
        with pytest.raises(kind, match=words):
            load(checkpoints)
        model = sharded()  # nothing of the first is left in the store
        assert checkpoints.load(2, model=model).step == 2
        assert_equal(values(model), values(sharded(2)))


@distributed(2)
def test_a_load_on_one_rank_only_names_the_others() -> None:
    with two_steps() as (checkpoints, folder):
        if dist.get_rank() == 0:
            absent = (
                f"Rank 0 is about to load from {re.escape(str(folder))}, as all ranks have to, and "
                r"after {} s these have not come: 1"
            )
            with (
                pytest.MonkeyPatch.context() as patch,
                warnings.catch_warnings(record=True) as said,
            ):
                patch.setattr(checkpointer, "PATIENCE_S", 0.05)
                patch.setattr(agreement, "TIMEOUT", timedelta(seconds=0.2))
                warnings.simplefilter("always")
                with pytest.raises(CheckpointError, match=absent.format("0.2")):
                    checkpoints.load(1, model=nn.Linear(2, 2))
            assert re.search(absent.format("0.05"), str(said[0].message))
        dist.barrier()


@distributed(2)
def test_the_store_loses_nothing_by_loads() -> None:
    """What ranks tell each other is removed when all have read it."""
    with two_steps() as (checkpoints, _):
        model = sharded()
        checkpoints.load(model=model)
        dist.barrier()
        store: Any = dist.distributed_c10d._get_default_store()
        num = store.num_keys()
        dist.barrier()
        checkpoints.load(model=model)
        dist.barrier()
        assert store.num_keys() == num


class Recording:
    """A store, what is set in it, and the other requests."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.values: list[str] = []
        self.requests: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.requests.append(name)
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        self.values.append(value)
        self._store.set(key, value)


def tell(said: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What this rank is told, what it sets in the store, and its other requests."""
    store = agreement.the_store()
    assert store is not None
    recording = Recording(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "the_store", lambda: recording)
        told = agreement.told_by_all("test", said[dist.get_rank()], tuple(range(len(said))))
    return told, recording.values, recording.requests


@pytest.mark.parametrize("said", ["aaaa", "abba", "aabb", "abcd"])
def test_what_ranks_say_alike_is_passed_on_once(said: str) -> None:
    """All ranks read it, so that it must not grow with their number."""
    found = run_on(4, tell, list(said))
    assert [told for told, *_ in found] == [list(said)] * 4
    own, passed_on = found[0][1]
    # However many ranks there are: each removes its own key.
    assert found[0][2] == ["wait", "multi_get", "delete_key"]
    assert found[1][2][:3] == ["wait", "get", "delete_key"]
    assert own == said[0]
    assert (
        json.loads(passed_on)
        == {
            "aaaa": [["a", 4]],
            "abba": [["a", 1], ["b", 2], ["a", 1]],
            "aabb": [["a", 2], ["b", 2]],
            "abcd": [["a", 1], ["b", 1], ["c", 1], ["d", 1]],
        }[said]
    )
