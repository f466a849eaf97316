"""Versions: of the package, in one place, and of torch, those that the tests run on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import harness
from torch_versions import DEPEND_ON_TORCH_VERSION

if harness.RUNS_ON_TORCH:
    pytest.skip("fsdp2 only: about this package", allow_module_level=True)

import fsdp2
from fsdp2.cli import main as cli
from fsdp2.common import versions

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_written_once() -> None:
    assert fsdp2.__version__ == versions.__version__
    assert PROJECT["project"]["dynamic"] == ["version"]
    where = PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert where == "fsdp2.common.versions.__version__"
    pattern = re.compile(rf'"{re.escape(fsdp2.__version__)}"')
    files = [ROOT / "pyproject.toml", *(ROOT / "fsdp2").rglob("*.py")]
    assert [f.name for f in files if pattern.search(f.read_text())] == ["versions.py"]


def test_the_command_tells_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    python = ".".join(map(str, sys.version_info[:3]))
    assert shown == f"fsdp2 {fsdp2.__version__} (torch {torch.__version__}, Python {python})\n"


@pytest.mark.parametrize(
    "version", ["2.10.0", "2.16.0", "2.16.0.dev20261101+cpu", "3.0.0", "1.13.1"]
)
def test_a_torch_outside_of_the_range_warns_and_names_what_was_tested(version: str) -> None:
    with pytest.warns(UserWarning, match=r"supports torch 2\.11 to 2\.15") as caught:
        assert versions.warn_if_untested(version)
    assert f"torch {version}" in str(caught[0].message)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu", "2.14.0a0", "2.15.3+cu132"])
def test_a_torch_inside_of_the_range_does_not_warn(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not versions.warn_if_untested(version)


def test_the_warning_comes_once_when_the_package_is_imported() -> None:
    program = (
        "import warnings, torch\n"
        "torch.__version__ = '2.99.0'\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import fsdp2, fsdp2.checkpoint, fsdp2.common.versions\n"
        "print([str(w.message) for w in caught if 'supports torch' in str(w.message)])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert shown.count("2.99.0") == 1


def test_set_up_and_ci_take_the_newest_torch_and_one_that_is_supported() -> None:
    oldest, *_, newest = versions.tested_torch()
    shown = subprocess.run(
        ["make", "-n", "PYTHON=", ".venv-of-no-one/.train", "VENV=.venv-of-no-one"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("TORCH", "PYTHON", "MAKEFLAGS")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.search(rf"--torch {re.escape(newest)}\.\d+ train", shown)
    (second,) = re.findall(r"TORCH=(\d+\.\d+)", (ROOT / ".ci" / "run").read_text())
    assert second in versions.tested_torch()[:-1]
    major, minor = newest.split(".")
    needed = f"torch>={oldest},<{major}.{int(minor) + 1}"
    assert needed in PROJECT["project"]["dependencies"]


def test_the_files_that_depend_on_torchs_version_exist() -> None:
    for name, reason in DEPEND_ON_TORCH_VERSION.items():
        assert (ROOT / "tests" / name).exists(), name
        assert reason
