"""The time of collectives by size, of every group: by units of the library that compute nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..api.shard_model import shard_model
from .curves import Points, rising

_ROUNDS, _WARM_UP = 9, 2


class _Gradients(torch.autograd.Function):
    """Uses parameters, and gives them gradients that exist already."""

    @staticmethod
    def forward(ctx: Any, ready: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.ready = ready
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = tuple(ctx.ready)
        ctx.ready.clear()  # so that nobody else has them, and they need not be copied
        return (None, *given)


class _Unit(nn.Module):
    def __init__(self, numel: int, num_params: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(numel // num_params, device=device)) for _ in range(num_params)
        )
        self.ready: list[torch.Tensor] = []

    def forward(self) -> torch.Tensor:
        return _Gradients.apply(self.ready, *self.weights)


class Unit:
    """One unit of ``nbytes`` in float32, sharded or replicated over ``mesh``."""

    def __init__(self, mesh: DeviceMesh, nbytes: int, num_params: int = 1, *, sharded: bool = True):
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device("cuda", torch.cuda.current_device())
        made = _Unit(nbytes // 4, num_params, self.device)
        self._numels = [p.numel() for p in made.weights]
        strategy = "grad" if sharded else "none"
        self.model: Any = shard_model(made, mesh, strategy=strategy, wrap="root")
        self.group = mesh.get_group()
        self.step()  # the first finds out the order of units

    def step(self) -> tuple[float, float]:
        """Seconds of the gather, and of the reduction."""
        self.model.ready += [torch.ones(n, device=self.device) for n in self._numels]
        gather_s = self._seconds(self.model.unshard)
        loss = self.model()
        reduce_s = self._seconds(loss.backward)
        for param in self.model.parameters():
            param.grad = None
        self.model.reshard()
        return gather_s, reduce_s

    def _seconds(self, call: Callable[[], Any]) -> float:
        wait_for(self.device)
        dist.barrier(self.group)
        start = time.perf_counter()
        call()
        wait_for(self.device)
        return time.perf_counter() - start

    def times(self) -> tuple[float, float]:
        """Medians; the slowest rank counts."""
        found = [self.step() for _ in range(_ROUNDS + _WARM_UP)][_WARM_UP:]
        slowest = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        gathers, reductions = zip(*slowest.tolist(), strict=True)
        return median(gathers), median(reductions)


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def ranks_per_node() -> int:
    """As the launcher says it; without one, all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def meshes(device_type: str) -> dict[str, DeviceMesh]:
    """A mesh of all ranks and, of several nodes or of four ranks and more, those of its halves.

    By what `Hardware.collective_s` calls them: "8", "16 on 2".
    """
    world, node = dist.get_world_size(), min(ranks_per_node(), dist.get_world_size())
    found = {_name(range(world), node): init_device_mesh(device_type, (world,))}
    inner = node if world > node else world // 2
    if world % inner == 0 and 1 < inner < world:
        two = init_device_mesh(device_type, (world // inner, inner), mesh_dim_names=("a", "b"))
        found.setdefault(_name(range(inner), node), two["b"])
        found.setdefault(_name(range(0, world, inner), node), two["a"])
    return found


def _name(ranks: Sequence[int], node: int) -> str:
    nodes = len({rank // node for rank in ranks})
    return f"{len(ranks)}" + (f" on {nodes}" if nodes > 1 else "")


def collective_tables(
    device_type: str, sizes: Sequence[int], progress: Callable[[str], None]
) -> tuple[dict[str, Points], float]:
    """`Hardware.collective_s` and `Hardware.message_s`. All ranks call this.

    Args:
        sizes: bytes of the whole, rising.
    """
    if dist.get_world_size() < 2:
        return {}, 0.0
    found: dict[str, Points] = {}
    messages = []
    for name, mesh in meshes(device_type).items():
        progress(f"collectives of {name} ranks")
        gathers, reductions, sums = [], [], []
        for nbytes in sizes:
            gather_s, reduce_s = Unit(mesh, nbytes).times()
            gathers.append((float(nbytes), gather_s))
            reductions.append((float(nbytes), reduce_s))
            sums.append((float(nbytes), Unit(mesh, nbytes, sharded=False).times()[1]))
        found[f"all_gather {name}"] = rising(tuple(gathers))
        found[f"reduce_scatter {name}"] = rising(tuple(reductions))
        found[f"all_reduce {name}"] = rising(tuple(sums))
        several = sum(Unit(mesh, sizes[-1], 8).times())
        messages.append((several - gathers[-1][1] - reductions[-1][1]) / 14)
    return found, max(0.0, min(median(messages), 1e-3))


def overlap(device_type: str, nbytes: int) -> float:
    """The part of a gather that goes on while the host computes as long."""
    if dist.get_world_size() < 2:
        return 0.0
    unit = Unit(init_device_mesh(device_type, (dist.get_world_size(),)), nbytes)
    gather_s = unit.times()[0]
    a = torch.ones(256, 256, device=unit.device)
    c = torch.empty_like(a)
    start = time.perf_counter()
    for _ in range(5):
        torch.mm(a, a, out=c)
    wait_for(unit.device)
    count = max(1, int(gather_s / ((time.perf_counter() - start) / 5)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(a, a, out=c)

    def both() -> None:
        handle = unit.model.unshard(async_op=True)
        compute()
        handle.wait()

    parts: list[list[float]] = [[], [], []]
    for _ in range(_ROUNDS):
        for seconds, call in zip(parts, (unit.model.unshard, compute, both), strict=True):
            unit.model.reshard()
            seconds.append(unit._seconds(call))
    alone_s, compute_s, both_s = (median(each) for each in parts)
    saved = (alone_s + compute_s - both_s) / min(alone_s, compute_s)
    told = torch.tensor(saved, dtype=torch.float64, device=unit.device)
    dist.all_reduce(told)
    return min(1.0, max(0.0, told.item() / dist.get_world_size()))
