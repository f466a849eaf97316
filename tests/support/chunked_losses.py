"""Losses that call the model's head in chunks, and run the backward of each chunk at once.

The whole logits of a large vocabulary are never in memory: the largest activation of a language
model. torchtitan's `ChunkedLossWrapper` and Liger's fused linear cross entropy work like this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2 import FSDPModule

NUM_CHUNKS = 3


def _chunk_losses(head: nn.Module, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient with respect to ``hidden``; the head's gradients accumulate."""
    grads, total = [], hidden.new_zeros(())
    hidden_chunks, targets = hidden.chunk(NUM_CHUNKS, 1), target.chunk(NUM_CHUNKS, 1)
    for chunk, wanted in zip(hidden_chunks, targets, strict=True):
        leaf = chunk.detach().requires_grad_()
        with torch.enable_grad():
            logits = head(leaf).flatten(0, 1)
            loss = F.cross_entropy(logits, wanted.flatten(), reduction="sum") / target.numel()
        loss.backward()
        assert leaf.grad is not None
        grads.append(leaf.grad)
        total = total + loss.detach()
    return total, torch.cat(grads, 1)


class _Bridge(torch.autograd.Function):
    """A loss whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, grad: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_output, None, None


def in_the_loss(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Chunks between forward and backward, as in torchtitan."""
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.unshard()
    loss, grad = _chunk_losses(head, hidden, target)
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.reshard()
    return _Bridge.apply(hidden, grad, loss)  # type: ignore[no-any-return]


class _InForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        loss, grad = _chunk_losses(head, hidden, target)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (grad,) = ctx.saved_tensors
        return None, grad * grad_output, None


def in_a_function(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Chunks in the forward of an autograd function."""
    return _InForward.apply(head, hidden, target)  # type: ignore[no-any-return]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
        ctx.head, ctx.target = head, target
        ctx.save_for_backward(hidden)
        return F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor, None]:
        (hidden,) = ctx.saved_tensors
        return None, _chunk_losses(ctx.head, hidden, ctx.target)[1] * grad_output, None


def in_backward(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """Chunks recomputed in the backward of an autograd function, each with a backward."""
    return _InBackward.apply(head, hidden, target)  # type: ignore[no-any-return]


def at_once(head: nn.Module, hidden: Tensor, target: Tensor) -> Tensor:
    """The usual loss, for comparison."""
    return F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())


ChunkedLoss = Callable[[nn.Module, Tensor, Tensor], Tensor]
WITH_BACKWARD: list[ChunkedLoss] = [in_the_loss, in_a_function, in_backward]
