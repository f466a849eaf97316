"""The steps of small modules whose operators are timed: shapes that span those of real models.

They are powers of two and of no model in particular.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..estimation.optimizers import NAMED

Step = Callable[[], None]
_SINGLE: list[Any] = [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, torch.exp]
_PAIRS: list[Any] = [torch.add, torch.mul, torch.div]


@dataclass(frozen=True)
class Sizes:
    """How large the shapes are.

    Attributes:
        matmuls: tokens, inputs and outputs of linear layers.
        numels: elements of tensors that are added, normalized and so on.
        channels: channels and side of images.
        sequences: length and width of sequences.
        optimizer: elements of a parameter.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    numels: tuple[int, ...]
    channels: tuple[tuple[int, int], ...]
    sequences: tuple[tuple[int, int], ...]
    optimizer: tuple[int, ...]


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first, last + 1, 2))


QUICK = Sizes(((16, 16, 16), (64, 64, 64)), _powers(10, 12), ((8, 8),), ((16, 16),), (2**10,))
CPU = Sizes(
    tuple(
        (tokens, *widths)
        for tokens in (8, 32, 128, 512)
        for widths in ((64, 64), (256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 4096))
    ),
    _powers(8, 22),
    ((16, 32), (32, 16), (64, 32), (64, 16), (128, 16), (256, 8), (512, 4)),
    ((16, 128), (64, 256), (256, 256), (64, 512)),
    _powers(6, 22),
)
CUDA = Sizes(
    tuple(
        (tokens, *widths)
        for tokens in (128, 1024, 4096, 16384)
        for widths in ((512, 512), (1024, 4096), (4096, 4096), (8192, 8192), (4096, 14336))
    ),
    _powers(12, 28),
    ((64, 56), (128, 28), (256, 14), (512, 7)),
    ((512, 1024), (2048, 2048), (8192, 4096)),
    _powers(10, 26),
)


def workloads(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Step]:
    """Functions that each run forward and backward of something, or the step of an optimizer."""
    yield from _matmuls(sizes, device, dtype)
    yield from _sequences(sizes, device, dtype)
    yield from _elementwise(sizes, device, dtype)
    if dtype == torch.float32:
        yield from _images(sizes, device)
        yield from _optimizers(sizes, device)


def _training(function: Callable[..., Tensor], *inputs: Tensor) -> Step:
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]

    def step() -> None:
        made = function(*leaves)
        made.backward(torch.ones_like(made))
        for leaf in leaves:
            leaf.grad = None

    return step


def _layer(layer: nn.Module, *inputs: Tensor) -> Step:
    step = _training(lambda *args: layer(*args), *inputs)

    def whole() -> None:
        step()
        layer.zero_grad()

    return whole


def _matmuls(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Step]:
    for tokens, inputs, outputs in sizes.matmuls:
        x = torch.randn(tokens, inputs, device=device, dtype=dtype)
        yield _layer(nn.Linear(inputs, outputs, device=device, dtype=dtype), x)
        yield _layer(nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype), x)
        if tokens * inputs * outputs < 2**24:
            batch = torch.randn(8, tokens, inputs, device=device, dtype=dtype)
            weight = torch.randn(8, inputs, outputs, device=device, dtype=dtype)
            yield _training(torch.bmm, batch, weight)


def _sequences(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Step]:
    for length, width in sizes.sequences:
        heads = max(1, width // 64)
        q, k, v = (
            torch.randn(2, heads, length, width // heads, device=device, dtype=dtype)
            for _ in range(3)
        )
        for causal in (True, False):
            yield _training(
                lambda q, k, v, causal=causal: F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal
                ),
                q, k, v,
            )  # fmt: skip
        x = torch.randn(4, length, width, device=device, dtype=dtype)
        lstm = nn.LSTM(width, width, batch_first=True, device=device, dtype=dtype)
        if dtype == torch.float32:
            yield _training(lambda x, lstm=lstm: lstm(x)[0], x)
        table = nn.Embedding(16 * width, width, device=device, dtype=dtype)
        yield _lookup(table, torch.randint(16 * width, (4, length), device=device))


def _lookup(table: nn.Embedding, tokens: Tensor) -> Step:
    def step() -> None:
        made = table(tokens)
        made.backward(torch.ones_like(made))
        table.zero_grad()

    return step


def _elementwise(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Step]:
    for numel in sizes.numels:
        width = min(512, max(16, numel // 64))
        shape = (numel // width, width)
        x, y = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        norm = nn.LayerNorm(width, device=device, dtype=dtype)
        yield _layer(norm, x)
        yield _layer(nn.RMSNorm(width, device=device, dtype=dtype), x)
        for single in _SINGLE:
            yield _training(single, x)
        yield _training(lambda x: x.softmax(-1), x)
        yield _training(lambda x: x.log_softmax(-1), x)
        for pair in _PAIRS:
            yield _training(pair, x, y)
        yield _training(lambda x, y: torch.cat([x, y], -1), x, y)
        yield _training(lambda x: x.t().contiguous() * 2.0 + x.sum(), x)
        yield _training(lambda x: x.float().to(x.dtype).pow(2).mean(-1).rsqrt(), x)
        labels = torch.randint(width, (numel // width,), device=device)
        yield _training(lambda x, labels=labels: F.cross_entropy(x, labels), x)
        target = torch.rand(shape, device=device, dtype=dtype)
        yield _training(lambda x, target=target: F.binary_cross_entropy_with_logits(x, target), x)


def _images(sizes: Sizes, device: torch.device) -> Iterator[Step]:
    for channels, side in sizes.channels:
        for batch in (2, 8):
            x = torch.randn(batch, channels, side, side, device=device)
            conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False, device=device)
            yield _layer(conv, x)
            down = nn.Conv2d(channels, 2 * channels, 3, 2, padding=1, bias=False, device=device)
            yield _layer(down, x)
            narrow = nn.Conv2d(channels, 2 * channels, 1, 2, bias=False, device=device)
            yield _layer(narrow, x)
            yield _layer(nn.BatchNorm2d(channels, device=device), x)


def _optimizers(sizes: Sizes, device: torch.device) -> Iterator[Step]:
    for numel in sizes.optimizer:
        for name in ("adamw", "momentum"):
            param = nn.Parameter(torch.zeros(numel, device=device))
            param.grad = torch.ones_like(param)
            yield NAMED[name]([param]).step
