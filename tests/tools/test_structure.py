"""Limits to the size of the core and to what a step enters: `python -m benchmarks.structure`.

The limits are a little above what was measured when they were set. Whoever simplifies lowers them;
whoever has to raise one says in the commit what the code is worth.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import pytest
import torch

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


@cache
def core() -> Size:
    return structure.size_of(structure.core_files())


def test_the_core_stays_small() -> None:
    # With `comm/topology.py`, which was a file of `estimation/`, and `comm/followers.py`, most of
    # which was in `comm/host_relays.py`. Two that only models with `flat_step` enter, and one that
    # only those with `step_in_backward` do. And marks on inputs, which were in `runtime/hooks.py`;
    # how ranks of a host meet, which was a part of `comm/host_links.py`.
    assert core().files <= 66
    # With the types of what passes between files, not Any, the end of a gather that failed, and
    # subclasses on dims other than 0, optimizers of gathered parameters, and `zero_grad`
    # that frees; 570 lines and 54 functions for messages in fewer bytes (`CommPolicy`), which no
    # step without one enters; 215 and 24 for a budget of gathered bytes. 565 lines and 60 functions
    # for exchanges within a host: connections, reads, all-reduces in two phases; 300 and 27 for
    # groups over several hosts, which no step on one host enters; 40 and 3 for Ctrl-C and forks in
    # the middle of an exchange, and units that were expected again and did not run; 24 and 1 for
    # units of many modules, whose checks take no time with the square of these; 27 and 3 for what
    # `functional_call` lends to units that are registered anew before they run; 46 and 4 for writes
    # to gathered parameters, and freezing of them; 131 and 24 for which ranks share a host and what
    # is sent between them, half of them moved from `estimation/`; 29 and 6 for gathers in fewer
    # bytes by reads of memory; 45 and 5 for all-reduces whose sums are sent while backward runs;
    # 4 and 1 for whether sums are added host by host, which `deterministic` asks; 51 and 5 for
    # channels that end with their model, and freezing in every state; 134 and 12 for what modules
    # in the middle of a unit skip (`runtime/middle.py`); 130 and 15 for units that lie side by side
    # for `flat_step`; 1 function for ids of parameters that were replaced; 34 and 8 for a stream of
    # copies and which storages are gathered, for `offload_activations`; 20 and 3 for which
    # all-reduces are one exchange; 29 and 1 for sums
    # of 0-dim parameters in fewer bytes, which all ranks must hold alike; 7 and 1 for methods that
    # are registered again; 51 and 3 for threads that end before the interpreter does, or the
    # process would abort and its exit code be lost; 25 and 5 for ranks of one host that may not
    # read, and still send nothing between hosts; 5 and 1 for copies of what several streams of
    # compute have saved; 12 and 1 for units that `functional_call` finds gathered before the first
    # forward, and `zero_grad` of what is still being reduced; 52 and 2 for shards of whole blocks
    # of rows; 3 for losses inside of freed units; 122 and 16 for which gradients are complete while
    # backward goes on (`step_in_backward`); 21 and 2 for units that fit on the device;
    # 76 and 10 for inputs changed in place; 19 and 2 for gradients of what a root replaces; 14 and
    # 1 for the head of a file that was a part of another; 25 and 2 for backwards that raise after
    # they have added to gradients; 48 and 6 for ranks that agree, whatever one of them holds or has
    # used, on what to gather and reduce, and for gradients written after such backwards; 59 and 5
    # for what units that are planned anew in the middle of a step still hold; 4 and 1 for moves
    # that move nothing; 24 and 1 for what is frozen between a forward and its backward; 22
    # and 2 for errors of subclasses on some ranks, which all are told in the first gather; 7
    # and 1 for marks that a recomputation leaves, and for what predictions share; 42 for gathers
    # that are batched by sizes and hosts, and ranks that tell each other theirs; 22 for gathers
    # straight into symmetric memory; 14 for what checkers are told of ``fully_shard``; 139 and 14
    # for ties and parameters that are changed after sharding.
    assert core().code_lines <= 10182
    assert core().functions <= 1066


def test_no_function_of_the_core_is_long() -> None:
    assert core().largest[0] <= 60, core().largest[1]


def test_sharding_and_a_first_step_enter_few_files_and_functions(
    measured: dict[str, Entered],
) -> None:
    # With `api/torch_errors.py`, which is entered once in a process.
    assert len(measured[FIRST].files) <= 49 + OLDER_TORCH
    # Three of them ask whether there is a `CommPolicy`, three look for what would be lost, two for
    # what was frozen; one whether an optimizer wants units side by side, and one was a part of
    # another; one forgets parameters that were replaced, one notes gathered storages; five look at
    # granularities.
    assert len(measured[FIRST].functions) <= 360


def test_a_steady_step_enters_few_files_and_functions(measured: dict[str, Entered]) -> None:
    # `zero_grad` is a part of the step, and frees what it drops. The root asks once whether it is
    # in `functional_call`.
    assert len(measured[STEADY].files) <= 19 + OLDER_TORCH
    assert len(measured[STEADY].functions) <= 130 + OLDER_TORCH
    assert len(measured[STEADY].calls) <= 444 + 14 * OLDER_TORCH


def test_a_steady_step_stays_in_a_file_for_some_calls(measured: dict[str, Entered]) -> None:
    assert measured[STEADY].calls_per_file_change >= 1.64


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
    )
    size = structure.size_of([tmp_path / "a.py"])
    assert size == Size(files=1, code_lines=9, functions=2, comments=1, largest=(5, "a.f"))
    assert size.comments_per_100 == pytest.approx(100 / 9)


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
