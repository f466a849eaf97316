"""Models whose weights, or whose optimizer's state, are tensor subclasses: one maker each.

A maker takes the rows of the first weight and gives two models: one to shard, and the one that it
is compared with, whole on each process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.optim import block_rows
from subclasses import (
    OfMesh,
    OfModule,
    Padding,
    Scaled,
    with_nested,
    with_scaled,
    with_two_tensors,
)

# Blocks of NF4 (64 elements) and of its scales (4 of those) end where 2, 3 and 4 shards do.
SIZE = 96

Pair = tuple[nn.Module, nn.Module]


def plain_layers(hidden: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, hidden), nn.Tanh(), nn.Linear(hidden, SIZE)).to(dtype)


def converted(convert: Callable[[Tensor], Tensor], hidden: int) -> nn.Module:
    model: Any = plain_layers(hidden, torch.float32)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(convert(layer.weight.detach()))
    return model


def two_tensors(hidden: int) -> Pair:
    plain = plain_layers(hidden, torch.float64)
    return with_two_tensors(copy.deepcopy(plain)), plain


def scaled(kind: type[Scaled], style: str) -> Callable[[int], Pair]:
    def make(hidden: int) -> Pair:
        plain = plain_layers(hidden, torch.float64)
        return with_scaled(copy.deepcopy(plain), kind, style), plain

    return make


def nested(hidden: int) -> Pair:
    plain = plain_layers(hidden, torch.float64)
    return with_nested(copy.deepcopy(plain)), plain


class Lora(nn.Module):
    """A frozen NF4 weight and a trained low-rank one."""

    def __init__(self, size_in: int, size_out: int) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.base = nn.Linear(size_in, size_out, bias=False)
        base = to_nf4(self.base.weight.detach(), 64, 4)
        self.base.weight = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, size_in) * 0.1)
        self.up = nn.Parameter(torch.zeros(size_out, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def qlora(hidden: int) -> Pair:
    def make() -> nn.Module:
        torch.manual_seed(0)
        rows = hidden // 16 * 16  # of whole blocks, also on 2 ranks
        return nn.Sequential(Lora(SIZE, rows), nn.Tanh(), Lora(rows, SIZE))

    return make(), make()


def int8_mixed_precision(hidden: int) -> Pair:
    from torchao.prototype.quantized_training import int8_mixed_precision as ao

    def convert(weight: Tensor) -> Tensor:
        config = ao.Int8MixedPrecisionTrainingConfig()
        return ao.Int8MixedPrecisionTrainingLinearWeight(weight, config)

    return converted(convert, hidden), converted(convert, hidden)


def int8_weights(hidden: int) -> Pair:
    from torchao.prototype.quantized_training import int8

    _without_random_rounding(int8)
    convert = int8.Int8QuantizedTrainingLinearWeight.from_float
    return converted(convert, hidden), converted(convert, hidden)


def _without_random_rounding(int8: Any) -> None:
    # Rounding draws as many numbers as a rank has rows: other ones than one process.
    original = getattr(int8, "_original", int8.quantize_int8_rowwise)
    int8._original = original
    int8.quantize_int8_rowwise = lambda t, stochastic_rounding=False, eps=1e-12: original(t)


def bitnet(hidden: int) -> Pair:
    from torchao.prototype.quantized_training.bitnet import BitNetTrainingLinearWeight

    convert, rows = BitNetTrainingLinearWeight, hidden // 4 * 4  # it packs 4 numbers in a byte
    return converted(convert, rows), converted(convert, rows)


def float8(hidden: int) -> Pair:
    from torchao import float8 as ao

    def make() -> nn.Module:
        config = ao.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        return ao.convert_to_float8_training(plain_layers(hidden, torch.float32), config=config)

    return make(), make()


def plain(hidden: int) -> Pair:
    """For optimizers whose state is a subclass: of parts of at least 4096 elements."""
    rows = hidden // 16 * 32
    return plain_layers(rows, torch.float32), plain_layers(rows, torch.float32)


def adam(model: nn.Module) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=1e-2, foreach=False)


def of_torchao(name: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        import torchao.optim

        return getattr(torchao.optim, name)(model.parameters(), lr=1e-2)

    return make


@dataclass(frozen=True)
class Row:
    """A kind of model.

    Attributes:
        make: the pair of models.
        optimizer: makes the optimizer of each.
        tolerance: how far losses and parameters may be from those of one process, relative to the
            largest, and why; 0: bitwise, where a sum over the ranks has one order.
        needs_torchao: whether torchao must be installed.
        block: the ``shard_granularity`` of shards in blocks.
    """

    make: Callable[[int], Pair]
    optimizer: Callable[[nn.Module], Any] = adam
    tolerance: float = 0.0
    needs_torchao: bool = True
    block: int | Callable[[nn.Parameter], int] = 16


# Shards whose state is quantized as that of the whole is.
QUANTIZED = block_rows(256, min_numel=4096)

ROWS: dict[str, Row] = {
    "TwoTensor": Row(two_tensors, needs_torchao=False),
    "own class, `(mesh)`": Row(scaled(OfMesh, "replaces an attribute"), needs_torchao=False),
    "own class, five arguments": Row(scaled(OfModule, "returns new objects"), needs_torchao=False),
    "own class, pads itself": Row(
        scaled(Padding, "writes into inner tensors"), needs_torchao=False
    ),
    "own class, nested": Row(nested, needs_torchao=False),
    "NF4 with LoRA": Row(qlora),
    "int8 mixed precision": Row(int8_mixed_precision),
    "int8 weights": Row(int8_weights),
    # Its scale is the mean of means over the ranks, which rounds in another order than one mean.
    "BitNet": Row(bitnet, tolerance=1e-5),
    "float8": Row(float8),
    "AdamW8bit": Row(plain, of_torchao("AdamW8bit"), block=QUANTIZED),
    "AdamW4bit": Row(plain, of_torchao("AdamW4bit"), block=QUANTIZED),
    "AdamWFp8": Row(plain, of_torchao("AdamWFp8"), block=QUANTIZED),
}
