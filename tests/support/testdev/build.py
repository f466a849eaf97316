"""Builds the library of the device, once per version of its sources, of torch and of Python."""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

_SOURCES = Path(__file__).parent / "csrc"
_NAME = "testdev_native"
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wno-deprecated-declarations"]


def why_not() -> str | None:
    """Why the device cannot be built here; None where it can."""
    if not sys.platform.startswith("linux"):
        return "the test device needs Linux"
    if _compiler() is None:
        return "the test device needs a C++ compiler (c++, g++ or clang++, or CXX)"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "the test device needs the headers of Python"
    return None


def load() -> ModuleType:
    """Imports the library, after building it where that was not done yet."""
    path = _built()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiler() -> str | None:
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def _built() -> Path:
    """The library, where a run with the same sources has left it; else made now."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fsdp2-testdev"
    cache.mkdir(parents=True, exist_ok=True)
    headers = b"".join(path.read_bytes() for path in sorted(_SOURCES.glob("*.h")))
    key = f"{torch.__version__} {sys.version} {_FLAGS}".encode() + headers
    sources = {
        _keyed(cache, path.stem, key + path.read_bytes(), "o"): path for path in _cpp_files()
    }
    names = " ".join(sorted(made.name for made in sources)).encode()
    library = _keyed(cache, _NAME, names, "so")
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all workers of a test run get here at once
        if not library.exists():
            _build(sources, library)
    return library


def _cpp_files() -> list[Path]:
    """The longest ones first: then the other cores take the rest meanwhile."""
    return sorted(_SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)


def _keyed(folder: Path, name: str, content: bytes, suffix: str) -> Path:
    return folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.{suffix}"


def _build(sources: dict[Path, Path], library: Path) -> None:
    here = Path(torch.__file__).parent
    include = [here / "include", here / "include/torch/csrc/api/include"]
    paths = [f"-I{path}" for path in (*include, sysconfig.get_paths()["include"])]
    compiler = _compiler()
    assert compiler is not None

    def make(target: Path, *arguments: str) -> None:
        if not target.exists():
            unfinished = target.with_suffix(".part")
            _run([compiler, *arguments, "-o", str(unfinished)])
            unfinished.rename(target)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(make, made, *_FLAGS, *paths, "-c", str(source))
            for made, source in sources.items()
        ]
        for job in jobs:
            job.result()
    libraries = [f"-L{here / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    make(library, "-shared", *map(str, sources), *libraries, f"-Wl,-rpath,{here / 'lib'}")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
