"""Train a mixture of experts, with the experts on a separate mesh.

    torchrun --standalone --nproc-per-node 4 examples/train_moe.py

Every rank has its own batch. Attention, router, embedding and head are data-parallel, and
`fully_shard` shards them over all four ranks. For the experts, the same ranks form a mesh of two
dims. Along "ep", each rank keeps half of the experts, and tokens are sent to the ranks of their
experts. Along "efsdp", two ranks with the same experts shard their parameters:

                        ep 0                  ep 1
        efsdp 0         rank 0                rank 1
        efsdp 1         rank 2                rank 3
                        experts 0 to 3        experts 4 to 7
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from common.lm_model import LanguageModel, ModelConfig
from common.lm_report import Numbers
from common.options import OneLineParser, fail, positive
from common.text_data import Batches, read_text
from fsdp2 import fully_shard
from fsdp2.experts import TokenExchange, local_experts, shard_experts

CHOICES = 2  # experts per token


class Experts(nn.Module):
    """The feed-forward layers of all experts; dim 0 of each weight is the expert."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden) / math.sqrt(dim))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, dim) / math.sqrt(hidden))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        # This rank's experts, and the rows of each expert.
        up, down = local_experts(self.up), local_experts(self.down)
        parts = zip(rows.split(counts), up, down, strict=True)
        return torch.cat([F.silu(part @ u) @ d for part, u, d in parts])


class MixtureOfExperts(nn.Module):
    """Replaces a block's feed-forward layer: every token goes to its best experts."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.mesh: DeviceMesh | None = None  # all experts are here
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(num_experts, dim, hidden)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, ids = scores.topk(CHOICES)
        # Without this term of the loss, a few experts would get all tokens. Its minimum is 1, if
        # all experts are chosen equally often (Switch Transformer, arXiv 2101.03961).
        share = F.one_hot(ids, self.num_experts).float().mean((0, 1))
        self.balance = self.num_experts * (share * scores.mean(0)).sum()

        exchange = TokenExchange(ids, self.num_experts, self.mesh)
        rows = exchange.dispatch(tokens)  # to the ranks of their experts
        rows = self.experts(rows, exchange.counts)
        return exchange.combine(rows, weights).view_as(x)  # and back


def main() -> None:
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=positive, default=30, help="optimizer steps")
    parser.add_argument("--experts", type=positive, default=8, help="number of experts")
    options = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        fail("start it with torchrun --standalone --nproc-per-node 4")
    if options.experts < CHOICES:
        fail(f"--experts: every token goes to {CHOICES} of them")

    # Two views of the same ranks.
    device_type = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data_mesh = init_device_mesh(device_type, (4,), mesh_dim_names=("dp",))
    expert_mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("efsdp", "ep"))

    # A language model whose feed-forward layers are mixtures of experts. Shard the experts first,
    # and then the modules around them.
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(dim=128, num_layers=2, num_heads=4, hidden=384))
    mixtures = [MixtureOfExperts(options.experts, 128, 192) for _ in model.blocks]
    for block, mixture in zip(model.blocks, mixtures, strict=True):
        block.feed_forward = mixture
    model.to(device_type)
    for block, mixture in zip(model.blocks, mixtures, strict=True):
        mixture.mesh = expert_mesh["ep"]
        shard_experts(mixture.experts, mesh=expert_mesh)
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    # The parameters are on two meshes, but a multi-tensor step (foreach) needs a single mesh.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    if dist.get_rank() == 0:
        show_placements(model)

    text = read_text(None)
    batches = Batches(text.train, length=64, batch=4, rank=dist.get_rank(), num_ranks=4, seed=0)
    numbers, losses = Numbers(), []
    for step in range(1, options.steps + 1):
        inputs, targets = (ids.to(device_type) for ids in batches.next())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        balance = torch.stack([mixture.balance for mixture in mixtures]).mean()
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        means = numbers.of_all_ranks(loss.item(), balance.item()).mean(0)
        losses.append(float(means[0]))
        if dist.get_rank() == 0 and (step in (1, options.steps) or step % 10 == 0):
            print(
                f"step {step}/{options.steps}: loss {losses[-1]:.3f}, balance {means[1]:.2f}",
                flush=True,
            )

    dist.destroy_process_group()
    # All ranks have the same losses, so all of them exit with the same status.
    if losses[-1] >= losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


def show_placements(model: LanguageModel) -> None:
    """Print how the parameters of one block are placed on the two meshes."""
    for name, parameter in model.blocks[0].named_parameters():
        assert isinstance(parameter, DTensor)
        print(
            f"{name:<27} {tuple(parameter.shape)!s:<15} "
            f"on {parameter.device_mesh.mesh_dim_names}: {parameter.placements}, "
            f"here {tuple(parameter.to_local().shape)}"
        )


if __name__ == "__main__":
    main()
