"""torch.distributed.checkpoint between torch's FSDP2 and ours: one saves, the other goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp2 import fully_shard
from harness import distributed, ours_only
from models import MLP, TRANSFORMER, Case
from reference import assert_same_parameters, average_gradients

pytestmark = [ours_only("loads what torch's implementation saved")]

CASES = {case.name: case for case in (MLP, TRANSFORMER)}
OURS_TO_TORCHS = (fully_shard, torch_fully_shard)
TORCHS_TO_OURS = (torch_fully_shard, fully_shard)


def build(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return case.build().double()


def sharded(case: Case, seed: int, shard: Callable[..., Any]) -> tuple[nn.Module, Any]:
    model = build(case, seed)
    for unit in case.units(model):
        shard(unit)
    shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(case: Case, model: nn.Module, optimizer: Any, steps: range, plain: bool = False) -> None:
    for step in steps:
        case.loss(model, *case.batch(step, dist.get_rank(), torch.float64)).backward()
        if plain:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(
    ("saves", "loads"), [OURS_TO_TORCHS, TORCHS_TO_OURS], ids=["ours to torch's", "torch's to ours"]
)
@distributed(2, long=(1, 3))
def test_one_goes_on_from_what_the_other_saved(
    saves: Callable[..., Any], loads: Callable[..., Any], case: str
) -> None:
    """Parameters and AdamW's state, compared with a plain model that trained through."""
    model_case = CASES[case]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    first, optimizer = sharded(model_case, 0, saves)
    train(model_case, first, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(first, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder[0])

    second, optimizer = sharded(model_case, 1, loads)
    model_state, optimizer_state = get_state_dict(second, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=folder[0])
    set_state_dict(
        second, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    train(model_case, second, optimizer, range(2, 4))

    plain = build(model_case, 0)
    train(model_case, plain, torch.optim.AdamW(plain.parameters(), lr=0.05), range(4), plain=True)
    assert_same_parameters(second, plain)
