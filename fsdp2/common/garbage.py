"""When Python looks for cyclic garbage, in work that makes many objects which stay.

A full collection walks over all objects of the process each time that their number has grown by a
quarter. Traces have a million: it took 30 % of the time of a plan for a model of 126 layers.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 10**9


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Context in which only young objects are looked at.

    Cycles that a user's code makes die as soon as elsewhere, unless they grow old before they are
    garbage: these stay until after the context.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def one_collection() -> Iterator[None]:
    """Context that collects at its end, and only what was made in it.

    For work of a second at most whose objects refer to each other in circles: else they would be
    old when they become garbage, and only a full collection would find them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if was_enabled:
            gc.enable()
