"""A Llama-like byte-level language model in plain PyTorch, without any code for sharding.

RMSNorm before each layer, rotary position embedding, causal attention, SwiGLU, no biases.
The vocabulary is the 256 byte values, so there is no tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; `hidden` is the inner width of SwiGLU."""

    dim: int = 512
    num_layers: int = 3
    num_heads: int = 8
    hidden: int = 1408
    # Recompute each block's activations in backward instead of keeping them.
    recompute: bool = False


def rotary_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each (length, head_dim / 2), in fp32.

    They are computed in each forward. A buffer created on the meta device would hold garbage after
    `to_empty`, and a cache in Python would keep a tensor of the trace if the step is traced
    (`--graph`).
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device).float(), 10_000.0**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of `x`, (batch, heads, length, head_dim)."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.num_heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # -1, not the number of heads: under tensor parallelism this rank has only some of them.
        shape = (batch, length, -1, self.head_dim)
        q, k, v = (w(x).view(shape).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = rotary_table(length, self.head_dim, x.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One transformer block: attention and feed-forward, each behind an RMSNorm, both residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.recompute = config.recompute
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        # Inside the block's forward. The hooks of `fully_shard` run around it, so the parameters
        # are gathered once for recomputation and backward together.
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self._layers, x, use_reentrant=False)
        return self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Maps bytes, (batch, length) int64, to logits of the next byte, (batch, length, 256)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_std(name: str, config: ModelConfig) -> float | None:
    """Standard deviation of the initial values of parameter `name`; None: the values are ones.

    The two projections that write to the residual stream start smaller, as in GPT-2, so that the
    stream does not grow with depth.
    """
    if "norm" in name:
        return None
    if name.endswith(("wo.weight", "down.weight")):
        return 0.02 / (2 * config.num_layers) ** 0.5
    return 0.02
