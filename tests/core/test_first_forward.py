"""Before the first forward ranks compare what they have made: what would hang, or train something
that is no model, is an error or a warning that names it. (What differs: `test_agreement`.)"""

from __future__ import annotations

import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from harness import RUNS_ON_TORCH, cached_mesh, distributed, ours_only
from impatient import impatient_mesh

pytestmark = ours_only("checks of its own")

if not RUNS_ON_TORCH:
    from fsdp2 import (
        FSDPModule,
        RanksDisagreeError,
        broadcast_replicas,
        fully_shard,
        init_on_whole_tensors,
        load_full_state_dict,
        replicate,
        shard_model,
    )
    from fsdp2.guards.rank_agreement import first_forward
    from fsdp2.guards.rank_agreement import store_exchange as meeting
    from fsdp2.guards.rank_agreement.store_exchange import StoreExchange

X = torch.ones(2, 4)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


@contextmanager
def warned() -> Iterator[list[str]]:
    """What is warned of inside, once it is over."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


@distributed(2)
def test_a_rank_that_does_not_come_is_named() -> None:
    rank = dist.get_rank()
    model = sharded(mlp(), mesh=impatient_mesh())
    if rank == 0:
        with pytest.raises(RanksDisagreeError) as caught:
            model(X)
        for part in (
            "Rank 0 is about to run the first forward of '(root)'",
            "but rank 1 did not come within 1 s",
            "Another rank failed or did something else",
            "watch_ranks",
        ):
            assert part in str(caught.value)
    dist.barrier()
    if rank == 1:  # late: not left alone in a gather
        with pytest.raises(RanksDisagreeError, match="the others have given up"):
            model(X)
    dist.barrier()
    model(X).sum().backward()  # nothing was broken by it
    with pytest.MonkeyPatch.context() as patch, warned() as texts:
        patch.setattr(first_forward, "WARN_AFTER_S", 0.2)
        model = sharded(mlp())
        if rank == 1:
            time.sleep(0.6)
        model(X)
    assert len(texts) == (rank == 0), texts
    assert all("but rank 1 did not come within 0.2 s. Still waiting" in text for text in texts)


@distributed(2)
def test_a_corrected_model_trains_after_it() -> None:
    """Message tags are counted alike on all ranks, although the refused models had other units."""
    mesh = impatient_mesh()
    more = [nn.Linear(4, 4)] if dist.get_rank() == 0 else []
    with pytest.raises(RanksDisagreeError):
        sharded(nn.Sequential(*mlp(), *more), mesh=mesh)(X)
    model, whole = sharded(mlp(), mesh=mesh), mlp()
    assert torch.equal(model(X), whole(X))


@distributed(2)
def test_shards_of_different_models_are_named() -> None:
    """And not where something was written into them since."""
    rank = dist.get_rank()

    def load(model: nn.Sequential) -> None:
        model.load_state_dict({name: p.detach() * 0 + 1 for name, p in model.named_parameters()})

    def draw(model: nn.Sequential) -> None:
        with init_on_whole_tensors(1):
            for p in model.parameters():
                nn.init.normal_(p)

    def write_data(model: nn.Sequential) -> None:
        for p in model.parameters():
            assert isinstance(p, DTensor)
            p.to_local().data.fill_(1.0)

    def skip(model: nn.Sequential) -> None:
        pass

    for seed, change, expected in (
        (rank, skip, "'2.weight'.*'2.bias'.*'0.weight'.*'0.bias'"),
        (0, skip, None),
        (rank, load, None),
        (rank, draw, None),
        (rank, write_data, None),
        (rank, lambda m: nn.init.zeros_(m[2].weight), "'2.bias'.*'0.weight'.*'0.bias'"),
    ):
        model = sharded(mlp(seed))
        change(model)
        if expected is not None:
            with pytest.raises(RanksDisagreeError) as caught:
                model(X)
            text = str(caught.value)
            assert ("'2.weight'" in text) == (change is skip)
            assert re.search(f"(?s){expected}.*mixture of them.*manual_seed.*CHECK_RANKS=0", text)
            load(model)  # a remedy
        for _ in range(2):
            model(X).sum().backward()


@distributed(2)
def test_a_mixture_that_is_wanted() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(first_forward.SWITCH, "0")
        sharded(mlp(dist.get_rank()))(X).sum().backward()


@distributed(2)
def test_what_a_load_leaves_as_it_was_on_one_rank_is_no_difference() -> None:
    """Rank 0 has drawn what all ranks load, and some of it is the same for every seed."""

    def build(seed: int) -> nn.Sequential:
        return nn.Sequential(*mlp(seed), nn.LayerNorm(4))

    model = sharded(build(dist.get_rank()))
    load_full_state_dict(model, build(0).state_dict())
    model(X).sum().backward()


@distributed(4)
def test_replicas_that_differ_are_an_error_until_they_are_made_equal() -> None:
    rank = dist.get_rank()
    mesh = cached_mesh(2, 2, names=("replicate", "shard"))

    def scalar(model: nn.Sequential) -> nn.Sequential:
        model.register_parameter("scale", nn.Parameter(torch.tensor(float(rank))))
        return sharded(model)

    makers: tuple[tuple[Callable[[], nn.Module], str, str], ...] = (
        (
            lambda: shard_model(mlp(rank), strategy="none"),
            r"values of '0.weight': checksum .* \(rank 0\), checksum .* \(rank 3\)",
            "0.weight",
        ),
        (
            lambda: sharded(mlp(rank // 2), mesh=mesh),
            r"values of '0.weight' \(shard . of mesh dim 1\): .* \(rank [01]\), .* \(rank [23]\)",
            "2.weight",
        ),
        (lambda: scalar(mlp()), r"values of 'scale': .*\(rank 0\), .*\(rank 1\)", "scale"),
    )
    for make, expected, name in makers:
        model = make()
        with pytest.raises(RanksDisagreeError) as caught:
            model(X)
        assert re.search(expected, str(caught.value)), str(caught.value)
        assert "fsdp2.broadcast_replicas(model)" in str(caught.value)
        broadcast_replicas(model)
        model(X).sum().backward()
        reference = mlp()
        reference.register_parameter("scale", nn.Parameter(torch.tensor(0.0)))
        value = model.get_parameter(name)
        assert isinstance(value, DTensor)
        torch.testing.assert_close(
            value.full_tensor(), reference.get_parameter(name), rtol=0, atol=0
        )


@distributed(2)
def test_once_per_root_and_not_where_ranks_need_not_come_together() -> None:
    rank = dist.get_rank()
    said: list[str] = []
    say = StoreExchange.say

    def noting(self: Any, topics: Any, about: str) -> None:
        said.append(about)
        say(self, topics, about)

    def steps(model: nn.Module) -> list[str]:
        for _ in range(3):
            model(X).sum().backward()
        found = said.copy()
        said.clear()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreExchange, "say", noting)
        assert steps(sharded(mlp())) == ["run the first forward of '(root)'"]
        model = sharded(mlp())
        assert isinstance(model[0], FSDPModule)
        part = "run the first forward of '(root)'"
        assert steps(model[0]) == [part]  # a root, until
        assert steps(model) == [part]
        # Replicas gather nothing: one of them may evaluate alone.
        model = shard_model(mlp(), strategy="none")
        if rank == 0:
            with torch.no_grad():
                model(X)
        assert said == []
        assert steps(model) == [part]
        # Two meshes: of the replicated unit and of the rest, the same ranks.
        model = mlp()
        replicate(model[0])
        assert len(steps(fully_shard(model))) == 1
        patch.setenv("FSDP2_CHECK_RANKS", "0")
        assert steps(sharded(mlp())) == []
        patch.undo()


def test_worlds_of_one_process_meet_nobody() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers it)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("fake", store=store, rank=0, world_size=8)
    try:
        sharded(mlp())(X)
    finally:
        dist.destroy_process_group()


class CountingStore:
    """A store for ranks that are threads; counts requests."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.num_requests = 0
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.num_requests += 1
            self.data[key] = value.encode()
            self._changed.notify_all()

    def add(self, key: str, value: int) -> int:
        with self._changed:
            self.num_requests += 1
            self.data[key] = str(int(self.data.get(key, b"0")) + value).encode()
            return int(self.data[key])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self._changed:
            self.num_requests += 1
            return [self.data[key] for key in keys]

    def wait(self, keys: list[str], timeout: Any) -> None:
        with self._changed:
            self.num_requests += 1
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("timeout")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.data for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            self.num_requests += 1
            return self.data.pop(key, None) is not None


class Ranks:
    """Meetings of so many ranks that are threads, or take turns in one."""

    def __init__(self, patch: pytest.MonkeyPatch, num_ranks: int) -> None:
        class Group:
            pass

        self.store, self.here = CountingStore(), threading.local()
        groups = [Group() for _ in range(num_ranks)]
        c10d = dist.distributed_c10d
        patch.setattr(meeting, "_rounds", weakref.WeakKeyDictionary())
        patch.setattr(dist, "get_rank", lambda: self.here.rank)
        patch.setattr(c10d, "_get_default_store", lambda: self.store)
        patch.setattr(c10d, "_get_default_group", lambda: groups[self.here.rank])
        self.meetings = []
        for rank in range(num_ranks):
            self.here.rank = rank
            self.meetings.append(StoreExchange("test", tuple(range(num_ranks)), 20.0))

    def say(self, rank: int, word: str) -> None:
        self.here.rank = rank
        self.meetings[rank].say({"": {"word": word}, f"of half {rank % 2}": {}}, "test")

    def meet_in_threads(self, words: list[str]) -> list[Any]:
        def meet(rank: int) -> dict[str, list[str]]:
            self.say(rank, words[rank])
            return self.meetings[rank].hear()

        with ThreadPoolExecutor(len(words)) as pool:
            return list(pool.map(meet, range(len(words))))


def test_a_meeting_of_1024_ranks_is_five_requests_per_rank() -> None:
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(patch, 1024)
        for meeting_number in (1, 2):
            for rank in range(1024):
                ranks.say(rank, "a")
            assert all(ranks.meetings[rank].hear() == {} for rank in range(1024))
            assert ranks.store.num_requests <= meeting_number * (4 * 1024 + 20)
        assert len(ranks.store.data) < 1024 + 10  # of the last meeting only


def test_a_meeting_that_differs_asks_one_rank_of_each_kind_for_details() -> None:
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(patch, 32)
        found = ranks.meet_in_threads(["a"] * 9 + ["b"] + ["a"] * 22)
        text = "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 23 more"
        assert found == [{"": [f"word: a ({text}), b (rank 9)"]}] * 32
        assert ranks.store.num_requests <= 6 * 32 + 30
        # As many kinds as ranks: some of them are shown.
        found = ranks.meet_in_threads([str(rank) for rank in range(32)])
        assert found == [found[0]] * 32
        assert found[0][""][0].count("(rank ") == meeting.MAX_KINDS
        assert ranks.meet_in_threads(["a"] * 32) == [{}] * 32
