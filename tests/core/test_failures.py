"""When communication fails, the error says what was communicated, with whom, and what to do."""

from __future__ import annotations

import contextlib
import datetime
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import fully_shard
from harness import RUNS_ON_TORCH, distributed, ours_only, shared_folder

pytestmark = ours_only("messages of its own")

if not RUNS_ON_TORCH:
    from fsdp2 import broadcast_replicas, clip_grad_norm_, full_state_dict, replicate
    from fsdp2.checkpoint import Checkpointer
    from fsdp2.checkpoint import agreement as checkpoint_agreement
    from fsdp2.common.failures import explained
    from fsdp2.experts import TokenExchange
    from fsdp2.optim import Muon, whole_step


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
    """Of rank 0, while the other does nothing; then both go on."""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            action()
        text = str(caught.value)
        for part in ("Rank 0: ", *parts, "failed, waiting for rank 1: ", "watch_ranks"):
            assert part in text, f"{part!r} is not in: {text}"
        assert text.count("watch_ranks") == 1, text
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert str(caught.value.__cause__) in text
    dist.barrier()


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


@distributed(2, restart=True)
def test_forward_and_backward_of_one_rank() -> None:
    model = sharded(short_mesh())
    step(model)
    failure(lambda: model(torch.ones(2, 4)), "the all-gather of unit '(root)' in forward")
    model = sharded(short_mesh())
    step(model)
    loss = model(torch.ones(2, 4)).sum()
    # (The root, kept after forward, is the first to communicate.)
    failure(loss.backward, "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")
    model = sharded(short_mesh(), replicate)
    step(model)
    failure(lambda: step(model), "the reduction of gradients of unit '(root)' (1.weight, 1.bias)")


@distributed(2, restart=True)
def test_a_call_of_one_rank_that_all_have_to_make() -> None:
    model = sharded(short_mesh())
    step(model)
    failure(lambda: clip_grad_norm_(model.parameters(), 1.0), "a norm's all-reduce")
    mesh = short_mesh()
    failure(lambda: full_state_dict(sharded(mesh), group=mesh.get_group()), "full_state_dict")
    model = sharded(short_mesh(), replicate)
    failure(lambda: broadcast_replicas(model), "broadcast_replicas")
    model = sharded(short_mesh())
    muon = Muon([p for p in model.parameters() if p.ndim == 2])
    step(model)
    failure(muon.step, "an optimizer's exchange of whole tensors (Muon")
    model = sharded(short_mesh())
    whole = whole_step(torch.optim.SGD(model.parameters(), 0.1))
    step(model)
    failure(whole.step, "whole_step")
    mesh = short_mesh()
    ids = torch.tensor([[0], [1]])
    failure(lambda: TokenExchange(ids, 2, mesh), "the exchange of tokens between experts")
    with pytest.MonkeyPatch.context() as patch, shared_folder() as folder:
        patch.setattr(checkpoint_agreement, "TIMEOUT", datetime.timedelta(seconds=0.5))
        checkpoint_agreement.run_nonce()
        if dist.get_rank() == 1:  # (the first of the ranks waits for nothing)
            with pytest.raises(RuntimeError, match=AGREEING):
                Checkpointer(folder)
        dist.barrier()


AGREEING = (
    r"Rank 1: agreeing on the checkpoint \(shared/.*\) failed, waiting for rank 0: .*timeout.*"
    "(?s:.*)did not make a call that all ranks have to make"
)


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
