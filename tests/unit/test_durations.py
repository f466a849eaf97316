"""The order in which test files run, samples of their cases, and the record that both rest on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from durations import Recorder, left_out_of_sample, load, longest_first, of_files

ROOT = Path(__file__).parents[2]


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def items(*names: str) -> list[Any]:
    return [Item(nodeid=name) for name in names]


def test_long_files_go_first_and_their_tests_stay_in_order() -> None:
    given = items("a.py::one", "a.py::two[x]", "b.py::z", "b.py::a", "new.py::one", "c.py::one")
    found = longest_first(given, {"a.py": 1.0, "b.py": 30.0, "c.py": 1.0})
    names = [item.nodeid for item in found]
    assert names == ["new.py::one", "b.py::z", "b.py::a", "a.py::one", "a.py::two[x]", "c.py::one"]


def test_a_run_is_added_to_what_was_recorded(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).touch()
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"a.py": {"one": [1, 7.0]}, "b.py": {}, "gone.py": {}}))
    recorder: Any = Recorder(file, tmp_path)
    for nodeid, seconds in [
        ("b.py::one[x]", 1.0),
        ("b.py::one[x]", 0.5),  # its teardown
        ("b.py::one[y]", 1.0),
        ("b.py::Class::two", 1.25),
        ("c.py::one", 0.01),
    ]:
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    recorder.pytest_sessionfinish()
    recorded = json.loads(file.read_text())
    assert recorded == {
        "a.py": {"one": [1, 7.0]},
        "b.py": {"one": [2, 2.5], "Class::two": [1, 1.2], "": [0, 0.1]},
        "c.py": {"": [0, 0.1]},
    }
    assert of_files(recorded) == pytest.approx({"a.py": 7.0, "b.py": 3.8, "c.py": 0.1})
    assert of_files(recorded, sampled=True)["b.py"] == pytest.approx(2.55)


def test_cases_of_a_sample() -> None:
    given = items(
        *(f"a.py::one[{i}]" for i in range(10)),
        "a.py::slow[x]",
        "a.py::slow[y]",
        "a.py::slowest",
        "a.py::new[x]",
        "b.py::new[x]",
    )
    recorded = {"a.py": {"one": [20, 8.0], "slow": [2, 4.0], "slowest": [1, 9.0], "": [0, 0.1]}}
    left_out = left_out_of_sample(given, recorded)
    kept = [item.nodeid for item in given if item not in left_out]
    tests = Counter(name.partition("[")[0] for name in kept)
    # 0.4 s a case; at least one of each test; what is not recorded runs whole.
    assert tests == {"a.py::one": 2, "a.py::slow": 1, "a.py::new": 1, "b.py::new": 1}
    assert left_out_of_sample(given, {}) == set()


def test_nearly_all_files_are_recorded() -> None:
    """Few are new or renamed since: the order is worth something, and samples are small."""
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    assert len(there & load().keys()) > 0.8 * len(there)
    assert sum(map(len, load().values())) > 2 * len(there)  # their tests, too
