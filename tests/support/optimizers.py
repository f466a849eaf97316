"""Trains with an optimizer over sharded parameters beside the same one on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from models import Case
from reference import pair, run_both, whole

Make = Callable[[list[nn.Parameter]], Optimizer]
STEPS = 5


class OwnOptimizer(Optimizer):
    """An optimizer of a user's own: steps each group by `update`, as most are written."""

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            self.begin(group, params)
            for p in params:
                p.sub_(self.update(p, p.grad, group, self.state[p]) * group["lr"])
        return loss

    def begin(self, group: dict[str, Any], params: list[Tensor]) -> None: ...

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return grad


class Lion(OwnOptimizer):
    """Sign of a momentum (Chen et al., 2023); replaces its state in every step."""

    def update(self, p: Tensor, grad: Any, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        state["num_steps"] = state.get("num_steps", 0) + 1  # a number, new each time
        if "m" not in state:
            state["m"] = torch.zeros_like(p)
        update = state["m"].lerp(grad, 0.1).sign_()
        state["m"] = state["m"].lerp(grad, 0.01)  # a tensor, new each time
        return update


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def feed(model: nn.Module, plain: nn.Module) -> None:
    """Give the sharded model the reference's gradients: only the optimizer is compared then."""
    for sharded, reference in zip(model.parameters(), plain.parameters(), strict=True):
        if reference.grad is None:
            assert sharded.grad is None
        elif isinstance(sharded.grad, DTensor):
            sharded.grad.to_local().copy_(part_of(reference.grad, sharded.grad))


def part_of(tensor: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a whole tensor, as torch deals it out."""
    for mesh_dim in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[mesh_dim]
        if not placement.is_replicate():
            chunks = tensor.chunk(like.device_mesh.size(mesh_dim), placement.dim)
            index = like.device_mesh.get_local_rank(mesh_dim)
            empty = tensor.narrow(placement.dim, 0, 0)
            tensor = chunks[index] if index < len(chunks) else empty
    return tensor


def train(
    case: Case,
    ours: Make,
    reference: Make,
    *,
    dtype: torch.dtype = torch.float64,
    scheduler: Callable[[Optimizer], Any] | None = None,
    choose: Callable[[nn.Module], list[nn.Parameter]] = trainable,
    steps: int = STEPS,
    **options: Any,
) -> tuple[nn.Module, nn.Module, Optimizer, Optimizer]:
    """Both models after some steps with the same gradients, and their optimizers."""
    model, plain = pair(case, dtype=dtype, **options)
    optimizers = ours(choose(model)), reference(choose(plain))
    schedulers = [scheduler(each) for each in optimizers] if scheduler else []
    for step in range(steps):
        run_both(case, model, plain, step, dtype=dtype)
        feed(model, plain)
        for each in optimizers:
            each.step()
            each.zero_grad()
        for each in schedulers:
            each.step()
    return model, plain, *optimizers


def assert_same_training(
    model: nn.Module,
    plain: nn.Module,
    optimizer: Optimizer,
    reference: Optimizer,
    *,
    tolerance: float = 1e-12,
) -> None:
    """Compares parameters, and every tensor of the state, with those of the reference."""
    for (name, actual), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(actual, expected, name, tolerance)
    groups = zip(optimizer.param_groups, reference.param_groups, strict=True)
    for actual_group, expected_group in groups:
        assert actual_group["lr"] == expected_group["lr"]
        params = zip(actual_group["params"], expected_group["params"], strict=True)
        for actual_param, expected_param in params:
            state, wanted = optimizer.state[actual_param], reference.state[expected_param]
            assert set(state) == set(wanted)
            for key, value in wanted.items():
                close(state[key], value, key, tolerance)


def close(actual: Any, expected: Any, what: str, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        assert actual == expected, what
        return
    if expected.ndim > 0:
        assert isinstance(actual, DTensor), f"{what} is no DTensor"
    actual, expected = whole(actual), expected.detach()
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    if expected.numel():
        error = (actual.cpu() - expected.cpu()).abs().max().item()
        limit = tolerance * max(expected.abs().max().item(), 1e-3)
        assert error <= limit, f"{what} differs by {error:.3e}; allowed is {limit:.3e}"


def all_dtensors(values: Iterable[Any]) -> bool:
    """Whether all tensors with dims are DTensors."""
    return all(isinstance(v, DTensor) for v in values if isinstance(v, Tensor) and v.ndim)
