"""How long each test file takes: `make test ARGS=--record-durations` writes durations.json.

Two use it. Files go to the workers of pytest-xdist in the order of the collection, here the longest
first, so that no worker is left with a long one at the end. `make check` takes as many files as fit
in its time. A file that is not named in it is new, or renamed, and counts as a long one here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")
LEAST_S = 0.1  # files that take less are not told apart


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """The tests in the order of their files' durations; those of a file stay as they are."""
    return sorted(items, key=lambda item: -seconds.get(file_of(item.nodeid), float("inf")))


class Recorder:
    """The plugin of pytest that writes down what the files of a run took.

    The others keep what was written before, unless they are gone.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.root = file, root
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        now = {name: max(LEAST_S, round(s, 1)) for name, s in self.seconds.items()}
        kept = {n: s for n, s in sorted((before | now).items()) if (self.root / n).exists()}
        self.file.write_text(json.dumps(kept, indent=0) + "\n")
