"""The layers: files import only what stands before them in ``layers.txt``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"
KERNEL = ("policy.py", "sharding/", "comm/", "runtime/", "api/fully_shard.py", "api/module.py")
PARTS = (
    *("transports/", "features/", "guards/"),
    *(f"api/{name}.py" for name in ("comm_settings", "library_methods", "torch_errors")),
)
# Imports for type checkers alone: the methods that parts give to `FSDPModule`.
FOR_TYPES = {"api/module.py": "parts.py"}


def layers() -> list[str]:
    """All files in the order of ``layers.txt``, relative to the package."""
    order: list[str] = []
    room = ""
    for line in (Path(__file__).parent / "layers.txt").read_text().splitlines():
        if line.startswith("    "):
            assert room.endswith("/"), f"{room} is a file: {line}"
            order += [f"{room}{name}.py" for name in line.split()]
        elif room_here := line.split("#")[0].strip():
            room = room_here
            if not room.endswith("/"):
                order.append(room)
    return order


@cache
def imported(path: Path) -> tuple[str, ...]:
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    """The files of the package that ``path`` imports, also within functions and for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        if base.with_suffix(".py").exists() and base != PACKAGE:
            yield str(base.with_suffix(".py").relative_to(PACKAGE))
            continue
        for alias in node.names:
            file = base / f"{alias.name}.py"
            yield str((file if file.exists() else base / "__init__.py").relative_to(PACKAGE))


def parts_known_to(name: str) -> list[str]:
    """The optional files that a file of the kernel imports."""
    if not name.startswith(KERNEL):
        return []
    return sorted({other for other in imported(PACKAGE / name) if other.startswith(PARTS)})


def upward(order: list[str]) -> list[str]:
    """Imports of what comes later, or is the file itself."""
    rank = {name: i for i, name in enumerate(order)}
    for folder in {str(parent) for name in order for parent in Path(name).parents} - {"."}:
        inside = [i for name, i in rank.items() if name.startswith(f"{folder}/")]
        rank[f"{folder}/__init__.py"] = max(inside)  # its face: as its last file
    return [
        f"{name} imports {other}"
        for name in order
        for other in imported(PACKAGE / name)
        if FOR_TYPES.get(name) != other
        if rank.get(other, len(order)) >= rank[name]
    ]


def test_every_file_has_its_layer() -> None:
    files = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    assert sorted(layers()) == sorted(files)


def test_the_files_of_a_room_stand_together() -> None:
    rooms = [name.split("/")[0] for name in layers()]
    assert len(list(groupby(rooms))) == len(set(rooms))


def test_files_import_only_what_stands_before_them() -> None:
    assert upward(layers()) == []


def test_the_kernel_imports_no_part() -> None:
    """Not for types either, nor in functions. `test_parts` trains without any of them."""
    assert [(name, parts) for name in layers() if (parts := parts_known_to(name))] == []


@pytest.mark.parametrize(
    "rooms", [("checkpoint/", "snapshots/"), ("snapshots/",), ("planning/",)], ids=lambda r: r[0]
)
def test_only_the_command_line_builds_on_some_rooms(rooms: tuple[str, ...]) -> None:
    """Models are sharded, collected, initialized and trained without loading that code."""
    room = rooms[0]
    others = [name for name in layers() if not name.startswith((*rooms, "cli/"))]
    assert [n for n in others if any(o.startswith(room) for o in imported(PACKAGE / n))] == []


def test_any_other_order_of_two_files_that_know_each_other_is_refused() -> None:
    """What the tests above rely on: imports are found, and the order matters."""
    order = layers()
    known = [(a, b) for a, b in pairwise(order) if a in imported(PACKAGE / b)]
    assert len(known) > 20
    for a, b in known:
        swapped = [{a: b, b: a}.get(name, name) for name in order]
        assert f"{b} imports {a}" in upward(swapped)


def test_no_two_public_classes_have_one_name() -> None:
    """A name in a traceback or a search is that of one thing. (Private ones are of one file.)"""
    where: dict[str, list[str]] = {}
    for name in layers():
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where.setdefault(node.name, []).append(name)
    assert len(where) > 400
    assert {name: files for name, files in where.items() if len(files) > 1} == {}
