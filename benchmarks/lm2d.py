"""The language model, tensor parallel on one mesh dim and sharded on the other: its wall time.

The tensor parallelism is torch's and the same for all variants; only what shards the rest differs.
It is what torchtitan does to a Llama: embedding split by rows, activations between the layers
sharded by sequence, matrices in pairs by columns and rows, and a loss on logits that stay sharded
by vocabulary. "plain" is that model without data parallelism: what all variants pay anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from .lm import Run, take_turns
from .models import LM, LMConfig, lm_loss
from .ranks import progress
from .steps import make_lm, random_tokens
from .variants import average_gradients, build

TENSOR_PARALLEL = 2


def tensor_parallel(model: LM, mesh: DeviceMesh) -> LM:
    """Applies torchtitan's plan over the ranks of the 1-D ``mesh``; returns the model."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    norms = ("attention_norm", "mlp_norm")
    columns = dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), ColwiseParallel())
    rows = dict.fromkeys(("wo", "w2"), RowwiseParallel(output_layouts=Shard(1)))
    # Gathered once for the matrices that read it.
    gathered = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    for block in model.blocks:
        parallelize_module(
            block, mesh, {**dict.fromkeys(norms, SequenceParallel()), **columns, **rows}
        )
        parallelize_module(block, mesh, dict.fromkeys(norms, gathered))
    return model


class Run2D(Run):
    """One variant in training; ranks that share tensors see the same batch."""

    def __init__(
        self, name: str, config: LMConfig, batch_size: int, tokens: int, mesh: DeviceMesh
    ) -> None:
        def make() -> nn.Module:
            return tensor_parallel(make_lm(config), mesh["tensor"])

        variant = build(name, make, mesh["data"], bf16=False)
        self.data_rank = mesh.get_local_rank("data")
        super().__init__(variant, config, batch_size, tokens)
        self.data_group = mesh.get_group("data")

    def make_batches(self, *sizes: int) -> list[Tensor]:
        return [random_tokens(self.config, *sizes, seed, rank=self.data_rank) for seed in range(4)]

    def forward_backward(self, batch: Tensor) -> float:
        with loss_parallel():
            loss = lm_loss(self.variant.model(batch[0]), batch[1])
            loss.backward()
        return whole(loss).item()

    def average(self) -> None:
        average_gradients(self.variant, self.data_group)

    def norm(self) -> float:
        """Of whole gradients: what is replicated must count once."""
        squares = [
            whole(p.grad).double().square().sum()
            for p in self.variant.model.parameters()
            if p.grad is not None
        ]
        return torch.stack(squares).sum().sqrt().item()


def whole(tensor: Tensor) -> Tensor:
    """The whole of a DTensor; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def measure(
    names: list[str], config: LMConfig, batch_size: int, tokens: int, rounds: int, iters: int
) -> dict[str, Any]:
    """Times the named variants on this rank of a mesh of (ranks / 2) x 2: data x tensor parallel.

    Args:
        names: Variants, in the order of the first round.
        config: Sizes of the model.
        batch_size: Sequences per data-parallel rank.
        tokens: Tokens per sequence.
        rounds: How often each variant has its turn.
        iters: Timed steps per turn.

    Returns:
        What `lm.measure` returns.
    """
    shape = (dist.get_world_size() // TENSOR_PARALLEL, TENSOR_PARALLEL)
    runs: list[Run] = []
    for name in names:
        progress(f"lm-2d: building {name}")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        runs.append(Run2D(name, config, batch_size, tokens, mesh))
    return take_turns(runs, "lm-2d", rounds, iters)
