"""Pieces of a training step that several measures share, and the check that variants agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .models import LM, LMConfig, lm_loss
from .variants import Variant

# Largest relative difference to the plain model: losses, gradient norms. Sums in another order
# are all that differs in fp32; in bf16 the order also decides how a gradient is rounded.
TOLERANCES = {False: (1e-6, 1e-5), True: (1e-4, 1e-3)}


class DisagreementError(RuntimeError):
    """Variants that should train the same model do not."""


def make_lm(config: LMConfig) -> LM:
    """The language model in fp32 on the CPU, with the same initial weights at every call."""
    torch.manual_seed(0)
    return LM(config)


def random_tokens(
    config: LMConfig, batch_size: int, tokens: int, seed: int = 1, rank: int | None = None
) -> Tensor:
    """Token ids and targets of this rank, or of `rank`: (2, batch size, tokens)."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(config.vocab, (2, batch_size, tokens), generator=generator)


def train_step(variant: Variant, batch: Tensor) -> float:
    """Forward and backward on (tokens, targets); returns this rank's loss."""
    loss = lm_loss(variant.model(batch[0]), batch[1])
    loss.backward()
    return loss.item()


def mean_over_ranks(number: float) -> float:
    """The mean of a number over the ranks."""
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def check_agreement(results: dict[str, dict[str, Any]], bf16: bool) -> None:
    """Compares every variant's `losses` and `gradient_norms` with the plain model's.

    Raises:
        DisagreementError: One differs by more than rounding explains.
    """
    for key, tolerance in zip(("losses", "gradient_norms"), TOLERANCES[bf16], strict=True):
        expected = results["plain"][key]
        for name, result in results.items():
            for i, (ours, theirs) in enumerate(zip(result[key], expected, strict=True)):
                if not abs(ours - theirs) <= tolerance * abs(theirs):
                    raise DisagreementError(
                        f"{name}: {key}[{i}] is {ours}, the plain model's is {theirs}; "
                        f"allowed is a relative difference of {tolerance}"
                    )
