"""A model whose names have changed since it was saved resumes with all of its state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp2 import fully_shard
from fsdp2.checkpoint import Checkpointer, CheckpointMismatch, load_model
from harness import distributed, ours_only, shared_folder

pytestmark = ours_only("checkpoints")

LAYERS = ("inner", "norm", "head")


class Counted(nn.Linear):
    """A layer with state that is no tensor."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def build(prefix: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    modules = (Counted(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    names = (f"{prefix}{name}" for name in LAYERS)
    return nn.Sequential(OrderedDict(zip(names, modules, strict=True)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(100 * step + (dist.get_rank() if dist.is_initialized() else 0))
        loss = model(torch.randn(5, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def to_old(name: str) -> str:
    return name.replace("new_", "old_")


KEYS = [
    f"{layer}.{kind}"
    for layer in LAYERS
    for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
] + ["inner._extra_state"]
TABLE = {f"new_{key}": f"old_{key}" for key in KEYS}


@pytest.mark.parametrize("names", [to_old, TABLE], ids=["function", "table"])
def test_renamed_parameters_resume_with_their_optimizer_state(
    tmp_path: Path, names: Callable[[str], str] | Mapping[str, str]
) -> None:
    checkpoints = Checkpointer(tmp_path)
    old = build("old_", 0)
    old_optimizer = torch.optim.AdamW(old.parameters())
    train(old, old_optimizer, range(3))
    checkpoints.save(3, model=old, optimizer=old_optimizer)
    new = build("new_", 1)
    optimizer = torch.optim.AdamW(new.parameters())
    with pytest.raises(CheckpointMismatch, match="or names= to translate names"):
        checkpoints.load(model=new, optimizer=optimizer)
    checkpoints.load(model=new, optimizer=optimizer, names=names)
    assert new[0].calls == 3
    assert train(new, optimizer, range(3, 6)) == train(old, old_optimizer, range(3, 6))
    for a, b in zip(new.state_dict().values(), old.state_dict().values(), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


@distributed(2)
def test_renamed_shards_and_buffers_of_each_rank_resume() -> None:
    old, new = build("old_", 0), build("new_", 1)
    for model in (old, new):
        fully_shard(model)
    old_optimizer, optimizer = (torch.optim.AdamW(m.parameters()) for m in (old, new))
    train(old, old_optimizer, range(3))
    with shared_folder() as folder:
        checkpoints = Checkpointer(folder)
        checkpoints.save(3, model=old, optimizer=old_optimizer)
        checkpoints.load(model=new, optimizer=optimizer, names=to_old)
    assert torch.equal(new[1].running_mean, old[1].running_mean)
    means: list[Any] = [None, None]
    dist.all_gather_object(means, new[1].running_mean)
    assert not torch.equal(means[0], means[1])
    assert train(new, optimizer, range(3, 6)) == train(old, old_optimizer, range(3, 6))


def test_a_tied_parameter_may_have_another_name_first(tmp_path: Path) -> None:
    def tied(*order: str) -> nn.Module:
        torch.manual_seed(len(order[0]))
        first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        second.weight = first.weight
        return nn.Sequential(OrderedDict(zip(order, (first, second), strict=True)))

    checkpoints = Checkpointer(tmp_path)
    old, new = tied("embedding", "head"), tied("head", "embedding")
    old_optimizer, optimizer = (torch.optim.AdamW(m.parameters()) for m in (old, new))
    train(old, old_optimizer, range(2))
    checkpoints.save(2, model=old, optimizer=old_optimizer)
    checkpoints.load(model=new, optimizer=optimizer)
    assert train(new, optimizer, range(2, 4)) == train(old, old_optimizer, range(2, 4))


def test_state_of_modules_is_loaded_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """Also into what `checkpoint_wrapper` wraps, which leaves itself out of names."""
    old = nn.Sequential(OrderedDict(old_inner=checkpoint_wrapper(Counted(4, 4))))
    old(torch.ones(1, 4))
    Checkpointer(tmp_path).save(1, model=old)
    for wrapped in (False, True):
        inner = Counted(4, 4)
        layer = checkpoint_wrapper(inner) if wrapped else inner
        new = nn.Sequential(OrderedDict(new_inner=layer))
        load_model(new, tmp_path / "step-000001", names=to_old)
        assert inner.calls == 1
