"""The name of a run, which ranks agree on for checkpoints."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its own checkpoints", allow_module_level=True)

from fsdp2.checkpoint import CheckpointError, agreement
from fsdp2.checkpoint.saving import roll_call


class Group:
    """Stands for a default group."""


def test_each_default_group_of_a_process_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the store of a later one lies at the address of an earlier one."""
    stores = [dist.HashStore(), dist.HashStore()]
    current = [Group(), Group()]
    monkeypatch.setattr(agreement, "all_ranks", lambda: (0, 1))
    monkeypatch.setattr(agreement, "id", lambda store: 1, raising=False)
    found = []
    for store, group in zip(stores, current, strict=True):
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda s=store: s)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda g=group: g)
        found += [agreement.run_nonce(), agreement.run_nonce()]
    assert found[0] == found[1] != found[2] == found[3]
    num_kept = len(agreement._runs)
    del current[:], group
    monkeypatch.undo()
    gc.collect()
    assert len(agreement._runs) == num_kept - 2


@pytest.mark.parametrize("keeps_store", [False, True])
def test_hosts_that_were_restarted_a_different_number_of_times(
    keeps_store: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun counts on each host what failed there. Their saves must meet all the same."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "all_ranks", lambda: (0, 1))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(keeps_store))
    nonces = []
    for count in "02":
        group = Group()
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda g=group: g)
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        monkeypatch.setattr(agreement, "_attempts", type(agreement._attempts)())
        nonces.append(agreement.next_nonce(tmp_path / "step-1", (0, 1)))
    # A store that is kept has the name that the first start was given.
    assert (nonces[0] == nonces[1]) != keeps_store


class GoneStore:
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_a_save_whose_store_is_gone_was_not_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call: Any = object.__new__(roll_call.RollCall)
    call.target, call.ranks, call._key = tmp_path, (0, 1), "key"
    monkeypatch.setattr(roll_call, "the_store", GoneStore)
    attempt = Mock()
    call.check_refused(attempt)
    store = dist.HashStore()
    monkeypatch.setattr(roll_call, "the_store", lambda: store)
    call.check_refused(attempt)
    attempt.give_up.assert_not_called()
    call.rank = 1
    call.refuse(OSError("no space"))
    with pytest.raises(CheckpointError, match="be committed: rank 1 failed: OSError: no space"):
        call.check_refused(attempt)
    attempt.give_up.assert_called_once_with("OSError: no space", 1)
