"""An estimate: the numbers, and their text form."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from typing_extensions import override

from ..render.text import plural, show_bytes, table
from .trace.account import Peak

_PHASES = (("forward", "forward"), ("backward", "backward"), ("step", "optimizer step"))


@dataclass(frozen=True)
class RankEstimate:
    """Bytes on one rank.

    Attributes:
        rank: index among the ranks that share each parameter.
        parameters, gradients, optimizer: sharded; in host memory if they are offloaded.
        buffers, inputs: of the model and of a batch.
        forward, backward, step: the memory peaks of the phases of a training step. They include
            everything above that is in device memory at that time.
        host: bytes by category in host memory.
        reserved: what torch's allocator holds after some steps: the peak, and what is lost to
            fragmentation. None on the CPU, where there is no such allocator.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    forward: Peak
    backward: Peak
    step: Peak
    host: dict[str, int]
    reserved: int | None = None

    @property
    def peak(self) -> Peak:
        """The highest peak of a training step."""
        return max((self.forward, self.backward, self.step), key=lambda peak: peak.total)


@dataclass(frozen=True)
class TrafficRow:
    """What a rank sends in one training step with one kind of collective.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce" or, under a `CommPolicy`, "all_to_all".
        group: "shard", "secondary" or "replicate".
        calls: number of launches; ``messages``: number of collectives in them.
        sent: bytes sent.
        within_nodes, between_nodes: the parts of ``sent`` by link, averaged over the ranks of a
            node, for rings that enter and leave each node once.
    """

    kind: str
    group: str
    calls: int
    messages: int
    sent: int
    within_nodes: int
    between_nodes: int


@dataclass(frozen=True)
class Estimate:
    """What `estimate` returns; ``print`` shows it as tables.

    Attributes:
        ranks: the first and the last rank, and in between the one with the highest peak if it is
            neither.
        traffic: what the first rank sends.
        flops: of one rank's forward and backward, including recomputation.
        num_params: elements of the whole model.
        notes: operators without a cost, and what else the estimate assumes.
    """

    mesh_shape: tuple[int, ...]
    strategy: str
    num_params: int
    num_units: int
    flops: int
    ranks: list[RankEstimate]
    traffic: list[TrafficRow]
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> RankEstimate:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def sent(self) -> int:
        """Bytes that a rank sends per step."""
        return sum(row.sent for row in self.traffic)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as JSON-compatible data."""
        return {**asdict(self), "peak_bytes": self.worst.peak.total, "sent_bytes": self.sent}

    @override
    def __str__(self) -> str:
        return _as_text(self)


def _as_text(made: Estimate) -> str:
    """Tables: memory by phase and by purpose, other ranks, traffic."""
    shape = " x ".join(map(str, made.mesh_shape))
    worst = made.worst
    lines = [
        f"{made.num_params / 1e6:,.1f}M parameters in {plural(made.num_units, 'unit')}, "
        f"strategy '{made.strategy}', mesh {shape}",
        "",
        f"Memory of rank {worst.rank}, peak of each phase",
        _memory(worst),
        "",
        "Ranks",
        _ranks(made),
    ]
    if made.traffic:
        lines += ["", "Sent per rank and step", _traffic(made)]
    lines += ["", f"Compute per rank and step: {made.flops / 1e12:,.2f} TFLOP"]
    return "\n".join([*lines, *made.notes])


def _memory(rank: RankEstimate) -> str:
    peaks = [getattr(rank, attribute) for attribute, _ in _PHASES]
    names = list(dict.fromkeys(name for peak in peaks for name, n in peak.parts.items() if n))
    rows: list[tuple[str, ...]] = [("", *(title for _, title in _PHASES))]
    for name in names:
        rows.append((name, *(_cell(peak.parts.get(name, 0)) for peak in peaks)))
    rows.append(("total", *(show_bytes(peak.total) for peak in peaks)))
    for name, nbytes in rank.host.items():
        rows.append((f"{name} on the host", *([show_bytes(nbytes)] * 3)))
    return table(rows, right="123")


def _cell(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _ranks(made: Estimate) -> str:
    reserves = made.worst.reserved is not None
    header = ("rank", "parameters", "gradients", "optimizer state", "peak")
    rows: list[tuple[str, ...]] = [(*header, *["reserved"] * reserves, "")]
    for rank in made.ranks:
        note = "worst" if rank is made.worst else ""
        sizes = [rank.parameters, rank.gradients, rank.optimizer, rank.peak.total]
        if rank.reserved is not None:
            sizes.append(rank.reserved)
        rows.append((str(rank.rank), *map(show_bytes, sizes), note))
    return table(rows, right="012345" if reserves else "01234")


def _traffic(made: Estimate) -> str:
    header = ("collective", "over", "calls", "sent", "within nodes", "between nodes")
    rows: list[tuple[str, ...]] = [header]
    for row in made.traffic:
        sizes = map(show_bytes, (row.sent, row.within_nodes, row.between_nodes))
        kind = row.kind.replace("_", "-")
        rows.append((kind, row.group, str(row.calls), *sizes))
    return table(rows, right="2345")
