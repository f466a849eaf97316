"""DTensors that wrap a local tensor without copying it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement


def dtensor_over(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor whose local tensor is ``local`` itself, without communication and autograd.

    Args:
        local: this rank's part; on the mesh's kind of device, or in host memory (CPU offload).
        shape, stride: shape and stride of the whole tensor.
    """

    spec = spec_over(mesh, placements, shape, stride, local.dtype)
    return DTensor(local, spec, requires_grad=False)


def spec_over(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """torch's description of a DTensor.

    `DTensor.from_local` makes one, too, but in an autograd function, which took a sixth of the time
    of `fully_shard`. It also copies a tensor in host memory to the mesh's device.
    """
    whole = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), whole)


def laid_out_as(like: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over ``local`` itself, with layout, shape and dtype of ``like``, as operators
    make them."""
    return DTensor(local, like._spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor itself, without autograd (unlike ``to_local``); else
    ``tensor``."""
    return getattr(tensor, "_local_tensor", tensor)
