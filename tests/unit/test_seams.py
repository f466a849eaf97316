"""Nothing changes the kernel from outside: no file of the package replaces methods of its objects.

What is to know of a step hears its events (`runtime.events`); what is to do something else is a
subclass that a seam takes: `Unit.param_group_type` and the like, `building.made_types`, registries
of transports, parts and hooks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdp2"
KERNEL = ("sharding/", "comm/", "runtime/", "api/fully_shard.py", "api/module.py")
# Files that set attributes by name, in a `__dict__`, or of which the kernel has a function of that
# name, by what they do it to.
TO_OTHER_THINGS = {
    "modules": "api/deepcopy.py api/forward_methods.py api/library_methods.py api/torch_compat.py "
    "checkpoint/loading/fill.py experts.py planning/plan_report.py planning/trace/checkpointing.py "
    "planning/trace/compiled.py",
    "optimizers": "offload/optimizer_state.py optim/in_backward.py optim/local.py "
    "optim/stepping.py optim/whole_step.py",
    "modules and parameters, which get a subclass": "common/classes.py",
    "copies of what users pass": "common/pytree.py",
    "tensors and storages": "dtensor/memory.py features/tensor_subclasses/tensor_subclass.py "
    "offload/activations.py",
    "errors": "common/failures.py",
    "torch's classes, in one table": "common/torch_patches.py",
    "a class of their own": "api/torch_errors.py testing/simulated.py",
    "records of their own": "features/steps_in_backward.py planning/hardware/measure.py "
    "planning/trace/allocator.py planning/simulation/schedule.py planning/trace/tracing.py",
    "`UnitGrads.local_gradient`, where a part may put its own": "features/partial_gradients.py",
    "contexts of autograd functions": "features/transforms.py",
}


def functions_of_kernel() -> frozenset[str]:
    """Methods of its classes and functions of its files, but for the events of parts."""
    return frozenset(
        function.name
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)).startswith(KERNEL) and path.name != "events.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.Module)
        for function in node.body
        if isinstance(function, ast.FunctionDef)
        and "property" not in map(ast.unparse, function.decorator_list)
    )


def found_in(source: str, functions: frozenset[str]) -> Iterator[str]:
    """What in ``source`` may replace a method, or a function of a module."""
    for node in ast.walk(ast.parse(source)):
        changed = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if any({"unittest", "mock"} & set(name.split(".")) for name in names):
                yield "mock"
        elif isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func):
            if not node.args or ast.unparse(node.args[0]) != "self":
                yield ast.unparse(node)
        elif isinstance(node, ast.Subscript) and changed:
            if ast.unparse(node.value).startswith("vars(") or "__dict__" in ast.unparse(node.value):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute) and changed:
            owner = ast.unparse(node.value)
            of_class = owner[0].isupper() and owner.isidentifier()
            if owner not in ("self", "cls") and (of_class or node.attr in functions):
                yield ast.unparse(node)


def test_the_package_sets_attributes_of_nothing_in_the_kernel() -> None:
    """Equality: what has become unnecessary goes from the table, so that it does not come back."""
    functions = functions_of_kernel()
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(KERNEL) and list(found_in(path.read_text(), functions)):
            found.add(name)
    assert found == {name for files in TO_OTHER_THINGS.values() for name in files.split()}


@pytest.mark.parametrize(
    "source",
    [
        "from unittest import mock",
        "import unittest.mock as m",
        "setattr(unit, name, method)",
        "object.__setattr__(bucket, 'free', f)",
        "vars(unit)['reshard'] = f",
        "unit.__dict__[name] = f",
        "del vars(runtime)['reduce']",
        "runtime.post_forward = f",
        "del reduction.complete",
        "Bucket.shard_from, x = f, 1",
        "Whatever.not_a_method = f",
        "gathered.resize = f",
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert list(found_in(source, functions_of_kernel()))


@pytest.mark.parametrize(
    "source",
    [
        "self.reshard = f",
        "reduction.scatter = timed",
        "found['reshard'] = f",
        "unit.reshard(streams)",
    ],
)
def test_the_rule_allows(source: str) -> None:
    assert not list(found_in(source, functions_of_kernel()))
