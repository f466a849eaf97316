"""The two models that are measured: a Llama-like language model and a stack of tiny blocks.

Plain PyTorch, nothing distributed. The language model has 34.1M parameters with the default
config; the stack has 64 blocks of 9 small parameters, so that a step is almost only host time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LMConfig:
    """Sizes of the language model; the default is the 34M model of the results."""

    vocab: int = 8192
    width: int = 512
    hidden: int = 1408
    num_blocks: int = 8
    num_heads: int = 8


@dataclass(frozen=True)
class StackConfig:
    """Sizes of the stack of tiny blocks: 4 matrices of width x width, 3 of width x hidden.

    With fewer key and value heads than heads, two of the four have fewer rows.
    """

    width: int = 64
    hidden: int = 128
    num_blocks: int = 64
    num_heads: int = 4
    num_kv_heads: int | None = None


@lru_cache
def rotation(tokens: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, (tokens, half) each, in fp32."""
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of `x` (batch, heads, tokens, head width), computed in fp32."""
    cos, sin = rotation(x.shape[-2], x.shape[-1] // 2, x.device)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


class Block(nn.Module):
    """One transformer block: 7 linears without bias and 2 RMS norms, 9 parameters."""

    def __init__(
        self, width: int, hidden: int, num_heads: int, num_kv_heads: int | None = None
    ) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.shares_kv = num_kv_heads not in (None, num_heads)
        kv_width = (num_kv_heads or num_heads) * self.head_width
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_width, bias=False)
        self.wv = nn.Linear(width, kv_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, tokens, width) to the same shape."""
        y = self.attention_norm(x)
        heads = (*y.shape[:2], -1, self.head_width)
        q, k, v = (w(y).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(
            rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.shares_kv
        )
        x = x + self.wo(a.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class LM(nn.Module):
    """A Llama-like language model; forward maps token ids (batch, tokens) to the logits."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(
            Block(config.width, config.hidden, config.num_heads) for _ in range(config.num_blocks)
        )
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """Many tiny blocks in a row, without parameters of its own."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(config.width, config.hidden, config.num_heads, config.num_kv_heads)
            for _ in range(config.num_blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Bf16Compute(nn.Module):
    """Runs `module` on bf16 casts of its fp32 parameters; gradients come back as fp32.

    What mixed precision of a sharded variant means, for the variants that have no such policy.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        cast = {name: p.to(torch.bfloat16) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, args)


def lm_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in fp32 of logits (batch, tokens, vocab) for ids (batch, tokens)."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
