"""What a load leaves out is said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2.checkpoint import Checkpointer
from harness import ours_only, run_on

pytestmark = ours_only("checkpoints")

NOT_RESTORED = "random state is not restored: 2 ranks saved it, 1 load it"


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def trained() -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
    model = two_layers()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(each.parameters()) for each in model
    ]
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers, torch.optim.lr_scheduler.StepLR(optimizers[0], 1)


def test_what_was_saved_and_is_not_loaded_is_unread(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    model, optimizers, scheduler = trained()
    checkpoints.save(1, model=model, optimizer=optimizers, scheduler=scheduler)
    everything = {"model": model, "optimizer": optimizers, "scheduler": scheduler}
    assert checkpoints.load(**everything).unread == []
    for left_out in ("optimizer", "scheduler"):
        some = {name: value for name, value in everything.items() if name != left_out}
        assert checkpoints.load(**some).unread == [left_out]
    assert checkpoints.load().unread == ["model", "optimizer", "scheduler"]
    # Of two optimizers, one.
    some = {**everything, "optimizer": optimizers[:1]}
    assert checkpoints.load(**some).unread == ["optimizer"]
    # The rest of the model is elsewhere, as in stages of a pipeline.
    part = nn.Sequential(model[0])
    loaded = checkpoints.load(model=part, optimizer=optimizers[0], strict=False)
    assert loaded.unread == ["scheduler"]


def test_a_model_saved_alone_leaves_nothing_unread(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=two_layers())
    assert checkpoints.load(model=two_layers()).unread == []


def save(folder: str) -> None:
    Checkpointer(folder).save(1, model=nn.Linear(2, 2))


def load(folder: str, random_state: bool) -> list[str]:
    model = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Checkpointer(folder).load(model=model, random_state=random_state)
    return [str(each.message) for each in said if "random" in str(each.message)]


def test_random_state_that_is_not_restored_is_said_by_the_first_rank(tmp_path: Path) -> None:
    run_on(2, save, str(tmp_path))
    (said,) = run_on(1, load, str(tmp_path), True)
    assert len(said) == 1
    assert NOT_RESTORED in said[0]
    assert run_on(1, load, str(tmp_path), False) == [[]]
    assert run_on(2, load, str(tmp_path), True) == [[], []]
    first, *others = run_on(3, load, str(tmp_path), True)
    assert len(first) == 1
    assert others == [[], []]
