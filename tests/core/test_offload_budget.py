"""`shard_model(..., max_device_bytes=n)`: which units stay on the device, and that nothing else
changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import harness
from harness import cached_mesh, distributed
from models import MLP

pytestmark = harness.ours_only("torch has no shard_model")

if not harness.RUNS_ON_TORCH:
    from fsdp2 import CPUOffloadPolicy, explain, materialize, shard_model
    from fsdp2.optim import step_in_backward
    from fsdp2.runtime.unit import unit_of

    UNPINNED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}

ALL = ["(root)", *(f"blocks.{i}" for i in range(5))]


class Widths(nn.Module):
    """Blocks of 37 x 37, one of which is much larger, and one is frozen: without gradients."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [37, 37, 999, 37, 37]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(37, n), nn.Linear(n, 37)) for n in sizes
        )
        self.blocks[1].requires_grad_(False)
        self.head = nn.Linear(37, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    mesh = cached_mesh(dist.get_world_size())
    return shard_model(Widths(), mesh, wrap="blocks.*", **options)


def small_block() -> int:
    """Bytes of the shards of a small block on each rank, with padding."""
    model: Any = sharded(**UNPINNED)
    return sum(bucket.shards.nbytes for bucket in unit_of(model.blocks[0]).buckets)


def offloaded(model: nn.Module) -> list[str]:
    return [unit.name for unit in explain(model).units if unit.offload]


def bytes_on_device(model: nn.Module) -> int:
    """Of shards and their gradients."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if isinstance(t, DTensor)]
    locals_ = [tensor.to_local() for tensor in tensors]
    return sum(t.nbytes for t in locals_ if t.device.type == torch.get_default_device().type)


def trained(model: nn.Module, *, limit: int | None, in_backward: bool) -> list[torch.Tensor]:
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if in_backward:
        optimizer = step_in_backward(optimizer)
    for step in range(4):
        x = torch.randn(4, 37, generator=torch.Generator().manual_seed(step), device="cpu")
        model(x.to(torch.get_default_device())).square().mean().backward()
        optimizer.step()
        if torch.get_default_device().type != "cpu":
            assert bytes_on_device(model) <= (limit or 0)
        optimizer.zero_grad()
    return [p.to_local().detach().cpu() for p in model.parameters() if isinstance(p, DTensor)]


@pytest.mark.parametrize("in_backward", [False, True])
@distributed(1, 2, 3)
def test_units_stay_on_the_device_while_they_fit(in_backward: bool) -> None:
    small = small_block()
    stay: dict[int | None, list[str]] = {
        None: [],
        2 * small - 1: ["blocks.1", "(root)"],  # the first has no gradients
        2 * small: ["blocks.0"],
        3 * small: ["blocks.0", "blocks.1"],
        5 * small: ["blocks.0", "blocks.1", "blocks.3"],  # not the large one between them
        1 << 30: ALL,
    }
    results = []
    for limit, expected in stay.items():
        model = sharded(**UNPINNED, max_device_bytes=limit)
        assert set(offloaded(model)) == set(ALL) - set(expected), limit
        results.append(trained(model, limit=limit, in_backward=in_backward))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@distributed(2)
def test_a_model_on_the_meta_device_gets_its_memory_where_units_are() -> None:
    with torch.device("meta"):
        model = Widths()
    shard_model(
        model, cached_mesh(2), wrap="blocks.*", **UNPINNED, max_device_bytes=3 * small_block()
    )
    materialize(model)
    device = torch.get_default_device().type
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        stays = name.startswith(("blocks.0.", "blocks.1."))
        assert parameter.to_local().device.type == (device if stays else "cpu"), name
    trained(model, limit=3 * small_block(), in_backward=False)


@pytest.mark.parametrize("strategy", ["none", "grad"])
@distributed(2)
def test_every_strategy_has_it(strategy: str) -> None:
    model = sharded(**UNPINNED, max_device_bytes=1 << 30, strategy=strategy)
    assert offloaded(model) == []
    model = sharded(**UNPINNED, max_device_bytes=0, strategy=strategy)
    assert set(offloaded(model)) == set(ALL)


@distributed(1)
def test_limits_that_mean_nothing_are_refused() -> None:
    mesh, model = cached_mesh(1), MLP.build()
    values: list[tuple[Any, type[Exception]]] = [(1.5, TypeError), (True, TypeError)]
    for value, kind in [*values, (-1, ValueError)]:
        with pytest.raises(kind, match="max_device_bytes must"):
            shard_model(model, mesh, **UNPINNED, max_device_bytes=value)
    with pytest.raises(ValueError, match=r"pass offload_policy=CPUOffloadPolicy\(\)"):
        shard_model(model, mesh, max_device_bytes=1)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
