"""The model of Megatron's tables computes, distributed, what it computes alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from benchmarks.published_megatron import (
    MegatronGPT,
    cores_of,
    parallelize_megatron,
    split_megatron,
)
from harness import cached_mesh, cpu_only, distributed, ours_only
from parts import assert_gradients_of_parts
from reference import assert_same

pytestmark = [ours_only("a model of the benchmarks"), cpu_only("a model of the benchmarks")]


def _model() -> MegatronGPT:
    torch.manual_seed(0)
    return MegatronGPT(width=8, num_layers=4, num_heads=4, vocab=12, length=6, dropout=0.0).double()


@pytest.mark.parametrize("parts", [True, False])
@distributed(2)
def test_losses_and_gradients_are_those_of_one_rank(parts: bool) -> None:
    plain, model = _model(), _model()
    parallelize_megatron(model, cached_mesh(2), parts=parts)
    tokens = torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(1))
    losses = [each(tokens) for each in (plain, model)]
    assert_same(losses[1], losses[0], "losses")
    for each in losses:
        each.mean().backward()
    assert (
        assert_gradients_of_parts(model, plain) == 2 + 4 * 6
    )  # (of what is plain, ranks have parts of the gradients)


@distributed(2)
def test_stages_send_parts_of_what_all_have() -> None:
    """Ranks with all of the sequence send a part each, and put parts together."""
    model, plain = _model(), _model()
    parallelize_megatron(model, cached_mesh(2), parts=False)
    tokens = torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(1))
    x: Any = tokens
    sent: list[torch.Tensor] = []
    for stage in split_megatron(model, 2):
        x = stage(x)
        sent.append(x)
    assert sent[0].shape == (3, 3, 8)  # half of the sequence
    losses = plain(tokens)
    assert_same(x, losses, "losses")
    x.mean().backward()
    losses.mean().backward()
    for found, expected in (
        (model.layers[0].qkv.weight, plain.layers[0].qkv.weight),
        (model.layers[0].norm1.weight, plain.layers[0].norm1.weight),
    ):
        grad = found.grad.full_tensor() if isinstance(found, DTensor) else found.grad
        assert_same(grad.float(), expected.grad.float(), "gradient")


def test_stages_one_after_the_other_are_the_model() -> None:
    model = _model()
    tokens = torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(1))
    x = tokens
    for stage in split_megatron(model, 2):
        x = stage(x)
    assert_same(x, model(tokens), "losses")
    with pytest.raises(ValueError, match="4 blocks cannot be divided into 3 stages"):
        split_megatron(model, 3)
    assert all(model.get_submodule(name) for name in cores_of(4))
