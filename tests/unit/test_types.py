"""What type checkers know of sharded modules.

mypy reads this file (`make lint`): there a wrong `assert_type` is an error. When it runs, the
values have to be of these types, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its annotations", allow_module_level=True)

from collections.abc import Iterator

import typed_program

from fsdp2 import FSDPModule, fully_shard, replicate, shard_model, share_comm_ctx


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_checkers_see_what_torchs_annotations_say() -> None:
    model = fully_shard(nn.Linear(4, 4))
    assert_type(model, FSDPModule)
    model.unshard()
    model.set_modules_to_forward_prefetch([model])
    assert_type(_parameters_of(model), list[nn.Parameter])
    both = fully_shard([nn.LayerNorm(4), nn.Linear(4, 4)])
    assert_type(both, list[FSDPModule])
    assert isinstance(both, list)
    both[0].reshard()
    share_comm_ctx([*both, model])


def test_a_variable_that_was_passed_keeps_its_type() -> None:
    linear = nn.Linear(4, 4)
    fully_shard(linear)
    assert_type(linear.in_features, int)
    assert isinstance(linear, FSDPModule)
    linear.set_requires_gradient_sync(False)
    assert_type(linear.in_features, int)
    assert_type(replicate(nn.LayerNorm(4)), nn.LayerNorm)
    model = shard_model(nn.Sequential(nn.Linear(4, 4)))
    assert_type(model, nn.Sequential)


def test_a_typed_program_runs(tmp_path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = typed_program.shard(typed_program.Net(4), offload=False)
    typed_program.train(model, [torch.ones(2, 4)] * 2, tmp_path)
    assert (tmp_path / "step-000002").exists()


def _parameters_of(module: FSDPModule) -> list[nn.Parameter]:
    """The methods of `nn.Module` are known of an `FSDPModule`."""
    assert_type(module.weight, torch.Tensor | nn.Module)
    return list(module.parameters())
