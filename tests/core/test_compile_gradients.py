"""torch.compile of what reads sharded parameters and gradients: optimizers, norms, clipping.

torch.compile wants a DTensor and its local tensor to begin at the same place of their storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.runtime.unit import unit_of
from fsdp2.sharding.gradients import GradientStore
from harness import distributed, ours_only
from models import MLP
from reference import assert_same, pair

# torch 2.11 compiles a step of SGD to one of other roundings, for plain parameters too.
ROUNDINGS = 1e-14 if torch.__version__ < "2.12" else 0.0
# Compiled AdamW computes its bias corrections in float32, for plain parameters too: not equal.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, one call per parameter": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def backward(model: nn.Module, step: int) -> None:
    MLP.loss(model, *MLP.batch(step, dist.get_rank(), torch.float64)).backward()


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def assert_equal(ours: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), other.parameters(), strict=True):
        for what, a, b in ("", mine, theirs), (" (gradient)", mine.grad, theirs.grad):
            torch.testing.assert_close(
                local(a), local(b), rtol=ROUNDINGS, atol=ROUNDINGS, msg=f"{name}{what}"
            )


@pytest.mark.parametrize("name", OPTIMIZERS)
@distributed(2, long=(1,))
def test_a_compiled_step_is_the_step(name: str) -> None:
    torch._dynamo.reset()
    compiled, eager = pair(MLP)[0], pair(MLP)[0]
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (compiled, eager)]
    steps: list[Callable[[], Any]] = [
        torch.compile(optimizers[0].step, backend="aot_eager"),
        optimizers[1].step,
    ]
    for number in range(3):
        for model, step in zip((compiled, eager), steps, strict=True):
            backward(model, number)
            step()
        assert_equal(compiled, eager)
        for optimizer in optimizers:
            optimizer.zero_grad()


def own_norm(params: Iterable[Tensor]) -> Tensor:
    return torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()  # type: ignore[union-attr]


def clip(params: Iterable[Tensor]) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(params, 0.01)


def clip_by_ours(params: Iterable[Tensor]) -> Tensor:
    return fsdp2.clip_grad_norm_(params, 0.01)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "function", [own_norm, clip, pytest.param(clip_by_ours, marks=ours_only("its clipping"))]
)
@distributed(1, 2)
def test_compiled_norms_and_clipping(function: Callable[[Iterable[Tensor]], Tensor]) -> None:
    """torch's own in one graph; ours, whose collectives are not traced, beside the graph."""
    torch._dynamo.reset()
    compiled, eager = pair(MLP)[0], pair(MLP)[0]
    whole_graph = function is not clip_by_ours
    call = torch.compile(function, backend="aot_eager", fullgraph=whole_graph)
    for number in range(2):
        backward(compiled, number)
        backward(eager, number)
        norms = call([*compiled.parameters()]), function([*eager.parameters()])
        assert_same(whole(norms[0]), whole(norms[1]), "norm")
        assert_equal(compiled, eager)
        for model in (compiled, eager):
            model.zero_grad()


@ours_only("about memory of gradients")
@pytest.mark.parametrize("width", [16, 256])
@distributed(2)
def test_gradients_dropped_by_zero_grad_use_the_same_tensors_again(width: int) -> None:
    """Whether their memory is given back meanwhile or, being small, is not."""
    torch.manual_seed(0)
    model = fsdp2.fully_shard(nn.Linear(width, width))
    stores: list[GradientStore] = []
    in_the_way: list[Tensor] = []  # so that new memory is somewhere else
    for step in range(3):
        in_the_way.append(torch.empty(width * width // 2))
        model(torch.full((2, width), float(step))).sum().backward()
        (bucket,) = unit_of(model).buckets
        assert isinstance(bucket.grads, GradientStore)
        stores.append(bucket.grads)
        assert torch.equal(local(model.weight.grad), torch.full((width // 2, width), 2.0 * step))
        model.zero_grad()
    assert all(store is stores[0] for store in stores)
