"""The attention kernels of CUDA, on fake tensors, chosen as CUDA chooses them.

The rules are those of torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` for GPUs
since Ampere. The operators called are CUDA's own: torch knows their shapes, and what they save for
backward, also without CUDA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...render.text import plural
from .context import ContextParallel

aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn", "math")
_LOW = (torch.float16, torch.bfloat16)
_MAX_WIDTH = 256  # of a head, for flash and cuDNN


class AttentionKernels:
    """Takes the place of ``scaled_dot_product_attention`` for fake tensors.

    Args:
        choice: one of `KINDS`, or "auto".
        context: over which sequences are split; None: each rank has whole ones.
    """

    def __init__(self, choice: str, context: ContextParallel | None = None) -> None:
        self._choice = choice
        self._context = context
        self._without_kernel: Counter[str] = Counter()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = (q, k, v, attn_mask, is_causal, enable_gqa)
        if self._context is not None and attn_mask is not None:
            raise self._context.refused("attention with a mask")
        kind = self._kind(call)
        if kind == "math":
            if self._context is not None:
                why = "; ".join(self._without_kernel) or "Kernels(attention='math')"
                raise self._context.refused(f"attention without a fused kernel ({why})")
            return aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        options = {"scale": scale if scale is not None else q.shape[-1] ** -0.5}
        if kind == "flash":
            return self._flash((q, k, v), dropout_p, is_causal, options)
        bias = _bias(attn_mask, q, k)
        needs = any(t is not None and t.requires_grad for t in (q, k, v, bias))
        more: tuple[Any, ...] = (bias, needs and torch.is_grad_enabled(), dropout_p, is_causal)
        operator = aten._scaled_dot_product_efficient_attention
        if kind == "cudnn":
            operator, more = aten._scaled_dot_product_cudnn_attention, (*more, False)
        return self._run(lambda *qkv: operator(*qkv, *more, **options)[0], (q, k, v), is_causal)

    def _flash(
        self, qkv: tuple[torch.Tensor, ...], dropout_p: float, causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        """The kernel takes widths that are multiples of 8: others are padded, and cut again."""
        width = qkv[0].shape[-1]
        missing = -width % 8
        if missing:
            qkv = tuple(F.pad(t, (0, missing)) for t in qkv)
        operator = aten._scaled_dot_product_flash_attention
        out = self._run(lambda *t: operator(*t, dropout_p, causal, **options)[0], qkv, causal)
        return out[..., :width] if missing else out

    def _run(
        self, kernel: Callable[..., torch.Tensor], qkv: tuple[torch.Tensor, ...], causal: bool
    ) -> torch.Tensor:
        if self._context is None:
            return kernel(*qkv)
        return self._context.attend(kernel, qkv, causal=causal)

    def notes(self) -> list[str]:
        """A sentence for each reason for which attention has its scores in memory."""
        return [
            f"Attention without a fused kernel, {plural(calls, 'call')}: {why}"
            for why, calls in self._without_kernel.items()
        ]

    def _kind(self, call: tuple) -> str:
        if self._choice != "auto":
            why = None if self._choice == "math" else _against(self._choice, call)
            if why:
                raise ValueError(f"Kernels(attention='{self._choice}') cannot be used: {why}")
            return self._choice
        backends = torch.backends.cuda
        enabled = (
            ("flash", backends.flash_sdp_enabled()),
            ("efficient", backends.mem_efficient_sdp_enabled()),
        )
        reasons = []
        for kind, on in enabled:
            why = _against(kind, call) if on else "it is switched off"
            if why is None:
                return kind
            reasons.append(f"{kind}: {why}")
        if not backends.math_sdp_enabled() and backends.cudnn_sdp_enabled():
            return "cudnn"
        self._without_kernel["; ".join(reasons)] += 1
        return "math"


def _against(kind: str, call: tuple) -> str | None:
    """Why a kernel cannot be used for a call; None if it can."""
    q, k, v, mask, causal, grouped = call
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"it takes 4 dims, not {q.dim()}"
    if not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values have different dtypes"
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        return "queries and keys have different batch sizes"
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (q, k, v)):
        return "the last dim is not contiguous"
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads != v.shape[1] or (heads != kv_heads and not (grouped and heads % kv_heads == 0)):
        return f"there are {heads} heads of queries and {kv_heads} of keys without enable_gqa"
    if kind == "efficient":
        return _against_efficient(q, v, heads != kv_heads)
    if q.dtype not in _LOW:
        return f"it takes float16 and bfloat16, not {str(q.dtype)[6:]}"
    if max(q.shape[-1], v.shape[-1]) > _MAX_WIDTH:
        return f"heads are wider than {_MAX_WIDTH}"
    if kind == "flash":
        if mask is not None:
            return "there is a mask"
        if q.shape[-1] != v.shape[-1]:
            return f"heads of queries have width {q.shape[-1]}, those of values {v.shape[-1]}"
        if causal and q.shape[-2] != k.shape[-2]:
            return "causal attention of as many keys as queries only"
    return None


def _against_efficient(q: torch.Tensor, v: torch.Tensor, grouped: bool) -> str | None:
    if q.dtype not in (*_LOW, torch.float32):
        return f"it takes no {str(q.dtype)[6:]}"
    if grouped:
        return "it takes no grouped queries"
    unit = 16 // q.itemsize  # elements of an aligned load
    if q.shape[-1] % unit or v.shape[-1] % unit:
        return f"the width of heads is no multiple of {unit}"
    return None


def _bias(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A mask is added to the scores; of booleans a tensor of numbers is made."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        added = torch.zeros_like(mask, dtype=q.dtype)
        mask = added.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*q.shape[:-1], k.shape[-2])
