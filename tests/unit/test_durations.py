"""The order in which test files run, and the record that it rests on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from durations import FILE, Recorder, longest_first

ROOT = Path(__file__).parents[2]


def items(*names: str) -> list[Any]:
    return [SimpleNamespace(nodeid=name) for name in names]


def test_long_files_go_first_and_their_tests_stay_in_order() -> None:
    given = items("a.py::one", "a.py::two[x]", "b.py::z", "b.py::a", "new.py::one", "c.py::one")
    found = longest_first(given, {"a.py": 1.0, "b.py": 30.0, "c.py": 1.0})
    names = [item.nodeid for item in found]
    assert names == ["new.py::one", "b.py::z", "b.py::a", "a.py::one", "a.py::two[x]", "c.py::one"]


def test_a_run_is_added_to_what_was_recorded(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).touch()
    file = tmp_path / "durations.json"
    file.write_text(json.dumps({"a.py": 7.0, "b.py": 5.0, "gone.py": 3.0}))
    recorder: Any = Recorder(file, tmp_path)
    for nodeid, seconds in [("b.py::one", 1.0), ("b.py::two", 2.25), ("c.py::one", 0.01)]:
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=seconds))
    recorder.pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"a.py": 7.0, "b.py": 3.2, "c.py": 0.1}


def test_nearly_all_files_are_recorded() -> None:
    """Few are new or renamed since: the order is worth something."""
    recorded = json.loads(FILE.read_text()).keys()
    there = {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py")}
    assert len(there & recorded) > 0.8 * len(there)
