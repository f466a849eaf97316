"""How the gather of one block is batched, from 8 to 512 ranks: from the layout alone.

No process group, no memory: models are on the meta device, and where each parameter lies is
arithmetic on its shape. Hosts have 8 GPUs. For three ways of batching (the library's, everything
from 64 KiB per rank on direct, everything in one pack), the time of the gather and its copies by
NCCL's own model (`nccl_model`): not measured.

    python -m benchmarks.batches [--write-docs]
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from fsdp2.describe.bucket_bytes import ParameterFacts, buckets_of
from fsdp2.sharding.layout import DIRECT_MIN_BYTES

from .machine import REPOSITORY
from .nccl_model import Links, copy_seconds, h100, seconds
from .published_models import LlamaBlock
from .report import row, write_readme

NUM_RANKS = (8, 64, 512)
DTYPE = torch.bfloat16  # of computation, so of the gather
MARKERS = ("<!-- batches:begin -->", "<!-- batches:end -->")


class MixtureBlock(nn.Module):
    """The parameters of a block with a module per expert, in the sizes of Qwen3-30B-A3B."""

    def __init__(self, width: int = 2048, hidden: int = 768, num_experts: int = 128) -> None:
        super().__init__()
        heads, kv_heads, head = 32, 4, 128
        self.norms = nn.ModuleList(nn.RMSNorm(size) for size in (width, width, head, head))
        self.q = nn.Linear(width, heads * head, bias=False)
        self.k = nn.Linear(width, kv_heads * head, bias=False)
        self.v = nn.Linear(width, kv_heads * head, bias=False)
        self.o = nn.Linear(heads * head, width, bias=False)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(_expert(width, hidden) for _ in range(num_experts))


def _expert(width: int, hidden: int) -> nn.Module:
    pairs = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in pairs.items()})


class GPT2Block(nn.Module):
    """The parameters of a block of GPT-2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


UNITS = {
    "Llama-3-8B block": lambda: LlamaBlock(4096, 14336, 32, 8),
    "Llama-3-70B block": lambda: LlamaBlock(8192, 28672, 64, 8),
    "128 experts": MixtureBlock,
    "GPT-2 block": lambda: GPT2Block(768),
}


# By name in the table: `fully_shard`'s direct_min_bytes.
WAYS: dict[str, int | None] = {"the rule": None, "from 64 KiB": DIRECT_MIN_BYTES, "packed": 1 << 60}


@dataclass(frozen=True)
class Batch:
    """The gather of one unit.

    Attributes:
        slices: bytes that a rank sends of each entry of the batched call: direct parameters, and
            the pack.
        packed_bytes: of whole parameters that are copied to their places after the gather.
        links: between the ranks.
    """

    slices: tuple[int, ...]
    packed_bytes: int
    links: Links

    @property
    def seconds(self) -> float:
        """Of the gather and of the copies, by NCCL's model."""
        return seconds(self.slices, self.links) + copy_seconds(self.packed_bytes)


def batch_of(unit: nn.Module, num_ranks: int, *, direct_min_bytes: int | None = None) -> Batch:
    """How `fsdp2.fully_shard` batches the gather of ``unit`` on hosts with 8 GPUs each."""
    links = h100(num_ranks)
    params = [
        ParameterFacts(name, tuple(param.shape), param.dtype, param_dtype=DTYPE)
        for name, param in unit.named_parameters()
    ]
    (bucket,) = buckets_of(
        params,
        num_ranks,
        1,
        reduce_dtype=torch.float32,
        direct_min_bytes=direct_min_bytes,
        num_hosts=links.num_hosts,
    )
    layout, size = bucket.layout, DTYPE.itemsize
    slices = [layout.slots[i].shard_numel * size for i in layout.direct]
    pack = [layout.pack_numel * size] if layout.pack_numel else []
    packed = sum(prod(layout.slots[i].shape) for i in layout.packed) * size
    return Batch((*slices, *pack), packed, links)


def table() -> str:
    """The table, in Markdown."""
    header = ["gather of", "ranks", "packed by the rule", *(f"{way}, µs" for way in WAYS)]
    lines = [row(header), row(["---"] + ["---:"] * (len(header) - 1))]
    for name, make in UNITS.items():
        with torch.device("meta"):
            unit = make()
        whole = sum(param.numel() for param in unit.parameters()) * DTYPE.itemsize
        for num_ranks in NUM_RANKS:
            ways = [batch_of(unit, num_ranks, direct_min_bytes=least) for least in WAYS.values()]
            cells = [name, f"{num_ranks}", f"{ways[0].packed_bytes / whole:.1%}"]
            cells += [f"{way.seconds * 1e6:,.0f}" for way in ways]
            lines.append(row(cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument(
        "--write-docs", action="store_true", help="put it into docs/developers/streams.md"
    )
    options = parser.parse_args(arguments)
    text = table()
    print(text)
    if options.write_docs:
        write_readme(REPOSITORY / "docs" / "developers" / "streams.md", text, *MARKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
