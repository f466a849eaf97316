"""What an import loads, and that every import path that is written down works.

Times are measured by `python -m benchmarks.imports`; here is what they rest on: which modules are
loaded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

import fsdp2

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdp2"
MODULES = (
    *("checkpoint", "custom", "experts", "optim", "planning", "policy", "profiling", "testing"),
    "wrap",
)
# What a training script imports.
SHARDING = (
    "from fsdp2 import fully_shard",
    "from fsdp2 import FSDPModule, optim",
)
BY_NAME = "from fsdp2 import Sharding, shard_model"
# Only those who ask for them need these.
ON_DEMAND = {"checkpoint", "cli", "describe", "planning", "profiling", "render", "snapshots"}


def run_python(program: str, path: Path = ROOT, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


# ---------------------------------------------------------------------------------- what is loaded


@pytest.mark.parametrize("arguments", ["--help", "--version", "ckpt --help", "plan --help"])
def test_help_does_not_import_torch(arguments: str) -> None:
    program = (
        "import sys\n"
        "from fsdp2.cli.main import main\n"
        "try:\n"
        f"    main({arguments.split()})\n"
        "except SystemExit as ended:\n"
        "    print(ended.code, 'torch' in sys.modules, 'fsdp2.checkpoint' in sys.modules)"
    )
    assert run_python(program).splitlines()[-1] == "0 False False"


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """For each import, the modules of the package that are there after it: one process for all."""
    lines = [
        *("import fsdp2", *SHARDING, BY_NAME),
        *(f"import fsdp2.{name}" for name in MODULES),
    ]
    program = (
        "import json, sys, torch.distributed.fsdp\n"
        "found = {}\n"
        f"for line in {lines}:\n"
        "    for name in [n for n in sys.modules if n.partition('.')[0] == 'fsdp2']:\n"
        "        del sys.modules[name]\n"
        "    exec(line, {})\n"
        "    found[line] = [n for n in sys.modules if n.partition('.')[0] == 'fsdp2']\n"
        "print(json.dumps(found))"
    )
    return json.loads(run_python(program))


def rooms(names: list[str]) -> set[str]:
    return {name.split(".")[1] for name in names if "." in name}


def test_the_package_loads_nothing_before_a_name_is_used(loaded: dict[str, list[str]]) -> None:
    assert rooms(loaded["import fsdp2"]) == {"common"}


def test_sharding_loads_nothing_that_training_does_not_need(loaded: dict[str, list[str]]) -> None:
    for line in SHARDING:
        assert "runtime" in rooms(loaded[line])
        assert rooms(loaded[line]) & ON_DEMAND == set(), line
    assert rooms(loaded[BY_NAME]) & ON_DEMAND <= {"render"}  # for sizes in words


def test_every_way_in_looks_up_private_names_of_torch_first(
    loaded: dict[str, list[str]],
) -> None:
    """Where torch lacks one, an error names all that are missing, whatever is imported."""
    without = {f"import fsdp2.{name}" for name in ("policy", "wrap")} | {"import fsdp2"}
    for line, names in loaded.items():
        assert ("fsdp2.common.torch_private" in names) == (line not in without), line


def test_a_torch_that_was_not_tested_is_told_of_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.99.0+cpu'\n")
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import fsdp2, fsdp2.common.versions\n"
        "print([str(w.message) for w in caught])"
    )
    assert run_python(program, tmp_path).count("this is torch 2.99.0+cpu") == 1


def test_a_torch_that_is_not_there_is_told_of_by_the_first_name(tmp_path: Path) -> None:
    program = (
        "import fsdp2\n"
        "from fsdp2.common.versions import installed_torch\n"
        "print(installed_torch())\n"
        "try:\n    fsdp2.fully_shard\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    # -S: no installed packages.
    assert run_python(program, tmp_path, "-S") == "None\nNo module named 'torch'\n"


# ------------------------------------------------------------------------------ names on first use


def test_what_type_checkers_read_is_what_is_imported() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    homes: dict[str, str] = {}
    modules = []
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname is None
            if node.module is None:
                modules.append(alias.name)
            else:
                homes[alias.name] = node.module
    assert vars(fsdp2)["_HOME"] == homes
    assert sorted([*homes, *modules]) == fsdp2.__all__
    assert vars(fsdp2)["_MODULES"] == MODULES


def test_every_public_name_is_what_its_home_has() -> None:
    for name, home in vars(fsdp2)["_HOME"].items():
        assert getattr(fsdp2, name) is getattr(importlib.import_module(f"fsdp2.{home}"), name)
        assert name in vars(fsdp2), "looked up once"
    names: dict[str, object] = {}
    exec("from fsdp2 import *", names)
    assert set(fsdp2.__all__) <= names.keys()


def test_names_that_moved_are_found_and_warn() -> None:
    moved = vars(fsdp2)["_MOVED"]
    assert len(moved) > 15
    for name, home in moved.items():
        assert name not in fsdp2.__all__
        with pytest.warns(DeprecationWarning, match=rf"^fsdp2.{name} is fsdp2.{home}.{name} now$"):
            found = getattr(fsdp2, name)
        assert found is getattr(importlib.import_module(f"fsdp2.{home}"), name)


def test_names_are_functions_whatever_was_imported_before() -> None:
    """No file of the package has the name of a function, which an import of it would replace."""
    files = {path.stem for path in PACKAGE.iterdir()}
    assert files & set(fsdp2.__all__) == {"optim", "planning", "profiling", "wrap"}
    importlib.import_module("fsdp2.planning.planning")
    assert all(inspect.isfunction(f) for f in (fsdp2.plan, fsdp2.estimate, fsdp2.profile))


def test_dir_lists_every_public_name_and_module() -> None:
    assert dir(fsdp2) == sorted({*fsdp2.__all__, *MODULES, "__version__"})
    for name in dir(fsdp2):
        assert hasattr(fsdp2, name), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fsdp2' has no attribute 'shard'"):
        _ = fsdp2.shard
    with pytest.raises(AttributeError, match=r"'fully_shards': did you mean 'fully_shard'\?$"):
        _ = fsdp2.fully_shards
    assert not hasattr(fsdp2, "__wrapped__")
    with pytest.raises(ImportError, match="cannot import name 'shard' from 'fsdp2'"):
        exec("from fsdp2 import shard")


# ------------------------------------------------------------------------------ names in the docs


def texts() -> Iterator[tuple[str, str]]:
    """Everything that users read: pages, and docstrings of the package."""
    for page in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.rst"),
    ]:
        if page.name != "CHANGELOG.md" and "_build" not in page.parts:
            yield page.name, page.read_text()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield path.name, ast.get_docstring(node) or ""


def written_names(text: str) -> set[str]:
    """``fsdp2.optim.Muon``, and what statements import, as dotted names."""
    found = set(re.findall(r"(?<![\w./-])fsdp2(?:\.[A-Za-z_]\w*)+(?![\w/-])", text))
    statement = r"from (fsdp2[\w.]*) import (?:\(([^)]*)\)|([^\n(`]*))"
    for module, inside, rest in re.findall(statement, text):
        for name in re.sub(r"#.*", "", inside or rest).split(","):
            if word := re.match(r"\s*(?:>>> |\.\.\. )?\s*(\w+)", name):
                found.add(f"{module}.{word[1]}")
    return found


def resolves(name: str) -> bool:
    found: object = fsdp2
    where = "fsdp2"
    for part in name.split(".")[1:]:
        where += f".{part}"
        if not hasattr(found, part):
            try:
                found = importlib.import_module(where)
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def test_names_are_found_in_text() -> None:
    text = (
        "`fsdp2.optim.Muon(...)`, fsdp2/api.py, docs/fsdp2.md\n"
        "from fsdp2 import (\n    plan,  # a, b\n    wrap as w,\n)\n"
        "from fsdp2.testing import assert_all\n"
    )
    names = {"fsdp2.optim.Muon", "fsdp2.plan", "fsdp2.wrap", "fsdp2.testing"}
    names.add("fsdp2.testing.assert_all")
    assert written_names(text) == names
    assert [n for n in sorted(names) if not resolves(n)] == ["fsdp2.testing.assert_all"]


def test_every_name_of_the_package_that_is_written_down_exists() -> None:
    found = {(name, place) for place, text in texts() for name in written_names(text)}
    assert len({name for name, _ in found}) > 100
    assert sorted((name, place) for name, place in found if not resolves(name)) == []
