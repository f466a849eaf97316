"""The configurations that the planner considers: pure arithmetic and names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from typing_extensions import override

from ..wrap import UnitDescription

Wrap = str | list[str | tuple[str, ...]]


class Degrees(NamedTuple):
    """Ranks over which the model's own parallelisms go, beside sharding.

    Attributes:
        experts: over which experts are distributed.
        tensor: that share the operators.
        context: that have parts of the same sequences.
        pipeline: that have other stages.
    """

    experts: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that get the same batch."""
        return self.tensor * self.context * self.pipeline


class Pipeline(NamedTuple):
    """How a pipeline runs.

    Attributes:
        schedule: one of `SCHEDULES`.
        stages_per_rank: more than one with looped schedules.
    """

    schedule: str = "1F1B"
    stages_per_rank: int = 1

    @override
    def __str__(self) -> str:
        each = f", {self.stages_per_rank} stages each" if self.stages_per_rank > 1 else ""
        return f"{self.schedule}{each}"


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        strategy: as in `shard_model`.
        mesh: (ranks,) or (replicas, shards).
        wrap: a key of `wraps_of`.
        reshard: ``reshard_after_forward`` of all units but the root; None: the default.
        prefetch: number of units gathered ahead.
        checkpointing: activation checkpointing mode.
        accumulation: how gradients of micro-batches are summed, as in `estimate`; None: there is
            one micro-batch.
        expert_ranks: over which experts are distributed; None: they have no mesh of their own.
        tensor_ranks: that share the operators, for each rank of ``mesh``; None: nothing makes the
            model tensor-parallel.
        context_ranks: of the last dim of ``mesh``, those that have parts of the same sequences;
            None: nobody asks for them.
        pipeline_ranks: that have other stages, each with a mesh of its own; None: nobody asks for
            them.
        schedule, stages_per_rank: of the pipeline; None: there is none.
    """

    strategy: str
    mesh: tuple[int, ...]
    checkpointing: str = "none"
    wrap: str = "blocks"
    reshard: bool | int | None = None
    prefetch: int = 1
    accumulation: str | None = None
    expert_ranks: int | None = None
    tensor_ranks: int | None = None
    context_ranks: int | None = None
    pipeline_ranks: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            self.expert_ranks or 1,
            self.tensor_ranks or 1,
            self.context_ranks or 1,
            self.pipeline_ranks or 1,
        )

    @property
    def pipeline(self) -> Pipeline:
        """How its pipeline runs, if it has one."""
        return Pipeline(self.schedule or "1F1B", self.stages_per_rank or 1)

    @property
    def num_stages(self) -> int:
        """Of the pipeline; 1: there is none."""
        return self.degrees.pipeline * self.pipeline.stages_per_rank

    @property
    def complexity(self) -> int:
        """The number of choices that are not the default."""
        changed = (
            len(self.mesh) > 1,
            self.wrap != "blocks",
            self.reshard is not None,
            self.prefetch > 1,
            self.checkpointing != "none",
            self.accumulation not in (None, "unsharded"),
            self.tensor_ranks not in (None, 1),
            self.context_ranks not in (None, 1),
            self.pipeline_ranks not in (None, 1),
            self.schedule not in (None, "1F1B"),
        )
        return sum(changed)

    @override
    def __str__(self) -> str:
        parts = [self.strategy, " x ".join(map(str, self.mesh)), f"units: {self.wrap}"]
        if self.reshard is not None:
            parts.append(f"reshard {self.reshard}")
        parts.append(f"prefetch {self.prefetch}")
        parts.append(f"checkpointing {self.checkpointing}")
        if self.accumulation is not None:
            parts.append(f"accumulation {self.accumulation}")
        if self.expert_ranks is not None:
            parts.append(f"experts over {self.expert_ranks}")
        if self.tensor_ranks is not None:
            parts.append(f"tensor parallel over {self.tensor_ranks}")
        if self.context_ranks is not None:
            parts.append(f"context over {self.context_ranks}")
        if self.degrees.pipeline > 1:
            parts.append(f"pipeline over {self.pipeline_ranks} ({self.pipeline})")
        return ", ".join(parts)


class _Searched:
    """Stands for a choice that is searched, where None means something else."""

    @override
    def __repr__(self) -> str:
        return "SEARCHED"


SEARCHED: Any = _Searched()


@dataclass(frozen=True)
class Fixed:
    """What the user has chosen, and is therefore not searched.

    Attributes:
        strategy: as in `shard_model`; None: searched.
        mesh: (ranks,) or (replicas, shards); None: searched.
        reshard: ``reshard_after_forward``; `SEARCHED`: searched.
        prefetch: None: searched.
    """

    strategy: str | None = None
    mesh: tuple[int, ...] | None = None
    reshard: Any = SEARCHED
    prefetch: int | None = None

    def meshes(self, num_ranks: int, ranks_per_node: int) -> list[tuple[str, tuple[int, ...]]]:
        """Strategies with their meshes, as far as they are not fixed."""
        found = list(meshes_of(num_ranks, ranks_per_node))
        if self.strategy == "hybrid" and num_ranks <= ranks_per_node:
            found = [("hybrid", (1, num_ranks))]  # as `shard_model` on one node
        elif self.strategy not in (None, "none", "full", "hybrid"):
            found = [(str(self.strategy), mesh) for name, mesh in found if name != "none"]
        elif self.strategy == "none":
            found = [("none", (num_ranks,))]
        if self.mesh is not None:
            names = [self.strategy] if self.strategy else ["none", "full"]
            if len(self.mesh) > 1 and self.strategy is None:
                names = ["hybrid"]
            found = [(name, self.mesh) for name in names]
        found = [each for each in found if self.strategy in (None, each[0])]
        if type(self.reshard) is int:
            found = [(name, m) for name, m in found if name != "none" and m[-1] % self.reshard == 0]
        return found


def meshes_of(num_ranks: int, ranks_per_node: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Strategies with their meshes: all ranks; replicas of 1, 2, 4, ... nodes."""
    if num_ranks > 1:
        yield "none", (num_ranks,)
    yield "full", (num_ranks,)
    shards = ranks_per_node
    while shards < num_ranks:
        if num_ranks % shards == 0:
            yield "hybrid", (num_ranks // shards, shards)
        shards *= 2


def first_round(
    modes: Sequence[str],
    num_ranks: int,
    ranks_per_node: int,
    accumulations: Sequence[str | None] = (None,),
    fixed: Fixed = Fixed(),
    wrap: str = "blocks",
    expert_ranks: Sequence[int | None] = (None,),
    degrees: Sequence[tuple[int | None, int | None]] = ((None, None),),
    pipeline_ranks: int | None = None,
) -> list[Candidate]:
    """All meshes with all checkpointing modes, ways to sum gradients, ranks of experts, and pairs
    of ranks of tensor and of context parallelism.

    Args:
        pipeline_ranks: None or 1, as of `Candidate`; of a pipeline, ``num_ranks`` are those of a
            stage.
    """
    start = Candidate(
        "",
        (),
        wrap=wrap,
        reshard=None if fixed.reshard is SEARCHED else fixed.reshard,
        prefetch=fixed.prefetch or 1,
        pipeline_ranks=pipeline_ranks,
    )
    return [
        replace(
            start,
            strategy=strategy,
            mesh=mesh,
            checkpointing=mode,
            accumulation=accumulation,
            expert_ranks=ranks,
            tensor_ranks=tensor,
            context_ranks=context,
        )
        for ranks in expert_ranks
        for tensor, context in degrees
        for strategy, mesh in fixed.meshes(
            num_ranks // (tensor or 1), max(1, ranks_per_node // (tensor or 1))
        )
        if prod(mesh) * (tensor or 1) == num_ranks and mesh[-1] % (context or 1) == 0
        for mode in modes
        for accumulation in _useful(accumulations, strategy)
    ]


def expert_ranks_of(num_ranks: int, ranks_per_node: int, num_experts: int) -> list[int]:
    """Numbers of ranks over which experts may be distributed, each with as many experts: within a
    node, as many as there can be, and one in between."""
    ranks, found = min(ranks_per_node, num_ranks), []
    while ranks <= min(num_ranks, num_experts):
        if num_ranks % ranks == 0 and num_experts % ranks == 0:
            found.append(ranks)
        ranks *= 2
    found = found or [1]
    return sorted({found[0], found[len(found) // 2], found[-1]})


def _useful(accumulations: Sequence[str | None], strategy: str) -> Sequence[str | None]:
    """Without shards, sums are whole in any case: to reduce more than once saves nothing."""
    if strategy == "none" and "unsharded" in accumulations:
        return ("unsharded",)
    return accumulations


def second_round(
    start: Candidate,
    wraps: Sequence[str],
    ranks_per_node: int,
    fixed: Fixed = Fixed(),
) -> list[Candidate]:
    """All choices of units, resharding and prefetch for one mesh and checkpointing mode."""
    prefetches = [1] if start.strategy == "none" else [1, 2]
    if fixed.prefetch is not None:
        prefetches = [fixed.prefetch]
    return combinations(start, wraps, reshards_of(start, ranks_per_node, fixed), prefetches)


def reshards_of(start: Candidate, ranks_per_node: int, fixed: Fixed) -> list[bool | int | None]:
    """All choices of resharding for its mesh."""
    if fixed.reshard is not SEARCHED:
        return [fixed.reshard]
    reshards: list[bool | int | None] = [None]
    if start.strategy in ("full", "hybrid"):  # others are this setting
        reshards.append(False)
        shards = start.mesh[-1]
        if shards > ranks_per_node and shards % ranks_per_node == 0:
            reshards.append(ranks_per_node)
    return reshards


def combinations(
    start: Candidate,
    wraps: Sequence[str],
    reshards: Sequence[bool | int | None],
    prefetches: Sequence[int],
) -> list[Candidate]:
    """``start`` with all combinations of these choices."""
    return [
        replace(start, wrap=wrap, reshard=reshard, prefetch=prefetch)
        for wrap in wraps
        for reshard in reshards
        for prefetch in prefetches
    ]


def wraps_of(units: Sequence[UnitDescription], blocks: Sequence[str]) -> dict[str, Any]:
    """Choices of units as `shard_model` accepts them: one block, several blocks, the whole model.

    Args:
        units: from ``units_of(model, "auto")``.
        blocks: names of the modules that share a class.
    """
    wraps: dict[str, Any] = {"blocks": "auto"}
    names = [u.modules for u in units if not u.is_root]
    single = [group for group in names if len(group) == 1 and group[0] in set(blocks)]
    for size in (2, 4):
        if len(single) >= 2 * size:
            grouped: dict[tuple[str, ...], tuple[str, ...]] = {}
            for i in range(0, len(single), size):
                whole = tuple(name for group in single[i : i + size] for name in group)
                grouped |= dict.fromkeys(single[i : i + size], whole)
            wraps[f"{size} blocks"] = [
                group[0] if len(group) == 1 else group
                for group in dict.fromkeys(grouped.get(group, group) for group in names)
            ]
    wraps["one"] = "root"
    return wraps
