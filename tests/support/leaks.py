"""What a process holds: counted before and after, to see what is left of what came in between."""

from __future__ import annotations

import ctypes
import gc
import linecache
import os
import pathlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Sized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from fsdp2.transports.host import links as host_links

# What there must not be more of; numbers of bytes and of objects have some noise.
EXACT = (
    "file descriptors",
    "threads",
    "threads of the library",
    "DTensors",
    "modules",
    "optimizers",
    "meshes",
    "process groups",
    "keys of the store",
    "mapped files",
)

SIZES = ("tensors", "hooks", "objects", "blocks of Python", "bytes of malloc", "resident bytes")


# torch keeps records of the last collectives of a process, 1.2 KB each: so many fill them. (Without
# any of the library: in a process with two gloo ranks, 1,500 `dist.all_reduce` add 1.8 MB to what
# malloc has given out, 1,500 more 0.2 MB, and those after that nothing.)
RECORDS = 2200


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def fill_records() -> None:
    """Have torch keep as many records of collectives as it ever does."""
    tensor = torch.ones(1)
    for _ in range(RECORDS):
        dist.all_reduce(tensor)


def count() -> Counter[str]:
    """What this process holds after a garbage collection, by name; comparable by `left`.

    ``cache ...`` are the lengths of the containers in the globals of the library's modules,
    ``object ...`` the objects that the garbage collector knows, by type.
    """
    # One entry for each operator and layout of its arguments that ever came: which ones have come
    # depends on the program, not on how long it runs.
    FakeTensorMode.cache_clear()
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    # Patterns of names of files, of which Python keeps the last 128. A save looks for failures of
    # another rank's only if it comes upon the folder of that: in which round is up to chance.
    if hasattr(pathlib, "_make_selector"):  # until Python 3.12
        pathlib._make_selector.cache_clear()
    re.purge()
    linecache.clearcache()  # source lines, of whatever was on a stack that torch has looked at
    for _ in range(3):  # what a finalizer lets go of
        gc.collect()
    with host_links._lock:  # else the next new channel does
        host_links._drop_forgotten()
        # One for each tag that was ever used: units have more than they use at any time.
        for links in host_links._found.values():
            if isinstance(links, host_links.HostLinks):
                links.drop_idle([range(sys.maxsize)])
    found: Counter[str] = Counter()
    objects = gc.get_objects()
    kinds = Counter(map(type, objects))
    found["file descriptors"] = len(os.listdir("/proc/self/fd"))
    found["threads"] = len(os.listdir("/proc/self/task"))
    found["threads of the library"] = sum("fsdp2" in t.name for t in threading.enumerate())
    for name, kind in (("modules", nn.Module), ("optimizers", torch.optim.Optimizer)):
        found[name] = sum(num for each, num in kinds.items() if issubclass(each, kind))
    found["tensors"] = sum(num for each, num in kinds.items() if issubclass(each, torch.Tensor))
    found["DTensors"] = sum(num for each, num in kinds.items() if issubclass(each, DTensor))
    found["meshes"] = kinds[DeviceMesh]
    found["hooks"] = sum(map(_num_hooks, objects))
    found["process groups"] = len(c10d._world.pg_map)
    found["keys of the store"] = c10d._get_default_store().num_keys()
    lines = Path("/proc/self/maps").read_text().splitlines()
    found["mapped files"] = sum("/dev/shm" in line or "(deleted)" in line for line in lines)
    for kind, num in kinds.items():
        found[f"object {kind.__module__}.{kind.__qualname__}"] += num
    found["objects"] = len(objects)
    del objects, kinds, lines
    found.update(_caches())
    found["blocks of Python"] = sys.getallocatedblocks()
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = _MallocInfo
    info = libc.mallinfo2()
    found["bytes of malloc"] = info.uordblks + info.hblkhd
    libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found["resident bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def _num_hooks(thing: Any) -> int:
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        holders = ["_backward_hooks"]
        if thing.is_leaf and not thing.is_inference():
            holders.append("_post_accumulate_grad_hooks")
        return sum(len(getattr(thing, name) or ()) for name in holders)
    if issubclass(kind, nn.Module):
        return sum(len(held) for name, held in vars(thing).items() if name.endswith("_hooks"))
    return 0


def _caches() -> dict[str, int]:
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "fsdp2":
            continue
        for name, value in list(vars(module).items()):
            where = f"cache {module_name}.{name}"
            if name.startswith("__") or isinstance(value, type | torch.Tensor | str):
                continue
            if where == "cache fsdp2.dtensor.placement._ranks":
                # Equal meshes share an entry, which goes with the one that was asked for first: a
                # mesh of the session, or one of the model that is dropped. Meshes are counted.
                continue
            if hasattr(value, "cache_info"):
                info = value.cache_info()
                if info.maxsize is None:  # others end somewhere
                    found[where] = info.currsize
            elif isinstance(value, Sized) and hasattr(value, "__iter__"):
                found[where] = _length(value)
    return found


def _length(value: Any) -> int:
    """Of a container and of those in it."""
    inner = list(value.values()) if hasattr(value, "values") else []
    return len(value) + sum(_length(each) for each in inner if isinstance(each, dict | list | set))


def left(before: Counter[str], after: Counter[str], *, objects: int) -> dict[str, str]:
    """What there is more of afterwards, and must not.

    Args:
        objects: how many more there may be of one type, of tensors too: a group may hold on to what
            it has sent last.
    """
    return {
        name: f"{before[name]} -> {after[name]}"
        for name in {**after, **before}
        if (
            (name in EXACT and after[name] > before[name])
            or (name.startswith("cache ") and after[name] > before[name])
            or (name in ("tensors", "hooks") and after[name] > before[name] + objects)
            or (name.startswith("object ") and after[name] > before[name] + _noise(name, objects))
        )
    }


def _noise(name: str, objects: int) -> int:
    # Python and torch make lists and tuples now and then that have nothing to do with a model; and
    # a parameter keeps an empty dictionary of each kind of hook that it ever had.
    noisy = name.startswith("object builtins.") or name == "object collections.OrderedDict"
    return max(objects, 100) if noisy else objects
