"""The models that the parity tests train: small, and each awkward in its own way.

Each `Case` says how to build the model, which of its submodules become units (the root always
does), what a batch of a rank and a step is, and how the loss comes out of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank + 1)


def normal_batch(*shape: int) -> Callable[[int, int, torch.dtype], tuple[Any, ...]]:
    """A batch function: one tensor of this shape, different for every step and rank."""

    def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
        # Drawn in fp64 and rounded, so that dtypes see the same numbers.
        generator = _generator(step, rank)
        return (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype),)

    return batch


def square_loss(model: nn.Module, *inputs: Any) -> Tensor:
    """The mean of (output - 1) squared; output any tensor."""
    return (model(*inputs) - 1).square().mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its units and its data."""

    name: str
    build: Callable[[], nn.Module]
    units: Callable[[nn.Module], list[nn.Module]]
    batch: Callable[[int, int, torch.dtype], tuple[Any, ...]]
    loss: Callable[..., Tensor] = square_loss


def run_backward(case: Case, model: nn.Module, step: int, **options: Any) -> None:
    """Forward and backward on this rank's batch of a step, in float64."""
    batch = case.batch(step, dist.get_rank(), torch.float64)
    case.loss(model, *batch).backward(**options)


def no_units(model: nn.Module) -> list[nn.Module]:
    """Only the root is sharded."""
    return []


def children(model: nn.Module) -> list[nn.Module]:
    """Every child that has parameters is a unit."""
    return [child for child in model.children() if any(True for _ in child.parameters())]


# --------------------------------------------------------------------------------------- MLP


class LinearBlocks(nn.Module):
    """Six residual blocks, each a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x


def build_mlp() -> nn.Module:
    """Dims that no world size divides; the last weight has one row."""
    layers = [nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers)


MLP = Case("mlp", build_mlp, children, normal_batch(6, 7))
MLP_ROOT = Case("mlp_root_only", build_mlp, no_units, normal_batch(6, 7))


def build_even_mlp() -> nn.Module:
    """Dims that 1, 2, 3 and 4 divide."""
    return nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12)
    )


EVEN_MLP = Case("even_mlp", build_even_mlp, children, normal_batch(5, 12))


# ------------------------------------------------------------------------------- transformer


class Block(nn.Module):
    """Pre-norm causal attention and an MLP. No bias on the keys: its gradient would be noise."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model whose output head is its embedding."""

    def __init__(self, vocabulary: int = 29, dim: int = 12, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, 3) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_batches(vocabulary: int, sequences: int, length: int) -> Callable[..., tuple[Any, ...]]:
    """A batch function: token ids, and the target of each position."""

    def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
        size = (sequences, length + 1)
        tokens = torch.randint(0, vocabulary, size, generator=_generator(step, rank))
        return tokens[:, :-1], tokens[:, 1:]

    return batch


token_batch = token_batches(29, sequences=3, length=6)


def token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """A linear layer beside the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


TRANSFORMER = Case(
    "transformer",
    Transformer,
    lambda model: list(model.get_submodule("blocks").children()),
    token_batch,
    token_loss,
)


# --------------------------------------------------------------------------------------- CNN


def build_cnn() -> nn.Module:
    """Convolutions with batch norm, whose running statistics are each rank's own.

    The convolutions have no bias: before a batch norm its gradient would be noise.
    """

    def stage(channels_in: int, channels_out: int) -> nn.Module:
        conv = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(channels_out), nn.Tanh())

    return nn.Sequential(stage(3, 5), stage(5, 7), nn.Flatten(), nn.Linear(7 * 25, 3))


CNN = Case("cnn", build_cnn, children, normal_batch(4, 3, 5, 5))


# --------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    """Calls one cell many times in a forward; the cell is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 5)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return self.head(state)


RECURRENT = Case("recurrent", Recurrent, children, normal_batch(4, 6, 3))


# ------------------------------------------------------------------- unused and conditional


class Conditional(nn.Module):
    """One branch in even steps, another in odd ones, and parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.even = nn.Linear(7, 7)
        self.odd = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.first(x).tanh()
        x = (self.even if step % 2 == 0 else self.odd)(x).tanh()
        return self.last(x)


def conditional_batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A normal batch and the step, which chooses the branch: the same on all ranks."""
    return (*normal_batch(4, 5)(step, rank, dtype), step)


CONDITIONAL = Case("conditional", Conditional, children, conditional_batch)
CONDITIONAL_ONE_UNIT = Case("conditional_one_unit", Conditional, no_units, conditional_batch)


# ------------------------------------------------------------------------------------ nested


class Nested(nn.Module):
    """A unit that holds parameters of its own and two inner units, used around each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.inner1 = nn.Linear(6, 10)
        self.inner2 = nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner2(self.inner1(x * self.scale).tanh()) + x


def build_nested() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), Nested(), Nested(), nn.Linear(6, 3))


def nested_units(model: nn.Module) -> list[nn.Module]:
    """Inner units first, then the blocks around them; the linear layers belong to the root."""
    blocks = [m for m in model.children() if isinstance(m, Nested)]
    return [u for b in blocks for u in (b.inner1, b.inner2, b)]


NESTED = Case("nested", build_nested, nested_units, normal_batch(5, 4))


# -------------------------------------------------------------------------------------- LoRA


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank part beside it."""

    def __init__(self, dim_in: int, dim_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, dim_in) / 2)
        self.up = nn.Parameter(torch.randn(dim_out, rank) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def build_lora() -> nn.Module:
    """The input of the first unit needs no gradient; one whole unit is frozen."""
    frozen = nn.Linear(9, 9)
    frozen.requires_grad_(False)
    tanh = nn.Tanh
    return nn.Sequential(
        LoraLinear(5, 9), tanh(), frozen, tanh(), LoraLinear(9, 9), nn.Linear(9, 3)
    )


LORA = Case("lora", build_lora, children, normal_batch(4, 5))

PARITY_CASES = [
    MLP,
    MLP_ROOT,
    EVEN_MLP,
    TRANSFORMER,
    CNN,
    RECURRENT,
    CONDITIONAL,
    CONDITIONAL_ONE_UNIT,
    NESTED,
    LORA,
]
BY_NAME = {case.name: case for case in PARITY_CASES}
