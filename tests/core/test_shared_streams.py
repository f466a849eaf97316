"""Streams are kept: larger roots and further models use those that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import testdev
from fsdp2 import fully_shard
from fsdp2.testing import check, recording
from harness import cached_mesh, ours_only, run_on
from stream_schedules import mesh_of

pytestmark = ours_only("looks at streams inside")
needs_device = pytest.mark.skipif(
    testdev.why_not() is not None, reason=testdev.why_not() or "the test device is there"
)


def make(mesh: Any, size: int = 8) -> nn.Sequential:
    """Two units and a root around them."""
    layers = [nn.Linear(size, size) for _ in range(2)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(nn.Sequential(*layers, nn.Linear(size, 1)), mesh=mesh)


class Backward(torch.autograd.Function):
    """The identity, which trains ``model`` within backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, model: nn.Module, x: Tensor) -> Tensor:
        ctx.model, ctx.x = model, x
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            ctx.model(ctx.x).sum().backward()
        return grads[0], None, None


def streams_of(model: Any) -> Any:
    return model._fsdp2_unit.runtime.streams


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("order", ["one after the other", "forwards, then backwards", "nested"])
def test_two_models_on_the_same_streams_do_not_race(order: str) -> None:
    """By the checker of stream orders: reads, writes, frees and takes of memory of both."""
    with recording() as recorder:
        models = [make(mesh_of((4,))), make(mesh_of((2, 2)))]
        optimizers = [torch.optim.Adam(m.parameters(), foreach=True) for m in models]
        for step in range(3):
            x = torch.randn(4, 8)
            if order == "one after the other":
                for model in models:
                    model(x).sum().backward()
            elif order == "nested":  # the second within the backward of the first
                Backward.apply(models[0](x), models[1], x).sum().backward()
            else:
                losses = [model(x).sum() for model in models]
                for loss in losses[:: 1 if step % 2 else -1]:
                    loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert streams_of(models[0]).gather is streams_of(models[1]).gather
        assert streams_of(models[0]).reduce is streams_of(models[1]).reduce
    assert [str(violation) for violation in check(recorder.events)] == []


def _a_larger_root() -> None:
    device: Any = torch.get_device_module(testdev.NAME)
    model = make(cached_mesh(2))
    x = torch.randn(4, 8)
    model[0](x).sum().backward()  # a root by itself, so far
    model.zero_grad()
    before = streams_of(model[0])
    model(x).sum().backward()
    assert streams_of(model[0]) is streams_of(model) is before
    other = make(cached_mesh(2))
    other(torch.randn(4, 8)).sum().backward()
    assert streams_of(other) is before
    with device.stream(device.Stream()):
        beside = make(cached_mesh(2))
        beside(torch.randn(4, 8)).sum().backward()
    assert streams_of(beside) is not before, "it may run beside the others, in another order"


@needs_device
def test_a_larger_root_and_another_model_keep_the_streams() -> None:
    run_on(2, _a_larger_root, device=testdev.NAME)


def _reserved_by_new_roots(num_roots: int) -> int:
    """Bytes that the device has reserved after the same unit was in so many roots."""
    device: Any = torch.get_device_module(testdev.NAME)
    size = 512
    model: Any = fully_shard(nn.Linear(size, size), mesh=cached_mesh(2))
    x = torch.randn(4, size)
    for _ in range(num_roots):
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        model = fully_shard(nn.Sequential(model), mesh=cached_mesh(2))
    device.synchronize()
    reserved = device.memory_reserved()
    del model
    device.synchronize()
    device.empty_cache()
    return reserved


def _pools_of_roots() -> None:
    _reserved_by_new_roots(1)  # what is made once
    few, many = _reserved_by_new_roots(1), _reserved_by_new_roots(7)
    # Each root's own streams would reserve 4.7 MiB; a block that was in use is another one's 2 MiB.
    assert many - few < 10 << 20, f"{many - few} more bytes are reserved"


@needs_device
def test_new_roots_leave_no_pools_of_memory_behind() -> None:
    run_on(2, _pools_of_roots, device=testdev.NAME)
