"""DTensors that wrap a local tensor without copying it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
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

    def over(part: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )

    with torch.no_grad():
        if local.is_meta or local.device.type == mesh.device_type:
            made = over(local)
            made._local_tensor = local  # not a view of it, which classes make with other settings
            return made
        # `from_local` copies a tensor in host memory to the mesh's device. Training would continue
        # on that copy and never change the tensor in host memory.
        spec = over(torch.empty_like(local, device="meta"))._spec
        return DTensor(local, spec, requires_grad=False)


def laid_out_as(like: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over ``local`` itself, with layout, shape and dtype of ``like``, as operators
    make them."""
    return DTensor(local, like._spec, requires_grad=False)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor itself of a DTensor, unlike ``to_local`` outside of autograd; else
    ``tensor``."""
    return getattr(tensor, "_local_tensor", tensor)
