"""A tensor-parallel copy of a model, over ranks that do not exist."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

Parallelize = Callable[[Any, DeviceMesh], Any]


@contextmanager
def parallel_copy(
    model: nn.Module, parallelize: Parallelize | None, ranks: int
) -> Iterator[nn.Module]:
    """``model`` itself for one rank, else a copy on the meta device that is tensor-parallel.

    The process group of the mesh sends nothing, and exists within the context only.

    Raises:
        ValueError: if there is a process group already.
    """
    if ranks == 1 or parallelize is None:
        yield model
        return
    if dist.is_initialized():
        raise ValueError(
            f"tensor_ranks={ranks} makes a process group of ranks that do not exist, but there is "
            "one already: predict in a process without one"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))
        copied = _on_meta(model)
        made = parallelize(copied, mesh) or copied
        if not any(isinstance(p, DTensor) for p in made.parameters()):
            raise ValueError(
                "parallelize left all parameters of the model plain: none is a DTensor"
            )
        yield made
    finally:
        dist.destroy_process_group()


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory."""
    with torch.no_grad():
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)
