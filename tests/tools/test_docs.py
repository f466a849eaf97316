"""The pages: all are in a table of contents, every public name has an entry, links resolve, and
`make docs` builds a site.

Links and the table of contents are read here without Sphinx, so that they hold wherever the tests
run; what only Sphinx sees (references in docstrings) is in a long test.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fsdp2
from harness import ours_only
from pages import without_blocks

pytestmark = [ours_only("about the pages of this package")]

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
DOCS = ROOT / "docs"
PAGES = sorted(page for kind in ("md", "rst") for page in DOCS.rglob(f"*.{kind}"))
LINKED = sorted([*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *DOCS.rglob("*.md")])


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -------------------------------------------------------------------------- the table of contents


def listed(page: Path) -> Iterator[Path]:
    """The pages that the tables of contents of ``page`` name."""
    text = page.read_text()
    for table in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in table.splitlines():
            if not line or line.startswith(":"):
                continue
            found = [
                path
                for kind in ("md", "rst")
                for path in sorted(page.parent.glob(f"{line}.{kind}"))
            ]
            assert found or "*" in line, f"{name(page)} lists {line}, which is not there"
            yield from found


def test_every_page_is_in_the_table_of_contents_once() -> None:
    seen, ahead = Counter([DOCS / "index.md"]), [DOCS / "index.md"]
    while ahead:
        pages = list(listed(ahead.pop()))
        seen.update(pages)
        ahead += pages
    assert set(seen) == set(PAGES)
    assert len(PAGES) > 10
    assert max(seen.values()) == 1, [name(page) for page in seen if seen[page] > 1]


# -------------------------------------------------------------------------------- the API reference

MODULES = (
    *("checkpoint", "custom", "experts", "optim", "planning", "profiling", "testing", "wrap"),
)
# Public by their spelling alone.
NO_ENTRY = {
    "fsdp2.wrap.parameters_of": "serves units, estimates and plans",
    "fsdp2.planning.PRESETS": "docs/planning/hardware.md lists them",
    "fsdp2.planning.Simulator": "serves `predict` and benchmarks",
    "fsdp2.planning.find_hardware": "`Cluster` calls it",
    "fsdp2.profiling.Recording": "the events of a profile; `Measures` adds them up",
}
# Their methods are torch's, which calls them.
WITHOUT_METHODS = {"fsdp2.testing.SimulatedGroup"}


def public_names() -> dict[str, Any]:
    found = {f"fsdp2.{name}": getattr(fsdp2, name) for name in fsdp2.__all__}
    for each in MODULES:
        module = importlib.import_module(f"fsdp2.{each}")
        found[module.__name__] = module
        for name in getattr(module, "__all__", None) or own_names(module):
            found[f"{module.__name__}.{name}"] = getattr(module, name)
    return {name: value for name, value in found.items() if name not in NO_ENTRY}


def own_names(module: Any) -> list[str]:
    """Classes and functions that a module without ``__all__`` defines, or all where it has none."""
    names = {
        name: value.__module__
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value))
    }
    return [name for name in names if names[name] == module.__name__] or list(names)


def entries() -> dict[str, str]:
    """The names that the reference documents, with the options of their entries."""
    found: dict[str, str] = {}
    for page in (DOCS / "api").glob("*.rst"):
        text = page.read_text() + "\n"
        for entry, options in re.findall(
            r"^\.\. auto\w+:: (\S+)\n((?:   .*\n)*)", text, re.MULTILINE
        ):
            assert entry not in found, f"{entry} has two entries"
            found[entry] = options
    return found


def resolve(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if attribute in MODULES:
        return importlib.import_module(name)
    return getattr(importlib.import_module(module), attribute)


def test_every_public_name_has_an_entry_and_every_entry_a_name() -> None:
    shown = {id(resolve(name)) for name in entries()}
    names = public_names()
    assert len(names) > 80
    assert [name for name, value in names.items() if id(value) not in shown] == []


def test_entries_of_classes_show_their_methods_which_all_have_docstrings() -> None:
    for name, options in entries().items():
        value = resolve(name)
        if not inspect.isclass(value) or name in WITHOUT_METHODS:
            continue
        methods = {
            key: method
            for key, method in vars(value).items()
            if not key.startswith("_") and (callable(method) or isinstance(method, property))
        }
        assert ":members:" in options or not methods or issubclass(value, Exception), name
        for key, method in methods.items():
            assert inspect.getdoc(method), f"{name}.{key} has no docstring"


# ------------------------------------------------------------------------------------------- links


@cache
def prose(page: Path) -> str:
    """The text of a page without its code."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", without_blocks(page))


def anchors(page: Path) -> set[str]:
    """What follows # in a link to a heading of ``page``."""
    text = without_blocks(page)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*?) *$", text, re.MULTILINE)
    }


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Path and anchor of every link to a file of the repository."""
    for target in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_to_files_and_headings_resolve(page: Path) -> None:
    for path, anchor in links(page):
        target = page.parent / path if path else page
        assert target.exists(), f"{path} is not there"
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}: no such heading"


def test_links_are_found() -> None:
    found = [link for page in LINKED for link in links(page)]
    assert len(found) > 30
    assert any(anchor for _, anchor in found)


# ------------------------------------------------------------------------------------------ Sphinx


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    missing = [
        m
        for m in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "sphinx_design")
        if not importlib.util.find_spec(m)
    ]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: requirements/docs.txt")
    options = ["-W", "--keep-going", "-n", "-q", "-b", "html", "-d", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()


def test_make_docs_builds_what_the_long_test_builds() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^docs:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert {"-W", "--keep-going", "-n"} <= set(recipe.split())
    assert "$(VENV)/.docs: requirements/docs.txt" in makefile
    assert "make docs" in (ROOT / ".ci" / "run").read_text()
