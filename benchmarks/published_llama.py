"""Llama 3 405B as its paper describes its run, in tensor-parallel stages; for the meta device.

After "The Llama 3 Herd of Models" (arXiv 2407.21783), written down from memory. Tensors are
(sequence, batch, width). The paper does not say which of its operators are one kernel. Here these
are: RMS norms, attention, the rotation of queries and keys, and the gate, which is made again in
backward (as in the SwiGLU of xformers) so that what it makes is not kept.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.planning import register_cost

from .published_layers import (
    ColumnLinear,
    Embedding,
    Parallel,
    RowLinear,
    losses_of,
    of_reduced,
    own_part,
    reduced,
)

# -- one kernel ------------------------------------------------------------------------------------


def _turned(x: Tensor, table: Tensor) -> Tensor:
    """Pairs of numbers, turned by the angles of their position."""
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * table[: len(x), None, None]).flatten(-2).to(x.dtype)


@torch.library.custom_op("published::rotated", mutates_args=())
def rotated(qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned by their positions, and values.

    Args:
        qkv: (sequence, batch, heads of keys, queries of each + 2, head).
        table: (sequence, half of a head), complex.

    Returns:
        Three tensors (sequence, batch, heads, head) of their own.
    """
    q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
    return _turned(q, table), _turned(k, table), v.clone()


@rotated.register_fake
def _(qkv: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    length, batch, heads, each, head = qkv.shape
    few = (length, batch, heads, head)
    return qkv.new_empty(length, batch, heads * (each - 2), head), *map(qkv.new_empty, (few, few))


@torch.library.custom_op("published::turned_back", mutates_args=())
def turned_back(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The gradient of what `rotated` gets."""
    back = table.conj()
    heads = k.shape[2]
    each = [_turned(q, back).unflatten(2, (heads, -1)), _turned(k, back).unsqueeze(3)]
    return torch.cat([*each, v.unsqueeze(3)], 3)


@turned_back.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    length, batch, heads, head = k.shape
    return k.new_empty(length, batch, heads, q.shape[2] // heads + 2, head)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
    return turned_back(q, k, v, *ctx.saved_tensors), None


rotated.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("published::gated", mutates_args=())
def gated(x: Tensor) -> Tensor:
    """``silu(gate) * up``, of pairs (gate, up) in the last dim."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up


@gated.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("published::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of ``x``, and what `gated` made of it."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    part = gate.sigmoid()
    of_gate = grad * up * part * (1 + gate * (1 - part))
    made = gate * part
    return torch.stack([of_gate, grad * made], -1).flatten(-2), made * up


@gated_backward.register_fake
def _(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(grad)


for _name in ("rotated", "turned_back", "gated", "gated_backward"):
    register_cost(f"published::{_name}")  # each reads and writes its tensors once


class _GatedToRows(torch.autograd.Function):
    """The gate and the linear layer after it: kept is what the gate gets."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, mesh: DeviceMesh | None, parts: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.parts = mesh, parts
        made = F.linear(gated(x), weight)
        return made if mesh is None else reduced(made, mesh, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        if ctx.mesh is not None:
            grad = of_reduced(grad, ctx.mesh, ctx.parts)
        of_x, made = gated_backward(grad @ weight, x)
        return of_x, grad.flatten(0, 1).t() @ made.flatten(0, 1), None, None


# -- the model -------------------------------------------------------------------------------------


class GatedRowLinear(RowLinear):
    """The gate, and a linear layer of whose inputs each rank has some."""

    def forward(self, x: Tensor) -> Tensor:
        return _GatedToRows.apply(x, own_part(self.weight), self.mesh, self.parts)


class Llama405BBlock(nn.Module):
    """Grouped-query attention and a gated layer, with RMS norms before them."""

    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head, self.group = width // num_heads, num_heads // num_kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = ColumnLinear(width, num_kv_heads * (self.group + 2) * self.head, bias=False)
        self.proj = RowLinear(width, width)
        self.up = ColumnLinear(width, 2 * hidden, bias=False)
        self.down = GatedRowLinear(hidden, width)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.group + 2, self.head))
        q, k, v = (t.permute(1, 2, 0, 3) for t in rotated(qkv, table))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(made.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(self.up(self.norm2(x)))


class Llama405B(nn.Module):
    """Token ids (batch, length) to the loss of each token (length, batch), against id 0.

    Args:
        width, num_layers, num_heads, num_kv_heads, hidden, vocab: of table 3 of the paper.
        length: the longest sequence.
    """

    def __init__(
        self,
        width: int = 16384,
        num_layers: int = 126,
        num_heads: int = 128,
        num_kv_heads: int = 8,
        hidden: int = 53248,
        vocab: int = 128256,
        length: int = 8192,
    ) -> None:
        super().__init__()
        self.words = Embedding(vocab, width)
        self.layers = nn.ModuleList(
            Llama405BBlock(width, hidden, num_heads, num_kv_heads) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = ColumnLinear(width, vocab, bias=False)
        half = width // num_heads // 2
        angles = torch.arange(length).outer(5e5 ** -(torch.arange(half) / half))
        self.register_buffer("table", torch.polar(torch.ones_like(angles), angles), False)

    def forward(self, tokens: Tensor) -> Tensor:
        return Llama405BStage(self, 0, len(self.layers))(tokens)


class Llama405BStage(nn.Module):
    """Some blocks of the model; the first stage embeds, the last one computes the losses."""

    def __init__(
        self, model: Llama405B, first: int, last: int, begins: bool = True, ends: bool = True
    ) -> None:
        super().__init__()
        self.words = model.words if begins else None
        self.layers = model.layers[first:last]
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.register_buffer("table", model.table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x)
        for block in self.layers:
            x = block(x, self.table)
        if self.head is None or self.norm is None:
            return x
        return losses_of(self.head(self.norm(x)), self.head.mesh)


def split_llama_405b(model: Llama405B, num_stages: int) -> list[Llama405BStage]:
    """Stages of equally many blocks, but one less in the first and in the last."""
    per_stage, rest = divmod(len(model.layers) + 2, num_stages)
    if rest:
        raise ValueError(
            f"{len(model.layers)} blocks, embedding and head cannot be divided into {num_stages} "
            "stages"
        )
    bounds = [0, *range(per_stage - 1, len(model.layers) + 1, per_stage), len(model.layers)]
    stages = list(pairwise(bounds))
    return [
        Llama405BStage(model, *each, begins=i == 0, ends=i == num_stages - 1)
        for i, each in enumerate(stages)
    ]


def parallelize_llama_405b(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism of ``model``, all of it or a stage, with parts of the sequence between
    linear layers."""
    for module in list(model.modules()):
        if isinstance(module, Parallel):
            module.distribute(mesh, parts=True)
