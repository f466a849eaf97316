"""Fills the virtual environment that `make` runs everything in.

    python3 tools/environment.py .venv --torch 2.15.0 train

makes the folder if it is not there, and installs torch, what the named set needs
(``requirements/<set>.txt``), and this package itself, editable. Sets build on each other:

    train     `make train` and the benchmarks
    examples  the other examples: their data sets
    test      the tests
    dev       linting
    clients   what only long tests use; on top of test
    docs      the documentation site; on top of train

torch comes first, and what follows may not change it. On a machine without an NVIDIA GPU, the
build for the CPU is taken if the package index that pip is configured with has one: it needs
1 GB, a build for CUDA 3 to 6 GB. An index of CPU builds is named as pip always wants it, with
``PIP_EXTRA_INDEX_URL`` or in pip's configuration.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SETS = ("train", "examples", "test", "dev", "clients", "docs")
NO_SUCH_BUILD = "No matching distribution found"


def main() -> None:
    parser = argparse.ArgumentParser(description="Fill a virtual environment.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", required=True, metavar="VERSION")
    parser.add_argument("set", choices=SETS)
    args = parser.parse_args()
    python = make(args.folder)
    install_torch(python, args.torch)
    install_set(python, args.folder, args.set)


def make(folder: Path) -> Path:
    """Make the environment if it is not there; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return python


def install_torch(python: Path, version: str) -> None:
    """Install torch ``version`` unless it is there, in the smallest build that serves."""
    if installed_torch(python).split("+")[0] == version.split("+")[0]:
        return
    if "+" not in version and not has_nvidia_gpu():
        tried = pip(python, f"torch=={version}+cpu", capture=True)
        if tried.returncode == 0:
            return
        if NO_SUCH_BUILD not in tried.stderr:
            sys.exit(tried.stderr)
        print(f"The package index has no CPU build of torch {version}: taking its default build.")
    if pip(python, f"torch=={version}").returncode:
        sys.exit(f"torch {version} could not be installed")


def install_set(python: Path, folder: Path, name: str) -> None:
    """Install what the set needs and this package. torch stays the one that is installed."""
    torch = installed_torch(python)
    constraint = folder / "torch.txt"
    constraint.write_text(f"torch=={torch}\n")
    together = files(f"{name}.txt")
    if "+" not in torch:
        together += files(f"{name}-torchvision.txt")
    steps = [[*together, "-c", str(constraint)], ["--no-deps", "--editable", str(ROOT)]]
    if alone := files(f"{name}-alone.txt"):
        steps.append(["--no-deps", *alone])
    for step in steps:
        if pip(python, *step).returncode:
            sys.exit(f"could not install: {' '.join(step)}")


def files(name: str) -> list[str]:
    """pip's arguments for the requirements file ``name``; none if there is no such file."""
    file = REQUIREMENTS / name
    return ["-r", str(file)] if file.exists() else []


def installed_torch(python: Path) -> str:
    """The version of torch in the environment; "" if it has none."""
    code = (
        "from importlib import metadata\n"
        "found = [d.version for d in metadata.distributions(name='torch')]\n"
        "print(found[0] if found else '')"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def has_nvidia_gpu() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def pip(python: Path, *args: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run pip's install, with its output shown or ``capture``\\ d."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *args]
    return subprocess.run(command, check=False, capture_output=capture, text=True)


if __name__ == "__main__":
    main()
