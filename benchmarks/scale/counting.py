"""Counts what a function reads, opens and lists, its CPU seconds and its memory, in a process of
its own.

Bytes and calls are those of the system, from /proc: nothing that goes by another way is missed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch

from .curves import Counted

T = TypeVar("T")
_PRELOAD = ["torch._dynamo", "benchmarks.scale.checkpoint", "benchmarks.scale.dcp"]
_SYSTEM = {"rchar": "bytes read", "wchar": "bytes written", "syscr": "reads", "syscw": "writes"}
_SELF = Path("/proc/self")

_opened: list[str] = []
_hooks: list[object] = []  # an audit hook stays to the end of the process


def isolated(function: Callable[..., T], *arguments: Any) -> T:
    """What ``function`` returns in a new process, which has torch already and has done nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_alone, function, arguments).result()


def _alone(function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    torch.set_num_threads(1)
    # A file of each rank may be open.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return function(*arguments)


@contextmanager
def counting(result: Counted) -> Iterator[None]:
    """Add to ``result`` what happens inside.

    Keys: "bytes read", "bytes written", "reads", "writes" (calls of the system); "files opened",
    without folders and without other descriptors of open files, whose number depends on the cores;
    "names listed", of folders; "cpu s" of all threads; "peak bytes", resident above the start.
    """
    if not _hooks:
        _hooks.append(_note)
        sys.addaudithook(_note)
    listdir, listed = os.listdir, 0

    def counted_listdir(*arguments: Any) -> Any:
        nonlocal listed
        names = listdir(*arguments)
        listed += len(names)
        return names

    gc.collect()
    (_SELF / "clear_refs").write_text("5")  # the peak begins anew
    resident = _kilobytes("VmRSS")
    io = os.open(_SELF / "io", os.O_RDONLY)
    with mock.patch.object(os, "listdir", counted_listdir):
        _opened.clear()
        before, own = _system(io)
        cpu = time.process_time()
        try:
            yield
        finally:
            seconds = time.process_time() - cpu
            after, _ = _system(io)
            num_opened = len(_opened)
            os.close(io)
    # To ask is to read, too.
    after["rchar"] -= own
    after["syscr"] -= 1
    result |= {name: float(after[key] - before[key]) for key, name in _SYSTEM.items()}
    result |= {"files opened": float(num_opened), "names listed": float(listed)}
    peak = max(0, _kilobytes("VmHWM") - resident)
    result |= {"cpu s": seconds, "peak bytes": 1024.0 * peak}


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        if not path.startswith("/proc/") and not flags & os.O_DIRECTORY:
            _opened.append(path)


def _system(io: int) -> tuple[dict[str, int], int]:
    """The system's counters, and how many bytes it took to read them."""
    text = os.pread(io, 4096, 0)
    pairs = (line.split(":") for line in text.decode().splitlines())
    return {key: int(value) for key, value in pairs}, len(text)


def _kilobytes(key: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {key} in {_SELF / 'status'}")
