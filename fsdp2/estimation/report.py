"""An estimate as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..terminal import plural, show_bytes, table

if TYPE_CHECKING:
    from .estimating import Estimate, RankEstimate

_PHASES = (("forward", "forward"), ("backward", "backward"), ("step", "optimizer step"))


def as_text(made: Estimate) -> str:
    """Tables: memory by phase and by purpose, other ranks, traffic."""
    shape = " x ".join(map(str, made.mesh_shape))
    worst = made.worst
    lines = [
        f"{made.num_params / 1e6:,.1f}M parameters in {plural(made.num_units, 'unit')}, "
        f"strategy '{made.strategy}', mesh {shape}",
        "",
        f"Memory of rank {worst.rank}, highest moment of each phase",
        _memory(worst),
        "",
        "Ranks",
        _ranks(made),
    ]
    if made.traffic:
        lines += ["", "Sent per rank and step", _traffic(made)]
    lines += ["", f"Compute per rank and step: {made.flops / 1e12:,.2f} TFLOP"]
    return "\n".join(lines + made.notes)


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
    rows: list[tuple[str, ...]] = [
        ("rank", "parameters", "gradients", "optimizer state", "peak", "")
    ]
    for rank in made.ranks:
        note = "worst" if rank is made.worst else ""
        sizes = (rank.parameters, rank.gradients, rank.optimizer, rank.peak.total)
        rows.append((str(rank.rank), *map(show_bytes, sizes), note))
    return table(rows, right="01234")


def _traffic(made: Estimate) -> str:
    header = ("collective", "over", "calls", "sent", "within nodes", "between nodes")
    rows: list[tuple[str, ...]] = [header]
    for row in made.traffic:
        sizes = map(show_bytes, (row.sent, row.within_nodes, row.between_nodes))
        kind = row.kind.replace("_", "-")
        rows.append((kind, row.group, str(row.calls), *sizes))
    return table(rows, right="2345")
