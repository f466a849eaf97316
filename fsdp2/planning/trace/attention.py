"""Attention: the kernels of accelerators on fake tensors, and over parts of a sequence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_forward_pre_hook

from ...render.text import plural
from .op_costs import operator_name

_SEQUENCE_DIM = 2  # of queries, keys and values
# Operators that combine positions.
_MEETINGS = re.compile(r"attention|attn|sdpa|lstm|gru|rnn|scan", re.IGNORECASE)
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class ContextParallel:
    """Attention of ranks that have parts of the same sequences.

    Args:
        mesh: the 1-D mesh of these ranks.
        length: number of positions on each rank.

    Attributes:
        ranks: number of these ranks.
        group: the name of their process group.
    """

    def __init__(self, mesh: DeviceMesh, length: int) -> None:
        self.mesh = mesh
        self.length = length
        self.ranks = mesh.size()
        self.group = mesh.get_group().group_name
        self._causal: bool | None = None  # of all attention so far, if there was any
        self._inside = False
        self._allowed: set[Any] = set()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which attention of DTensors covers all parts of a sequence."""
        from torch.distributed.tensor.experimental._attention import (
            _cp_options,
            _disable_context_parallel_dispatcher,
            _enable_context_parallel_dispatcher,
        )

        balanced = _cp_options.enable_load_balance
        _enable_context_parallel_dispatcher()
        try:
            with register_module_forward_pre_hook(self._check_module):
                yield
        finally:
            _disable_context_parallel_dispatcher()
            _cp_options.enable_load_balance = balanced

    def attend(
        self, kernel: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...], *, causal: bool
    ) -> torch.Tensor:
        """The result of ``kernel`` for queries, keys and values; this rank has their ``parts``.

        Raises:
            ValueError: for attention that torch does not split.
        """
        from torch.distributed.tensor.experimental._attention import _cp_options

        lengths = {part.shape[_SEQUENCE_DIM] for part in parts}
        if lengths != {self.length}:
            raise self.refused(
                f"attention of {parts[0].shape[_SEQUENCE_DIM]} queries to "
                f"{parts[1].shape[_SEQUENCE_DIM]} keys on a rank that has {self.length} positions"
            )
        if self._causal not in (None, causal):
            raise self.refused("both causal and non-causal attention (only one of them can be)")
        self._causal = causal
        # As torch requires for causal attention: each rank has a part of the head and of the tail.
        _cp_options.enable_load_balance = causal
        over = [DTensor.from_local(t, self.mesh, [Shard(_SEQUENCE_DIM)], run_check=False)
                for t in parts]  # fmt: skip
        self._inside = True
        try:
            made = kernel(*over)
        finally:
            self._inside = False
        assert isinstance(made, DTensor)
        return made.to_local()

    def refused(self, what: str) -> ValueError:
        return ValueError(
            f"context_ranks={self.ranks}: torch's context_parallel does not split {what}; it "
            "splits scaled_dot_product_attention of a sequence to itself, without a mask. Predict "
            "this model with context_ranks=1"
        )

    def _check_module(self, module: nn.Module, args: Any) -> None:
        """Refuse recurrence by its module: for some dtypes and processors there is no kernel, but
        an operator for each position, which does not show that it is part of a recurrence."""
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            raise self.refused(f"the recurrence of {type(module).__name__}")

    def check(self, func: Any, result: Any) -> None:
        """Refuse an operator that combines positions, except the attention that is split."""
        name = operator_name(func)
        if name in _SOFTMAX and result.ndim > 2 and result.shape[-2:] == (self.length,) * 2:
            raise self.refused(
                f"attention written by hand ({name} of {self.length} by {self.length} scores; if "
                "these are none, make the sample of another length)"
            )
        if func in self._allowed or self._inside:
            return
        if _MEETINGS.search(name) and not name.endswith("backward"):
            raise self.refused(f"the operator {name}")
        self._allowed.add(func)

    def check_whole(self) -> None:
        """Check that the whole model has attention to split.

        Raises:
            ValueError: if it has none.
        """
        if self._causal is None:
            raise self.refused("this model, which calls no such attention")

    def conclude(self) -> list[str]:
        """The assumptions of the trace, as sentences; none without attention, as in a stage that
        only embeds tokens."""
        from torch.distributed.tensor.experimental._attention import _cp_options

        if self._causal is None:
            return []
        method = _cp_options.rotate_method.name.lower().replace("_", "-")
        notes = [
            f"Context parallel: as torch's context_parallel, with keys and values by {method} "
            "(set_rotate_method)"
        ]
        if not self._causal:
            notes.append(
                "Attention is not causal: torch's context_parallel then needs its load balance off "
                "(_cp_options.enable_load_balance = False)"
            )
        return notes


aten = torch.ops.aten
KINDS = ("flash", "efficient", "cudnn", "math")
_LOW = (torch.float16, torch.bfloat16)
_MAX_WIDTH = 256  # of a head, for flash and cuDNN


class AttentionKernels:
    """Takes the place of ``scaled_dot_product_attention`` for fake tensors.

    Args:
        choice: one of `KINDS`, or "auto".
        context: the ranks that divide sequences; None: each rank has whole sequences.
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
        """The kernel takes widths that are multiples of 8; other widths are padded and cut."""
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
        """A sentence for each reason that attention has its scores in memory."""
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
            return f"heads of queries have width {q.shape[-1]}, heads of values {v.shape[-1]}"
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
    """The mask as a tensor to add to the scores; boolean masks are converted."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        added = torch.zeros_like(mask, dtype=q.dtype)
        mask = added.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*q.shape[:-1], k.shape[-2])
