"""How an optimizer's state is laid out, where that does not follow from the parameter.

Most state has the parameter's shape and layout. For the rest, the layout is saved with it. Numbers
for a whole parameter are plain in some optimizers (step counts) and DTensors in others (Adam-mini's
mean of squares). Optimizers that step on whole parameters keep rows, columns and matrices of other
shapes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ...dtensor.from_local import dtensor_over
from ...dtensor.parts import laid_out_like, local_part
from ...dtensor.placement import box_of
from ...dtensor.subclasses import is_subclass
from ..errors import CheckpointMismatch
from .header import TensorInfo
from .tensors import DTYPES

PLAIN = "plain"  # not a DTensor, though the parameter is one
DEVICE = "device"  # not a DTensor, and not on the CPU
# For each mesh dim the tensor dim that it shards; None where it replicates the tensor.
Dims = list[int | None]
Noted = str | Dims | None


def layout_of(value: Tensor, param: Tensor) -> Noted:
    """The layout to save with ``value``, as JSON; None if it is laid out as its parameter."""
    if isinstance(value, DTensor):
        like_param = (
            isinstance(param, DTensor)
            and value.shape == param.shape
            and value.placements == param.placements
        )
        if like_param or (isinstance(param, DTensor) and value.device_mesh != param.device_mesh):
            return None
        cuts = param.placements if isinstance(param, DTensor) else value.placements
        if not all(
            type(p) in (Shard, Replicate) or p == cut
            for p, cut in zip(value.placements, cuts, strict=True)
        ):
            return None
        return [None if isinstance(p, Replicate) else p.dim for p in value.placements]  # type: ignore[attr-defined]
    if value.ndim:
        return None
    if value.device.type != "cpu":
        return DEVICE
    return PLAIN if isinstance(param, DTensor) else None


def is_laid_out(tensor: Tensor, param: Tensor, noted: Noted) -> bool:
    """Whether an optimizer's tensor has the layout that was saved."""
    if noted is None or not isinstance(param, DTensor):
        return True
    return isinstance(tensor, DTensor) == isinstance(noted, list)


def empty_state(info: TensorInfo, noted: Noted, param: Tensor, group: dict[str, Any]) -> Tensor:
    """An empty tensor for state to be loaded, laid out as the state that was saved.

    Args:
        info: describes the whole tensor.
        noted: what `layout_of` returned for it.
        param: its parameter, and ``group``, whose options say whether kernels read step counts.

    Raises:
        CheckpointMismatch: if its layout is unknown.
    """
    dtype, data = DTYPES[info.dtype], param.detach()
    if isinstance(noted, list):
        if any(dim is not None and dim >= len(info.shape) for dim in noted):
            raise CheckpointMismatch(
                f"'{info.name}' has {len(info.shape)} dims, and was sharded on another: {noted}"
            )
        if not isinstance(data, DTensor):
            return torch.empty(info.shape, dtype=dtype, device=data.device)
        return _empty_dtensor(info.shape, dtype, _placements(noted, info.shape, data), data)
    if noted is not None or (info.shape == () and param.ndim):
        # As in torch's optimizers: step counts are on the CPU unless kernels read them.
        on_device = noted == DEVICE or group.get("fused") or group.get("capturable")
        return torch.zeros((), dtype=dtype, device=data.device if on_device else "cpu")
    if info.shape == tuple(data.shape):
        if is_subclass(data):  # a class with plain state, such as torchao's float8
            return _empty_plain(data, dtype)
        return torch.empty_like(data, dtype=dtype)
    raise CheckpointMismatch(
        f"'{info.name}' has shape {info.shape}, its parameter {tuple(data.shape)}: "
        "take a step first, so that the optimizer makes its state"
    )


def _empty_plain(param: Tensor, dtype: torch.dtype) -> Tensor:
    """A plain tensor placed as ``param``, which is of a tensor subclass."""
    local = local_part(param)
    made = torch.empty(local.shape, dtype=dtype, device=local.device)
    return laid_out_like(made, param) if isinstance(param, DTensor) else made


def _placements(dims: Dims, shape: tuple[int, ...], param: DTensor) -> list[Placement]:
    """The saved placements; on a mesh with another number of dims, the closest to them."""
    if len(dims) == len(param.placements):
        return [
            _cut_as(its, dim, shape, param) for dim, its in zip(dims, param.placements, strict=True)
        ]
    placements: list[Placement] = [Replicate() for _ in param.placements]
    sharded = [dim for dim in dims if dim is not None]
    cuts = [i for i, p in enumerate(param.placements) if not isinstance(p, Replicate)]
    if sharded and cuts:
        placements[cuts[-1]] = _cut_as(param.placements[cuts[-1]], sharded[0], shape, param)
    return placements


def _cut_as(cut: Placement, dim: int | None, shape: tuple[int, ...], param: DTensor) -> Placement:
    """The placement of state that is sharded on ``dim``; ``cut`` is its parameter's placement."""
    if dim is None:
        return Replicate()
    # Operators describe what they make of a parameter's rows by its own placement, which may cut
    # them otherwise than `Shard` does: between blocks, or after tensor parallelism.
    same = getattr(cut, "dim", None) == dim < param.ndim and shape[dim] == param.shape[dim]
    return cut if same else Shard(dim)


def _empty_dtensor(
    shape: tuple[int, ...], dtype: torch.dtype, placements: list[Placement], param: DTensor
) -> Tensor:
    mesh = param.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # this rank has part of the parameter
    box = box_of(shape, tuple(mesh.shape), tuple(placements), tuple(coordinate))
    local = torch.empty(box.shape, dtype=dtype, device=param._local_tensor.device)
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return dtensor_over(local, mesh, placements, shape, strides)
