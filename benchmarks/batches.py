"""How the gather of one block is batched, from 8 to 4,096 ranks: from the layout alone.

No process group, no memory: models are on the meta device, and where each parameter lies is
arithmetic on its shape. Beside the limit that there is, the one that would be there if it were on
whole parameters, without a cap on their number.

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
from fsdp2.render.text import show_bytes
from fsdp2.runtime.unit_config import direct_min_bytes_for
from fsdp2.sharding.layout import BucketLayout

from .machine import REPOSITORY
from .published_models import LlamaBlock
from .report import row, write_readme

NUM_RANKS = (8, 64, 512, 4096)
DTYPE = torch.bfloat16  # of computation, so of the gather
WHOLE_MIN_BYTES = 256 * 1024  # the limit on whole parameters to compare with
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


UNITS = {
    "Llama-3-8B block": lambda: LlamaBlock(4096, 14336, 32, 8),
    "Llama-3-70B block": lambda: LlamaBlock(8192, 28672, 64, 8),
    "128 experts, a module each": MixtureBlock,
}


@dataclass(frozen=True)
class Batch:
    """The gather of one unit.

    Attributes:
        num_entries: collectives in the one batched call: direct parameters, and the pack.
        smallest_slice: bytes that a rank sends of the smallest direct parameter; None: none is.
        packed_bytes: of whole parameters that are copied to their places after the gather.
        pack_slice: bytes that a rank sends of the pack.
    """

    num_entries: int
    smallest_slice: int | None
    packed_bytes: int
    pack_slice: int


def batch_of(unit: nn.Module, num_ranks: int, *, direct_min_bytes: int | None = None) -> Batch:
    """How `fsdp2.fully_shard` batches the gather of ``unit``."""
    layout = _layout(unit, num_ranks, direct_min_bytes_for(direct_min_bytes))
    slices = [layout.slots[i].shard_numel * DTYPE.itemsize for i in layout.direct]
    return Batch(
        num_entries=len(slices) + bool(layout.pack_numel),
        smallest_slice=min(slices, default=None),
        packed_bytes=sum(prod(layout.slots[i].shape) for i in layout.packed) * DTYPE.itemsize,
        pack_slice=layout.pack_numel * DTYPE.itemsize,
    )


def _layout(unit: nn.Module, num_ranks: int, direct_min_bytes: int) -> BucketLayout:
    params = [
        ParameterFacts(name, tuple(param.shape), param.dtype, param_dtype=DTYPE)
        for name, param in unit.named_parameters()
    ]
    (bucket,) = buckets_of(
        params, num_ranks, 1, reduce_dtype=torch.float32, direct_min_bytes=direct_min_bytes
    )
    return bucket.layout


def limit_on_whole(unit: nn.Module, num_ranks: int) -> tuple[int, int]:
    """Entries and the smallest slice if whole parameters from `WHOLE_MIN_BYTES` on were direct."""
    sizes = [param.numel() * DTYPE.itemsize for param in unit.parameters()]
    direct = [size // num_ranks for size in sizes if size >= WHOLE_MIN_BYTES]
    return len(direct) + (len(direct) < len(sizes)), min(direct)


def table() -> str:
    """The table, in Markdown."""
    header = [
        "gather of", "ranks", "parameters", "entries", "smallest direct slice", "slice of the pack",
        "packed, of all", "entries, limit on the whole", "smallest direct slice",
    ]  # fmt: skip
    lines = [row(header), row(["---"] + ["---:"] * (len(header) - 1))]
    for name, make in UNITS.items():
        with torch.device("meta"):
            unit = make()
        numels = [param.numel() for param in unit.parameters()]
        whole_bytes = show_bytes(sum(numels) * DTYPE.itemsize)
        for num_ranks in NUM_RANKS:
            batch = batch_of(unit, num_ranks)
            smallest = batch.smallest_slice
            entries, other = limit_on_whole(unit, num_ranks)
            cells = [
                name,
                f"{num_ranks:,}",
                str(len(numels)),
                str(batch.num_entries),
                "-" if smallest is None else show_bytes(smallest),
                show_bytes(batch.pack_slice),
                f"{show_bytes(batch.packed_bytes)} of {whole_bytes}",
                str(entries),
                show_bytes(other),
            ]
            lines.append(row(cells))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help="put it into docs/design.md")
    options = parser.parse_args(arguments)
    text = table()
    print(text)
    if options.write_docs:
        write_readme(REPOSITORY / "docs" / "design.md", text, *MARKERS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
