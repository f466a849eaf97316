"""What holds for every test: the `long` marker, the choice of tests that depend on torch's version,
the number of test files that run at once and their order, and the end of process groups and ranks.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import durations
import harness
import run_log
from torch_versions import DEPEND_ON_TORCH_VERSION


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--torch-versions",
        action="store_true",
        help="only the tests that depend on torch's version: about a fifth (torch_versions.py)",
    )

    parser.addoption(
        "--sample",
        action="store_true",
        help="of each test only as many cases as fit in a second (durations.py)",
    )

    parser.addoption(
        "--record-durations",
        action="store_true",
        help="write to tests/support/durations.json how long each file took",
    )

    parser.addoption(
        "--device",
        choices=("cpu", "testdev", "cuda"),
        default="cpu",
        help="run test bodies on this device: testdev is asynchronous (support/testdev), cuda "
        "wants a GPU for each rank, or FSDP2_TEST_RANKS_PER_GPU=n, and skips what needs more",
    )


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device != harness.DEVICE:
        os.environ["FSDP2_TEST_DEVICE"] = harness.DEVICE = device
    if path := os.environ.get(run_log.VARIABLE):
        config.pluginmanager.register(run_log.RunLog(path))
    if config.getoption("--record-durations") and config.getoption("--sample"):
        raise pytest.UsageError("--record-durations wants all cases: make test-ci")
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder(durations.FILE, config.rootpath))
    harness.start_chaos()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the long tests out unless the -m expression asks for them, and with
    ``--torch-versions`` the files that do not depend on it; ``--sample`` leaves out cases."""
    named = any("::" in argument for argument in config.args) or config.getoption("-k")
    if "long" not in config.getoption("-m"):
        _keep(config, items, lambda item: not item.get_closest_marker("long"))
        if not named:
            left_out = _other_world_sizes(items)
            _keep(config, items, lambda item: item not in left_out)
    if config.getoption("--torch-versions"):
        here = Path(__file__).parent
        files = {here / name for name in DEPEND_ON_TORCH_VERSION}
        _keep(config, items, lambda item: item.path in files)
    sampled = config.getoption("--sample") and not named
    if sampled:
        cases = durations.left_out_of_sample(items, durations.load())
        _keep(config, items, lambda item: item not in cases)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        seconds = durations.of_files(durations.load(), sampled=sampled)
        items[:] = durations.longest_first(items, seconds)


def _other_world_sizes(items: list[pytest.Item]) -> set[pytest.Item]:
    """A test of several world sizes runs on one of them, in turn down its file. Long: on all."""
    alike: dict[tuple[object, ...], list[pytest.Item]] = {}
    for item in items:
        parameters = dict(getattr(getattr(item, "callspec", None), "params", {}))
        if "world_size" in parameters:
            del parameters["world_size"]
            key = item.path, getattr(item, "originalname", ""), repr(sorted(parameters.items()))
            alike.setdefault(key, []).append(item)
    turns: Counter[Path] = Counter()
    left_out: set[pytest.Item] = set()
    for (path, *_), sizes in alike.items():
        if len(sizes) > 1:
            chosen = turns[path] % len(sizes)
            turns[path] += 1
            left_out.update(item for i, item in enumerate(sizes) if i != chosen)
    return left_out


def _keep(
    config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]
) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """How many test files `-n auto` runs at once: each has ranks of its own, which often wait.

    One beside a GPU: tests look at what a GPU does at the same time. A worker with the ranks of
    all world sizes needs about 5 GiB.
    """
    if torch.cuda.is_available():
        return 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, memory // (5 << 30), 4))


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """A module whose tests make a default process group in this process takes it with it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_sessionfinish() -> None:
    harness.stop_all()
