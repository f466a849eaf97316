"""Runs the tests nearest to a change, as many as fit in about two minutes: `make check`.

    python tools/check.py [--base COMMIT] [--seconds 120] [--list] [OPTIONS OF PYTEST]

What changed is the difference between the working tree and the base, with new files. The base is
the commit at which the branch left ``origin/main`` or ``main``, or else the last commit.

Nearly every test imports ``fsdp2``, and through it everything. So the graph of imports has three
rules. An import through an ``__init__.py`` goes to the file that the name comes from. A name that
is read as ``fsdp2.plan`` counts as imported, also in a string. What the harness imports says
nothing about the tests that use it. The tests are ranked:

1. those that changed, and those of the package's structure, run always;
2. those that import a changed file themselves, have its name in a string, or are named after it
   (``features/gather_budget.py``, ``test_gather_budget.py``);
3. the others by their distance in the graph.

Of equally near files, those go first that mention more of the names that the changed files define,
then those that take less time (``tests/support/durations.json``). What is left out is listed. Of
each test, as many cases run as in ``make test``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

from durations import load, of_files  # noqa: E402 (of the tests)

FOLDERS = ("fsdp2", "benchmarks", "examples", "tests", "tools")
FACES = ("/__init__.py", "/harness.py")  # what they import says nothing about who imports them
ALWAYS = ("tests/unit/test_layers.py", "tests/tools/test_structure.py")
UNKNOWN_S = 10.0  # a test file whose duration was never recorded
START_S = 15.0  # imports and collection, before the first test


class Source:
    """What a file imports, defines and mentions."""

    def __init__(self, root: Path, name: str) -> None:
        self.folders = PurePosixPath(name).parts[:-1]
        self.imports: dict[str, tuple[str, str]] = {}  # of a local name: the module, the name there
        self.dotted: set[str] = set()  # `fsdp2.optim.flat_step`
        self.texts: set[str] = set()  # strings that may be names of files or modules
        self.defined: set[str] = set()
        self.mentioned: set[str] = set()
        path = root / name
        for node in ast.walk(ast.parse(path.read_text() if path.exists() else "")):
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names):
                for alias in names:
                    self.imports[alias.asname or alias.name] = alias.name, ""
            case ast.ImportFrom(module, names, level):
                above = self.folders[: len(self.folders) + 1 - level] if level else ()
                base = ".".join([*above, *filter(None, [module])])
                self.imports |= {alias.asname or alias.name: (base, alias.name) for alias in names}
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                self.defined.add(name)
            case ast.Name(name):
                self.mentioned.add(name)
            case ast.Attribute(value, name):
                self.mentioned.add(name)
                while isinstance(value, ast.Attribute):
                    name, value = f"{value.attr}.{name}", value.value
                if isinstance(value, ast.Name):
                    self.dotted.add(f"{value.id}.{name}")
            case ast.Constant(str(text)) if re.fullmatch(r"[\w./-]+", text):
                self.texts |= {text, PurePosixPath(text).name}


class Graph:
    """Which files of ``root`` import which, by the rules above."""

    def __init__(self, root: Path, changed: Iterable[str] = ()) -> None:
        files = {p.relative_to(root).as_posix() for f in FOLDERS for p in (root / f).rglob("*.py")}
        files |= {name for name in changed if name.endswith(".py")}  # also those that are gone
        self.sources = {name: Source(root, name) for name in sorted(files)}
        self.modules: dict[str, str] = {}
        for name in self.sources:
            parts = PurePosixPath(name.removesuffix("/__init__.py")).with_suffix("").parts
            self.modules[".".join(parts)] = name
            if parts[0] in ("tests", "examples"):  # their folders are on the path
                self.modules |= {parts[-1]: name, ".".join(parts[1:]): name}
        self.importers: dict[str, set[str]] = {name: set() for name in files}
        for name, source in self.sources.items():
            for other in self.imported(source) - {name}:
                self.importers[other].add(name)

    def imported(self, source: Source) -> set[str]:
        found = {self.home(*origin) for origin in source.imports.values()}
        for dotted in source.dotted | source.texts:
            first, _, rest = dotted.partition(".")
            first = ".".join(filter(None, source.imports.get(first, (first, ""))))
            if rest and first.partition(".")[0] in FOLDERS:
                found.add(self.home(*f"{first}.{rest}".rsplit(".", 1)))
        return {name for name in found if name}

    def home(self, module: str, name: str) -> str | None:
        """The file that a name of a module comes from; the module's own, for none."""
        file = self.modules.get(f"{module}.{name}" if name else module) or self.modules.get(module)
        if file and file.endswith("/__init__.py") and name in self.sources[file].imports:
            return self.home(*self.sources[file].imports[name])
        return file

    def distances(self, changed: Iterable[str]) -> dict[str, int]:
        """How far each file is from the nearest changed one, over imports."""
        found = {name: 0 for name in changed if name in self.sources}
        there = list(found)
        for name in there:  # which grows
            if found[name] and name.endswith(FACES):
                continue
            new = self.importers[name] - found.keys()
            found |= dict.fromkeys(new, found[name] + 1)
            there += sorted(new)
        return found


class Choice(NamedTuple):
    """A test file, in the order in which they are chosen."""

    nearness: int
    names_in_common: int  # negative
    seconds: float
    name: str
    reason: str


def words(name: str) -> frozenset[str]:
    """How the words of a file's name begin: "reduction.py" is that of "test_reductions.py"."""
    stem = PurePosixPath(name.removesuffix("/__init__.py")).stem
    return frozenset(word[:5] for word in stem.split("_")) - {"test"}


def near(test: str, source: Source, changed: str, distance: int | None) -> tuple[int, str] | None:
    """How near a test is to a changed file, and why; None where nothing connects them."""
    path = PurePosixPath(changed)
    own = words(changed)
    if test == changed or test in ALWAYS:
        return 0, "changed" if test == changed else "always"
    if own == words(test) or (distance is not None and own <= words(test)):
        return 1, f"named after {changed}"
    if distance is not None:
        return distance, f"imports {changed}" + f", {distance} away" * (distance > 1)
    if source.texts & {path.name, *({path.parts[0]} - {*FOLDERS})}:
        return 1, f"has {path.name} in a string"
    return None


def rank(graph: Graph, changed: list[str], durations: dict[str, float]) -> list[Choice]:
    """The test files that a change reaches, the nearest first."""
    distances = {name: graph.distances([name]) for name in changed}
    code = [graph.sources[name] for name in changed if name in graph.sources]
    defined = {name for source in code for name in source.defined}
    found = []
    for test, source in graph.sources.items():
        if test.startswith("tests/") and "/test_" in test:
            ways = [near(test, source, name, distances[name].get(test)) for name in changed]
            if best := min(filter(None, ways), default=None):
                common = -len(defined & source.mentioned)
                seconds = durations.get(test, UNKNOWN_S)
                found.append(Choice(best[0], common, seconds, test, best[1]))
    return sorted(found)


def fitting(choices: list[Choice], seconds: float) -> tuple[list[Choice], list[Choice]]:
    """Those that run and those that are left out; what changed itself runs whatever it takes."""
    runs: list[Choice] = []
    for choice in choices:
        if not choice.nearness or sum(c.seconds for c in runs) + choice.seconds <= seconds:
            runs.append(choice)
    return runs, [choice for choice in choices if choice not in runs]


def git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")


def default_base() -> str:
    for name in ("refs/remotes/origin/main", "refs/heads/main"):
        if git("for-each-ref", name)[0]:
            return git("merge-base", "HEAD", name)[0]
    return "HEAD"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests nearest to a change.")
    parser.add_argument("--base", help="a commit; by default where the branch left main")
    parser.add_argument("--seconds", type=float, default=120, help="for the tests (120)")
    parser.add_argument("--list", action="store_true", help="only list what would run")
    args, options = parser.parse_known_args()
    base = args.base or default_base()
    found = git("diff", "--name-only", "--no-renames", base)
    changed = sorted({*found, *git("ls-files", "--others", "--exclude-standard")} - {""})
    durations = of_files(load(), sampled=True)
    workers = min(os.cpu_count() or 1, 4) if "-n" in options else 1
    choices = rank(Graph(ROOT, changed), changed, durations)
    runs, left_out = fitting(choices, workers * (args.seconds - START_S))
    about_s = START_S + sum(choice.seconds for choice in runs) / workers
    print(f"{len(changed)} files differ from {base}. In about {about_s:.0f} s run:")
    for choice in runs:
        print(f"    {choice.name}: {choice.reason}")
    print(f"LEFT OUT for lack of time, but not from make test-ci: {len(left_out)} files")
    names = " ".join(choice.name for choice in left_out)
    print(textwrap.indent(textwrap.fill(names, 96), "    "), flush=True)
    if args.list or not runs:
        return 0
    files = [choice.name for choice in runs]
    command = [sys.executable, "-m", "pytest", "--sample", *options, *files]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
