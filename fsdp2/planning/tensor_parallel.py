"""A model over ranks that do not exist: a tensor-parallel copy of it, a mesh for its context."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .workload import Parallelize


@contextmanager
def parallel_copy(
    model: nn.Module, parallelize: Parallelize | None, ranks: int, context_ranks: int = 1
) -> Iterator[tuple[nn.Module, DeviceMesh | None]]:
    """``model`` itself for one tensor rank, else a copy on the meta device that is tensor-parallel,
    and the mesh of context ranks, None for one.

    The process group of the meshes sends nothing, and exists within the context only.

    Raises:
        ValueError: if there is a process group already.
    """
    tensor_ranks = 1 if parallelize is None else ranks
    if tensor_ranks == context_ranks == 1:
        yield model, None
        return
    if dist.is_initialized():
        name, number = ("tensor_ranks", ranks) if ranks > 1 else ("context_ranks", context_ranks)
        raise ValueError(
            f"{name}={number} makes a process group of ranks that do not exist, but there is "
            "one already: predict in a process without one"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = context_ranks * tensor_ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        shape, names = (context_ranks, tensor_ranks), ("context", "tensor")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        made = model
        if tensor_ranks > 1 and parallelize is not None:
            copied = on_meta(model)
            made = parallelize(copied, mesh["tensor"]) or copied
            if not any(isinstance(p, DTensor) for p in made.parameters()):
                raise ValueError(
                    "parallelize left all parameters of the model plain: none is a DTensor"
                )
        yield made, mesh["context"] if context_ranks > 1 else None
    finally:
        dist.destroy_process_group()


def on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory."""
    with torch.no_grad():
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
            for p in model.parameters()
        }
        memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    return copy.deepcopy(model, memo)
