"""The name of a run, which ranks agree on for checkpoints."""

from __future__ import annotations

import gc

import pytest
import torch.distributed as dist

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: its own checkpoints", allow_module_level=True)

from fsdp2.checkpoint import agreement


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
