"""Small generic models of several kinds whose whole steps `measure` times.

Each kind has another bottleneck, so that their steps separate the factors of the parts of a step:
multiplications (words), convolutions (images), bytes of parameters and their gradients (wide), and
the host (many). Parameters, gradients and optimizer state of all strategies together exceed the
caches, as in models that are worth sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


@dataclass(frozen=True)
class Reference:
    """A model to train.

    Attributes:
        make: creates the model on the default device.
        batch: creates a batch with a number of samples there.
        loss: computes the loss from the model's output.
        samples: sizes of a rank's micro-batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    loss: Callable[[Tensor], Tensor]
    samples: tuple[int, ...]


class _WordBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.num_heads = num_heads

    @override
    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (each.transpose(1, 2) for each in heads.unbind(2))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(made.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class _Words(nn.Module):
    """A language model like GPT-2."""

    def __init__(self, vocab: int, width: int, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.Sequential(*(_WordBlock(width, num_heads) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


class _ManyBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden) for _ in range(2))
        self.down = nn.Linear(hidden, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(y)) * self.up(y))


def _convolution(channels: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def _images(channels: Sequence[int]) -> nn.Module:
    """Convolutions, two for each number of channels; the first one halves the sides."""
    layers = [_convolution(3, channels[0], 1)]
    for a, b in pairwise(channels):
        layers += [_convolution(a, b, 2), _convolution(b, b, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 9))


def _wide(widths: Sequence[int]) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))


def _square(x: Tensor) -> Tensor:
    return x.float().square().mean()


def _first_of(x: Tensor) -> Tensor:
    """The cross-entropy with class 0 as the label of all."""
    flat = x.float().flatten(0, -2)
    return F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long, device=x.device))


def _words(
    vocab: int, width: int, num_blocks: int, length: int, samples: tuple[int, ...]
) -> Reference:
    return Reference(
        lambda: _Words(vocab, width, width // 64, num_blocks),
        lambda n: torch.randint(vocab, (n, length)),
        _first_of,
        samples,
    )


def _many(
    width: int, hidden: int, num_blocks: int, length: int, samples: tuple[int, ...]
) -> Reference:
    return Reference(
        lambda: nn.Sequential(*(_ManyBlock(width, hidden) for _ in range(num_blocks))),
        lambda n: torch.randn(n, length, width),
        _square,
        samples,
    )


CPU = {
    "words": _words(2500, 320, 3, 80, (1, 5)),
    "images": Reference(
        lambda: _images((36, 72, 152, 296)), lambda n: torch.randn(n, 3, 28, 28), _first_of, (3, 10)
    ),
    "wide": Reference(
        lambda: _wide((640, 2400, 1344, 2400, 100)),
        lambda n: torch.randn(n, 640),
        _first_of,
        (32, 160),
    ),
    "many": _many(104, 168, 28, 44, (2, 10)),
}
CUDA = {
    "words": _words(16000, 1024, 4, 1024, (2, 8)),
    "images": Reference(
        lambda: _images((96, 192, 384, 768)),
        lambda n: torch.randn(n, 3, 112, 112),
        _first_of,
        (16, 64),
    ),
    "wide": Reference(
        lambda: _wide((2048, 8000, 4000, 8000, 1000)),
        lambda n: torch.randn(n, 2048),
        _first_of,
        (512, 4096),
    ),
    "many": _many(256, 384, 48, 128, (4, 32)),
}
# For a trial.
QUICK = {"many": _many(48, 80, 2, 8, (2,))}
