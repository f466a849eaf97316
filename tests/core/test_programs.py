"""Random programs on random models: the sharded model computes what the plain one does."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import harness
from fsdp2 import FSDPModule, fully_shard
from harness import ours_only, run_on
from planted_faults import FAULTS, PACKAGE, REPOSITORY, Fault, by_programs, by_test
from program_grammar import sample
from program_operations import Run
from program_runs import failures
from programs import Operation, Program, run
from random_models import Layer

SUPPORT = Path(harness.__file__).parent
pytestmark = ours_only("settings and functions that torch does not have")


@pytest.mark.parametrize("number", range(30))
def test_programs(number: int) -> None:
    program = sample(number + 1)[number]
    run_on(program.world_size, run, program)


def test_operations_have_different_names() -> None:
    """A method of one class would hide an operation of another."""
    names = [name for kind in Run.__mro__[:-1] for name in vars(kind) if not name.startswith("_")]
    assert len(names) == len(set(names))


FAILS = ("fail", 0, "before forward", "error")
FAILS_LATE, TWICE = ("fail", 1, "early in backward", "error"), ("twice",)
FUNCTIONAL, ALONE = ("functional",), ("alone", 0, "encode")
COPY, FREEZE, FREEZE_INNER = ("copy",), ("freeze", 0), ("freeze", 1)
# What random programs have found; each failed once.
FOUND: dict[str, tuple[Operation, ...]] = {
    "frozen before a state dict": (("step",), FREEZE, ("state_dict", "sharded")),
    "frozen after functional_call": (FUNCTIONAL, FREEZE_INNER),
    "frozen after functional_call, thawed": (FUNCTIONAL, FREEZE_INNER, TWICE, FREEZE_INNER),
    "frozen after a failed backward, thawed": (FAILS_LATE, FREEZE, TWICE, FREEZE),
    "frozen while gathered, and copied": (("drop",), FREEZE, COPY, ("step",)),
    "frozen while gathered, and moved": (("drop",), FREEZE, FREEZE_INNER, ("move",), ("step",)),
    "functional_call after a failure": (FAILS, FUNCTIONAL, ALONE),
    "dropped while being reduced": (("abandoned", "not last", True),),
    "profiled after a setting": (
        ("step",),
        ("node_setting", 0, "set_force_sum_reduction_for_comms", True),
        ("observe", ("step",)),
    ),
    "resumed with counts of steps": (("optimizer", "adamw", "offload"), ("step",), ("resume",)),
    "called alone, then in functional_call": (("alone", 0, "forward"), FUNCTIONAL, ("step",)),
}


@pytest.mark.parametrize("reshard", [None, 1, 2])
@pytest.mark.parametrize("name", FOUND)
def test_found_programs(name: str, reshard: int | None) -> None:
    inner = Layer("linear", bias=False, unit="sharded", reshard=reshard)
    model = Layer("linear", bias=False, inside=(inner,))
    run_on(2, run, Program(model, 2, 1, {"direct_min_bytes": None}, "", FOUND[name]))


def test_a_loss_inside_of_units_that_were_freed() -> None:
    """Backward read weights of the units around that were freed, once without an error."""
    leaf = Layer("norm", unit="sharded")
    inner = Layer("norm", unit="sharded", reshard=True, inside=(leaf,))
    model = Layer("linear", inside=(inner,))
    operations: tuple[Operation, ...] = (("step",), ("partial", 0), ("step",))
    run_on(2, run, Program(model, 2, 1, {"direct_min_bytes": None}, "", operations))


def test_a_recomputation_that_ends_early_holds_nothing() -> None:
    """What its inputs led to was held until the next forward: units seemed to await a backward."""
    norm = Layer("norm", unit="sharded", passes="keyword")
    inside = (
        dataclasses.replace(norm, recomputed="reentrant"),
        norm,
        dataclasses.replace(norm, recomputed=True, inside=(norm,)),
    )
    model = Layer("linear", frozen=True, recomputed=True, unit="sharded", inside=inside)
    operations: tuple[Operation, ...] = (("merge", 1000), ("step",))
    run_on(2, run, Program(model, 2, 1, {"direct_min_bytes": None}, "", operations))


# What no program uses, and why.
NOT_DRAWN = {
    "set_post_optim_event": "events of a device",
    "set_symm_mem_for_comm": "CUDA and NCCL only",
    "set_allocate_memory_from_process_group_for_comm": "CUDA and NCCL only",
    "set_reduce_scatter_divide_factor": "the old name of set_gradient_divide_factor",
    "ignored_params": "are no business of the library",
}


def test_programs_use_the_whole_interface() -> None:
    """Each method of `FSDPModule` and each argument of `fully_shard`, or the reason is above."""
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    arguments = [name for name in inspect.signature(fully_shard).parameters if name != "module"]
    files = [*SUPPORT.glob("program*.py")]
    used = "".join(path.read_text() for path in files)
    missing = {n for n in (*methods, *arguments) if not re.search(rf"\b{n}\b", used)}
    assert missing == set(NOT_DRAWN)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.effect)
def test_planted_faults_fit_the_source(fault: Fault) -> None:
    """Or `python -m planted_faults` would plant nothing."""
    assert (PACKAGE / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["into the place of rank 0", "of before the step"])
def test_programs_find_planted_faults(place: str) -> None:
    (fault,) = [fault for fault in FAULTS if place in fault.effect]
    assert by_programs(fault, fault.families, programs=200, minutes=5)["found"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.effect)
def test_planted_faults_name_a_test(fault: Fault) -> None:
    file, name = re.match(r"(.+)::(\w+)", fault.test).groups()  # type: ignore[union-attr]
    assert f"def {name}(" in (REPOSITORY / file).read_text()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.effect)
def test_the_named_test_fails_with_the_planted_fault(fault: Fault) -> None:
    assert by_test(fault)["found"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_programs() -> None:
    ran, failed = failures(sample(2000))
    assert (ran, failed) == (2000, 0)
