"""Limits to the size of the core and to what a step enters: `python -m benchmarks.structure`.

The limits are a little above what was measured when they were set. Whoever simplifies lowers them;
whoever has to raise one says in the commit what the code is worth.
"""

from __future__ import annotations

import inspect
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

import fsdp2
import fsdp2.planning
import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

from benchmarks import structure
from benchmarks.structure import FIRST, STEADY, Entered, Size

# A step enters one file and some functions more, for what the newest torch does itself.
OLDER_TORCH = torch.__version__ < "2.15"


@pytest.fixture(scope="module")
def measured() -> dict[str, Entered]:
    with ProcessPoolExecutor(1, mp_context=harness.fork_context()) as pool:
        return pool.submit(structure.measure_alone).result(timeout=harness.JOB_TIMEOUT_S)


# No part of a step, and larger than the kernel.
PLANNING = ("planning",)
# Files, code lines, functions. They may only shrink: a change is paid for in the room that it
# is made in. What leaves the kernel is paid for by the part that it comes to.
LIMITS = {
    structure.KERNEL: (27, 4890, 492),
    ("transports",): (15, 2089, 232),
    ("features",): (23, 2483, 277),
    ("guards",): (10, 964, 102),
    ("api/comm_settings.py",): (1, 141, 16),
    PLANNING: (60, 10512, 959),
}


@cache
def size_of(rooms: tuple[str, ...]) -> Size:
    return structure.size_of(structure.files_of(rooms))


def test_every_room_of_a_step_has_a_limit() -> None:
    limited = [name for rooms in LIMITS for name in rooms]
    assert sorted(limited) == sorted(structure.KERNEL + structure.PARTS + PLANNING)


@pytest.mark.parametrize("rooms", LIMITS, ids=lambda rooms: rooms[0])
def test_rooms_stay_small(rooms: tuple[str, ...]) -> None:
    size = size_of(rooms)
    measured = (size.files, size.code_lines, size.functions)
    assert all(a <= b for a, b in zip(measured, LIMITS[rooms], strict=True)), measured


@pytest.mark.parametrize("rooms", LIMITS, ids=lambda rooms: rooms[0])
def test_no_function_of_the_core_is_long(rooms: tuple[str, ...]) -> None:
    assert size_of(rooms).largest[0] <= 60, size_of(rooms).largest[1]


def test_no_public_function_has_many_parameters() -> None:
    """What belongs together goes into a dataclass: `Workload`, `Sharding`, `Cluster`."""
    modules = (fsdp2, fsdp2.planning)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    functions = {name: each for name, each in public.items() if inspect.isfunction(each)}
    found = {name: len(inspect.signature(each).parameters) for name, each in functions.items()}
    assert {name: number for name, number in found.items() if number > 12} == {}


def test_sharding_and_a_first_step_enter_few_files_and_functions(
    measured: dict[str, Entered],
) -> None:
    # With `api/torch_errors.py` and `common/torch_patches.py`, which are entered once in a process.
    # Each part is asked once whether it has anything to do in the tree.
    assert len(measured[FIRST].files) <= 65 + OLDER_TORCH
    assert len(measured[FIRST].functions) <= 398


def test_a_steady_step_enters_few_files_and_functions(measured: dict[str, Entered]) -> None:
    # `zero_grad` is a part of the step, and frees what it drops. The root asks once whether it is
    # in `functional_call`.
    assert len(measured[STEADY].files) <= 21 + OLDER_TORCH
    assert len(measured[STEADY].functions) <= 132 + OLDER_TORCH
    assert len(measured[STEADY].calls) <= 442 + 14 * OLDER_TORCH


def test_a_steady_step_has_few_branch_points(measured: dict[str, Entered]) -> None:
    # (torch's FSDP2 has 331.)
    assert structure.branch_points(structure.PACKAGE, measured[STEADY]) <= 519 + 20 * OLDER_TORCH


def test_the_classes_of_a_step_have_few_fields() -> None:
    limits = {"Runtime": 15, "Unit": 22, "ParamGroup": 21, "Bucket": 22, "Reduction": 20}
    assert limits.keys() == structure.CLASSES.keys()
    found = {name: len(structure.fields_of(name)) for name in limits}
    assert all(found[name] <= limit for name, limit in limits.items()), found


def test_branch_points_are_counted_by_function(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n    def f(self, x):\n        def g():\n            return 1 if x else 2\n"
        "        for y in x:\n            if y and x or y:\n                return g\n"
        "        return [y for y in x if y]\n\n"
        "def f():\n    while True:\n        pass\n"
    )
    points = {
        name: structure.branch_points(tmp_path, Entered([("a.py", name)]))
        for name in ("A.f", "A.f.<locals>.g", "f")
    }
    assert points == {"A.f": 6, "A.f.<locals>.g": 1, "f": 1}


def test_a_steady_step_stays_in_a_file_for_some_calls(measured: dict[str, Entered]) -> None:
    assert measured[STEADY].calls_per_file_change >= 1.58


def test_what_a_step_has_to_enter_is_counted(measured: dict[str, Entered]) -> None:
    """What the limits rely on: hooks, gathers and reductions of the step are among the calls."""
    names = {name for _, name in measured[STEADY].functions}
    for hook in ("pre_forward", "post_forward", "enter_backward", "leave_backward"):
        assert any(name.endswith(f".{hook}") for name in names), hook
    folders = {file.partition("/")[0] for file in measured[STEADY].files}
    assert folders >= {"runtime", "comm", "sharding"}
    assert names >= {"GroupTransport.all_gather", "GroupTransport.reduce_scatter"}


def test_lines_are_counted_by_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A module.\n\nTwo lines of it."""\n\n'
        "# why\n"
        "X = (\n    1,  # one\n\n    2,\n)\n\n\n"
        'def f(y):\n    """What it gives."""\n\n    def g():\n        return """two\n'
        'lines"""\n\n    return g() + y  # not alone on its line\n'
        'class Declared:\n    def h(self): ...\n\n    def i(self):\n        """Nothing."""\n'
    )
    size = structure.size_of([tmp_path / "a.py"])
    assert size == Size(files=1, code_lines=12, functions=2, comments=1, largest=(5, "a.f"))
    assert size.comments_per_100 == pytest.approx(100 / 12)


def test_calls_are_noted_in_order_and_only_those_of_the_package() -> None:
    with structure.entering(Path(structure.__file__).parent) as entered:
        structure.size_of([])
        structure.core_files()
        Path(".").exists()
    assert entered.calls[:2] == [("structure.py", "size_of"), ("structure.py", "core_files")]
    assert sys.getprofile() is None
    entered.calls = [("a", "f"), ("a", "g"), ("b", "h"), ("a", "f")]
    assert (entered.files, len(entered.functions)) == ({"a", "b"}, 3)
    assert entered.calls_per_file_change == 2
