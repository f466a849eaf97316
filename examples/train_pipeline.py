"""Train a pipeline of fully sharded stages on 2 x 2 processes.

    torchrun --standalone --nproc-per-node 4 examples/train_pipeline.py --schedule ZBVZeroBubble

Four ranks form a mesh of two dims. Along "pipeline", the layers of a language model are split into
stages; `torch.distributed.pipelining` sends activations forward and gradients backward, one
micro-batch after the other. Along "shard", `fully_shard` shards the parameters of each stage, and
two ranks work on different batches:

                     pipeline 0       pipeline 1
        shard 0      rank 0           rank 2          batch 0
        shard 1      rank 1           rank 3          batch 1
                     first layers     last layers

Schedules with two stages per rank split the model into four.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from common.lm_model import LanguageModel, ModelConfig
from common.lm_report import Numbers
from common.options import OneLineParser, fail, positive
from common.text_data import Batches, read_text
from fsdp2 import fully_shard

# The stages of each of the two ranks of a pipeline, and the number of stages.
ONE_EACH = ([[0], [1]], 2)
LOOPED = ([[0, 2], [1, 3]], 4)
V_SHAPED = ([[0, 3], [1, 2]], 4)
SCHEDULES = {
    "GPipe": ONE_EACH,
    "1F1B": ONE_EACH,
    "Interleaved1F1B": LOOPED,
    "LoopedBFS": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": V_SHAPED,
    "DualPipeV": V_SHAPED,
}
NUM_MICRO_BATCHES = 4


class Stage(nn.Module):
    """A part of the model: some blocks. The first also has the embedding, the last the head."""

    def __init__(self, model: LanguageModel, index: int, num_stages: int) -> None:
        super().__init__()
        per_stage = len(model.blocks) // num_stages
        self.embedding = model.embedding if index == 0 else nn.Identity()
        # The same names as in the whole model: a checkpoint of all stages is one of the model.
        first = index * per_stage
        own = {str(i): model.blocks[i] for i in range(first, first + per_stage)}
        self.blocks = nn.ModuleDict(own)
        is_last = index == num_stages - 1
        self.norm = model.norm if is_last else nn.Identity()
        self.head = model.head if is_last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parse_options() -> Namespace:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=30, help="optimizer steps")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument(
        "--accumulate-sharded",
        action="store_true",
        help="reduce gradients in every micro-batch, for less memory",
    )
    options = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        fail("start it with torchrun --standalone --nproc-per-node 4")
    return options


def make_stages(
    indices: list[int],
    num_stages: int,
    mesh: DeviceMesh,
    device: torch.device,
    accumulate_sharded: bool,
) -> dict[int, Stage]:
    """Create this rank's stages of the model, sharded over ``mesh``.

    A stage runs several micro-batches before its first backward. Gathering its parameters again for
    each would need much communication, so they stay gathered until the end of the step.
    """
    torch.manual_seed(0)  # the same model on every rank
    model = LanguageModel(ModelConfig(dim=128, num_layers=4, num_heads=4, hidden=384))
    stages = {i: Stage(model, i, num_stages) for i in indices}
    for stage in stages.values():
        stage.to(device)
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(stage, mesh=mesh, reshard_after_forward=False)
        # By default, whole gradients accumulate and are reduced once per step.
        stage.set_accumulate_sharded(accumulate_sharded)  # type: ignore[operator]
    return stages


def run_schedule(
    schedule: Any, has_first: bool, has_last: bool, inputs: Tensor, targets: Tensor
) -> float:
    """Forward and backward of all micro-batches; returns the mean loss, or NaN if the last stage
    is on another rank."""
    losses: list[Tensor] = []
    given = (inputs,) if has_first else ()
    if has_last:
        schedule.step(*given, target=targets, losses=losses)
    else:
        schedule.step(*given)
    return torch.stack(losses).mean().item() if losses else math.nan


def main() -> None:
    options = parse_options()
    # Adjacent ranks shard parameters, which needs more communication than stages do.
    device_type = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
    if device_type == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("pipeline", "shard"))
    pipeline, shard = mesh["pipeline"], mesh["shard"]

    placed, num_stages = SCHEDULES[options.schedule]
    indices = placed[pipeline.get_local_rank()]
    stages = make_stages(indices, num_stages, shard, device, options.accumulate_sharded)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)

    # The schedule drives the stages: it decides when they are gathered, freed and reduced.
    staged = [
        PipelineStage(stage, index, num_stages, device, group=pipeline.get_group())
        for index, stage in stages.items()
    ]
    make = get_schedule_class(options.schedule)
    one_each = placed is ONE_EACH[0]
    schedule = make(staged[0] if one_each else staged, NUM_MICRO_BATCHES, loss_fn=loss_of)

    # Ranks of one pipeline need the same batch, so the shard coordinate selects it.
    text = read_text(None)
    shard_rank = shard.get_local_rank()
    batches = Batches(text.train, length=64, batch=8, rank=shard_rank, num_ranks=2, seed=0)
    numbers, losses = Numbers(), []
    for step in range(1, options.steps + 1):
        inputs, targets = (ids.to(device) for ids in batches.next())
        loss = run_schedule(schedule, 0 in stages, num_stages - 1 in stages, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(numbers.of_all_ranks(loss).nanmean()))
        if dist.get_rank() == 0 and (step in (1, options.steps) or step % 10 == 0):
            print(f"step {step}/{options.steps}: loss {losses[-1]:.3f}", flush=True)

    dist.destroy_process_group()
    # All ranks have the same losses, so all of them exit with the same status.
    if losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
