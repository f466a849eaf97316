"""`Schedule`: what it expects next, from the order of the last forward."""

from __future__ import annotations

from typing import Any

from harness import ours_only

pytestmark = ours_only("the schedule of this package")


class Named:
    """Stands in for a unit: the schedule only tells them apart here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forward_prefetch: list[Named] = []


def made(*names: str) -> tuple[Any, dict[str, Any]]:
    """A schedule, and units by name."""
    from fsdp2.runtime.schedule import Schedule  # torch's shim has none

    return Schedule(), {name: Named(name) for name in names}


def run(schedule: Any, units: dict[str, Any], order: str) -> list[str]:
    """A forward of ``units`` in this order; what was expected after each began."""
    schedule.begin_root(units[order[0]], leads_to_backward=True)
    found = []
    for name in order:
        schedule.begin(units[name])
        found.append("".join(unit.name for unit in schedule.next(2)))
    last = schedule.is_last(units[order[-1]])
    schedule.end_root()
    return [*found, "last" if last else ""]


def test_the_last_forward_predicts_the_next() -> None:
    schedule, units = made("r", "a", "b")
    assert run(schedule, units, "rab") == ["", "", "", ""]
    assert run(schedule, units, "rab") == ["ab", "b", "", "last"]


def test_nothing_is_expected_after_another_order_begins() -> None:
    schedule, units = made("r", "a", "b", "c")
    run(schedule, units, "rabc")
    # Not after it comes back to what was expected either: until the end of this forward.
    assert run(schedule, units, "racc") == ["ab", "bc", "", "", ""]
    assert run(schedule, units, "racc") == ["ac", "cc", "c", "", "last"]


def test_a_forward_that_goes_on_is_not_the_last() -> None:
    schedule, units = made("r", "a", "b")
    run(schedule, units, "rab")
    assert run(schedule, units, "ra") == ["ab", "b", ""]
    assert run(schedule, units, "raba") == ["a", "", "", "", ""]


def test_each_root_has_an_order_of_its_own() -> None:
    schedule, units = made("r", "a", "b")
    run(schedule, units, "rab")
    run(schedule, units, "ab")
    assert run(schedule, units, "rab") == ["ab", "b", "", "last"]
    assert run(schedule, units, "ab") == ["b", "", "last"]
