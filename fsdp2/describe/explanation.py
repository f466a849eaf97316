"""The result of `explain`: dataclasses with the numbers of each unit, and their table."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from typing_extensions import override

from ..common.torch_patches import patches_torch
from ..render.text import plain_table, plural, show_bytes


@dataclass(frozen=True)
class ParameterReport:
    """One parameter.

    Attributes:
        shape: shape of the whole parameter, as this rank sees it.
        placements: placements of its DTensor, one per mesh dim.
        direct: True: gathered directly into its place; False: packed with other parameters and
            copied out; None: not gathered.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    trained: bool
    direct: bool | None


@dataclass(frozen=True)
class UnitReport:
    """One unit; bytes are per rank unless noted otherwise.

    Attributes:
        modules: its modules; ``("",)`` is the model itself.
        numel, trained_numel: elements of whole parameters.
        stored_dtypes, compute_dtypes, reduce_dtypes: dtypes of parameters, of computation and
            gathers, and of gradient reduction.
        num_shards, num_replicas: sizes of its mesh.
        sharded_bytes: bytes of the sharded parameters; sharded gradients have the same size once
            they exist.
        padding_bytes: padding in the sharded parameters of all ranks together.
        gathered_bytes: bytes of the unsharded parameters, between gather and free.
        reshard_after_forward: True, False, or the number of ranks to reshard to.
        reshard_after_backward: whether the gathered parameters are freed after backward.
        offload: whether shards are in host memory.
        forward_prefetch, backward_prefetch: units to prefetch, if set manually; None: the unit
            that ran after this one in the last forward, or (in backward) before it.
        num_gathers: all-gathers in a step of one micro-batch; 0 if nothing is gathered.
        sent_by_gathers, sent_by_reduction, sent_by_all_reduction: bytes that a rank sends in such a
            step, by all-gathers, the reduce-scatter, and the all-reduce over replicas (as rings).
        comm_policy: the settings of its `CommPolicy`, which these bytes include; None: no policy.
        residual_bytes: bytes of the last gradients' rounding errors that error feedback keeps.
        sent_between_hosts: the part of the sent bytes that goes to other hosts (for rings, on
            average); None: not known.
    """

    name: str
    modules: tuple[str, ...]
    is_root: bool
    params: tuple[ParameterReport, ...]
    numel: int
    trained_numel: int
    stored_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    reduce_dtypes: tuple[str, ...]
    num_shards: int
    num_replicas: int
    sharded_bytes: int
    padding_bytes: int
    gathered_bytes: int
    reshard_after_forward: bool | int
    reshard_after_backward: bool
    offload: bool
    forward_prefetch: tuple[str, ...] | None
    backward_prefetch: tuple[str, ...] | None
    num_gathers: int
    sent_by_gathers: int
    sent_by_reduction: int
    sent_by_all_reduction: int
    comm_policy: str | None = None
    residual_bytes: int = 0
    sent_between_hosts: int | None = None

    @property
    def sent_bytes(self) -> int:
        """All bytes that a rank sends for this unit in a step of one micro-batch."""
        return self.sent_by_gathers + self.sent_by_reduction + self.sent_by_all_reduction


@dataclass(frozen=True)
class Totals:
    """Sums over the units, named as in `UnitReport`.

    Attributes:
        num_ranks: number of ranks of the mesh, shards times replicas.
    """

    num_ranks: int
    numel: int
    trained_numel: int
    sharded_bytes: int
    padding_bytes: int
    gathered_bytes: int
    sent_by_gathers: int
    sent_by_reduction: int
    sent_by_all_reduction: int
    sent_bytes: int
    residual_bytes: int = 0
    sent_between_hosts: int | None = None


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; its ``str()`` is a table.

    Attributes:
        strategy: name of the strategy, if the model was sharded with one.
        units: the root first, then in model order.
        order: names of the units in the order of the last forward; empty before the first.
        communicators: for a model sharded on an accelerator, the purpose of each process group of
            this rank, such as "all-gather + reduce-scatter" for a shared group.
        max_gathered_bytes: the limit on gathered bytes of all units together; None: no limit.
    """

    strategy: str | None
    units: tuple[UnitReport, ...]
    order: tuple[str, ...]
    totals: Totals
    communicators: tuple[str, ...] = ()
    max_gathered_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The explanation as JSON-compatible values."""
        return json.loads(json.dumps(asdict(self)))

    def to_json(self) -> str:
        """The explanation as one JSON object."""
        return json.dumps(asdict(self))

    @override
    def __str__(self) -> str:
        header, rows, right = self.rows()
        head, *notes = self.notes()
        return "\n".join([head, "", plain_table(header, rows, right), "", *notes])

    def rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]], str]:
        """The table: its header, its rows (adjacent equal units share one), and the indices of the
        right-aligned columns."""
        rows: list[tuple[str, ...]] = []
        for facts, alike in groupby(self.units, key=_row):
            names = [unit.name for unit in alike]
            rows.append((_joined(names), *facts))
        t = self.totals
        numbers = (t.sharded_bytes, t.padding_bytes, t.gathered_bytes)
        sent = (t.sent_by_gathers, t.sent_by_reduction + t.sent_by_all_reduction)
        total = ["total", f"{t.numel:,}", "", "", "", *map(show_bytes, numbers)]
        rows.append((*total, *map(show_bytes, sent)))
        return _HEADER, rows, _RIGHT

    def notes(self) -> list[str]:
        """The lines around the table: a summary, then facts that the table lacks."""
        t = self.totals
        what = f"strategy '{self.strategy}'" if self.strategy else "no named strategy"
        lines = [
            f"{plural(len(self.units), 'unit')}, {t.numel:,} parameters ({t.trained_numel:,} "
            f"trained) on {plural(t.num_ranks, 'rank')}, {what}",
            "Bytes are per rank (padding: all ranks together); gathers and reduces: bytes sent in",
            "a step of one micro-batch. A row of several units has the numbers of each of them.",
        ]
        if any(unit.num_replicas > 1 for unit in self.units) and t.sent_by_reduction:
            lines.append(
                f"Of the reduces, {show_bytes(t.sent_by_all_reduction)} are all-reduced over "
                "replicas."
            )
        if t.sent_between_hosts:
            lines.append(
                f"Of what a rank sends, {show_bytes(t.sent_between_hosts)} go to other hosts."
            )
        dtypes = Counter(
            (*unit.stored_dtypes, ">", *unit.compute_dtypes, ">", *unit.reduce_dtypes)
            for unit in self.units
            if unit.params
        )
        lines += [f"Dtypes, stored > computed > reduced: {' '.join(d)}" for d in dtypes]
        for policy, of_policy in groupby(self.units, key=lambda unit: unit.comm_policy):
            if policy is not None:
                lines.append(f"CommPolicy of {_joined([u.name for u in of_policy])}: {policy}")
        if t.residual_bytes:
            lines.append(f"Error feedback keeps {show_bytes(t.residual_bytes)} per rank.")
        if any(unit.offload for unit in self.units):
            lines.append("Shards, gradients and optimizer state are in host memory.")
        if self.communicators:
            number = plural(len(self.communicators), "communicator")
            lines.append(f"{number} per rank: {'; '.join(self.communicators)}")
        if self.max_gathered_bytes is not None:
            limit = show_bytes(self.max_gathered_bytes)
            lines.append(f"Gathered at any moment: at most {limit}; units ahead as far as they fit")
        by_hand = [u.name for u in self.units if u.forward_prefetch or u.backward_prefetch]
        lines.append(
            f"Prefetch: set manually for {_joined(by_hand)}"
            if by_hand
            else "Prefetch: next unit of the last forward; reverse order in backward"
        )
        if patches_torch():
            lines.append(
                "Optimizers of torch.optim that are elementwise step on local shards "
                "(fsdp2.optim.dtensor_step turns it off)"
            )
        lines.append(
            f"Order of the last forward: {_joined(list(self.order))}"
            if self.order
            else "No forward has run yet: assuming module order"
        )
        return lines


_HEADER = (
    "unit", "parameters", "mesh", "reshard", "direct", "sharded", "padding", "gathered", "gathers",
    "reduces",
)  # fmt: skip
_RIGHT = "156789"


def _row(unit: UnitReport) -> tuple[str, ...]:
    """All columns except the name."""
    direct = sum(1 for p in unit.params if p.direct)
    gathered = sum(1 for p in unit.params if p.direct is not None)
    mesh = f"{unit.num_shards} shards" if unit.num_shards > 1 else ""
    if unit.num_replicas > 1 or not mesh:
        mesh = " x ".join(filter(None, (plural(unit.num_replicas, "replica"), mesh)))
    to = unit.reshard_after_forward
    reshard = ("yes" if to else "no") if isinstance(to, bool) else f"to {to}"
    return (
        f"{unit.numel:,}",
        mesh,
        reshard if unit.reshard_after_backward else f"{reshard}, kept",
        f"{direct} of {gathered}",
        show_bytes(unit.sharded_bytes),
        show_bytes(unit.padding_bytes),
        show_bytes(unit.gathered_bytes),
        f"{unit.num_gathers}x {show_bytes(unit.sent_by_gathers)}" if unit.num_gathers else "-",
        show_bytes(unit.sent_by_reduction + unit.sent_by_all_reduction),
    )


def _joined(names: list[str]) -> str:
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} .. {names[-1]} ({len(names)})"
