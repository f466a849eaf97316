"""Combine tensor parallelism and sharding on a 2 x 2 mesh.

    torchrun --standalone --nproc-per-node 4 examples/train_2d.py

Four ranks form a mesh of two dims. Along "tensor", two ranks split every matrix product of a block
between them and work on the same batch. Along "shard", `fully_shard` shards each rank's part of the
parameters, and two ranks work on different batches:

                  tensor 0   tensor 1
        shard 0   rank 0     rank 1      batch 0
        shard 1   rank 2     rank 3      batch 1

Every rank holds a quarter of each large matrix. As in torchtitan, "tensor" also includes:

- sequence parallelism: between the matrix products, a rank holds its part of the sequence;
- loss parallelism: a rank holds the logits of its part of the vocabulary.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from common.lm_model import LanguageModel, ModelConfig
from common.lm_report import Numbers
from common.options import OneLineParser, fail, positive
from common.text_data import Batches, read_text
from fsdp2 import fully_shard


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=30, help="optimizer steps")
    steps = parser.parse_args().steps
    if os.environ.get("WORLD_SIZE") != "4":
        fail("start it with torchrun --standalone --nproc-per-node 4")

    # Adjacent ranks share matrix products, which need the most communication.
    device_type = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("shard", "tensor"))

    # The model is small, so every rank creates all of it. Tensor parallelism comes first; then
    # `fully_shard` shards parameters that are already DTensors.
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(dim=128, num_layers=2, num_heads=4, hidden=384))
    model.to(device_type)
    split_model(model, mesh["tensor"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if dist.get_rank() == 0:
        show_placements(model)

    # Ranks of one row need the same batch, so the shard coordinate selects it.
    text = read_text(None)
    shard_rank = mesh.get_local_rank("shard")
    batches = Batches(text.train, length=64, batch=8, rank=shard_rank, num_ranks=2, seed=0)
    numbers, losses = Numbers(), []
    for step in range(1, steps + 1):
        inputs, targets = (ids.to(device_type) for ids in batches.next())
        with loss_parallel():  # around the loss of sharded logits and its backward
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert isinstance(loss, DTensor)  # like the logits
        losses.append(float(numbers.of_all_ranks(loss.full_tensor().item()).mean()))
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0 or step == steps):
            print(f"step {step}/{steps}: loss {losses[-1]:.3f}", flush=True)

    dist.destroy_process_group()
    # All ranks have the same losses, so all of them exit with the same status.
    if losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


def split_model(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Split the model over the ranks of `mesh`, the dim "tensor".

    The first matrix of each pair is split by output features (Colwise), so a rank has some of the
    attention heads or hidden features. The second is split by input features (Rowwise) and takes
    exactly these, and the ranks' results are summed. The sums are scattered by sequence, dim 1 of
    the activations. Norms and residual sums work on this rank's part, which is gathered again
    before the next matrices. Embedding and head are split by vocabulary.
    """
    by_sequence, whole = Shard(1), Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=by_sequence),
        "norm": SequenceParallel(),
        # The logits stay split by vocabulary, for the parallel loss.
        "head": ColwiseParallel(
            input_layouts=by_sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, plan)
    gathered = PrepareModuleInput(input_layouts=by_sequence, desired_input_layouts=whole)
    block_plan = {
        "attention_norm": SequenceParallel(),
        "attention": gathered,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=by_sequence),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": gathered,
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=by_sequence),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan)


def show_placements(model: LanguageModel) -> None:
    """Print how a few parameters are placed on the mesh."""
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.0.") or "." not in name.removesuffix(".weight"):
            assert isinstance(parameter, DTensor)
            print(
                f"{name:<33} {tuple(parameter.shape)!s:<11} "
                f"on {parameter.device_mesh.mesh_dim_names}: {parameter.placements}, "
                f"here {tuple(parameter.to_local().shape)}"
            )


if __name__ == "__main__":
    main()
