"""What may run beside what, read from the trace of a run: overlap, and that the checks see it lost.

Two launches overlap if neither waits for the other, by the vector clocks of the checker, and the
host issues them early enough, by their places in the trace.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest

from fsdp2.comm.streams import DeviceStreams
from fsdp2.testing import Checker
from fsdp2.testing.device import SimulatedDevice
from fsdp2.testing.order import Event, Launch, Mark, Record, Wait
from harness import ours_only
from stream_schedules import Layer, Micro, Plan, Step, traced

pytestmark = ours_only("records what this runtime does")
FOUR = (Layer(), Layer(), Layer(), Layer())
PLAN = Plan(layers=FOUR, direct_min_bytes=0, steps=(Step(), Step()))


class Run:
    """The last step of a plan, and questions about it."""

    def __init__(self, plan: Plan = PLAN) -> None:
        with traced(plan) as recorder:
            self.events: list[Event] = list(recorder.events)
        self.checker = Checker(keep_clocks=True)
        for event in self.events:
            self.checker.feed(event)
        self.start = self.mark("step begins", str(len(plan.steps) - 1), start=0)

    def mark(self, name: str, subject: str = "", start: int | None = None) -> int:
        """Where the first such mark of the step is."""
        start = self.start if start is None else start
        return self.events.index(Mark(name, subject), start)

    def between(self, first: int, last: int, stream: str, name: str = "") -> list[int]:
        """The launches on a stream between two places, by part of their names."""
        return [
            i
            for i in range(first, last)
            if isinstance(event := self.events[i], Launch)
            and event.stream == stream
            and name in event.name
        ]

    def forward(self, unit: str) -> list[int]:
        """What compute does in the forward of a unit."""
        first = self.mark("pre_forward ends", unit)
        return self.between(first, self.mark("post_forward begins", unit), "compute")

    def backward(self, unit: str) -> list[int]:
        first = self.mark("pre_backward ends", unit)
        return self.between(first, self.mark("post_backward begins", unit), "compute")

    def gather(self, unit: str, start: int | None = None) -> list[int]:
        """The first gather of a unit after ``start``."""
        first = self.mark("start_unshard begins", unit, start)
        last = self.mark("start_unshard ends", unit, first)
        return self.between(first, last, "gather", "gather")

    def reduction(self, unit: str) -> list[int]:
        """The reduce-scatter of a unit that has one."""
        start = self.start
        while True:
            first = self.mark("reduce begins", unit, start)
            start = self.mark("reduce ends", unit, first)
            found = self.between(first, start, "reduce", "reduce_scatter")
            if found:
                return found

    def overlap(self, first: list[int], second: list[int]) -> bool:
        """Whether all of ``first`` may run beside all of ``second``."""
        assert first
        assert second
        return all(self.checker.concurrent(i, j) for i in first for j in second)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_next_unit_is_gathered_beside_the_forward_of_this_one(number: int) -> None:
    run = Run()
    this, following = f"layers.{number}", f"layers.{number + 1}"
    gather, compute = run.gather(following), run.forward(this)
    assert gather[-1] < compute[0], "launched first"
    assert run.overlap(gather, compute)


@pytest.mark.parametrize("number", [3, 2, 1])
def test_the_next_unit_is_gathered_beside_the_backward_of_this_one(number: int) -> None:
    run = Run()
    this, following = f"layers.{number}", f"layers.{number - 1}"
    backward = run.backward(this)
    gather = run.gather(following, run.mark("pre_backward begins", this))
    assert gather[-1] < backward[0], "launched first"
    assert run.overlap(gather, backward)


def test_a_gather_waits_until_the_unit_before_the_last_has_computed() -> None:
    """The limit of memory: two units are gathered at a time, not all."""
    run = Run()
    (gather, *_), computed = run.gather("layers.2"), run.forward("layers.0")
    assert all(run.checker.happens_before(i, gather) for i in computed)


@pytest.mark.parametrize("number", [3, 2, 1])
def test_gradients_are_reduced_beside_the_backward_of_the_next_unit(number: int) -> None:
    run = Run()
    reduction, backward = run.reduction(f"layers.{number}"), run.backward(f"layers.{number - 1}")
    assert reduction[-1] < backward[0], "launched first"
    assert run.overlap(reduction, backward)


@pytest.mark.parametrize("freezes_scale", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_no_reduction_of_a_unit_waits_for_the_end_of_backward(
    number: int, freezes_scale: bool
) -> None:
    """Of the first unit neither, whose input may need no gradient."""
    run = Run(Plan(layers=FOUR, freezes_scale=freezes_scale, steps=(Step(), Step())))
    end = run.mark("end_backward begins")
    assert run.reduction(f"layers.{number}")[-1] < end


def test_the_head_is_reduced_beside_the_backward_of_the_blocks() -> None:
    """It belongs to the root, whose backward ends last."""
    run = Run(Plan(layers=FOUR, tokens=True, direct_min_bytes=0, steps=(Step(), Step())))
    reduction = run.reduction("(root)")
    assert run.overlap(reduction, run.backward("layers.3"))
    assert run.overlap(reduction, run.backward("layers.2"))


def test_reduce_scatters_do_not_wait_for_gathers_of_other_units() -> None:
    run = Run()
    reduction = run.reduction("layers.2")
    gather = run.gather("layers.0", run.mark("pre_backward begins", "layers.1"))
    assert run.overlap(reduction, gather)


def test_an_all_reduce_overlaps_with_the_next_reduce_scatter() -> None:
    run = Run(Plan(layers=FOUR, mesh=(2, 2), direct_min_bytes=0, steps=(Step(), Step())))
    first = run.mark("reduce begins", "layers.3")
    all_reduce = run.between(first, run.mark("reduce ends", "layers.3"), "all", "allreduce")
    assert run.overlap(all_reduce, run.reduction("layers.2"))


def test_the_first_gather_waits_for_the_optimizer_and_not_for_what_is_launched_after() -> None:
    run = Run(Plan(layers=FOUR, steps=(Step(event=True), Step(micros=(Micro(),)))))
    gather = run.gather("(root)")
    optimizer = run.between(run.mark("end_backward ends", start=0), run.start, "compute", "add")
    assert optimizer
    assert all(run.checker.happens_before(i, gather[0]) for i in optimizer)


def _null(*_: Any, **__: Any) -> Any:
    return nullcontext()


def test_a_runtime_without_overlap_is_seen_as_one() -> None:
    """Faults that the checker calls harmless: on one stream everything is in order."""
    with mock.patch.object(DeviceStreams, "gathering", _null):
        run = Run()
        first = run.mark("start_unshard begins", "layers.1")
        gather = run.between(first, run.mark("start_unshard ends", "layers.1"), "compute", "gather")
        assert not run.overlap(gather, run.forward("layers.0"))
    with mock.patch.object(DeviceStreams, "before_gathers", return_value=None):
        assert Run().checker.violations


@pytest.mark.parametrize("capturing", [True, False])
def test_backward_joins_every_stream_while_a_graph_is_captured(capturing: bool) -> None:
    """Also those with nothing but waits on them, which CUDA would call unjoined."""
    name = "is_current_stream_capturing"
    with mock.patch.object(SimulatedDevice, name, return_value=capturing):
        events = Run().events
    last = {event.stream: i for i, event in enumerate(events) if isinstance(event, Wait)}
    joined = set()
    for stream in ("gather", "reduce", "all"):
        after = events[last.get(stream, 0) :]
        marks = {e.event for e in after if isinstance(e, Record) and e.stream == stream}
        if any(isinstance(e, Wait) and e.stream == "compute" and e.event in marks for e in after):
            joined.add(stream)
    assert (joined == {"gather", "reduce", "all"}) == capturing
