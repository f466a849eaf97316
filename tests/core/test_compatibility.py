"""docs/compatibility.md is complete, and each row has tests; no name of torch's API is missing.

`compatibility.toml` names the tests, so that the page need not.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_api as their_comms

import fsdp2
from fsdp2 import custom
from harness import ours_only

pytestmark = [ours_only("about the page of this package")]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()
TESTS = tomllib.loads(Path(__file__).with_name("compatibility.toml").read_text())
POLICIES = [
    name
    for name in (
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "CPUOffloadPolicy",
        "DataParallelMeshDims",
    )
    if hasattr(theirs, name)  # torch 2.11 has not all of them
]
COMMS = [
    (kind, name) for kind in ("AllGather", "ReduceScatter") for name in ("allocate", "__call__")
]
METHODS = [
    name
    for name, value in vars(theirs.FSDPModule).items()
    if inspect.isfunction(value) and not name.startswith("_")
]


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Names of the test functions of a file, without running it."""
    tree = ast.parse(path.read_text())
    names = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return {name for name in names if name.startswith("test_")}


def tables() -> dict[str, dict[str, list[str]]]:
    """The cells of every row, by the heading and the first cell, without heads and rulers."""
    lines = PAGE.splitlines()
    rows: dict[str, dict[str, list[str]]] = {}
    heading = ""
    for number, line in enumerate(lines, 1):
        heading = line.lstrip("# ") if line.startswith("#") else heading
        is_head = number < len(lines) and lines[number].startswith("|--")
        if line.startswith("|") and not line.startswith("|--") and not is_head:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            under = rows.setdefault(heading, {})
            assert cells[0] not in under, f"line {number}: {cells[0]} is there twice"
            under[cells[0]] = cells
    return rows


def named_tests(data: Any) -> Iterator[str]:
    """All tests in the lists of nested tables."""
    if isinstance(data, list):
        yield from data
    else:
        for value in data.values():
            yield from named_tests(value)


def call(name: str, function: Callable[..., Any]) -> str:
    """``name(arguments with defaults)``, as the page has it."""
    parts = []
    keyword_only = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        default = parameter.default
        shown = (
            f"{type(default).__name__}()" if dataclasses.is_dataclass(default) else repr(default)
        )
        parts.append(parameter.name if default is parameter.empty else f"{parameter.name}={shown}")
    return f"{name}({', '.join(parts)})"


# ------------------------------------------------------------------------------------ the page


def test_every_test_that_is_named_exists() -> None:
    named = list(named_tests(TESTS))
    assert len(named) > 380
    for each in named:
        found = re.fullmatch(r"tests/(\w+/\w+)\.py::(test_\w+)", each)
        assert found, each
        path = ROOT / "tests" / f"{found[1]}.py"
        assert path.exists(), each
        assert found[2] in names_of_tests(path), each


def test_every_row_has_tests_and_every_entry_a_row() -> None:
    rows, entries = tables(), TESTS["rows"]
    assert sum(map(len, rows.values())) > 160
    assert list(entries) == list(rows)
    for heading, under in rows.items():
        assert list(entries[heading]) == list(under), heading
        for first, cells in under.items():
            assert entries[heading][first] or cells[-1] == "not there", f"{heading}: {first}"
            assert all(cells), f"{heading}: {first} has an empty cell"
            assert 2 <= len(cells) <= 3, f"{heading}: {first}"


def test_what_is_outside_of_tables_has_tests() -> None:
    headings = {line.lstrip("# ") for line in PAGE.splitlines() if line.startswith("#")}
    for heading, named in TESTS["prose"].items():
        assert heading in headings
        assert named, heading


def test_the_page_names_no_tests() -> None:
    assert "tests/" not in PAGE
    assert "test_" not in PAGE


def test_the_page_is_linked() -> None:
    assert "docs/compatibility.md" in (ROOT / "README.md").read_text()
    assert "compatibility.md" in (ROOT / "docs" / "developers" / "design.md").read_text()


# ------------------------------------------------------------------------------- torch's names


def test_every_name_of_torch_is_there() -> None:
    assert len(_fully_shard.__all__) >= 8
    for name in _fully_shard.__all__:
        assert name in fsdp2.__all__, name
        assert f"`{name}`" in PAGE, name


@pytest.mark.skipif(
    not hasattr(theirs, "DataParallelMeshDims"), reason="torch 2.11 has no dp_mesh_dims"
)
def test_the_arguments_of_fully_shard() -> None:
    theirs_shown = call("fully_shard", theirs.fully_shard)
    ours = f"{theirs_shown[:-1]}, direct_min_bytes=None, comm_policy=None, shard_granularity=None)"
    assert call("fully_shard", fsdp2.fully_shard) == ours
    assert f"`{theirs_shown}`" in " ".join(PAGE.split())
    for name in inspect.signature(fsdp2.fully_shard).parameters:
        assert re.search(rf"^\| `{name}`", PAGE, re.MULTILINE), name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_torch_is_there(name: str) -> None:
    shown = call(name, getattr(theirs.FSDPModule, name))
    assert hasattr(fsdp2.FSDPModule, name)
    assert call(name, getattr(fsdp2.FSDPModule, name)) == shown
    assert f"| `{shown}` |" in PAGE
    assert hasattr(fsdp2.FSDPModule, "_set_unshard_async_op")


@pytest.mark.parametrize("name", ["register_fsdp_forward_method", "share_comm_ctx"])
def test_functions_beside_it(name: str) -> None:
    shown = call(name, getattr(theirs, name))
    assert call(name, getattr(fsdp2, name)) == shown
    assert f"| `{shown}` |" in PAGE


def test_the_handle() -> None:
    shown = call("UnshardHandle.wait", theirs.UnshardHandle.wait)
    assert call("UnshardHandle.wait", fsdp2.UnshardHandle.wait) == shown
    assert f"| `{shown}` |" in PAGE


@pytest.mark.parametrize("name", POLICIES)
def test_fields_of_policies(name: str) -> None:
    their_class, our_class = getattr(theirs, name), getattr(fsdp2, name)
    fields = [(field.name, field.default) for field in dataclasses.fields(their_class)]
    ours = [(field.name, field.default) for field in dataclasses.fields(our_class)]
    assert ours[: len(fields)] == fields  # those of ours come after
    assert our_class.__dataclass_params__.frozen == their_class.__dataclass_params__.frozen
    for field, default in fields:
        assert f"| `{name}.{field}={default!r}` |" in PAGE
    public = {each for each in vars(their_class) if not each.startswith("_")}
    assert public <= set(vars(our_class)), name


@pytest.mark.parametrize(("kind", "name"), COMMS)
def test_what_custom_collectives_define(kind: str, name: str) -> None:
    shown = call(f"{kind}.{name}", getattr(getattr(their_comms, kind), name))
    assert call(f"{kind}.{name}", getattr(getattr(custom, kind), name)) == shown
    assert f"| `{shown}` |" in PAGE
