"""Many keys of the key-value store at once: in few requests, and none of them long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

MOST_KEYS = 1024  # in a request: a TCPStore takes time by the square of a request's length


def wait_for(store: dist.Store, keys: list[str], limit: timedelta) -> None:
    """Wait until all keys are there.

    Raises:
        RuntimeError: if they are not within the limit.
    """
    until = time.monotonic() + limit.total_seconds()
    for some in _parts(keys):
        left_s = max(0.001, until - time.monotonic())
        store.wait(some, timedelta(seconds=left_s))


def read(store: dist.Store, keys: list[str]) -> list[bytes]:
    """What is under keys that are all there. (``multi_get`` waits for those that are not.)"""
    return [value for some in _parts(keys) for value in store.multi_get(some)]


def read_present(store: dist.Store, keys: list[str]) -> dict[str, bytes]:
    """What is under the keys that are there, in a few requests for each that is not."""
    if len(keys) <= MOST_KEYS and store.check(keys):
        return dict(zip(keys, store.multi_get(keys), strict=True))
    half = len(keys) // 2
    return read_present(store, keys[:half]) | read_present(store, keys[half:]) if half else {}


def _parts(keys: list[str]) -> Iterator[list[str]]:
    return (keys[at : at + MOST_KEYS] for at in range(0, len(keys), MOST_KEYS))
