"""How long each test takes: `make test-ci ARGS=--record-durations` writes durations.json.

Three use it. Files go to the workers of pytest-xdist in the order of the collection, here the
longest first, so that no worker is left with a long one at the end. `make check` takes as many
files as fit in its time. And ``--sample`` runs as many cases of each test as fit in `SAMPLE_S`, and
no case of more than `MOST_S`: what takes long is mostly a matrix or a whole program whose parts
have quick tests. `.ci/run` runs everything, but on a slow machine a sample. A test or a file that
is not named in durations.json is new, or renamed: it runs whole, and counts as a long one here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from zlib import crc32

import pytest

FILE = Path(__file__).with_name("durations.json")
LEAST_S = 0.1  # tests that take less are recorded as one, without a name
SAMPLE_S = 1.0  # for the cases of one test
MOST_S = 2.0  # for one case: a test whose cases take longer is in no sample
TODAY = datetime.now(UTC).date()

# Of a test of a file: the number of its cases, and the seconds of all of them.
Recorded = Mapping[str, Mapping[str, Sequence[float]]]


def load() -> Recorded:
    recorded: Recorded = json.loads(FILE.read_text())
    return recorded


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def test_of(nodeid: str) -> str:
    """Without its parameters."""
    return nodeid.partition("::")[2].partition("[")[0]


def num_sampled(num_cases: float, seconds: float) -> int:
    """Of a test with so many cases, which take so long."""
    each_s = max(seconds / num_cases, 1e-9)
    return 0 if each_s > MOST_S else max(1, min(int(num_cases), int(SAMPLE_S / each_s)))


def of_files(recorded: Recorded, *, sampled: bool = False) -> dict[str, float]:
    """How many seconds each file takes."""
    return {
        name: sum(
            seconds * (num_sampled(cases, seconds) / cases if sampled and cases else 1)
            for cases, seconds in tests.values()
        )
        for name, tests in recorded.items()
    }


def longest_first(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """The tests in the order of their files' durations; those of a file stay as they are."""
    return sorted(items, key=lambda item: -seconds.get(file_of(item.nodeid), float("inf")))


def left_out_of_sample(items: Sequence[pytest.Item], recorded: Recorded) -> set[pytest.Item]:
    """Cases that do not fit in the time of their test. (In turn, some values of a parameter would
    never run: so they are drawn, by their names, and each day others.)"""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((file_of(item.nodeid), test_of(item.nodeid)), []).append(item)
    left_out: set[pytest.Item] = set()
    for (file, test), cases in tests.items():
        num, seconds = recorded.get(file, {}).get(test, (1, 0))
        num_run = num_sampled(len(cases), seconds / num * len(cases))
        left_out.update(sorted(cases, key=_drawn)[num_run:])
    return left_out


def _drawn(item: pytest.Item) -> int:
    return crc32(f"{item.nodeid} {TODAY}".encode())


class Recorder:
    """The plugin of pytest that writes down what the tests of a run took.

    Files that did not run keep what was written before, unless they are gone.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self.file, self.root = file, root
        self.seconds: dict[str, Counter[str]] = {}  # of files, by what comes after in node ids

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = self.seconds.setdefault(file_of(report.nodeid), Counter())
        file[report.nodeid.partition("::")[2]] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        now = {name: _of_tests(cases) for name, cases in self.seconds.items()}
        kept = {n: s for n, s in sorted((before | now).items()) if (self.root / n).exists()}
        lines = (f"{json.dumps(name)}: {json.dumps(tests)}" for name, tests in kept.items())
        self.file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _of_tests(seconds: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """From the seconds of cases, what is recorded of their tests."""
    cases, whole = Counter[str](), Counter[str]()
    for case, took in seconds.items():
        cases[test_of(f"::{case}")] += 1
        whole[test_of(f"::{case}")] += took
    found = {t: (cases[t], round(s, 1)) for t, s in sorted(whole.items()) if s >= LEAST_S}
    rest = sum(s for s in whole.values() if s < LEAST_S)
    return found | {"": (0, round(max(LEAST_S, rest), 1))}
