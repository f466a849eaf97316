"""Lets ranks measure together, so that none waits for a rank that has failed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import torch.distributed as dist

_LOOK_S = 0.2  # how often a waiting rank looks whether another one has failed
_NAP_S = 2e-5
_contexts = count()  # all ranks enter them in the same order
_causes: list[str] = []  # where ranks write the cause of their failure, one per entered context


@contextmanager
def failing_together() -> Iterator[None]:
    """Context in which ranks stop waiting in `together` if one fails.

    Raises:
        RuntimeError: from `together`, if another rank has failed; the message has the cause.
    """
    _causes.append(f"fsdp2/measure/{next(_contexts)}")
    try:
        yield
    except Exception as error:
        store = _store()
        if store is not None and not isinstance(error, _OtherFailedError):
            with suppress(RuntimeError):  # the store is gone
                cause = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
                store.set(_causes[-1], cause)
        raise
    finally:
        _causes.pop()


def together() -> None:
    """Wait for all ranks.

    Raises:
        RuntimeError: if one has failed.
    """
    store = _store()
    if store is None:
        return
    work: Any = dist.barrier(async_op=True)
    look = time.monotonic() + _LOOK_S
    while not work.is_completed():
        if time.monotonic() > look:
            if _causes and store.check([_causes[-1]]):
                raise _OtherFailedError(f"measure: {store.get(_causes[-1]).decode()}")
            look = time.monotonic() + _LOOK_S
        time.sleep(_NAP_S)
    work.wait()


class _OtherFailedError(RuntimeError):
    pass


def _store() -> Any:
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    return dist.distributed_c10d._get_default_store()
