"""A hook of the user's that raises in the middle of a reduction: nothing is kept, counted twice,
or freed while a stream or a message still uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.testing import check, recording
from harness import cached_mesh, distributed, ours_only
from stream_schedules import mesh_of

pytestmark = [ours_only("about how this runtime fails")]


class Fails(torch.autograd.Function):
    """Identity, whose backward raises while ``now`` is set."""

    now = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if Fails.now:
            raise ValueError("the user's")
        return grads


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Fails.apply(self.a(x)))


def sharded() -> Any:
    torch.manual_seed(0)
    model = Two()
    mesh = cached_mesh(2)
    for layer in (model.a, model.b):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]


@distributed(2)
def test_gradients_attached_before_a_hook_raised_are_dropped() -> None:
    x = torch.ones(2, 8)
    expected = sharded()
    expected(x).sum().backward()
    model, raises = sharded(), [True]

    def hook(param: Tensor) -> None:
        if raises:
            raises.clear()
            raise ValueError("the user's")

    model.b.bias.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="the user's"):
        model(x).sum().backward()
    out = model(x)
    assert gradients(model) == [None] * 4
    out.sum().backward()
    for mine, theirs in zip(gradients(model), gradients(expected), strict=True):
        assert torch.equal(mine, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("manual", [False, True])
@distributed(2)
def test_micro_batches_in_flight_are_not_lost_silently(manual: bool) -> None:
    x = torch.ones(2, 8)
    model = sharded()
    if manual:
        model.set_manual_backward_finalization(True)
    else:
        model.set_is_last_backward(False)
    model(x).sum().backward()
    model.set_is_last_backward(True)
    Fails.now = True
    try:
        with pytest.raises(ValueError, match="the user's"):
            model(x).sum().backward()
    finally:
        Fails.now = False
    with pytest.raises(RuntimeError, match=r"in the middle of an accumulation .*'a', 'b'"):
        model(x)
    assert gradients(model) == [None] * 4


class Pair(nn.Module):
    """A unit of two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).bfloat16()).float()


def train(model: nn.Module) -> int:
    """Three steps; how many raised what a hook raises."""
    raised = 0
    for _ in range(3):
        try:
            model(torch.ones(2, 8)).sum().backward()
        except ValueError:
            raised += 1
        for param in model.parameters():
            param.grad = None
    return raised


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_reduction_whose_launch_raised_keeps_its_memory(shape: tuple[int, ...]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with recording() as recorder:
        mesh = mesh_of(shape)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)
        calls = [0]

        def hook(_: Tensor) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise ValueError("the user's")

        for layer in model:
            layer.set_all_reduce_hook(hook)
        assert train(model) == 1
    assert list(check(recorder.events)) == []


@pytest.mark.parametrize("host_ordered", [False, True])
def test_reductions_behind_one_that_raised_are_waited_for(host_ordered: bool) -> None:
    with recording(host_ordered=host_ordered) as recorder:
        mesh = mesh_of((4,))
        model = nn.Sequential(*(Pair() for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        raises = [True]

        def hook(_: Tensor) -> None:
            if raises:
                raises.clear()
                raise ValueError("the user's")

        for param in model[1].parameters():
            param.register_post_accumulate_grad_hook(hook)
        assert train(model) == 1
    assert list(check(recorder.events)) == []
