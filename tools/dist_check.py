"""Builds the wheel and the sdist and installs both into fresh environments of each Python there is.

    python tools/dist_check.py [--python /path/to/python ...]

The interpreters are this one, ``python3.11`` to ``python3.14`` on the path, and those named by
``--python``. torch is not installed again, which would take gigabytes for each of them: the fresh
environment borrows it from an interpreter that has it. There the package is imported, with every
module in it, its command runs, and one training step is made; where there is no torch, its modules
are compiled, and the report says that this is all. What a fresh environment sees of the package is
what was installed: the check runs in an empty folder.

The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
PLACES = (
    "import sys, sysconfig\n"
    "print('%d.%d' % sys.version_info[:2], sys.prefix)\n"
    "try:\n"
    "    import torch\n"
    "    print(torch.__version__, sysconfig.get_path('purelib'))\n"
    "except ImportError: pass\n"
)
COMPILES = "import compileall, sys; sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1))"
IMPORTS = """
import importlib, pkgutil, sys
import fsdp2
assert fsdp2.__file__.startswith(sys.prefix), fsdp2.__file__
from importlib.metadata import version
assert version("fsdp2") == fsdp2.__version__, version("fsdp2")
names = [m.name for m in pkgutil.walk_packages(fsdp2.__path__, "fsdp2.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
fsdp2.fully_shard(model)
before = [p.full_tensor().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
changed = [not torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters())]
assert all(changed), changed
dist.destroy_process_group()
print(len(names), "modules imported, one step made, torch", torch.__version__)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Check wheel and sdist on each Python.")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsdp2-dist.") as folder:
        wheel, sdist = build(Path(folder))
        results = [
            check(python, artifact, Path(folder))
            for python in interpreters(args.python)
            for artifact in (wheel, sdist)
        ]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist, both from what git tracks."""
    source = folder / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    return build_of(source, folder / "dist")


def build_of(source: Path, output: Path) -> tuple[Path, Path]:
    """Wheel and sdist of a tree, in ``output``, without what was there before."""
    for old in (*output.glob("*.whl"), *output.glob("*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--outdir", str(output), str(source)], source)
    (wheel,) = output.glob("*.whl")
    (sdist,) = output.glob("*.tar.gz")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {sdist.name}: {sdist.stat().st_size:,}")
    return wheel, sdist


def interpreters(more: list[str]) -> list[str]:
    """Those that run, each once, and those that were asked for."""
    candidates = [sys.executable, *more, *(f"python{version}" for version in VERSIONS)]
    found: dict[str, str] = {}
    for candidate in candidates:
        places = look(candidate)
        if places and (candidate in more or places[0] not in found):
            found[candidate if candidate in more else places[0]] = candidate
    seen = {(look(python) or ("",))[0] for python in found.values()}
    for version in VERSIONS:
        if version not in seen:
            print(f"Python {version}: not on this machine")
    return list(found.values())


def look(python: str) -> list[str] | None:
    """[version, prefix] of an interpreter, and [torch's version, site-packages] if it has torch."""
    try:
        done = subprocess.run([python, "-c", PLACES], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split()


def check(python: str, artifact: Path, folder: Path) -> bool:
    """Install ``artifact`` into a fresh environment of ``python`` and try it."""
    version, _, *torch = look(python) or ["?", "?"]
    environment = folder / f"{version}-{artifact.suffix[1:]}-{len(list(folder.iterdir()))}"
    empty = environment / "empty"
    name = f"Python {version}, {'wheel' if artifact.suffix == '.whl' else 'sdist'}"
    try:
        run([python, "-m", "venv", str(environment)], folder)
        empty.mkdir()
        inside = str(environment / "bin" / "python")
        run([inside, "-m", "pip", "install", "--no-deps", str(artifact)], empty)
        (packages,) = environment.glob("lib/python3*/site-packages")
        if not (packages / "fsdp2" / "py.typed").exists():
            raise RuntimeError("py.typed is missing")
        if torch:
            (packages / "borrowed.pth").write_text(torch[1])
            shown = run([inside, "-c", IMPORTS], empty)
            shown += run([str(environment / "bin" / "fsdp2"), "--version"], empty)
        else:
            run([inside, "-c", COMPILES, str(packages / "fsdp2")], empty)
            shown = "compiled only: no torch for this Python"
    except (RuntimeError, OSError) as error:
        print(f"{name}: FAILED\n{error}")
        return False
    print(f"{name}: {'; '.join(shown.split(chr(10))).rstrip('; ')}")
    return True


def run(command: list[str], folder: Path) -> str:
    """The output of a command; a RuntimeError with all of it where it fails."""
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
