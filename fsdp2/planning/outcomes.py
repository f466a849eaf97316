"""A configuration that the planner considers, and its outcome: the steps of ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import override

from ..api.shard_model import Sharding
from ..render.text import show_bytes, show_seconds
from .hardware.hardware import Hardware
from .simulation.simulate import SimulatedStep
from .simulation.unit_figures import peak_gathered_bytes, unit_figures, waited_s
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
        expert_ranks: ranks over which experts are distributed; None: experts have no separate mesh.
        tensor_ranks: tensor-parallel ranks for each rank of ``mesh``; None: the model is not
            tensor-parallel.
        context_ranks: context-parallel ranks within the last dim of ``mesh``; None: not used.
        pipeline_ranks: pipeline ranks, each stage with its own mesh; None: not used.
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
        """Number of ranks that share a batch."""
        return (self.tensor_ranks or 1) * (self.context_ranks or 1) * (self.pipeline_ranks or 1)

    @property
    def is_pipeline(self) -> bool:
        return self.pipeline_ranks not in (None, 1)

    def workload(self, given: Workload) -> Workload:
        """``given``, with this candidate's values."""
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
        """``given``, with this candidate's values; ``wrap`` is the meaning of the label."""
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


# If compute waits for at least this fraction of a step, something else is the bottleneck.
WAITS = 0.1

# Figures of a step in addition to its time and memory.
_FIGURES = (
    *("compute_s", "contention_s", "stragglers_s", "host_s", "optimizer_s", "exposed_s"),
    *("stream_s", "flops"),
)

# `compare` recognizes the JSON of a plan or prediction by this key; its value is the version.
PREDICTED = "fsdp2_prediction"


@dataclass(frozen=True)
class Outcome:
    """A candidate and the time and memory of its simulated step.

    Attributes:
        candidate: the configuration.
        seconds: duration of a step: all micro-batches and the optimizer.
        exposed_s: seconds in a step that kernels wait for communication.
        peak_bytes: peak of live tensors on the fullest rank (allocated).
        fits: whether ``needed_bytes`` are within the budget.
        reserved_bytes: bytes that torch's allocator holds for the tensors.
        needed_bytes: ``reserved_bytes`` and the memory of CUDA, cuBLAS and NCCL.
    """

    candidate: Candidate
    seconds: float
    exposed_s: float
    peak_bytes: int
    fits: bool
    reserved_bytes: int
    needed_bytes: int

    @property
    def paced_s(self) -> float:
        """``seconds``, scaled to the samples of a step without tensor and context parallelism: with
        them, fewer ranks have separate batches."""
        return self.seconds * self.candidate.ranks_per_batch

    @override
    def __str__(self) -> str:
        memory = show_bytes(self.peak_bytes)
        over = "" if self.fits else ", does not fit"
        return f"{self.candidate}: {show_seconds(self.seconds)}, {memory}{over}"


def simplicity(outcome: Outcome) -> tuple[float, ...]:
    """The order in which equally fast outcomes are chosen: fewer choices, then less memory."""
    return (outcome.candidate.complexity, outcome.peak_bytes, outcome.paced_s)


def slowest_first(steps: Iterable[SimulatedStep]) -> list[SimulatedStep]:
    return sorted(steps, key=lambda step: -step.seconds)


def outcome_of(candidate: Candidate, steps: Sequence[SimulatedStep], budget: int) -> Outcome:
    """The outcome of these steps, the slowest first, of ranks that wait for each other."""
    fullest = max(steps, key=lambda step: step.needed_bytes)
    return Outcome(
        candidate,
        _together_s(steps),
        steps[0].exposed_s,
        max(step.peak.total for step in steps),
        fullest.needed_bytes <= budget,
        fullest.reserved,
        fullest.needed_bytes,
    )


def with_micro_batches(fewer: Outcome, more: Outcome, num: int) -> Outcome:
    """Extrapolate: ``more`` has one micro-batch more than ``fewer``; add ``num`` further ones."""
    return replace(
        more,
        seconds=more.seconds + num * (more.seconds - fewer.seconds),
        exposed_s=more.exposed_s + num * (more.exposed_s - fewer.exposed_s),
    )


def _together_s(steps: Sequence[SimulatedStep]) -> float:
    """The time of ranks that wait for each other: when gradients are summed, and after the
    optimizer step."""
    if len(steps) == 1:
        return steps[0].seconds
    backward = max(step.seconds - step.optimizer_s for step in steps)
    return backward + max(step.optimizer_s for step in steps)


def figures_of(step: SimulatedStep) -> dict[str, Any]:
    """The figures of a step, except its time and memory, as JSON-compatible data."""
    return {
        **{name: getattr(step, name) for name in _FIGURES},
        "peak_parts": step.peak.parts,
        "waited_s": waited_s(step),
        "peak_gathered_bytes": peak_gathered_bytes(step),
        "units": [asdict(unit) for unit in unit_figures(step)],
    }


def stage_figures(steps: Sequence[SimulatedStep]) -> list[dict[str, float]]:
    """`Prediction.stages`."""
    return [
        {
            "compute_s": step.compute_s,
            "bubble_s": step.bubble_s,
            "peak_bytes": step.peak.total,
            "needed_bytes": step.needed_bytes,
        }
        for step in steps
    ]


# -- what bounds a step --------------------------------------------------------------------------


def bound_of(step: SimulatedStep) -> str:
    """The bottleneck: ``"compute"``, ``"communication"``, ``"copies"`` (of activations), ``"host"``
    or ``"pipeline"`` (waits for other stages)."""
    waited = step.exposed_s - step.stragglers_s
    if waited < WAITS * step.seconds:
        return "compute"
    if step.bubble_s > waited / 2:
        return "pipeline"
    # The host is the bottleneck only if it is busy for longer than any stream.
    if step.host_s > max(step.stream_s.values()):
        return "host"
    beside = {name: s for name, s in step.stream_s.items() if name != "compute"}
    return "copies" if max(beside, key=beside.__getitem__) == "copies" else "communication"


def bound_sentence(step: SimulatedStep) -> str:
    """The bottleneck as a sentence, with the time of each stream and the exposed time."""
    moved = {name: s for name, s in step.stream_s.items() if name != "compute" and s}
    if not moved:
        return f"Nothing is communicated; compute takes {show_seconds(step.compute_s)}."
    parts = ", ".join(f"{name} {show_seconds(s)}" for name, s in moved.items())
    share = 100 * step.exposed_s / step.seconds
    kind = {
        "compute": "compute-bound",
        "communication": "limited by communication",
        "pipeline": "limited by the pipeline (schedule, stages that differ)",
        "copies": "limited by copies of activations between device and host",
        "host": f"limited by the host, which takes {show_seconds(step.host_s)} to launch it",
    }[bound_of(step)]
    lost = f" (contention adds {show_seconds(step.contention_s)})" if step.contention_s else ""
    late = f", {show_seconds(step.stragglers_s)} of it for the slowest rank" * bool(
        step.stragglers_s
    )
    return (
        f"The step is {kind}: kernels take {show_seconds(step.compute_s)}, {parts}{lost}; "
        f"{show_seconds(step.exposed_s)} ({share:.0f} % of the step) are not hidden{late}."
    )


# Outcomes within this factor of the fastest are compared at both ends of the range.
CLOSE = 1.05
MOST_COMPARED = 6

StepTime = Callable[[Hardware, float], float]


@dataclass(frozen=True)
class Range:
    """The range of a step time, in seconds, from the uncertainty of the hardware's speeds.

    Attributes:
        fastest_s, slowest_s: the time with the best and the worst speeds of kernels and links.
        kernels_s, links_s: the difference if only the speed of kernels, or of links, varies.
    """

    fastest_s: float
    slowest_s: float
    kernels_s: float
    links_s: float

    @property
    def driver(self) -> str:
        """The assumption that contributes most to the range."""
        if self.kernels_s >= self.links_s:
            return "the speed of kernels (shapes, software, compiled or not)"
        return "the speed of links (load, topology)"

    @override
    def __str__(self) -> str:
        fastest, slowest = show_seconds(self.fastest_s), show_seconds(self.slowest_s)
        return f"{fastest} to {slowest}, most of it by {self.driver}"


def range_figures(made: Range | None) -> dict[str, Any]:
    """The range as JSON-compatible data."""
    if made is None:
        return {"step_range_s": None, "range_kernels_s": 0.0, "range_links_s": 0.0}
    return {
        "step_range_s": [made.fastest_s, made.slowest_s],
        "range_kernels_s": made.kernels_s,
        "range_links_s": made.links_s,
    }


def is_known(hardware: Hardware) -> bool:
    """Whether all its speeds are known, as for measured hardware."""
    return hardware.kernels_range == hardware.links_range == (1.0, 1.0)


def range_of(hardware: Hardware, step_s: StepTime) -> Range | None:
    """The range of a step's time; None if all speeds are known.

    Args:
        step_s: simulates the step on hardware whose kernels have this relative speed.
    """
    if is_known(hardware):
        return None
    (slow, fast), (low, high) = hardware.kernels_range, hardware.links_range
    return Range(
        step_s(with_links(hardware, high), fast),
        step_s(with_links(hardware, low), slow),
        step_s(hardware, slow) - step_s(hardware, fast),
        step_s(with_links(hardware, low), 1.0) - step_s(with_links(hardware, high), 1.0),
    )


def with_links(hardware: Hardware, speed: float) -> Hardware:
    """The hardware with links of another relative speed."""
    if speed == 1.0:
        return hardware
    return replace(
        hardware,
        node_bandwidth=hardware.node_bandwidth * speed,
        network_bandwidth=hardware.network_bandwidth * speed,
        node_latency_s=hardware.node_latency_s / speed,
        network_latency_s=hardware.network_latency_s / speed,
    )


def as_fast(
    ranked: Sequence[Outcome],
    hardware: Hardware,
    paced_s: Callable[[Outcome, Hardware, float], float],
) -> list[Outcome]:
    """The outcomes that may be as fast as the first of ``ranked``, which comes first.

    Args:
        ranked: outcomes that fit, the fastest first.
        paced_s: simulates an outcome like `StepTime`, and returns its `Outcome.paced_s`.
    """
    first = ranked[0]
    close = [o for o in ranked[1:] if o.paced_s <= CLOSE * first.paced_s][: MOST_COMPARED - 1]
    if is_known(hardware) or not close:
        return [first]
    (slow, fast), (low, high) = hardware.kernels_range, hardware.links_range
    cases = [(with_links(hardware, high), slow), (with_links(hardware, low), fast)]
    least = [paced_s(first, *case) for case in cases]
    return [first] + [
        each
        for each in close
        if any(paced_s(each, *case) <= best for case, best in zip(cases, least, strict=True))
    ]
