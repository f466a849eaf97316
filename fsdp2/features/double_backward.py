"""A second backward, through the graph of a first one that was called with ``create_graph=True``.

The first leaves a unit with the gradients of its inputs. A second backward enters the unit through
these and reads the weights again, so the runtime keeps the weights (`Backward.creates_graph`). The
reduction over ranks is not differentiated, so a backward through ``.grad`` raises: otherwise a
gradient penalty that is added to a loss would silently have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ..dtensor.from_local import local_of
from ..runtime.events import TreePart, registry
from ..runtime.hooks import hooks_of
from ..runtime.runtime import Runtime
from ..runtime.unit import Forward, Unit
from ..sharding.param import ShardedParam


class DoubleBackward(TreePart):
    """Watches the gradients of a first backward."""

    runtime: Runtime

    @override
    def left_with_graph(self, unit: Unit, grads: Iterable[torch.Tensor | None]) -> None:
        enter = partial(_enter_again, unit, Forward(unit, entered=True))
        for grad in grads:
            if grad is not None and grad.requires_grad:
                grad.register_hook(enter)

    @override
    def graph_created(self) -> None:
        for param in (param for unit in self.runtime.units for param in unit.params):
            if isinstance(param.sharded.grad, DTensor):
                param.sharded.grad = _reduced_without_graph(param, param.sharded.grad)


def _enter_again(unit: Unit, forward: Forward, grad: torch.Tensor) -> None:
    """A second backward reached the unit, through the graph of the first."""
    parallel = next((param.fqn for param in unit.params if param.is_tensor_parallel), None)
    if parallel is not None:
        raise RuntimeError(
            f"A second backward (create_graph=True) reached unit '{unit.name}', which has "
            f"tensor-parallel parameters ('{parallel}'). torch does not differentiate twice "
            "through conversions between DTensors and local tensors, so gradients would lack "
            "terms. Compute penalties on gradients with a model that is only sharded: "
            "fully_shard over all ranks, without tensor parallelism"
        )
    hooks_of(unit).enter_backward(forward, grad)


def _reduced_without_graph(param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
    """``grad``, a sharded gradient, as a tensor that may not be differentiated.

    It requires a gradient, like everything that ``backward(create_graph=True)`` leaves.
    """
    with torch.enable_grad():
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        return _NoGraph.apply(anchor, param, local_of(grad).detach())


class _NoGraph(torch.autograd.Function):
    """Identity whose backward is an error."""

    @staticmethod
    @override
    def forward(
        ctx: Any, anchor: torch.Tensor, param: ShardedParam, local: torch.Tensor
    ) -> torch.Tensor:
        ctx.fqn = param.fqn
        return param.sharded_spec.wrap(local)

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"Backward reached '{ctx.fqn}'.grad, which backward(create_graph=True) made. The "
            "reduction of gradients over ranks is not differentiable. Put penalties on gradients "
            "from torch.autograd.grad(..., create_graph=True) instead: with respect to inputs and "
            "activations or, with reshard_after_forward=False and between forward and backward, "
            "to the unsharded parameters (of this rank's own loss)"
        )


registry.add(DoubleBackward)
