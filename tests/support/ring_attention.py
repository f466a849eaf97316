"""torch's ring attention, with the attention kernel that CPUs have.

`torch.distributed.tensor.experimental.context_parallel` replaces attention by a ring over the
kernels of CUDA (flash, efficient, cuDNN); it does not know the flash kernel of the CPU. The ring
itself is the same for all kernels, so here it runs over that one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

aten = torch.ops.aten
SEQUENCE_DIM = 2


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's part of the sequence to all parts."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = _templated_ring_attention(group, SEQUENCE_DIM, kernel, q, k, v, is_causal=True)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        grad_q, grad_k, grad_v = _templated_ring_attention_backward(
            ctx.group,
            SEQUENCE_DIM,
            kernel,
            grad_out=grads[0].contiguous(),
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
        )
        return None, grad_q, grad_k, grad_v
