"""When communication fails, the error says what was communicated, with whom, and what to do."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import fully_shard
from harness import RUNS_ON_TORCH, distributed, ours_only

pytestmark = ours_only("messages of its own")

if not RUNS_ON_TORCH:
    from fsdp2 import clip_grad_norm_, full_state_dict, replicate
    from fsdp2.failures import explained


def short_mesh() -> DeviceMesh:
    """All ranks, over a group that waits for a second."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    return DeviceMesh.from_group(group, "cpu")


def sharded(mesh: DeviceMesh, apply: Callable[..., Any] = fully_shard) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    apply(model[0], mesh=mesh)
    return apply(model, mesh=mesh)


def failure(action: Callable[[], Any], *parts: str) -> None:
    """Of rank 0, while the others do nothing; then all go on."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            action()
        text = str(caught.value)
        for part in ("Rank 0: ", *parts, "failed, waiting for rank 1: ", "watch_ranks"):
            assert part in text, f"{part!r} is not in: {text}"
        assert text.count("watch_ranks") == 1, text
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert str(caught.value.__cause__) in text
    else:
        time.sleep(2)
    dist.barrier()


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@distributed(2, restart=True)
def test_a_forward_of_one_rank() -> None:
    model = sharded(short_mesh())
    step(model)
    failure(lambda: model(torch.ones(2, 4)), "the all-gather of unit '(root)' in forward")


@distributed(2, restart=True)
def test_a_backward_of_one_rank() -> None:
    model = sharded(short_mesh())
    step(model)
    loss = model(torch.ones(2, 4)).sum()
    # (The root, kept after forward, is the first to communicate.)
    failure(loss.backward, "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")


@distributed(2, restart=True)
def test_gradients_of_one_rank() -> None:
    model = sharded(short_mesh(), replicate)
    step(model)
    failure(lambda: step(model), "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")


@distributed(2, restart=True)
def test_a_norm_of_one_rank() -> None:
    model = sharded(short_mesh())
    step(model)
    failure(lambda: clip_grad_norm_(model.parameters(), 1.0), "a norm's all-reduce")


@distributed(2, restart=True)
def test_a_full_state_dict_of_one_rank() -> None:
    mesh = short_mesh()
    model = sharded(mesh)
    failure(lambda: full_state_dict(model, group=mesh.get_group()), "full_state_dict")


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def test_other_errors_stay_as_they_are_and_types_are_kept() -> None:
    with one_rank():
        plain = RuntimeError("shapes do not match")
        with pytest.raises(RuntimeError) as caught, explained("x", None):
            raise plain
        assert caught.value is plain
        with (
            pytest.raises(dist.DistBackendError, match="Rank 0: x failed: lost") as lost,
            explained("y", None),
            explained("x", None),
        ):
            raise dist.DistBackendError("lost")
        assert "y failed" not in str(lost.value)
