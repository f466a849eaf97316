"""The page for symptoms: the messages that it has are those that the package raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp2
import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about its own pages", allow_module_level=True)

import fsdp2.checkpoint
from pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGE = Path(fsdp2.__file__).parent
OURS = ("A checkpoint will not load or save", "Messages from fsdp2")


def messages(heading: str) -> list[str]:
    """The first column of the tables of messages under a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", section, re.MULTILINE)
    return re.findall(r"^\| `([^`]+)`", "".join(tables), re.MULTILINE)


def texts() -> Iterator[str]:
    """The constant pieces of all strings in the package, docstrings left out."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                yield node.value


MESSAGES = [message for heading in OURS for message in messages(heading)]


@pytest.fixture(scope="module")
def pieces() -> str:
    return "\0".join(texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_one_of_the_package(message: str, pieces: str) -> None:
    kind, separator, text = message.partition(": ")
    if separator and kind.isidentifier():
        known = {"TypeError", "TimeoutError", *fsdp2.checkpoint.__all__}
        assert kind in known, f"there is no {kind}"
    else:
        text = message
    fragments = [piece.strip(" ()") for piece in text.split("...")]
    fragments = [piece for piece in fragments if len(piece) > 1]
    assert fragments
    for fragment in fragments:
        assert fragment in pieces, f"no message has {fragment!r}"


def test_there_are_messages() -> None:
    assert len(messages(OURS[0])) > 15
    assert len(messages(OURS[1])) > 20


def test_a_message_is_found_by_its_row() -> None:
    """One row per message, which comes first, in backquotes: a search and an index go by that."""
    first = re.findall(
        r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE
    )
    rows = "".join(first).splitlines()
    found = [re.match(r"\| `([^`]+)`( \([^|]*\))? \| ", row) for row in rows]
    assert len(rows) > 70
    assert [row for row, match in zip(rows, found, strict=True) if match is None] == []
    named = [match[1] for match in found if match is not None]
    assert len(set(named)) == len(named)


def test_names_that_the_page_tells_to_call_exist() -> None:
    """A call or a setting in backquotes that looks like ours is there."""
    text = PAGE.read_text()
    calls = set(re.findall(r"`(?:model\.|fsdp2\.)(\w+)\(", text)) | set(
        re.findall(r"\b(set_\w+)\(", text)
    )
    calls -= {"load_state_dict", "to", "to_empty"}
    assert len(calls) > 5
    known = {*fsdp2.__all__, *dir(fsdp2.FSDPModule)}
    assert calls <= known, calls - known
