"""What type checkers know of sharded modules.

mypy reads this file (`make lint`): there a wrong `assert_type` is an error. When it runs, the
values have to be of these types, too.
"""

from __future__ import annotations

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

from fsdp2 import FSDPModule, fully_shard, replicate, shard_model, share_comm_ctx


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_sharded_module_is_of_its_own_class() -> None:
    linear = fully_shard(nn.Linear(4, 4))
    assert_type(linear, nn.Linear)
    assert linear.in_features == 4
    assert_type(replicate(nn.LayerNorm(4)), nn.LayerNorm)
    model = shard_model(nn.Sequential(nn.Linear(4, 4)))
    assert_type(model, nn.Sequential)
    both = fully_shard([nn.LayerNorm(4), nn.Linear(4, 4)])
    assert_type(both, list[nn.Module])
    assert isinstance(both, list)
    heads = fully_shard([nn.Linear(4, 4)])
    assert_type(heads, list[nn.Linear])
    share_comm_ctx([linear, model])
    share_comm_ctx(heads)


def test_and_an_fsdp_module_too() -> None:
    linear = fully_shard(nn.Linear(4, 4))
    assert isinstance(linear, FSDPModule)
    linear.set_requires_gradient_sync(False)
    linear.set_modules_to_forward_prefetch([linear])
    assert_type(linear.in_features, int)
    assert_type(_parameters_of(linear), list[nn.Parameter])


def _parameters_of(module: FSDPModule) -> list[nn.Parameter]:
    """The methods of `nn.Module` are known of an `FSDPModule`."""
    assert_type(module.weight, torch.Tensor | nn.Module)
    return list(module.parameters())
