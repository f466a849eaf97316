"""Times of collectives by size and group, measured with units that compute nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from ...api.shard_model import shard_model
from ...sharding.layout import DIRECT_MIN_BYTES
from .curves import Points, rising
from .in_steps import added, wait_for

_ROUNDS, _WARM_UP = 9, 2
# Units with several parameters: the first size is packed, the second is not.
_SEVERAL, _PACKED_BYTES = 8, 2**17


class _Gradients(torch.autograd.Function):
    """Uses parameters, and gives them existing gradients."""

    @staticmethod
    @override
    def forward(ctx: Any, ready: list[torch.Tensor], *params: torch.Tensor) -> torch.Tensor:
        ctx.ready = ready
        return params[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = tuple(ctx.ready)
        ctx.ready.clear()  # so that there are no other references, and they need not be copied
        return (None, *given)


class _Unit(nn.Module):
    def __init__(self, numel: int, num_params: int, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(numel // num_params, device=device)) for _ in range(num_params)
        )
        self.ready: list[torch.Tensor] = []

    @override
    def forward(self) -> torch.Tensor:
        return _Gradients.apply(self.ready, *self.weights)


class TimedUnit:
    """One unit of ``nbytes`` in float32, sharded or replicated over ``mesh``."""

    def __init__(self, mesh: DeviceMesh, nbytes: int, num_params: int = 1, *, sharded: bool = True):
        self.device = torch.device(mesh.device_type)
        if self.device.type != "cpu":
            self.device = torch.device("cuda", torch.cuda.current_device())
        made = _Unit(nbytes // 4, num_params, self.device)
        self._numels = [p.numel() for p in made.weights]
        strategy = "grad" if sharded else "none"
        self.model: Any = shard_model(
            made, mesh, strategy=strategy, wrap="root", direct_min_bytes=DIRECT_MIN_BYTES
        )
        self.group = mesh.get_group()
        self.step()  # the first finds out the order of units

    def step(self) -> tuple[float, float]:
        """Seconds of the gather and of the reduction."""
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
        """Medians of the slowest rank's times."""
        found = [self.step() for _ in range(_ROUNDS + _WARM_UP)][_WARM_UP:]
        slowest = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
        gathers, reductions = zip(*slowest.tolist(), strict=True)
        return median(gathers), median(reductions)


def ranks_per_node() -> int:
    """Ranks per node, from the launcher's environment; without a launcher, all ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def meshes(device_type: str) -> dict[str, DeviceMesh]:
    """A mesh of all ranks and, with several nodes or at least four ranks, smaller meshes.

    The keys are the names in `Hardware.collective_s`: "8", "16 on 2".
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
    device_type: str, sizes: Sequence[int], progress: Callable[[str], None], *, quick: bool = False
) -> tuple[dict[str, Points], dict[str, Any]]:
    """`Hardware.collective_s`, `message_s` and `param_s`. All ranks call this.

    If the host does everything in order, the times are what each collective adds to a step.

    Args:
        sizes: bytes of the whole data, ascending.
    """
    found: dict[str, Points] = {}
    messages: list[float] = []
    params: list[float] = []
    for name, mesh in meshes(device_type).items():
        progress(f"collectives of {name} ranks")
        make = partial(_in_steps, quick=quick) if device_type == "cpu" else _alone
        rows = [(float(nbytes), make(mesh, nbytes, 1)) for nbytes in sizes]
        for i, kind in enumerate(("all_gather", "reduce_scatter", "all_reduce")):
            found[f"{kind} {name}"] = rising(tuple((nbytes, row[i]) for nbytes, row in rows))
        direct_bytes = _SEVERAL * mesh.size() * DIRECT_MIN_BYTES
        for nbytes, each in ((_PACKED_BYTES, params), (direct_bytes, messages)):
            several, one = make(mesh, nbytes, _SEVERAL), make(mesh, nbytes, 1)
            more = sum(several[:2]) - sum(one[:2])  # of a gather and a reduction
            each.append(more / 2 / (_SEVERAL - 1))
    param_s = max(0.0, min(median(params), 1e-3))
    message_s = max(0.0, min(median(messages) - param_s, 1e-3))
    return found, {"message_s": message_s, "param_s": param_s}


def _alone(mesh: DeviceMesh, nbytes: int, num_params: int) -> tuple[float, float, float]:
    """Seconds of a gather, a reduce-scatter and an all-reduce of a unit."""
    sharded = TimedUnit(mesh, nbytes, num_params).times()
    return (*sharded, TimedUnit(mesh, nbytes, num_params, sharded=False).times()[1])


def _in_steps(
    mesh: DeviceMesh, nbytes: int, num_params: int, *, quick: bool
) -> tuple[float, float, float]:
    """Seconds that they add to a step."""
    return added(mesh, nbytes, _alone(mesh, nbytes, num_params), num_params, quick=quick)
