"""Steps of small modules whose operators are timed, with shapes in the range of real models.

The shapes are powers of two, and of no model in particular. Each module runs as in a training step:
forward of several copies, then backward of all, the last copy first. So weights and saved tensors
are no longer in caches, results get new memory, and only an operator's input from the operator
before it is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from ..trace.optimizers import NAMED

Step = Callable[[], None]
_SINGLE: list[Any] = [F.relu, F.gelu, F.silu, torch.sigmoid, torch.tanh, torch.exp]
_PAIRS: list[Any] = [torch.add, torch.mul, torch.div]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the shapes.

    Attributes:
        matmuls: tokens, inputs and outputs of linear layers.
        numels: elements of tensors for pointwise operators, norms and so on.
        channels: channels and side of images.
        sequences: length and width of sequences.
        optimizer: elements of a parameter.
        cold: bytes of all copies of a workload, more than caches hold.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    numels: tuple[int, ...]
    channels: tuple[tuple[int, int], ...]
    sequences: tuple[tuple[int, int], ...]
    optimizer: tuple[int, ...]
    cold: int


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first, last + 1, 2))


_MIB = 2**20
_MOST_COPIES = 64
# Few, but from small to large: times beyond the largest are not known.
QUICK = Sizes(
    ((16, 64, 64), (256, 512, 512)), _powers(10, 20)[::5], ((32, 16),), ((128, 128),),
    (2**8, 2**20), _MIB,
)  # fmt: skip
CPU = Sizes(
    tuple(
        (tokens, *widths)
        for tokens in (8, 32, 128, 512)
        for widths in ((64, 64), (256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 4096))
    ),
    _powers(8, 22),
    ((16, 32), (32, 16), (64, 32), (64, 16), (128, 16), (256, 8), (512, 4)),
    ((16, 128), (64, 256), (256, 256), (64, 512), (512, 256)),
    _powers(6, 22),
    24 * _MIB,
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
    0,  # a copy: kernels are timed by many calls of the same
)


def workloads(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Step]:
    """Functions that each run forward and backward of a module, or the step of an optimizer."""
    makers = [*_matmuls(sizes, dtype), *_sequences(sizes, dtype), *_elementwise(sizes, dtype)]
    if dtype == torch.float32:
        makers += _images(sizes)
    for make in makers:
        with torch.device(device):
            step = _training(make, sizes.cold)
        yield step
    if dtype == torch.float32:
        yield from _optimizers(sizes, device)


# What one copy runs, and the inputs. Tensors are made on the default device.
_Made = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
_Maker = Callable[[], _Made]


def _training(make: _Maker, cold: int) -> Step:
    """A step of enough copies to exceed the caches."""
    copies = [make()]
    nbytes = 4 * sum(t.nbytes for t in _tensors(copies[0]))  # with results and gradients
    copies += [make() for _ in range(min(_MOST_COPIES, ceil(cold / nbytes)) - 1)]
    for copy in copies:
        for tensor in copy[1]:
            if tensor.is_floating_point():
                tensor.requires_grad_()

    def step() -> None:
        made = [function(*map(_as_made, inputs)) for function, inputs in copies]
        for _, inputs in reversed(copies):
            result = made.pop()
            result.backward(torch.ones_like(result))
            del result
            for tensor in inputs:  # like gradients of activations; gradients of parameters stay
                tensor.grad = None
        for copy in copies:
            for tensor in _tensors(copy):
                tensor.grad = None

    return step


def _tensors(copy: _Made) -> list[Tensor]:
    function, inputs = copy
    return [*inputs, *(function.parameters() if isinstance(function, nn.Module) else ())]


def _as_made(tensor: Tensor) -> Tensor:
    """A tensor that an operator has just written, instead of a leaf."""
    return tensor.neg() if tensor.requires_grad else tensor


def _randn(layer: Callable[[], Any], dtype: torch.dtype, *shapes: tuple[int, ...]) -> _Made:
    """A new layer and inputs of these shapes."""
    return layer(), tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def _matmuls(sizes: Sizes, dtype: torch.dtype) -> Iterator[_Maker]:
    for tokens, inputs, outputs in sizes.matmuls:
        for bias in (True, False):
            linear = partial(nn.Linear, inputs, outputs, bias=bias, dtype=dtype)
            yield partial(_randn, linear, dtype, (tokens, inputs))
        if tokens * inputs * outputs < 2**24:
            shapes = (8, tokens, inputs), (8, inputs, outputs)
            yield partial(_randn, partial(_the, torch.bmm), dtype, *shapes)


def _sequences(sizes: Sizes, dtype: torch.dtype) -> Iterator[_Maker]:
    for length, width in sizes.sequences:
        for head in (32, 64, 128):
            for causal in (True, False):
                if head <= width:
                    yield partial(_attention, length, width, head, causal, dtype)
        if dtype == torch.float32:
            yield partial(_randn, partial(_Recurrent, width), dtype, (4, length, width))
        yield partial(_lookup, 16 * width, width, (4, length), dtype)
        # The head of a language model, whose logits are large.
        yield partial(_cross_entropy, 4 * length, 16 * width, dtype)


def _lookup(rows: int, width: int, tokens: tuple[int, ...], dtype: torch.dtype) -> _Made:
    return nn.Embedding(rows, width, dtype=dtype), (torch.randint(rows, tokens),)


def _cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> _Made:
    labels = torch.randint(classes, (rows,))
    return _CrossEntropy(labels), (torch.randn(rows, classes, dtype=dtype),)


def _attention(length: int, width: int, head: int, causal: bool, dtype: torch.dtype) -> _Made:
    shape = (2, length, width // head, head)  # heads are views of what linear layers write

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend, tuple(torch.randn(shape, dtype=dtype) for _ in range(3))


class _Recurrent(nn.LSTM):
    def __init__(self, width: int) -> None:
        super().__init__(width, width, batch_first=True)

    @override
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class _CrossEntropy(nn.Module):
    def __init__(self, labels: Tensor) -> None:
        super().__init__()
        self.labels = labels

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), self.labels)


def _elementwise(sizes: Sizes, dtype: torch.dtype) -> Iterator[_Maker]:
    functions: list[tuple[Callable[..., Tensor], int]] = [
        *((single, 1) for single in _SINGLE),
        *((pair, 2) for pair in _PAIRS),
        (lambda x: x.softmax(-1), 1),
        (lambda x: x.log_softmax(-1), 1),
        (lambda x, y: torch.cat([x, y], -1), 2),
        (lambda x: x.t().contiguous() * 2.0 + x.sum(), 1),
        (lambda x: x.float().to(x.dtype).pow(2).mean(-1).rsqrt(), 1),
        (lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()), 2),
    ]
    for numel in sizes.numels:
        width = min(512, max(16, numel // 64))
        rows = numel // width

        for norm in (nn.LayerNorm, nn.RMSNorm):
            yield partial(_randn, partial(norm, width, dtype=dtype), dtype, (rows, width))
        for function, number in functions:
            layer = partial(_the, function)
            yield partial(_randn, layer, dtype, *[(rows, width)] * number)
        yield partial(_cross_entropy, rows, width, dtype)


def _the(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


def _images(sizes: Sizes) -> Iterator[_Maker]:
    for channels, side in sizes.channels:
        conv = partial(nn.Conv2d, channels, bias=False)
        layers: list[Callable[[], nn.Module]] = [
            partial(conv, channels, 3, padding=1),
            partial(conv, 2 * channels, 3, 2, padding=1),
            partial(conv, 2 * channels, 1, 2),
            partial(nn.BatchNorm2d, channels),
        ]
        for batch in (2, 8):
            for layer in layers:
                yield partial(_randn, layer, torch.float32, (batch, channels, side, side))


def _optimizers(sizes: Sizes, device: torch.device) -> Iterator[Step]:
    for numel in sizes.optimizer:
        # As in a step: one parameter after the other, and none is still in the caches.
        number = max(1, min(_MOST_COPIES, ceil(sizes.cold / (16 * numel))))
        for name in ("adamw", "momentum"):
            params = [nn.Parameter(torch.zeros(numel, device=device)) for _ in range(number)]
            for param in params:
                param.grad = torch.ones_like(param)
            yield NAMED[name](params).step
