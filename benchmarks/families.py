"""Five small models of different kinds, on which estimates are compared with runs.

Each entry of `FAMILIES` makes a model and a batch for one rank. Nothing is random in their shapes,
so that every rank does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import LM, LMConfig, lm_loss


@dataclass(frozen=True)
class Family:
    """A model, a batch for it and its loss.

    Attributes:
        model: makes the model on the current default device.
        batch: makes the arguments of forward.
        loss: of the model's output.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    loss: Callable[[Any], Tensor]


class Residual(nn.Module):
    """Two convolutions with batch norms around a sum, as in ResNet-18."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of two blocks; images (batch, 3, height, width) to the logits of 10 classes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        )
        blocks: list[nn.Module] = []
        channels_in = width
        for stage in range(4):
            channels = width * 2**stage
            blocks.append(Residual(channels_in, channels, 1 if stage == 0 else 2))
            blocks.append(Residual(channels, channels, 1))
            channels_in = channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels_in, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A language model of stacked LSTMs."""

    def __init__(self, vocab: int = 6000, width: int = 512, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


class Recommender(nn.Module):
    """Deep and wide: large embedding tables, their products, and a deep network.

    Args:
        tables: entries of each table.
        width: of the embeddings.
        num_dense: numbers of an example beside its categories.
    """

    def __init__(
        self,
        tables: tuple[int, ...] = (60001, 40000, 9973, 5000, 700, 33),
        width: int = 64,
        num_dense: int = 13,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in tables)
        self.wide = nn.ModuleList(nn.Embedding(n, 1) for n in tables)
        self.bottom = nn.Sequential(nn.Linear(num_dense, 256), nn.ReLU(), nn.Linear(256, width))
        num_pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(
            nn.Linear(num_pairs + width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
            nn.Linear(256, 1),
        )  # fmt: skip

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        deep = self.bottom(dense)
        embedded = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack([deep, *embedded], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.triu_indices(stacked.shape[1], stacked.shape[1], 1)
        crossed = products[:, rows, columns]
        wide = sum(table(categories[:, i]) for i, table in enumerate(self.wide))
        return self.top(torch.cat([crossed, deep], dim=1)) + wide


class Experts(nn.Module):
    """A layer whose tokens each go to two of several experts, with a fixed capacity (GShard)."""

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        capacity = 2 * 2 * flat.shape[0] // self.num_experts
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        mask = F.one_hot(chosen, self.num_experts).to(x.dtype)
        place = (mask.flatten(0, 1).cumsum(0) - 1).view_as(mask) * mask
        kept = mask * (place < capacity)
        slot = F.one_hot(place.sum(-1).long().clamp(max=capacity - 1), capacity).to(x.dtype)
        dispatch = torch.einsum("tke,tkc->tec", kept, slot)
        combine = torch.einsum("tk,tke,tkc->tec", weights, kept, slot)
        inputs = torch.einsum("tec,td->ecd", dispatch, flat)
        outputs = torch.bmm(F.silu(torch.bmm(inputs, self.up)), self.down)
        return torch.einsum("tec,ecd->td", combine, outputs).view_as(x)


class ExpertBlock(nn.Module):
    """Attention and a layer of experts."""

    def __init__(self, width: int, num_heads: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.experts = Experts(width, hidden, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.experts(self.norm2(x))


class MixtureOfExperts(nn.Module):
    """A language model with experts; forward maps token ids to the logits."""

    def __init__(self, vocab: int = 4000, width: int = 256, num_blocks: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, 4, 512, 8) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens(vocab: int, batch: int, length: int) -> tuple[Tensor]:
    return (torch.randint(vocab, (batch, length)),)


def _next_token_loss(logits: Tensor) -> Tensor:
    return lm_loss(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))


def _click_loss(logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.float(), torch.ones(logits.shape))


FAMILIES = {
    "transformer": Family(
        lambda: LM(LMConfig(vocab=4096, width=384, hidden=1024, num_blocks=6, num_heads=6)),
        lambda: _tokens(4096, 2, 96),
        _next_token_loss,
    ),
    "convolutional": Family(
        ResNet,
        lambda: (torch.randn(4, 3, 32, 32),),
        lambda logits: F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long)),
    ),
    "recurrent": Family(Recurrent, lambda: _tokens(6000, 4, 32), _next_token_loss),
    "recommender": Family(
        Recommender,
        lambda: (torch.randn(256, 13), torch.randint(33, (256, 6))),
        _click_loss,
    ),
    "experts": Family(MixtureOfExperts, lambda: _tokens(4000, 2, 64), _next_token_loss),
}
