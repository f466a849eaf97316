"""Streams of the user's: those that steps run on, and those that read shards and gradients.

On the test device, whose streams run late at random, and whose freed memory is NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
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


def _gradients(model: Any) -> list[Tensor]:
    return [param.grad.to_local().cpu() for param in model.parameters()]


def _accumulate(model: Any, x: Tensor, num_micro_batches: int) -> None:
    for i in range(num_micro_batches):
        model.set_requires_gradient_sync(i == num_micro_batches - 1)
        model(x * (i + 1)).square().sum().backward()


def _compare(gradients: Callable[..., list[Tensor]]) -> None:
    """Those with another stream are those without, whatever is late."""
    wanted = gradients(another_stream=False, seed=0)
    for seed in SEEDS:
        assert all(map(torch.equal, gradients(another_stream=True, seed=seed), wanted)), seed


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
    _compare(_after_a_step_on)


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
    _compare(_with_backward_on)


def test_backward_may_be_called_on_another_stream_than_forward() -> None:
    """What it frees when it ends is the forward's, and may not be reduced yet."""
    run_on(2, _backward_elsewhere, device=testdev.NAME)


def _copied_on_the_side(seed: int, *, size: int, drop: Callable[[Any], None]) -> list[Tensor]:
    """What a stream of the user's reads of gradients that the user has dropped since."""
    _delay(seed)
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(size, size), mesh=cached_mesh(2))
    side, current, busy = _device().Stream(), _device().current_stream(), torch.zeros(8)
    copies = []
    for step in range(5):
        model(torch.full((2, size), float(step))).square().sum().backward()
        side.wait_stream(current)
        for param in model.parameters():
            gradient = param.grad.to_local()
            with _device().stream(side):
                for _ in range(20):
                    busy.add_(1)
                copies.append(gradient + 0)
            gradient.record_stream(side)
        del gradient
        drop(model)
    _device().synchronize()
    return [copy.cpu() for copy in copies]


def _zero_grad(model: Any) -> None:
    model.zero_grad()


def _set_to_none(model: Any) -> None:
    for param in model.parameters():
        param.grad = None


def _recorded_gradients(size: int, drop: Callable[[Any], None]) -> None:
    wanted = _copied_on_the_side(0, size=size, drop=drop)
    assert all(each.isfinite().all() for each in wanted)
    for seed in SEEDS:
        assert all(map(torch.equal, _copied_on_the_side(seed, size=size, drop=drop), wanted)), seed


@pytest.mark.parametrize("drop", [_zero_grad, _set_to_none])
@pytest.mark.parametrize("size", [8, 512])
def test_a_stream_that_was_recorded_may_read_gradients_after_they_are_dropped(
    size: int, drop: Callable[[Any], None]
) -> None:
    """Also of small ones, which keep their memory from step to step."""
    run_on(2, _recorded_gradients, device=testdev.NAME, size=size, drop=drop)


def _recorded_shard() -> None:
    for seed in SEEDS:
        _delay(seed)
        model: Any = fully_shard(nn.Linear(512, 512), mesh=cached_mesh(2))
        shard = model.weight.to_local().detach()
        wanted = shard.cpu()
        side = _device().Stream()
        side.wait_stream(_device().current_stream())
        with _device().stream(side):
            for _ in range(4):
                torch.zeros(8).add_(1)
            copy = shard + 0
        torch.ops.aten.record_stream(shard, side)
        del shard, model
        gc.collect()
        _device().synchronize()
        assert torch.equal(copy.cpu(), wanted), seed


def test_a_stream_that_was_recorded_may_read_a_shard_after_its_model_is_gone() -> None:
    run_on(2, _recorded_shard, device=testdev.NAME)
