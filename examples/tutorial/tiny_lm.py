"""The model and the data of the tutorial: plain PyTorch, without sharding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 64, 64, 24
BATCH = 24  # sequences of one step, over all ranks


class Block(nn.Module):
    """One layer of a transformer: causal attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyLM(nn.Module):
    """A language model: maps token ids of shape (batch, length) to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_weights(self) -> None:
        """Give every parameter its initial value."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()


def batch_of(step: int) -> Tensor:
    """The token ids of one step, of shape (BATCH, LENGTH + 1): the same on every rank.

    Each token is a function of the one before it, so there is a rule to learn.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 11) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean cross-entropy of predicting each token from those before it."""
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
