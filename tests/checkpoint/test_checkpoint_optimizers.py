"""Optimizers that keep more than a few tensors like the parameter, in checkpoints.

State in containers, numbers that are DTensors, rows and columns: saved at 2 ranks, loaded at 1, 2
and 3 into an optimizer that has not stepped.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from checkpoint_cases import whole
from fsdp2.checkpoint import Checkpointer, CheckpointError
from fsdp2.optim import whole_step
from harness import distributed, ours_only, run_on, shared_folder
from models import Case, children, normal_batch
from reference import shard_case

pytestmark = ours_only("checkpoints")

STEPS, MORE = 2, 2
# Uneven on 2 and 3 ranks, and every rank has rows: some optimizers ask for the largest of them.
MODEL = Case(
    "rows for all",
    lambda: nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)),
    children,
    normal_batch(6, 7),
)


class Base(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.update(p.grad, self.state[p]) * group["lr"])

    def update(self, grad: Any, state: dict[str, Any]) -> Any:
        raise NotImplementedError


class MeanOfSquares(Base):
    """One number for each parameter, made as Adam-mini makes it: a DTensor."""

    def update(self, grad: Any, state: dict[str, Any]) -> Any:
        squares = torch.sum(grad * grad)
        if not state:
            state["vmean"] = torch.zeros_like(squares)
            state["step"] = torch.tensor(0.0)
        state["step"] += 1
        state["vmean"].mul_(0.9).add_(squares / grad.numel(), alpha=0.1)
        return grad / (state["vmean"].sqrt() + 0.1) / state["step"]


class InContainers(Base):
    """Tensors, numbers and strings in containers of every kind, in each other."""

    def update(self, grad: Any, state: dict[str, Any]) -> Any:
        if not state:
            state["momenta"] = {beta: torch.zeros_like(grad) for beta in (0.0, 0.5, 0.9)}
            state["queue"] = deque(maxlen=2)
            state["nested"] = [("a", {"step": 0}), (torch.zeros_like(grad), None)]
            state["by name"] = defaultdict(list)
            state["ordered"] = OrderedDict(b=torch.zeros(()), a=[])
            state[7] = 0.5
        for beta, momentum in state["momenta"].items():
            momentum.mul_(beta).add_(grad)
        state["queue"].append(grad.clone())
        state["nested"][0][1]["step"] += 1
        state["nested"][1][0].add_(grad)
        state["by name"]["seen"].append(grad.abs())
        state["by name"][f"new {len(state['by name'])}"].append(1)
        state["ordered"]["b"] += 1
        state["ordered"].move_to_end("b")
        step = state["nested"][0][1]["step"] + state["ordered"]["b"]
        sums = sum(state["momenta"].values()) + sum(state["queue"]) + state["nested"][1][0]
        return (sums + sum(state["by name"]["seen"])) / step * state[7]


class RowsAndColumns(Base):
    """As Adafactor, with another shape for each; only for `whole_step`."""

    def update(self, grad: Any, state: dict[str, Any]) -> Any:
        if grad.ndim < 2:
            return grad
        if not state:
            state["factors"] = [grad.new_zeros(grad.shape[0], 1), grad.new_zeros(grad.shape[1])]
        rows, columns = state["factors"]
        rows.add_(grad.square().mean(1, keepdim=True))
        columns.add_(grad.square().mean(0))
        return grad / (rows.sqrt() * columns.sqrt() + 0.1).sqrt()


def package(name: str, kind: str, **options: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        return getattr(importlib.import_module(name), kind)(model.parameters(), **options)

    return make


def adam_mini(model: nn.Module) -> Any:
    from adam_mini import Adam_mini

    return Adam_mini(model.named_parameters(), lr=0.01, model_sharding=False, verbose=False)


MAKERS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "mean of squares": ("torch", lambda model: MeanOfSquares(model.parameters())),
    "containers": ("torch", lambda model: InContainers(model.parameters())),
    "rows": ("torch", lambda model: whole_step(RowsAndColumns(model.parameters()))),
    "adafactor": (
        "torch", lambda model: whole_step(torch.optim.Adafactor(model.parameters(), lr=0.01))
    ),
    "aggmo": ("pytorch_optimizer", package("pytorch_optimizer", "AggMo", lr=0.01)),
    "adashift": (
        "pytorch_optimizer", package("pytorch_optimizer", "AdaShift", lr=0.01, keep_num=2)
    ),
    "adam-mini": ("adam_mini", adam_mini),
}  # fmt: skip


def built(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = shard_case(MODEL, MODEL.build().double())
    return model, MAKERS[name][1](model)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """The same batch on all ranks, so that every number of ranks trains alike."""
    for step in steps:
        MODEL.loss(model, *MODEL.batch(step, 0, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(value: Any, path: str) -> dict[str, Any]:
    """Every leaf by its path, with the types on the way."""
    if isinstance(value, Tensor):
        kind = "DTensor" if isinstance(value, DTensor) else "plain"
        return {f"{path}: {kind}": whole(value)}
    if isinstance(value, dict):
        found: dict[str, Any] = {f"{path}: {type(value).__name__}": list(value)}
        for key, item in value.items():
            found |= flat(item, f"{path}[{key!r}]")
        return found
    if isinstance(value, list | tuple | deque):
        found = {f"{path}: {type(value).__name__}": getattr(value, "maxlen", None)}
        for i, item in enumerate(value):
            found |= flat(item, f"{path}[{i}]")
        return found
    return {path: value}


def everything(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: whole(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= flat(dict(optimizer.state[param]), name)
    return found


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)
        else:
            assert actual[name] == value, name


def save(folder: str, names: list[str]) -> dict[str, Any]:
    """What was saved and, of a run that went on, what came of it."""
    saved = {}
    for name in names:
        model, optimizer = built(name)
        train(model, optimizer, range(STEPS))
        Checkpointer(f"{folder}/{name}").save(STEPS, model=model, optimizer=optimizer)
        there = everything(model, optimizer)
        train(model, optimizer, range(STEPS, STEPS + MORE))
        saved[name] = there, everything(model, optimizer)
    return saved


def load(folder: str, saved: dict[str, Any], tolerance: float) -> None:
    for name, (expected, later) in saved.items():
        model, optimizer = built(name, seed=1)
        loaded = Checkpointer(f"{folder}/{name}").load(model=model, optimizer=optimizer)
        assert loaded.verified
        assert_same(everything(model, optimizer), expected, 0.0)
        train(model, optimizer, range(STEPS, STEPS + MORE))
        assert_same(everything(model, optimizer), later, tolerance)


@pytest.mark.parametrize("package", dict.fromkeys(needed for needed, _ in MAKERS.values()))
def test_all_state_comes_back_on_any_number_of_ranks(tmp_path: Path, package: str) -> None:
    """Bit for bit, and training goes on as if it had never stopped."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    names = [name for name, (needed, _) in MAKERS.items() if needed == package]
    saved = run_on(2, save, str(tmp_path), names)[0]
    for ranks, tolerance in ((2, 0.0), (3, 1e-10), (1, 1e-10)):
        run_on(ranks, load, str(tmp_path), saved, tolerance)


@distributed(2)
def test_tensors_in_sets_and_unknown_objects_are_named() -> None:
    model, optimizer = built("containers")
    train(model, optimizer, range(1))
    state = optimizer.state[next(iter(model.parameters()))]
    with shared_folder() as folder:
        checkpoints = Checkpointer(folder)
        state["sets"] = [{torch.zeros(2)}]
        with pytest.raises(TypeError, match=r"optim.sets.0.weight\[0\] is a set of tensors"):
            checkpoints.save(0, model=model, optimizer=optimizer)
        state["sets"] = {"projector": object()}
        with pytest.raises(TypeError, match=r"optim.sets.0.weight\['projector'\] is a builtins.ob"):
            checkpoints.save(0, model=model, optimizer=optimizer)


@distributed(2)
def test_a_container_that_a_newer_version_wrote_is_an_error() -> None:
    from fsdp2.checkpoint.format import values

    model, optimizer = built("containers")
    train(model, optimizer, range(1))
    with shared_folder() as folder:
        checkpoints = Checkpointer(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(values, "_encode_dict", lambda value, where, save: {"$": "tree"})
            checkpoints.save(0, model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match=r"Unknown tag 'tree'"):
            checkpoints.load(model=model, optimizer=optimizer)
