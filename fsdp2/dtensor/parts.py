"""What a rank holds of a tensor."""

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
    """``function``, which torch.compile calls and does not trace: process groups are in it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, outside of autograd and not a copy; else the tensor."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = tensor._local_tensor
    if isinstance(part, collectives.AsyncCollectiveTensor):
        return part.wait()
    return part


def without_partial_sums(tensor: DTensor) -> DTensor:
    """The same tensor, replicated where its placements are partial sums (a collective then)."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    with torch.no_grad(), explained(_SUMMING, None):
        return tensor.redistribute(placements=placements)


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same tensor with the placements of ``other``; itself where it has them."""
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return tensor
    if tensor.placements == other.placements:
        return tensor
    with torch.no_grad(), explained(_SUMMING, None):
        return tensor.redistribute(other.device_mesh, other.placements)


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros, laid out as a DTensor or plain tensor."""
    zeros = torch.zeros_like(local_part(tensor.detach()))
    return laid_out_like(zeros, tensor) if isinstance(tensor, DTensor) else zeros


def laid_out_like(local: Tensor, tensor: DTensor) -> DTensor:
    """A DTensor over ``local`` that is laid out as ``tensor`` is."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return dtensor_over(local, mesh, placements, tensor.shape, tensor.stride())
