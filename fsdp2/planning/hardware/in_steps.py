"""Measures the time of a step beyond its operators: of the host, and of collectives in steps.

If the host does everything in order, a collective measured alone differs from one in a step: ranks
arrive at different times, the data is no longer in caches, it writes to newly allocated memory, and
hooks run around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from ...api.shard_model import shard_model
from .curves import round_to
from .timed import OperatorTimes

_ROUNDS, _WARM_UP = 8, 2
_ROWS = 16
_MOST_BYTES, _MOST_UNITS = 2**25, 8


class _Block(nn.Module):
    def __init__(self, width: int, num_params: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(num_params))
        )
        for layer in self.layers:
            nn.init.normal_(layer.get_parameter("weight"), std=width**-0.5)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class _Model(nn.Module):
    def __init__(self, num_blocks: int, width: int, num_params: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(width, num_params) for _ in range(num_blocks)))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def added(
    mesh: DeviceMesh,
    nbytes: int,
    least: tuple[float, float, float],
    num_params: int = 1,
    *,
    quick: bool = False,
) -> tuple[float, float, float]:
    """Seconds that a gather, a reduce-scatter and an all-reduce add to a step.

    Units have ``nbytes`` in float32. All ranks of the mesh call this.

    Compared with an unsharded model, a step of strategy "none" has an additional all-reduce of
    every unit. A step of "grad" has a gather and a reduce-scatter of every unit, and a step of
    "full" another gather of all units but the last.

    Args:
        least: the times of a gather, a reduce-scatter and an all-reduce alone. In a step, each is
            assumed to take at least a quarter of that, whatever the measured differences.
        num_params: number of equally large parameters in a unit.
        quick: two units, and few steps.
    """
    num_units = 2 if quick else max(2, min(_MOST_UNITS, _MOST_BYTES // nbytes))
    width = max(1, round((nbytes / 4 / num_params) ** 0.5))
    variants: list[nn.Module] = [_Model(num_units, width, num_params)]
    variants += [
        shard_model(_Model(num_units, width, num_params), mesh, strategy=each, wrap="class:_Block")
        for each in ("none", "grad", "full")
    ]
    x = torch.randn(_ROWS, width)
    plain, summed, kept, freed = times(
        [partial(_step, made, x) for made in variants], mesh.get_group(), 2 if quick else _ROUNDS
    )
    gather_s = max((freed - kept) / (num_units - 1), least[0] / 4)
    scatter_s = max((kept - plain) / num_units - gather_s, least[1] / 4)
    sum_s = max((summed - plain) / num_units, least[2] / 4)
    return round_to(gather_s), round_to(scatter_s), round_to(sum_s)


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    for param in model.parameters():
        param.grad = None


def times(calls: Sequence[Callable[[], Any]], group: dist.ProcessGroup, rounds: int) -> list[float]:
    """Seconds of each call; the calls take turns, and the slowest rank's time counts.

    The result is the lower quartile over turns: the caller needs differences, and other programs
    make some turns longer, but none shorter.
    """
    found: list[list[float]] = [[] for _ in calls]
    for i in range(rounds + _WARM_UP):
        for call, seconds in zip(calls, found, strict=True):
            dist.barrier(group)
            start = time.perf_counter()
            call()
            if i >= _WARM_UP:
                seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return [quantiles(each, n=4, method="inclusive")[0] for each in slowest.tolist()]


# -- the host ------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Operators and views of a transformer block, with almost no computation."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.gate, self.up = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.num_heads = num_heads

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + F.silu(self.gate(y)) * self.up(y)


def launch_s(operators: OperatorTimes) -> tuple[float, float]:
    """Host seconds for an operator of a model, in addition to the operator's own time.

    On a GPU, this is the whole time of the host, since operators run on the device.

    Returns:
        The seconds, and the additional seconds for an operator that checkpointing repeats.
    """
    device = operators.device
    model = nn.Sequential(*(_Layer(32, 2) for _ in range(16))).to(device)
    x = torch.randn(1, 8, 32, device=device)

    def again() -> None:
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=False, preserve_rng_state=False)
        y.sum().backward()
        model.zero_grad()

    once_s, number = _beyond(operators, lambda: _step(model, x), lambda: _step(model, x))
    more_s, _ = _beyond(operators, lambda: _step(model, x), again)
    minus_forward_s, of_forward = _beyond(operators, lambda: model(x), lambda: None)
    of_each_s = max(0.0, once_s / number)
    repeated_s = (more_s - once_s + minus_forward_s) / of_forward
    return of_each_s, max(0.0, repeated_s - of_each_s)


def optimizer_launch_s(operators: OperatorTimes, mesh: DeviceMesh) -> float:
    """Host seconds for an operator of an optimizer, whose parameters are DTensors."""
    sharded = shard_model(_Model(16, 16, 4), mesh, wrap="class:_Block")
    shards = [nn.Parameter(p.to_local().detach().clone()) for p in sharded.parameters()]  # type: ignore[attr-defined]
    made = []
    for params in (shards, list(sharded.parameters())):
        for param in params:
            param.grad = torch.zeros_like(param)
        made.append(torch.optim.AdamW(params).step)
    beyond_s, number = _beyond(operators, *made)
    return max(0.0, beyond_s / number)


def _beyond(
    operators: OperatorTimes, alone: Callable[[], Any], whole: Callable[[], Any]
) -> tuple[float, float]:
    """Seconds of ``whole`` beyond the operators of ``alone``, and the number of these operators."""
    device = operators.device
    alone()
    own_s, whole_s = [], []
    before = operators.number
    for _ in range(_ROUNDS):
        start_s = operators.total_s
        with operators:
            alone()
        own_s.append(operators.total_s - start_s)
    number = (operators.number - before) / _ROUNDS
    for _ in range(_ROUNDS + _WARM_UP):
        wait_for(device)
        start = operators.clock()
        whole()
        whole_s.append(operators.clock() - start)
    on_host = median(own_s) if device.type == "cpu" else 0.0
    return operators.stretch * (median(whole_s) - on_host), number


def wait_for(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
