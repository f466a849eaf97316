"""CUDA graphs of whole steps: wherever the warm-up ran, and whatever used host memory since.

On the CPU a replay is a call of the same step, so that the bodies run there too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from test_cuda import batch, each_device, local, mlp, shard

from fsdp2.testing import simulated_mesh


def captured(step: Callable[[], None], device: str) -> Callable[[], None]:
    if device == "cpu":
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def use_pinned_memory(device: str) -> list[torch.Tensor]:
    """Blocks of the sizes that a capture copied tables from, with other contents."""
    used = [torch.full((2**i,), 7) for i in range(4, 10) for _ in range(16)]
    if device == "cuda":
        used = [tensor.pin_memory() for tensor in used]
        torch.cuda.synchronize()
    return used


@pytest.mark.parametrize("warm_up", ["on a side stream", "on the default stream"])
@each_device
def test_every_replay_is_an_eager_step(warm_up: str, device: str) -> None:
    with simulated_mesh(4, 50e9, 1e-5, device_type=device) as mesh:
        model = mlp().to(device)
        shard(model, mesh=mesh)
        x, loss = batch(0, 96, device), torch.zeros((), device=device)

        def step() -> None:
            model.zero_grad()
            found = model(x).square().mean()
            found.backward()
            loss.copy_(found.detach())

        side = torch.cuda.Stream() if device == "cuda" and "side" in warm_up else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with nullcontext() if side is None else torch.cuda.stream(side):
            for _ in range(3):
                step()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        model.zero_grad()
        replay = captured(step, device)
        gradients = [p.grad for p in model.parameters()]
        seen = []
        for number in range(1, 4):
            x.copy_(batch(number, 96, device))
            replay()
            if device == "cpu":
                gradients = [p.grad for p in model.parameters()]
            seen.append([loss.clone(), *(local(grad).clone() for grad in gradients)])
            kept = use_pinned_memory(device)  # after the first replay, before the others
        del kept
        for number, replayed in enumerate(seen, start=1):
            x.copy_(batch(number, 96, device))
            step()
            eager = [loss, *(local(p.grad) for p in model.parameters())]
            for mine, expected in zip(replayed, eager, strict=True):
                torch.testing.assert_close(mine, expected)
