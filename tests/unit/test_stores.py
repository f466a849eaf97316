"""Many keys at once, in a store that counts."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from fsdp2.checkpoint import CheckpointError, agreement
from fsdp2.common import stores
from fsdp2.common.stores import read, read_present, wait_for


def filled(num: int) -> tuple[dist.Store, list[str]]:
    store, keys = dist.HashStore(), [f"key{i}" for i in range(num)]
    for key in keys:
        store.set(key, f"value of {key}")
    return store, keys


@pytest.mark.parametrize("num", [0, 1, 3, 4, 10])
def test_all_are_read_in_their_order(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_KEYS", 3)
    store, keys = filled(num)
    wait_for(store, keys, timedelta(seconds=5))
    assert read(store, keys) == [f"value of {key}".encode() for key in keys]
    assert list(read_present(store, keys)) == keys


def test_what_is_missing_is_left_out_or_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_KEYS", 3)
    store, keys = filled(10)
    store.delete_key("key7")
    there = [key for key in keys if key != "key7"]
    found = read_present(store, keys)
    assert found == {key: f"value of {key}".encode() for key in there}
    with pytest.raises(RuntimeError):
        wait_for(store, keys, timedelta(seconds=0.05))
    wait_for(store, there, timedelta(seconds=0.05))


def test_no_request_is_long() -> None:
    class Counting:
        longest = 0

        def multi_get(self, keys: list[str]) -> list[bytes]:
            self.longest = max(self.longest, len(keys))
            return [b""] * len(keys)

        def wait(self, keys: list[str], _: timedelta) -> None:
            self.multi_get(keys)

    counting = Counting()
    keys = [str(i) for i in range(5000)]
    wait_for(counting, keys, timedelta(seconds=1))  # type: ignore[arg-type]
    assert len(read(counting, keys)) == 5000  # type: ignore[arg-type]
    assert counting.longest == 1024


def test_who_came_at_the_last_moment_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that ends with an error, and then all keys are there."""
    store = dist.HashStore()
    store.set("a", "1")

    def late(store: object, keys: object, limit: object) -> None:
        raise RuntimeError("wait timeout")

    monkeypatch.setattr(agreement, "wait_for", late)
    agreement._wait_for_all(store, {0: "a"}, "load", None)
    with pytest.raises(CheckpointError, match=r"these have not come: 1$"):
        agreement._wait_for_all(store, {0: "a", 1: "b"}, "load", None)
