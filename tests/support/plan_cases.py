"""Configurations whose estimates, predictions, tables and plans are kept as hashes: `plan_hashes`.

Small models on ranks that do not exist. Together they enter every choice that `estimate`,
`predict`, `sweep` and `plan` know, alone and beside others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from by_keywords import estimate, plan, predict, sweep
from fsdp2 import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2.experts import TokenExchange
from fsdp2.planning import Kernels, StateOffload, find_hardware

H100 = find_hardware("h100")
SLOW = replace(H100, network_bandwidth=2e9)
DISK = replace(H100, disk_read_bandwidth=3e9, disk_write_bandwidth=2e9)
KNOWN = replace(H100, kernels_range=(1.0, 1.0), links_range=(1.0, 1.0))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Attention(nn.Module):
    """Heads are counted by their width, so that ranks may have some of them."""

    def __init__(self, width: int, head: int = 8) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            p(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(made.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(number, width, 2 * width))
        self.down = nn.Parameter(torch.empty(number, 2 * width, width))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = rows.split(counts)
        made = [torch.relu(p @ self.up[i]) @ self.down[i] for i, p in enumerate(parts)]
        return torch.cat(made)


class Mixture(nn.Module):
    """Token t goes to experts t and t + 1."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.experts = Experts(number, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = torch.arange(len(flat), device=x.device) % self.number
        ids = torch.stack([first, (first + 1) % self.number], 1)
        exchange = TokenExchange(ids, self.number)
        return x + exchange.combine(self.experts(exchange.dispatch(flat), exchange.counts)).view_as(
            x
        )


class Block(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.feed = Mixture(width, experts) if experts else Dense(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.attention(x))


class Words(nn.Module):
    """Token ids to logits; as a stage of a pipeline, without a first or last layer."""

    def __init__(
        self, first: nn.Module | None, blocks: nn.ModuleList, last: nn.Module | None
    ) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, blocks, last

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x if self.last is None else self.last(x)


def model(width: int = 64, num_blocks: int = 4, experts: int = 0, rows: int = 101) -> Words:
    with torch.device("meta"):
        blocks = nn.ModuleList(Block(width, experts) for _ in range(num_blocks))
        return Words(nn.Embedding(rows, width), blocks, nn.Linear(width, rows))


def split(whole: Words, num_stages: int) -> list[Words]:
    count = len(whole.blocks) // num_stages
    return [
        Words(
            whole.first if i == 0 else None,
            whole.blocks[i * count : (i + 1) * count],
            whole.last if i == num_stages - 1 else None,
        )
        for i in range(num_stages)
    ]


def parallelize(whole: Words, mesh: DeviceMesh) -> None:
    """Attention by heads, and dense layers by columns and rows; experts are left alone."""
    for block in whole.blocks:
        assert isinstance(block, Block)
        colwise = dict.fromkeys(("q", "k", "v"), ColwiseParallel())
        parallelize_module(block.attention, mesh, {**colwise, "out": RowwiseParallel()})
        if isinstance(block.feed, Dense):
            dense = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.feed, mesh, dense)


def mean(out: Tensor) -> Tensor:
    return out.float().mean()


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        function: "estimate", "predict", "sweep" or "plan".
        ranks: the mesh or the number of ranks that it gets.
        hardware: of all but "estimate".
        sizes: of `model`.
        batch: samples and positions.
        long: whether it takes seconds.
    """

    function: str
    ranks: Any
    options: dict[str, Any] = field(default_factory=dict)
    hardware: Any = H100
    sizes: dict[str, int] = field(default_factory=dict)
    batch: tuple[int, int] = (2, 128)
    long: bool = False

    def run(self) -> Any:
        """What the call returns."""
        sample = torch.empty(self.batch, dtype=torch.long, device="meta")
        options = {"loss_fn": mean, **self.options}
        if self.function == "estimate":
            return estimate(model(**self.sizes), self.ranks, sample, **options)
        call: Any = {"predict": predict, "sweep": sweep, "plan": plan}[self.function]
        return call(model(**self.sizes), sample, self.hardware, self.ranks, **options)


def _estimate(ranks: Any, sizes: Any = None, **options: Any) -> Case:
    return Case("estimate", ranks, options, sizes=sizes or {})


def _predict(ranks: Any, sizes: Any = None, hardware: Any = H100, **options: Any) -> Case:
    return Case("predict", ranks, options, hardware, sizes or {})


def _sweep(ranks: Any, sizes: Any = None, hardware: Any = H100, **options: Any) -> Case:
    return Case("sweep", ranks, options, hardware, sizes or {})


def _plan(ranks: int, sizes: Any = None, *, long: bool = False, **options: Any) -> Case:
    hardware = options.pop("hardware", H100)
    return Case("plan", ranks, options, hardware, sizes or {}, long=long)


UNEVEN: dict[str, int] = {"rows": 97, "width": 48}
LARGE: dict[str, int] = {"rows": 32_000, "width": 2048, "num_blocks": 6}  # kernels count, too
MIXED: dict[str, int] = {"experts": 16}
PIPED: dict[str, Any] = {"split_stages": split, "micro_batches": 8, "mp_policy": BF16}
CPU_STATE = StateOffload("cpu", 0, min_bytes=512, chunk_bytes=20_000)
ONE: dict[str, Any] = {"activation_checkpointing": ("none",), "strategy": "full", "prefetch": 1}

CASES: dict[str, Case] = {
    "estimate: usual": _estimate(8),
    "estimate: hybrid": _estimate((4, 8), strategy="hybrid", mp_policy=BF16),
    "estimate: grad, sharded sums": _estimate(
        8, strategy="grad", micro_batches=3, accumulation="sharded", optimizer="momentum"
    ),
    "estimate: every micro-batch reduces": _estimate(
        (2, 4), strategy="hybrid", micro_batches=2, accumulation="every", optimizer=None
    ),
    "estimate: selective, offloaded activations": _estimate(
        16, activation_checkpointing="selective", max_saved_bytes=1_000_000, mp_policy=BF16
    ),
    "estimate: offloaded, some stays": _estimate(
        8, offload_policy=CPUOffloadPolicy(), max_device_bytes=60_000
    ),
    "estimate: state on the host": _estimate(4, offload_optimizer=CPU_STATE),
    "estimate: experts": _estimate(
        16, MIXED, experts="class:Experts", expert_ranks=8, activation_checkpointing="full"
    ),
    "estimate: compiled": _estimate(8, compiled=True, mp_policy=BF16),
    "estimate: on the CPU, over nodes": _estimate(8, device_type="cpu", ranks_per_node=2),
    "estimate: narrow messages, uneven rows, a budget": _estimate(
        8, UNEVEN, comm_policy=CommPolicy(gather=torch.float8_e4m3fn, reduce=torch.bfloat16),
        max_gathered_bytes=300_000,
    ),
    "estimate: blocks of rows": _estimate(8, UNEVEN, shard_granularity=lambda p: 16),
    "estimate: one unit, small ones replicated": _estimate(
        8, wrap="root", replicate_below=5000, direct_min_bytes=1 << 20
    ),
    "estimate: some compiled and recomputed": _estimate(
        8, compiled=("blocks.1",), activation_checkpointing="full",
        checkpoint_modules=["blocks.0", "blocks.2"], kernels=Kernels(attention="math"),
    ),
    "estimate: large": replace(_estimate(16, LARGE, mp_policy=BF16), batch=(4, 2048)),
    "predict: large": replace(
        _predict(32, LARGE, strategy="hybrid", mp_policy=BF16, micro_batches=2), batch=(4, 2048)
    ),
    "plan: large": replace(
        _plan(16, LARGE, mp_policy=BF16, activation_checkpointing=("none", "selective")),
        batch=(4, 2048),
    ),
    "predict: usual": _predict(16, mp_policy=BF16),
    "predict: hybrid over nodes": _predict(32, strategy="hybrid", prefetch=2, mp_policy=BF16),
    "predict: a mesh, resharded within nodes": _predict(
        (2, 16), strategy="hybrid", reshard_after_forward=8, memory_budget=10**7
    ),
    "predict: speeds that differ": _predict(16, hardware=replace(H100, speeds=[1.0, 0.5])),
    "predict: all is known": _predict(8, hardware=KNOWN, wrap=["blocks.0", "blocks.1"]),
    "predict: unsharded": _predict(8, strategy="none", optimizer="sgd", micro_batches=2),
    "predict: offloaded": _predict(
        8, offload_policy=CPUOffloadPolicy(), max_device_bytes=60_000, max_saved_bytes=500_000
    ),
    "predict: state in files": _predict(
        8, hardware=DISK, offload_optimizer=replace(CPU_STATE, to="files")
    ),
    "predict: compiled": _predict(8, compiled=True, activation_checkpointing="full"),
    "predict: experts": _predict(
        32, MIXED, SLOW, experts="class:Experts", expert_ranks=16, mp_policy=BF16
    ),
    "predict: tensor and context": _predict(
        32, parallelize=parallelize, tensor_ranks=2, context_ranks=4, mp_policy=BF16
    ),
    "predict: experts beside tensor ranks": _predict(
        16, MIXED, experts="class:Experts", expert_ranks=8, parallelize=parallelize,
        tensor_ranks=2, wrap="class:Block",
    ),
    "predict: 1F1B": _predict(16, pipeline_ranks=4, **PIPED),
    "predict: Interleaved1F1B, sums on shards": _predict(
        16, pipeline_ranks=2, schedule="Interleaved1F1B", stages_per_rank=2,
        accumulation="sharded", activation_checkpointing="full", **PIPED,
    ),
    "predict: ZBVZeroBubble": _predict(
        16, pipeline_ranks=2, schedule="ZBVZeroBubble", stages_per_rank=2, **PIPED
    ),
    "predict: experts and tensor ranks in stages": _predict(
        32, MIXED, experts="class:Experts", expert_ranks=4, pipeline_ranks=2,
        parallelize=parallelize, tensor_ranks=2, schedule="GPipe", **PIPED,
    ),
    "sweep: ranks and sizes": _sweep(
        [8, 32], samples=[1, 2], context=[64, 128], activation_checkpointing=["none", "full"]
    ),
    "sweep: strategies, accumulation, what fails": _sweep(
        [8, (2, 8)], strategy=["full", "hybrid"], micro_batches=[1, 2], prefetch=[1, 2],
        accumulation=["unsharded", "every"], reshard_after_forward=[None, 4],
    ),
    "sweep: degrees": _sweep(
        16, MIXED, experts="class:Experts", expert_ranks=[1, 4], parallelize=parallelize,
        tensor_ranks=[1, 2], context_ranks=[1, 2], compiled=[False],
    ),
    "sweep: pipelines": _sweep(
        16, pipeline_ranks=[1, 2], schedule=["1F1B", "Interleaved1F1B"], stages_per_rank=[1, 2],
        compiled=[False, True], **PIPED,
    ),
    "plan: usual": _plan(16, mp_policy=BF16),
    "plan: two modes": _plan(16, activation_checkpointing=("none", "full"), wrap="auto"),
    "plan: all is fixed": _plan(
        16, mesh_shape=(2, 8), strategy="hybrid", wrap="auto", reshard_after_forward=False,
        prefetch=2, checkpoint="selective", hardware=SLOW, comm_policy=CommPolicy(
            reduce=torch.bfloat16
        ),
    ),
    "plan: too little memory": _plan(
        8, memory_budget=2**30, max_gathered_bytes=300_000,
        activation_checkpointing=("none",), offload_policy=CPUOffloadPolicy(),
    ),
    "plan: speeds that differ": replace(
        _plan(16, hardware=replace(H100, speeds=[1.0, 0.5]), **ONE, wrap="auto"), batch=(8, 64)
    ),
    "plan: micro-batches": _plan(8, micro_batches=10, hardware=KNOWN, **ONE),
    "plan: experts": _plan(32, MIXED, hardware=SLOW, experts="class:Experts", **ONE),
    "plan: degrees": _plan(
        16, parallelize=parallelize, tensor_ranks=[1, 2], context_ranks=[1, 2], max_samples=16,
        shard_granularity=2, mp_policy=BF16, **ONE,
    ),
    "plan: pipelines": _plan(
        16, pipeline_ranks=[2, 4], schedule=["1F1B", "Interleaved1F1B"], wrap="auto", **ONE,
        **PIPED,
    ),
    "plan: pipelines of experts, all searched": _plan(
        32, MIXED, experts="class:Experts", long=True, **PIPED
    ),
}  # fmt: skip
