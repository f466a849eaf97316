"""What is not known of hardware, and what that does to predicted times.

The same GPU reaches another part of its data sheet with other software, and links another part of
theirs under another load. A prediction is therefore a range. Configurations are compared where
kernels are slow and links fast and the other way round: what is faster in one of these only is as
fast, for all that is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from ..render.text import show_seconds
from .hardware.hardware import Hardware
from .outcomes import Outcome

# Outcomes that are compared in both cases: those of at most this time, relative to the fastest.
CLOSE = 1.05
MOST_COMPARED = 6

StepTime = Callable[[Hardware, float], float]


@dataclass(frozen=True)
class Range:
    """Seconds of a step.

    Attributes:
        fastest_s, slowest_s: with the best and the worst that is known of kernels and links.
        kernels_s, links_s: the difference that each of the two makes alone.
    """

    fastest_s: float
    slowest_s: float
    kernels_s: float
    links_s: float

    @property
    def driver(self) -> str:
        """What most of the range is from."""
        if self.kernels_s >= self.links_s:
            return "the speed of kernels (shapes, software, compiled or not)"
        return "the speed of links (load, topology)"

    @override
    def __str__(self) -> str:
        fastest, slowest = show_seconds(self.fastest_s), show_seconds(self.slowest_s)
        return f"{fastest} to {slowest}, most of it by {self.driver}"


def range_figures(made: Range | None) -> dict[str, Any]:
    """As JSON-compatible data."""
    if made is None:
        return {"step_range_s": None, "range_kernels_s": 0.0, "range_links_s": 0.0}
    return {
        "step_range_s": [made.fastest_s, made.slowest_s],
        "range_kernels_s": made.kernels_s,
        "range_links_s": made.links_s,
    }


def is_known(hardware: Hardware) -> bool:
    """Whether all speeds of it are known, as those of measured hardware."""
    return hardware.kernels_range == hardware.links_range == (1.0, 1.0)


def range_of(hardware: Hardware, step_s: StepTime) -> Range | None:
    """The range of a step's time; None where all speeds are known.

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
    """The same with links of another relative speed."""
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
    """Those that are as fast as the first of ``ranked``, for all that is known; it comes first.

    Args:
        ranked: outcomes that fit, the fastest first.
        paced_s: simulates an outcome as `StepTime`, and returns its time as `Outcome.paced_s`.
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
