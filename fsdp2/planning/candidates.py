"""A configuration that the planner considers: numbers and names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from ..api.shard_model import Sharding
from .workload import Workload


@dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        strategy: as in `Sharding`.
        mesh: (ranks,) or (replicas, shards).
        wrap: the label of a choice of units.
        reshard: ``reshard_after_forward`` of all units but the root; None: the default.
        prefetch: number of units gathered ahead.
        checkpointing: activation checkpointing mode.
        accumulation: how gradients of micro-batches are summed, as in `Workload`; None: there is
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
    reshard: Any = None
    prefetch: int = 1
    accumulation: str | None = None
    expert_ranks: int | None = None
    tensor_ranks: int | None = None
    context_ranks: int | None = None
    pipeline_ranks: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None

    @property
    def ranks_per_batch(self) -> int:
        """Ranks that get the same batch."""
        return (self.tensor_ranks or 1) * (self.context_ranks or 1) * (self.pipeline_ranks or 1)

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline_ranks not in (None, 1)

    def workload(self, given: Workload) -> Workload:
        """``given``, as it runs here."""
        return replace(
            given,
            activation_checkpointing=self.checkpointing,
            accumulation=self.accumulation or "unsharded",
            expert_ranks=self.expert_ranks or 1,
            tensor_ranks=self.tensor_ranks or 1,
            context_ranks=self.context_ranks or 1,
            pipeline_ranks=self.pipeline_ranks or 1,
            schedule=self.schedule or "1F1B",
            stages_per_rank=self.stages_per_rank or 1,
        )

    def sharding(self, given: Sharding, wrap: Any) -> Sharding:
        """``given``, as it is here; ``wrap`` is what the label means."""
        return replace(
            given,
            strategy=self.strategy,
            wrap=wrap,
            reshard_after_forward=self.reshard,
            prefetch=self.prefetch,
        )

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
            self.is_pipeline,
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
        for told, value in (
            ("accumulation", self.accumulation),
            ("experts over", self.expert_ranks),
            ("tensor parallel over", self.tensor_ranks),
            ("context over", self.context_ranks),
        ):
            if value is not None:
                parts.append(f"{told} {value}")
        if self.is_pipeline:
            how = schedule_told(self.schedule or "1F1B", self.stages_per_rank or 1)
            parts.append(f"pipeline over {self.pipeline_ranks} ({how})")
        return ", ".join(parts)


def schedule_told(schedule: str, stages_per_rank: int) -> str:
    each = f", {stages_per_rank} stages each" if stages_per_rank > 1 else ""
    return f"{schedule}{each}"
