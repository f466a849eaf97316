"""Streams of the user's: those that steps run on, and those that read shards and gradients.

On the test device, whose streams run late at random, and whose freed memory is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import testdev
from fsdp2 import fully_shard
from harness import cached_mesh, ours_only, run_on

pytestmark = [
    ours_only("torch's, too, is tested by its own suite"),
    pytest.mark.skipif(testdev.why_not() is not None, reason=testdev.why_not() or ""),
]
SEEDS = range(1, 9)


def _device() -> Any:
    """``torch.testdev``."""
    return torch.get_device_module(testdev.NAME)


def _delay(seed: int) -> None:
    testdev.native().set_delays(seed=seed, probability=0.3 if seed else 0, max_us=2000)


def _blocks() -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(4)]
    for layer in layers:
        fully_shard(layer, mesh=cached_mesh(2))
    return fully_shard(nn.Sequential(*layers), mesh=cached_mesh(2))


def _batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 64).requires_grad_()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [param.grad.to_local().cpu() for param in model.parameters()]


def _accumulate(model: Any, x: Tensor, num_micro_batches: int) -> None:
    for i in range(num_micro_batches):
        model.set_requires_gradient_sync(i == num_micro_batches - 1)
        model(x * (i + 1)).square().sum().backward()


def _after_a_step_on(another_stream: bool, seed: int) -> list[Tensor]:
    _delay(seed)
    model, x = _blocks(), _batch()
    current = _device().current_stream()
    stream = _device().Stream() if another_stream else current
    stream.wait_stream(current)
    with _device().stream(stream):
        _accumulate(model, x, 1)
    current.wait_stream(stream)
    model.zero_grad()
    _accumulate(model, x, 3)
    return _gradients(model)


def _steps_on_two_streams() -> None:
    wanted = _after_a_step_on(another_stream=False, seed=0)
    for seed in SEEDS:
        found = _after_a_step_on(another_stream=True, seed=seed)
        assert all(map(torch.equal, found, wanted)), seed


def test_gradients_accumulate_on_the_stream_of_their_forward() -> None:
    """A node of autograd that outlives its step goes on adding on the stream of that step."""
    run_on(2, _steps_on_two_streams, device=testdev.NAME)


def _with_backward_on(another_stream: bool, seed: int) -> list[Tensor]:
    _delay(seed)
    model, x = _blocks(), _batch()
    current = _device().current_stream()
    stream = _device().Stream() if another_stream else current
    loss = model(x).square().sum()
    stream.wait_stream(current)
    with _device().stream(stream):
        loss.backward()
    current.wait_stream(stream)
    return _gradients(model)


def _backward_elsewhere() -> None:
    wanted = _with_backward_on(another_stream=False, seed=0)
    for seed in SEEDS:
        found = _with_backward_on(another_stream=True, seed=seed)
        assert all(map(torch.equal, found, wanted)), seed


def test_backward_may_be_called_on_another_stream_than_forward() -> None:
    """What it frees when it ends is the forward's, and may not be reduced yet."""
    run_on(2, _backward_elsewhere, device=testdev.NAME)
