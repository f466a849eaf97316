"""A device that is not the CPU, on every machine: ``torch.device("testdev")``.

Its memory cannot be touched from the host, its streams are threads, its collectives are ordered by
streams, and fresh and freed memory holds NaNs, so work that is not ordered by an event or a wait
gives wrong numbers. What it is for, and what it cannot show, is in docs/developers/streams.md.

    >>> import testdev
    >>> testdev.start()
    >>> torch.ones(3, device="testdev").sum().item()
    3.0
"""

from __future__ import annotations

import datetime
import functools
from typing import Any

import torch
import torch.distributed as dist

from . import build
from .build import why_not
from .module import NAME, make

__all__ = ["BACKEND", "NAME", "native", "start", "why_not"]

BACKEND = "testccl"


@functools.cache
def native() -> Any:
    """The functions of the library itself: delays, counts of host waits, and so on."""
    return build.load()


@functools.cache
def start() -> None:
    """Registers the device and its process group with torch, for good."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make(native()))
    torch.utils.generate_methods_for_privateuse1_backend()
    native().set_make_inner(_make_inner)
    dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=[NAME])


def _make_group(options: Any, backend_options: Any) -> Any:
    split_from = getattr(options, "split_from", None)  # torch 2.13 does not say
    if split_from is not None:
        split_from.meet()  # as ncclCommSplit, for which all its ranks have to come
    chosen = native().Options() if backend_options is None else backend_options
    chosen._timeout = options.timeout
    inner = _make_inner(options.store, options.group_rank, options.group_size, options.timeout)
    return native().Group(inner, chosen)


def _make_inner(store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, timeout)
