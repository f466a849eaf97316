"""GPT as Megatron-LM runs it, in tensor-parallel stages; large ones for the meta device only.

After "Megatron-LM" (arXiv 1909.08053), "Efficient Large-Scale Language Model Training" (2104.04473)
and "Reducing Activation Recomputation" (2205.05198), written down from memory. Tensors are
(sequence, batch, width). What those run as one kernel is written so that it is one here: the scale
of scores is that of the multiplication, the causal mask is part of the softmax (so it is left out),
the bias of the first linear layer is added by its multiplication.
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
    received,
    sent,
)

# Width, blocks and heads: table 3 of "Reducing Activation Recomputation"; tables 1 and 2 of
# "Efficient Large-Scale Language Model Training", where 530B and 1T are the same.
SIZES_OF_MEGATRON = {
    "Megatron 22B": (6144, 48, 64),
    "Megatron 175B": (12288, 96, 96),
    "Megatron 530B": (20480, 105, 128),
    "Megatron 1T": (25600, 128, 160),
    "Megatron 1.7B": (2304, 24, 24),
    "Megatron 3.6B": (3072, 30, 32),
    "Megatron 7.5B": (4096, 36, 32),
    "Megatron 18.4B": (6144, 40, 48),
    "Megatron 39.1B": (8192, 48, 64),
    "Megatron 76.1B": (10240, 60, 80),
    "Megatron 145.6B": (12288, 80, 96),
    "Megatron 310.1B": (16384, 96, 128),
}

# -- one kernel ------------------------------------------------------------------------------------


@torch.library.custom_op("published::bias_dropout_add", mutates_args=())
def bias_dropout_add(x: Tensor, bias: Tensor, before: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """``before + dropout(x + bias)``, and what was kept of it, one byte each."""
    kept = torch.rand_like(x, dtype=torch.float32) >= p
    return before + (x + bias) * kept / (1 - p), kept


@bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor, before: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@torch.library.custom_op("published::dropped", mutates_args=())
def dropped(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    """The gradient of what dropout gets."""
    return grad * kept / (1 - p)


@dropped.register_fake
def _(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.p = inputs[3]


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor, Tensor, None]:
    (kept,) = ctx.saved_tensors
    of_x = dropped(grad, kept, ctx.p)
    return of_x, of_x.flatten(0, 1).sum(0), grad, None


bias_dropout_add.register_autograd(_backward, setup_context=_keep)
for _name in ("published::bias_dropout_add", "published::dropped"):
    register_cost(_name)  # each reads and writes its tensors once


# -- the model -------------------------------------------------------------------------------------


class CoreAttention(nn.Module):
    """Scores, softmax, dropout, and the mean of values: what is recomputed in "selective"."""

    def __init__(self, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout

    def forward(self, mixed: Tensor) -> Tensor:
        length, batch, width = mixed.shape
        head = width // self.num_heads // 3
        split = mixed.view(length, batch * self.num_heads, 3 * head)
        q, k, v = (t.transpose(0, 1) for t in split.chunk(3, -1))
        empty = q.new_empty(len(q), length, length)
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0.0, alpha=head**-0.5)
        weights = F.dropout(F.softmax(scores, -1), self.dropout, self.training)
        made = torch.bmm(weights, v).transpose(0, 1)
        return made.reshape(length, batch, self.num_heads * head)


class MegatronBlock(nn.Module):
    """Norms, attention written out, GELU; biases of the second layers are added with dropout."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = ColumnLinear(width, 3 * width)
        self.core = CoreAttention(num_heads, dropout)
        self.proj = RowLinear(width, width)
        self.up = ColumnLinear(width, 4 * width)
        self.down = RowLinear(4 * width, width)
        self.bias1 = nn.Parameter(torch.zeros(width))
        self.bias2 = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        made = self.proj(self.core(self.qkv(self.norm1(x))))
        x = bias_dropout_add(made, self.bias1, x, self.dropout)[0]
        made = self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return bias_dropout_add(made, self.bias2, x, self.dropout)[0]


class MegatronGPT(nn.Module):
    """Token ids (batch, length) to the loss of each token (length, batch), against id 0.

    Args:
        vocab: of embedding and head, which share no weight here.
        width, num_layers, num_heads, length, dropout: as in papers.
    """

    def __init__(
        self,
        width: int,
        num_layers: int,
        num_heads: int,
        vocab: int = 51200,
        length: int = 2048,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words = Embedding(vocab, width)
        self.positions = nn.Parameter(torch.randn(length, 1, width) * 0.02)
        self.layers = nn.ModuleList(
            MegatronBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = ColumnLinear(width, vocab, bias=False)
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        return MegatronStage(self, 0, len(self.layers))(tokens)


class MegatronStage(nn.Module):
    """Some blocks of the model; the first stage embeds, the last one computes the losses."""

    def __init__(self, model: MegatronGPT, first: int, last: int) -> None:
        super().__init__()
        begins, ends = first == 0, last == len(model.layers)
        self.words = model.words if begins else None
        self.positions = model.positions if begins else None
        self.layers = model.layers[first:last]
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.words is None or self.positions is None:
            x = received(x, self.layers[0].qkv)
        else:
            positions = self.positions[: x.shape[1]]
            x = self.words(x)
            if len(x) < len(positions):  # this rank has a part of the sequence
                assert self.words.mesh is not None
                positions = positions.chunk(self.words.mesh.size())[
                    self.words.mesh.get_local_rank()
                ]
            x = F.dropout(x + positions, self.dropout, self.training)
        for block in self.layers:
            x = block(x)
        if self.head is None or self.norm is None:
            return sent(x, self.layers[0].qkv)
        return losses_of(self.head(self.norm(x)), self.head.mesh)


def split_megatron(model: MegatronGPT, num_stages: int) -> list[MegatronStage]:
    """Stages of equally many blocks."""
    per_stage, rest = divmod(len(model.layers), num_stages)
    if rest:
        raise ValueError(f"{len(model.layers)} blocks cannot be divided into {num_stages} stages")
    bounds = range(0, len(model.layers) + 1, per_stage)
    return [MegatronStage(model, *ends) for ends in pairwise(bounds)]


def parallelize_megatron(model: Any, mesh: DeviceMesh, *, parts: bool = True) -> None:
    """Tensor parallelism of ``model``: all of it, or a stage.

    Args:
        parts: whether what is between the linear layers is of a part of the sequence on each rank
            ("sequence parallelism"); otherwise of all of it.
    """
    for module in list(model.modules()):
        if isinstance(module, Parallel):
            module.distribute(mesh, parts)
        elif isinstance(module, CoreAttention):
            module.num_heads //= mesh.size()


def cores_of(num_layers: int) -> list[str]:
    """The names of what "selective" recomputes, of as many blocks."""
    return [f"layers.{i}.core" for i in range(num_layers)]
