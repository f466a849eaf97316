"""Forwards inside transforms of ``torch.func``, and forward-mode differentiation.

Hooks on tensors, and on the nodes of views, are lost inside a transform. A node of an autograd
function stays in the graph, so inside a transform each output and all inputs pass through one. It
costs a function call, so it is used only there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from ..runtime.hooks import Border, Leave, marks_in_transforms


class TransformedBorder(Border):
    """A `Border` in the form that ``torch.func`` transforms require, which is slower to call."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(leave: Leave, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tensors

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.leave = inputs[0]

    @staticmethod
    @override
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(t if t is None else t.view_as(t) for t in tangents)


class Entrance(torch.autograd.Function):
    """Identity on an output of a transformed forward, where hooks on tensors would be lost."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(enter: Callable[[Any], None], tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.enter = inputs[0]

    @staticmethod
    @override
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.enter(grad)
        return None, grad

    @staticmethod
    @override
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> torch.Tensor:
        return Entrance.apply(ctx.enter, tangent.view_as(tangent))


class _Marks:
    def mark_inputs(self, leave: Leave, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return TransformedBorder.apply(leave, *inputs)

    def mark_output(self, enter: Callable[[Any], None], output: torch.Tensor) -> torch.Tensor:
        return Entrance.apply(enter, output)


marks_in_transforms.append(_Marks())
