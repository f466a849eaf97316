"""The part of a tensor that a rank holds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..common.failures import explained
from .from_local import dtensor_over

_SUMMING = "putting an optimizer's partial sums together"

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Let torch.compile call ``function`` without tracing it: it uses process groups."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, neither copied nor tracked by autograd; else the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor._local_tensor
    if isinstance(part, collectives.AsyncCollectiveTensor):
        return part.wait()
    return part


def without_partial_sums(tensor: DTensor) -> DTensor:
    """The same tensor with partial sums replicated; a collective if there are any."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    with torch.no_grad(), explained(_SUMMING, None):
        return tensor.redistribute(placements=placements)


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor with the placements of ``other``; unchanged if it has them already."""
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor
    if tensor.placements == other.placements:
        return tensor
    with torch.no_grad(), explained(_SUMMING, None):
        return tensor.redistribute(other.device_mesh, other.placements)


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros with the layout of ``tensor``, a DTensor or plain tensor."""
    zeros = torch.zeros_like(local_part(tensor.detach()))
    return laid_out_like(zeros, tensor) if isinstance(tensor, DTensor) else zeros


def laid_out_like(local: Tensor, tensor: DTensor) -> DTensor:
    """A DTensor over ``local`` with the layout of ``tensor``."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return dtensor_over(local, mesh, placements, tensor.shape, tensor.stride())
