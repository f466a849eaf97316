"""Arithmetic of profiles, on recordings written by hand."""

from __future__ import annotations

import pytest

from fsdp2.profiling.events import (
    Communication,
    Moment,
    Recording,
    Sample,
    UnitBorder,
    WaitInterval,
    exclusive,
)
from fsdp2.profiling.measures import Traffic, measure, steps_of
from fsdp2.profiling.trace import rows_of


def borders(*told: tuple[float, str, str, int]) -> list[UnitBorder]:
    """(time, "+name" or "-name", phase, depth)."""
    return [UnitBorder(name[0] == "+", name[1:], phase, depth, t) for t, name, phase, depth in told]


def shown(made: tuple) -> list[tuple[str, float, float]]:
    return [(c.unit, c.begin_s, c.end_s) for c in made]


def test_time_belongs_to_the_innermost_unit() -> None:
    told = borders(
        (0, "+root", "forward", 0),
        (1, "+a", "forward", 1),
        (3, "-a", "forward", 1),
        (4, "-root", "forward", 0),
    )
    assert shown(exclusive(told, [])) == [("root", 0, 1), ("a", 1, 3), ("root", 3, 4)]


def test_an_enclosing_unit_that_is_told_of_later_stays_outside() -> None:
    told = borders(
        (0, "+a", "backward", 1),
        (0, "+root", "backward", 0),
        (2, "-a", "backward", 1),
        (5, "-root", "backward", 0),
    )
    assert shown(exclusive(told, [])) == [("a", 0, 2), ("root", 2, 5)]


def test_units_that_are_left_in_another_order() -> None:
    told = borders(
        (0, "+a", "backward", 0),
        (1, "+b", "backward", 0),
        (2, "-a", "backward", 0),
        (3, "-b", "backward", 0),
        (4, "-b", "backward", 0),  # left twice
    )
    assert shown(exclusive(told, [])) == [("a", 0, 1), ("b", 1, 2), ("b", 2, 3)]


def test_clocks_that_go_back_a_little() -> None:
    told = borders((1, "+a", "forward", 0), (0.5, "+b", "forward", 1), (2, "-b", "forward", 1))
    assert shown(exclusive(told, [])) == [("b", 1, 2)]


@pytest.mark.parametrize(
    ("wait", "left"),
    [
        ((0, 1), [(1, 4)]),
        ((2, 3), [(1, 2), (3, 4)]),
        ((0, 9), []),
        ((3, 9), [(1, 3)]),
        ((0, 2), [(2, 4)]),
        ((4, 5), [(1, 4)]),
    ],
)
def test_waits_are_no_compute(wait: tuple[float, float], left: list[tuple[float, float]]) -> None:
    told = borders((1, "+a", "forward", 0), (4, "-a", "forward", 0))
    made = exclusive(told, [WaitInterval("b", "all-gather", *wait)])
    assert [(c.begin_s, c.end_s) for c in made] == left


def moments(text: str) -> list[Moment]:
    """r: a root forward, o: an optimizer's step, s: the user's; one second apart."""
    kinds = {"r": "root", "o": "optimizer", "s": "step"}
    return [Moment(kinds[c], float(i)) for i, c in enumerate(text) if c != " "]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", []),
        ("r r", [(0, 2), (2, 9)]),  # each forward
        ("rrorro", [(0, 3), (3, 9)]),  # micro-batches are one step
        ("roror", [(0, 2), (2, 4), (4, 9)]),
        ("rors", [(0, 3)]),  # what the user says
        ("rs rs r", [(0, 1), (1, 4), (4, 9)]),
        (" o r o", [(3, 9)]),
    ],
)
def test_steps(told: str, expected: list[tuple[float, float]]) -> None:
    assert steps_of(moments(told), 10.0, 9.0) == expected


def test_measures_are_means_over_steps() -> None:
    gather = Communication("a", "all-gather", "forward", 4, 100, 75, 0.0, 0.25, 0.0, 2.0)
    again = Communication("a", "all-gather", "backward", 4, 100, 75, 4.0, 0.25, 4.0, 5.0)
    waits = (
        WaitInterval("a", "all-gather", 1.0, 2.0),
        WaitInterval("b", "reduce-scatter", 5.0, 5.5),
    )
    samples = tuple(
        Sample(t, {"gathered parameters": nbytes}, total)
        for t, nbytes, total in ((0.0, 5, 50), (3.0, 9, None), (6.0, 1, 60))
    )
    recording = Recording(
        rank=1,
        device="cuda:1",
        stream_ordered=True,
        units=("a", "b"),
        compute=exclusive(
            borders((0, "+a", "forward", 0), (4, "-a", "forward", 0), (6, "+", "optimizer", 2),
                    (8, "-", "optimizer", 2)), waits
        ),
        communications=(gather, again),
        waits=waits,
        memory=samples,
        moments=tuple(moments("r   r")),
        end_s=10.0,
    )  # fmt: skip
    made = measure(recording)
    assert [(s.begin_s, s.end_s) for s in made.steps] == [(0, 4), (4, 8)]
    assert [s.exposed_s for s in made.steps] == [1.0, 0.5]
    assert [s.compute_s for s in made.steps] == [3.0, 0.0]
    assert [s.optimizer_s for s in made.steps] == [0.0, 2.0]
    assert [s.peak_gathered_bytes for s in made.steps] == [9, 9]
    assert [s.peak_bytes for s in made.steps] == [50, 60]
    a, b = made.units
    assert a.gather == Traffic(1.0, 1.5, 100.0, 75.0, 0.5, 0.25)
    assert a.gather.bandwidth == 50.0
    assert a.forward_s == 1.5
    assert b.reduce.exposed_s == 0.25
    assert a.peak_bytes == 50
    assert b.reduce.bandwidth is None
    assert made.total.exposed_s == 0.75
    assert made.to_dict()["units"][0]["gather"]["bandwidth"] == 50.0


def test_rows_have_no_overlaps() -> None:
    spans = [WaitInterval("", "", *span) for span in ((0, 4), (1, 2), (2, 5), (4, 6), (5, 7))]
    rows = rows_of(spans)
    assert [[(s.begin_s, s.end_s) for s in row] for row in rows] == [
        [(0, 4), (4, 6)],
        [(1, 2), (2, 5), (5, 7)],
    ]


def test_memory_that_has_not_changed_is_what_it_was_before() -> None:
    """On the CPU nothing is sampled then: the peak of a unit is of the last sample before it."""
    told = borders(
        (1, "+a", "forward", 0),
        (2, "-a", "forward", 0),
        (3, "+b", "forward", 0),
        (5, "-b", "forward", 0),
    )
    recording = Recording(
        rank=0,
        device="cpu",
        stream_ordered=False,
        units=("a", "b"),
        compute=exclusive(told, []),
        communications=(),
        waits=(),
        memory=tuple(Sample(t, {}, total) for t, total in ((0.5, 70), (4.0, 20))),
        moments=(),
        end_s=6.0,
    )
    assert [unit.peak_bytes for unit in measure(recording).units] == [70, 20]
