"""What holds for every test: the `long` marker, and the end of the ranks."""

from __future__ import annotations

import pytest

import harness


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests out unless the -m expression asks for them."""
    if "long" in config.getoption("-m"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)


def pytest_sessionfinish() -> None:
    harness.stop_all()
