"""What holds for every test: the `long` marker, and the end of process groups and ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import harness


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests out unless the -m expression asks for them."""
    if "long" in config.getoption("-m"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """A module whose tests make a default process group in this process takes it with it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_sessionfinish() -> None:
    harness.stop_all()
