"""The model of Llama 3 405B computes, distributed, what it computes alone, and what Llama is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.published_llama import (
    Llama405B,
    Llama405BBlock,
    parallelize_llama_405b,
    rotated,
    split_llama_405b,
)
from harness import cached_mesh, cpu_only, distributed, ours_only
from parts import assert_gradients_of_parts
from reference import assert_same

pytestmark = [ours_only("a model of the benchmarks"), cpu_only("a model of the benchmarks")]


def _model(num_layers: int = 3) -> Llama405B:
    torch.manual_seed(0)
    return Llama405B(
        width=16, num_layers=num_layers, num_heads=4, num_kv_heads=2, hidden=12, vocab=12, length=6
    ).double()


def _tokens() -> Tensor:
    return torch.randint(12, (3, 6), generator=torch.Generator().manual_seed(1))


def _written_out(block: Llama405BBlock, x: Tensor, table: Tensor) -> Tensor:
    """A block of one rank by plain operators."""
    length, batch, _ = x.shape
    qkv = block.qkv(block.norm1(x)).view(length, batch, 2, 4, 4)
    pairs = torch.view_as_complex(qkv[..., :3, :].unflatten(-1, (-1, 2)).contiguous())
    pairs = pairs * table[:, None, None, None]
    turned = torch.view_as_real(pairs).flatten(-2)
    q = turned[..., :2, :].flatten(2, 3)
    k, v = (t.repeat_interleave(2, 2) for t in (turned[..., 2, :], qkv[..., 3, :]))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / 2
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    x = x + block.proj(torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2))
    gate, up = block.up(block.norm2(x)).unflatten(-1, (-1, 2)).unbind(-1)
    return x + F.linear(F.silu(gate) * up, block.down.weight)


def test_a_block_is_attention_and_a_gated_layer() -> None:
    model = _model(1)
    [block] = model.layers
    results = []
    for forward in (block, lambda x, table: _written_out(block, x, table)):
        x = torch.randn(6, 3, 16, dtype=torch.double, generator=torch.Generator().manual_seed(2))
        x.requires_grad_()
        model.zero_grad()
        made = forward(x, model.table)
        made.square().sum().backward()
        results.append([made, x.grad, *(p.grad for p in block.parameters())])
    for found, expected in zip(*results, strict=True):
        assert_same(found, expected, "output or gradient")


def test_what_is_kept_of_a_block_is_counted_once() -> None:
    """Neither what is gathered nor what the gate makes is kept."""
    qkv = torch.randn(6, 3, 2, 4, 4, dtype=torch.double)
    for made in rotated(qkv, _model(1).table):
        assert made.untyped_storage().nbytes() == made.numel() * 8  # no view of all
    kept: list[Tensor] = []
    model = _model(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model.layers[0](torch.randn(6, 3, 16, dtype=torch.double), model.table)
    hidden = [t for t in kept if t.shape == (6, 3, 12)]
    assert not hidden
    assert [t for t in kept if t.shape == (6, 3, 24)]


@distributed(2)
def test_losses_and_gradients_are_those_of_one_rank() -> None:
    plain, model = _model(), _model()
    parallelize_llama_405b(model, cached_mesh(2))
    losses = [each(_tokens()) for each in (plain, model)]
    assert_same(losses[1], losses[0], "losses")
    for each in losses:
        each.mean().backward()
    assert (
        assert_gradients_of_parts(model, plain) == 2 + 3 * 4
    )  # (norms see a part of the sequence)


def test_stages_one_after_the_other_are_the_model() -> None:
    model = _model(6)
    for num_stages, blocks in ((1, [6]), (2, [3, 3]), (4, [1, 2, 2, 1]), (8, [0, *[1] * 6, 0])):
        stages = split_llama_405b(model, num_stages)
        assert [len(stage.layers) for stage in stages] == blocks
        x = _tokens()
        for stage in stages:
            x = stage(x)
        assert_same(x, model(_tokens()), "losses")
    with pytest.raises(ValueError, match="6 blocks, embedding and head cannot be divided into 3"):
        split_llama_405b(model, 3)
