"""docs/compatibility.md is complete and its tests exist; no name of torch's API is missing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
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


def tables() -> list[tuple[int, list[str]]]:
    """The cells of every row of the page with its line number, without heads and rulers."""
    lines = PAGE.splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        is_head = number < len(lines) and lines[number].startswith("|--")
        if line.startswith("|") and not line.startswith("|--") and not is_head:
            rows.append((number, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return rows


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


def test_every_test_on_the_page_exists() -> None:
    named = re.findall(r"`tests/(\w+/\w+)\.py(?:::(\w+))?`", PAGE)
    assert len(named) > 150
    for file, name in named:
        path = ROOT / "tests" / f"{file}.py"
        assert path.exists(), f"tests/{file}.py"
        assert not name or name in names_of_tests(path), f"tests/{file}.py::{name}"


def test_every_row_names_a_test() -> None:
    rows = tables()
    assert len(rows) > 110
    for number, cells in rows:
        assert "::test_" in cells[-1] or "not there" in cells[-2], f"line {number}: {cells[0]}"
        assert all(cells), f"line {number} has an empty cell"


def test_the_page_is_linked() -> None:
    assert "docs/compatibility.md" in (ROOT / "README.md").read_text()
    assert "compatibility.md" in (ROOT / "docs" / "design.md").read_text()


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
    assert f"`{theirs_shown}`" in PAGE
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
