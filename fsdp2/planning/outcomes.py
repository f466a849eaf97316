"""The time and memory of a configuration: steps of ranks that differ, and what they come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import override

from ..render.text import show_bytes, show_seconds
from .candidates import Candidate
from .simulation.simulate import SimulatedStep
from .simulation.unit_figures import peak_gathered_bytes, unit_figures, waited_s

# The least part of a step that compute has to wait for the rest to be what bounds it.
WAITS = 0.1

# The key by which `compare` knows the JSON of a plan or a prediction; its value is the version.
PREDICTED = "fsdp2_prediction"


@dataclass(frozen=True)
class Outcome:
    """A candidate and the time and memory of its simulated step.

    Attributes:
        candidate: the configuration.
        seconds: of a step: all micro-batches and the optimizer.
        exposed_s: how long kernels wait for communication in a step.
        peak_bytes: of live tensors on the fullest rank (allocated).
        fits: whether ``needed_bytes`` are within the budget.
        reserved_bytes: what torch's allocator holds for the tensors.
        needed_bytes: the same, with what CUDA, cuBLAS and NCCL hold.
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
        """``seconds`` for the samples that a step has without tensor and context parallelism: with
        them, fewer ranks have batches of their own."""
        return self.seconds * self.candidate.ranks_per_batch

    @override
    def __str__(self) -> str:
        memory = show_bytes(self.peak_bytes)
        over = "" if self.fits else ", does not fit"
        return f"{self.candidate}: {show_seconds(self.seconds)}, {memory}{over}"


def simplicity(outcome: Outcome) -> tuple[float, ...]:
    """The order in which outcomes that are as fast are chosen: fewer choices, less memory."""
    return (outcome.candidate.complexity, outcome.peak_bytes, outcome.paced_s)


def slowest_first(steps: Iterable[SimulatedStep]) -> list[SimulatedStep]:
    return sorted(steps, key=lambda step: -step.seconds)


def outcome_of(candidate: Candidate, steps: Sequence[SimulatedStep], budget: int) -> Outcome:
    """What these steps, the slowest first, come to where ranks wait for each other."""
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
    """``more``, a step with one micro-batch more than ``fewer``, with ``num`` further ones."""
    return replace(
        more,
        seconds=more.seconds + num * (more.seconds - fewer.seconds),
        exposed_s=more.exposed_s + num * (more.exposed_s - fewer.exposed_s),
    )


def _together_s(steps: Sequence[SimulatedStep]) -> float:
    """The time of ranks that wait for each other: where gradients are summed, and after the step
    of the optimizer."""
    if len(steps) == 1:
        return steps[0].seconds
    backward = max(step.seconds - step.optimizer_s for step in steps)
    return backward + max(step.optimizer_s for step in steps)


def figures_of(step: SimulatedStep) -> dict[str, Any]:
    """The figures of a step, but its time and memory, as JSON-compatible data."""
    return {
        "compute_s": step.compute_s,
        "contention_s": step.contention_s,
        "stragglers_s": step.stragglers_s,
        "host_s": step.host_s,
        "optimizer_s": step.optimizer_s,
        "exposed_s": step.exposed_s,
        "stream_s": step.stream_s,
        "flops": step.flops,
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
    """``"compute"``, ``"communication"``, ``"copies"`` (of activations), ``"host"`` or, for what
    ranks wait for other stages, ``"pipeline"``."""
    waited = step.exposed_s - step.stragglers_s
    if waited < WAITS * step.seconds:
        return "compute"
    if step.bubble_s > waited / 2:
        return "pipeline"
    # The host is what all wait for only if it is busy for longer than any stream.
    if step.host_s > max(step.stream_s.values()):
        return "host"
    beside = {name: s for name, s in step.stream_s.items() if name != "compute"}
    return "copies" if max(beside, key=beside.__getitem__) == "copies" else "communication"


def bound_sentence(step: SimulatedStep) -> str:
    """The same as a sentence, with the time of each stream and of what is not hidden."""
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
    lost = f" (beside them: {show_seconds(step.contention_s)} more)" if step.contention_s else ""
    late = f", {show_seconds(step.stragglers_s)} of it for the slowest rank" * bool(
        step.stragglers_s
    )
    return (
        f"The step is {kind}: kernels take {show_seconds(step.compute_s)}, {parts}{lost}; "
        f"{show_seconds(step.exposed_s)} ({share:.0f} % of the step) are not hidden{late}."
    )
