"""torch.compile and the transforms of torch.func, applied to models of sharded units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor, nn

from harness import distributed, ours_only
from models import BY_NAME, MLP, Case
from reference import (
    assert_same,
    assert_same_gradients,
    average_gradients,
    pair,
    run_both,
)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["mlp", "transformer"])
@distributed(2)
def test_compiled_units(name: str, backend: str) -> None:
    """Each unit is compiled, with hooks between its graphs."""
    case = BY_NAME[name]
    model, plain = pair(case)
    for unit in case.units(model):
        unit.compile(backend=backend)
    for step in range(2):
        run_both(case, model, plain, step)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@distributed(2)
def test_a_compiled_model() -> None:
    model, plain = pair(MLP)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        run_both(MLP, compiled, plain, step)  # type: ignore[arg-type]
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


class Gate(nn.Module):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)) * y, x


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Gate(), Gate()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(*self.first(x, y))[0]


GATES = Case("gates", Gates, lambda m: list(m.children()), lambda *_: ())


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, y = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    return x, y


def per_sample_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    def total(x: Tensor, y: Tensor) -> Tensor:
        return model(x, y).sum()

    return torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))(x, y)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "jvp": lambda model, x, y: torch.func.jvp(model, (x, y), (y, x)),
    "vmap": lambda model, x, y: torch.func.vmap(model)(x, y),
    "grad": lambda model, x, y: torch.func.grad(lambda v: model(v, y).sum())(x),
    "jacrev": lambda model, x, y: torch.func.jacrev(lambda v: model(v, y))(x),
    "per-sample gradients": per_sample_gradients,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@distributed(2)
def test_transforms(name: str) -> None:
    """Of the very first forward, which makes the storages, and of the next one."""
    model, plain = pair(GATES)
    x, y = vectors()
    for _ in range(2):
        actual, expected = TRANSFORMS[name](model, x, y), TRANSFORMS[name](plain, x, y)
        flat = torch.utils._pytree.tree_leaves((actual, expected))
        for ours, theirs in zip(flat[: len(flat) // 2], flat[len(flat) // 2 :], strict=True):
            assert_same(ours, theirs, name)


@pytest.mark.parametrize("name", ["jvp", "vmap"])
@distributed(2)
def test_backward_through_a_transform(name: str) -> None:
    """Parameters are gathered for it and their gradients reduced."""
    model, plain = pair(GATES)
    x, y = vectors()
    for _ in range(2):
        for each in (model, plain):
            inputs = x.clone().requires_grad_(), y.clone().requires_grad_()
            outputs = TRANSFORMS[name](each, *inputs)
            sum(output.sum() for output in outputs).backward()  # type: ignore[union-attr]
        average_gradients(plain)
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()


@ours_only("torch fails: the tangent of a view has to be a view")
@distributed(2)
def test_forward_mode_with_gradients() -> None:
    model, plain = pair(GATES)
    x, y = vectors()
    results = []
    for each in (model, plain):
        with forward_ad.dual_level():
            inputs = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            duals = [forward_ad.make_dual(v, t) for v, t in zip(inputs, (y, x), strict=True)]
            tangent = forward_ad.unpack_dual(each(*duals)).tangent
            assert tangent is not None
            tangent.sum().backward()
            results.append(tangent.detach())
    assert_same(*results, "tangent")  # type: ignore[misc]
    average_gradients(plain)
    assert_same_gradients(model, plain)
