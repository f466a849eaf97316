"""A small Llama-like model and the tensor parallelism that torchtitan gives such models.

The plan is torchtitan's for Llama 3: the embedding is split by rows of the vocabulary, between the
layers activations are sharded by sequence (so norms are sequence parallel), the two matrices of a
pair are split by columns and by rows, and the loss is computed on logits that stay sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

LENGTH = 8


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model."""

    vocabulary: int = 32
    dim: int = 8
    num_heads: int = 4
    hidden: int = 24
    num_layers: int = 2


EVEN = Sizes()
# Of 7 rows a tensor-parallel rank has 4 or 3, and two data-parallel ranks share those. Only the
# heads must come out even: a rank computes with whole ones.
ODD = Sizes(vocabulary=29, dim=10, num_heads=2, hidden=7)


class Attention(nn.Module):
    """Causal attention over the heads that this rank has."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.num_heads
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(sizes.dim, sizes.dim, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (x.shape[0], x.shape[1], -1, self.head_dim)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, sizes: Sizes = EVEN) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def token_batch(step: int, rank: int, sizes: Sizes = EVEN, num_sequences: int = 2) -> Tensor:
    """Ids and targets of data-parallel rank `rank`: (2, sequences, length)."""
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randint(sizes.vocabulary, (2, num_sequences, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean cross-entropy of the targets."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    embedding: str = "rowwise",
    sharded_logits: bool = True,
    local_hidden: bool = True,
    prepare_output: bool = False,
) -> None:
    """torchtitan's plan.

    Arguments:
        embedding: "rowwise", by rows of the vocabulary, or "colwise", by features.
        sharded_logits: leave the logits sharded by vocabulary, for `loss_parallel`.
        local_hidden: give the hidden features of SwiGLU to the model as plain tensors; without,
            as DTensors, which is what sizes need that the ranks do not divide.
        prepare_output: the feed-forward computes whole outputs, which are cut when they leave it.
    """
    if embedding == "rowwise":
        embedding_plan: Any = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    else:
        embedding_plan = ColwiseParallel(output_layouts=Shard(1))
    plan: dict[str, Any] = {
        "tok_embeddings": embedding_plan,
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if sharded_logits else Replicate(),
            use_local_output=not sharded_logits,
        ),
    }
    parallelize_module(model, mesh, plan)
    hidden = ColwiseParallel(use_local_output=local_hidden)
    layer_plan: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
        "feed_forward.w1": hidden,
        "feed_forward.w2": RowwiseParallel(
            output_layouts=Replicate() if prepare_output else Shard(1)
        ),
        "feed_forward.w3": hidden,
    }
    after = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    for layer in model.get_submodule("layers").children():
        parallelize_module(layer, mesh, layer_plan)
        if prepare_output:
            parallelize_module(layer, mesh, {"feed_forward": after})


def recompute_activations(model: nn.Module) -> None:
    """Wraps every layer, as torchtitan does before it shards them."""
    layers = model.get_submodule("layers")
    for name, layer in list(layers.named_children()):
        layers.register_module(name, checkpoint_wrapper(layer))


def shard_units(
    fully_shard: Callable[..., Any], model: nn.Module, *, mesh: DeviceMesh, **options: Any
) -> nn.Module:
    """The embedding, every layer, norm and head together, and the root."""
    fully_shard(model.tok_embeddings, mesh=mesh, **options)
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard([model.norm, model.output], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def losses_in_parallel(sharded_logits: bool) -> contextlib.AbstractContextManager[Any]:
    """Around the loss and its backward."""
    return loss_parallel() if sharded_logits else contextlib.nullcontext()
