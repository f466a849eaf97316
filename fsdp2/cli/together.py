"""Ranks of a job fail together: a rank that fails sends the others the cause, and they end too."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..common.threads import work_in_turns
from ..render.text import ERROR, fail, one_line

_CAUSE, _FIRST, _HEARD = (f"fsdp2/together/{name}" for name in ("cause", "first", "heard"))
_LOOK_S = 0.2  # how often a rank looks whether another has failed
_FAREWELL_S = 5.0  # how long one that fails waits at most until the others have heard it


def run_together(work: Callable[[], int]) -> int:
    """Run ``work`` on all ranks of the default process group; if one fails, all do.

    A rank that waits in a collective cannot be interrupted. A thread on each rank therefore watches
    the group's store. If another rank fails, the thread prints the cause and ends the process.

    Returns:
        The result of ``work``; 2 on a rank on which it raises.
    """
    import torch.distributed as dist

    # A separate connection: the other one is busy for as long as the main thread waits.
    store: Any = dist.distributed_c10d._get_default_store().clone()
    ended = threading.Event()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    watch = work_in_turns("fsdp2-together", lambda: _watch(store, ended, rank, num_ranks))
    try:
        return work()
    except Exception as error:
        ended.set()
        watch.join()
        if not isinstance(error, OSError | ValueError):  # not a mistake in what was given
            traceback.print_exc()
        return fail(_told(store, error, rank, num_ranks))
    finally:
        ended.set()


def _told(store: Any, error: Exception, rank: int, num_ranks: int) -> str:
    """Send the cause to the others; returns it, or the cause that another rank sent first."""
    cause = f"rank {rank} on {socket.gethostname()}: {one_line(error) or type(error).__name__}"
    try:
        if store.add(_FIRST, 1) > 1:
            return _heard(store, rank, num_ranks)
        store.set(_CAUSE, cause)
        _wait_for_others(store, num_ranks)  # they may see that a connection ends before the cause
    except RuntimeError:  # the store is gone
        pass
    return cause


def _heard(store: Any, rank: int, num_ranks: int) -> str:
    """The cause that another rank sent."""
    cause = store.get(_CAUSE).decode()
    store.add(_HEARD, 1)
    if rank == 0:  # whose process may serve the store
        _wait_for_others(store, num_ranks)
    return cause


def _wait_for_others(store: Any, num_ranks: int) -> None:
    """Wait until all other ranks have read the cause."""
    until = time.monotonic() + _FAREWELL_S
    while store.add(_HEARD, 0) < num_ranks - 1 and time.monotonic() < until:
        time.sleep(_LOOK_S / 4)


def _watch(store: Any, ended: threading.Event, rank: int, num_ranks: int) -> bool:
    """Look once; returns whether to keep watching."""
    if ended.wait(_LOOK_S):
        return False
    try:
        if not store.check([_CAUSE]):
            return True
        cause = _heard(store, rank, num_ranks)
    except RuntimeError:
        cause = "the process that serves the job's store has ended: see its output for the cause"
    try:
        fail(cause)
        sys.stderr.flush()
    finally:  # also where nobody reads the output any more
        os._exit(ERROR)
