"""The log of a run of pytest that may be ended at any time: ``FSDP2_TEST_LOG=FILE``.

Each test is named in the file when it begins, and its outcome when it is known, with the text of a
failure. Where a run that ended early (a hang, a crash, a GPU that gave up) is started again, it
leaves out what the file names as begun.

The file may hold several runs, each below a line that begins with `HEADING`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "FSDP2_TEST_LOG"
HEADING = "##### "
BEGUN, HUNG, OVER = "begun", "no end", "all tests of this run are over"
KEPT_CHARS = 6000


def note(text: str) -> None:
    """Add a line about the present test, from pytest's process or a rank; nothing without a log."""
    if path := os.environ.get(VARIABLE):
        with open(path, "a") as file:
            file.write(f"{text}\n")


def last_run(text: str) -> str:
    """What a log has of its last run."""
    return text.rpartition(f"\n{HEADING}")[2]


def outcomes(run: str) -> dict[str, str]:
    """By the names of tests: "passed", "failed", "skipped", or `HUNG` for what never ended."""
    found: dict[str, str] = {}
    for line in run.splitlines():
        word, _, rest = line.partition(" ")
        name = rest.rpartition(" in ")[0] or rest
        if word == BEGUN:
            found[rest] = HUNG
        elif name in found and word in ("passed", "failed", "skipped"):
            found[name] = word if found[name] != "failed" else "failed"
    return found


class RunLog:
    """The plugin of pytest that writes the log."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        begun = outcomes(last_run(text))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
        items[:] = [item for item in items if item.nodeid not in begun]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            note(f"failed to collect {report.nodeid}\n{report.longreprtext[-KEPT_CHARS:]}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        note(f"{BEGUN} {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        note(f"{report.outcome} {report.nodeid} in {report.duration:.2f} s")
        if report.failed:
            note(report.longreprtext[-KEPT_CHARS:])
        elif isinstance(report.longrepr, tuple):
            note(f"    {report.longrepr[2]}")

    def pytest_report_teststatus(
        self, report: pytest.CollectReport | pytest.TestReport
    ) -> tuple[str, str, str]:
        """No dots between the lines of the log, where pytest's output goes to the same file."""
        passed_before = report.passed and getattr(report, "when", None) != "call"
        return ("" if passed_before else report.outcome, "", "")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """After an illegal access every call of a process fails: the next tests get another one."""
        result = yield
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                note(f"the device is lost to this process: {error}")
                os._exit(1)
        return result

    def pytest_sessionfinish(self) -> None:
        note(OVER)
